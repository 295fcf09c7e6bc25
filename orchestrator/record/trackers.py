"""Trackers read along: TensorBoard, Weights & Biases, MLflow. None of them can hold up, or end, the training.

``TrackerThread`` is a listener of the event log. It turns events into named numbers and puts them on one bounded queue per
tracker; a daemon thread behind each queue builds the tracker, feeds it and closes it.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import posixpath
import queue
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from orchestrator.errors import UserError
from orchestrator.record.events import Event

PROJECT = "expert-orchestrator"
MOST_ERRORS = 3  # in a row, before a tracker is given up


class Tracker(Protocol):
    """What a tracker must do. It is built, called and closed in one thread of its own."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def text(self, name: str, content: str) -> None: ...

    def close(self) -> None: ...


Factory = Callable[[Path, str, Mapping[str, Any]], Tracker]
"""Builds a tracker from the run's folder, its name and its config."""


class TensorBoard:
    """Event files in RUN/tensorboard, written with the tensorboard package alone."""

    def __init__(self, run_dir: Path, run_name: str, config: Mapping[str, Any]) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._events: Any = event_pb2  # generated classes, unknown to a type checker
        self._summaries: Any = summary_pb2
        self._writer = EventFileWriter(str(run_dir / "tensorboard"), flush_secs=10)
        self.text("config", f"# {run_name}\n\n```json\n{json.dumps(config, indent=2, default=str)}\n```")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._write(step, [self._summaries.Summary.Value(tag=name, simple_value=value) for name, value in values.items()])

    def text(self, name: str, content: str) -> None:
        from tensorboard.plugins.text.metadata import create_summary_metadata
        from tensorboard.util.tensor_util import make_tensor_proto

        metadata = create_summary_metadata(name, "")
        self._write(0, [self._summaries.Summary.Value(tag=name, metadata=metadata, tensor=make_tensor_proto([content]))])

    def _write(self, step: int, values: list[Any]) -> None:
        self._writer.add_event(self._events.Event(wall_time=time.time(), step=step, summary=self._summaries.Summary(value=values)))

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run in W&B's project "expert-orchestrator"; its files are in RUN/wandb."""

    def __init__(self, run_dir: Path, run_name: str, config: Mapping[str, Any]) -> None:
        import wandb

        # Its messages and its capture of the console would break up the progress bar; without a limit, wandb's own hook at
        # the end of the process would wait for a lost network for ever (what was not sent stays in the folder for 'wandb sync').
        settings = wandb.Settings(silent=True, console="off", finish_timeout=60)
        # Without an API key wandb would ask for one on the terminal, from this thread, in the middle of the training.
        if wandb.setup(settings).settings.mode in ("online", "run", "shared") and not wandb.login(prompt=False):
            raise UserError("the tracker wandb found no API key. Run 'wandb login' first, or set WANDB_MODE=offline to log to files alone.")
        # wandb makes the folder "wandb" in the one it is given.
        self._run = wandb.init(project=PROJECT, name=run_name, dir=str(run_dir), config=dict(config), settings=settings)
        # An axis of our own: W&B's refuses a step that comes again, as one replayed after a recovery does.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "step": step})

    def text(self, name: str, content: str) -> None:
        (Path(self._run.dir) / f"{_file_name(name)}.txt").write_text(content, encoding="utf-8")  # W&B uploads this folder

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """A run in MLflow: in RUN/mlflow/mlflow.db, unless a tracking URI was set for mlflow itself."""

    def __init__(self, run_dir: Path, run_name: str, config: Mapping[str, Any]) -> None:
        import mlflow
        from mlflow.entities import Metric, Param

        for name in ("mlflow", "alembic"):  # they announce each table of a new database on the user's screen
            logging.getLogger(name).setLevel(logging.WARNING)
        self._metric = Metric
        self._waiting: list[Metric] = []
        self._last_write = time.monotonic()
        folder = None if mlflow.is_tracking_uri_set() else (run_dir / "mlflow").resolve()
        self._client = mlflow.MlflowClient(tracking_uri=_sqlite(folder) if folder else None)
        self._run_id = self._client.create_run(self._experiment(folder), run_name=run_name).info.run_id
        params = [Param(_mlflow_name(name), str(value)[:500]) for name, value in _flat(config)]
        for begin in range(0, len(params), 100):  # the most that one call takes
            self._client.log_batch(self._run_id, params=params[begin : begin + 100])

    def _experiment(self, folder: Path | None) -> str:
        known = self._client.get_experiment_by_name(PROJECT)
        return known.experiment_id if known else self._client.create_experiment(PROJECT, folder and (folder / "artifacts").as_uri())

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        self._waiting += [self._metric(_mlflow_name(name), value, now, step) for name, value in values.items()]
        # A write costs about 10 ms, longer than many a training step: several steps share one.
        if len(self._waiting) >= 500 or time.monotonic() - self._last_write > 2:
            self._write()

    def _write(self) -> None:
        waiting, self._waiting, self._last_write = self._waiting, [], time.monotonic()
        for begin in range(0, len(waiting), 1000):  # the most that one call takes
            self._client.log_batch(self._run_id, metrics=waiting[begin : begin + 1000])

    def text(self, name: str, content: str) -> None:
        self._client.log_text(self._run_id, content, f"{_file_name(name)}.txt")

    def close(self) -> None:
        self._write()
        self._client.set_terminated(self._run_id)


FACTORIES: Mapping[str, Factory] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "mlflow": MLflow}


def factories(names: Iterable[str]) -> dict[str, Factory]:
    """The trackers of these names. One that is unknown or not installed is a UserError, before anything is started."""
    chosen: dict[str, Factory] = {}
    for name in names:
        if name not in FACTORIES:
            raise UserError(f"unknown tracker {name!r}; known are {', '.join(FACTORIES)}")
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # no origin: a folder that happens to be called wandb, as wandb leaves behind
            raise UserError(f"the tracker {name} was asked for, but it is not installed. Install it: pip install '{PROJECT}[{name}]'")
        chosen[name] = FACTORIES[name]
    return chosen


class TrackerThread:
    """Feeds trackers from events without ever waiting for one: what a full queue cannot take is dropped and counted.

    ``trackers`` are names, or factories by name. ``on_warning`` is called in the thread that sends events or closes.
    """

    def __init__(
        self,
        trackers: Iterable[str] | Mapping[str, Factory],
        run_dir: Path,
        run_name: str,
        config: Mapping[str, Any],
        on_warning: Callable[[str], None] | None = None,
        *,
        close_timeout_s: float = 10.0,
        queue_size: int = 10_000,
    ) -> None:
        chosen = trackers if isinstance(trackers, Mapping) else factories(trackers)
        self._on_warning = on_warning
        self._close_timeout_s = close_timeout_s
        self._warnings: deque[str] = deque()
        self._workers = [_Worker(name, factory, queue_size, self._warnings.append) for name, factory in chosen.items()]
        for worker in self._workers:
            worker.start(run_dir, run_name, dict(config))

    @property
    def dropped(self) -> dict[str, int]:
        """Updates that each tracker was too slow for."""
        return {worker.name: worker.dropped for worker in self._workers}

    def __call__(self, event: Event) -> None:
        values = scalars(event)
        if values:
            step = int(event.get("step") or 0)
            self._put(lambda tracker: tracker.log(step, values))
        if event["event"] == "start":
            self.text("start", "\n".join(f"{name}: {value}" for name, value in event.items() if name != "event"))
        self._deliver_warnings()

    def text(self, name: str, content: str) -> None:
        """Hands all trackers a text: the plan, for instance."""
        self._put(lambda tracker: tracker.text(name, content))

    def close(self) -> None:
        """Waits until all is written, ``close_timeout_s`` in all; a tracker that takes longer is left behind."""
        deadline = time.monotonic() + self._close_timeout_s
        for worker in self._workers:
            worker.ask_to_finish()
        for worker in self._workers:
            worker.finish(deadline)
        self._deliver_warnings()

    def _put(self, action: Callable[[Tracker], None]) -> None:
        for worker in self._workers:
            worker.put(action)

    def _deliver_warnings(self) -> None:
        # Not from the tracker's thread: a receiver is likely to write to the event log, which belongs to this one.
        while self._warnings:
            warning = self._warnings.popleft()
            if self._on_warning is not None:
                self._on_warning(warning)


class _Worker:
    """One tracker, its queue and its thread."""

    def __init__(self, name: str, factory: Factory, queue_size: int, warn: Callable[[str], None]) -> None:
        self.name = name
        self.dropped = 0
        self._factory = factory
        self._warn = warn
        self._queue: queue.Queue[Callable[[Tracker], None] | None] = queue.Queue(queue_size)
        self._closing = threading.Event()
        self._gone = False  # failed, or left behind: nothing more is put or taken
        self._failed_before = False

    def start(self, run_dir: Path, run_name: str, config: Mapping[str, Any]) -> None:
        self._thread = threading.Thread(target=self._run, args=(run_dir, run_name, config), name=f"tracker-{self.name}", daemon=True)
        self._thread.start()

    def put(self, action: Callable[[Tracker], None]) -> None:
        if self._gone or self._closing.is_set():
            return
        try:
            self._queue.put_nowait(action)
        except queue.Full:
            self.dropped += 1

    def ask_to_finish(self) -> None:
        self._closing.set()
        with suppress(queue.Full):  # a full queue needs no waking: its reader looks at the flag when it has emptied it
            self._queue.put_nowait(None)

    def finish(self, deadline: float) -> None:
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive() and not self._gone:
            self._gone = True
            left = self._queue.qsize()
            self._warn(f"the tracker {self.name} did not finish in time and is left behind; about {left} updates may be missing there")
        if self.dropped:
            self._warn(f"the tracker {self.name} was too slow: {self.dropped} updates were dropped there; events.jsonl has them all")
            self.dropped = 0

    def _run(self, run_dir: Path, run_name: str, config: Mapping[str, Any]) -> None:
        try:
            tracker = self._factory(run_dir, run_name, config)
        except (Exception, SystemExit) as error:
            self._gone = True
            self._warn(f"the tracker {self.name} did not start: {_error_text(error)}. Training goes on without it")
            return
        self._feed(tracker)
        try:
            tracker.close()
        except (Exception, SystemExit) as error:
            self._warn(f"the tracker {self.name} did not close well: {_error_text(error)}")

    def _feed(self, tracker: Tracker) -> None:
        errors = 0
        while (action := self._next()) is not None:
            try:
                action(tracker)
                errors = 0
            except (Exception, SystemExit) as error:
                errors += 1
                self._report(error, errors)

    def _next(self) -> Callable[[Tracker], None] | None:
        while not self._gone and not (self._closing.is_set() and self._queue.empty()):
            action = self._queue.get()
            if action is not None:
                return action
        return None

    def _report(self, error: BaseException, errors: int) -> None:
        if errors >= MOST_ERRORS:
            self._gone = True
            self._warn(f"the tracker {self.name} failed {errors} times in a row and is switched off: {_error_text(error)}")
        elif not self._failed_before:
            self._failed_before = True
            self._warn(f"the tracker {self.name} failed: {_error_text(error)}. Training goes on")


def scalars(event: Event) -> dict[str, float]:
    """The numbers of an event under the names that trackers show; empty for events without any."""
    match event["event"]:
        case "step":
            named = {"loss": event.get("loss"), "grad_norm": event.get("grad_norm"), "learning_rate": event.get("lr")}
            return _numbers("train/", named | _mapping(event.get("metrics")) | {"samples_per_second": _rate(event)})
        case "evaluate":
            return _numbers("validation/", {"loss": event.get("loss")} | _mapping(event.get("metrics")))
        case "phases":
            return _numbers("phases/", _without(event, "steps") | _mapping(event.get("seconds")))
        case "epoch":
            memory = {f"memory_{name}": value for name, value in _mapping(event.get("memory")).items()}
            return _numbers("epoch/", _without(event, "epoch") | memory)
        case "monitor":
            return _numbers("monitor/", _monitor_values(event))
        case "load":
            return _numbers(
                "experts/", {f"layer{layer}_imbalance": _imbalance(loads) for layer, loads in enumerate(event.get("loads") or ())}
            )
        case _:
            return {}


def _monitor_values(event: Event) -> dict[str, Any]:
    values = {f"host_{name}": value for name, value in _mapping(event.get("host")).items()}
    for device in event.get("devices") or ():
        values |= {f"gpu{device.get('index')}_{name}": value for name, value in device.items() if name not in ("index", "name")}
    return values


def _imbalance(loads: Iterable[Any]) -> float | None:
    """Tokens of the busiest expert over the mean: 1 is even; None where no token came."""
    counts = [number(count) or 0.0 for count in loads]
    return max(counts) * len(counts) / sum(counts) if sum(counts) else None


def _rate(event: Event) -> float | None:
    samples, seconds = number(event.get("samples")), number(event.get("seconds"))
    return samples / seconds if samples and seconds else None


def number(value: Any) -> float | None:
    """The number that a field of an event holds, also as the text 'nan' or 'inf'; None where it holds something else."""
    try:
        return None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _numbers(prefix: str, values: Mapping[str, Any]) -> dict[str, float]:
    return {prefix + str(name): found for name, value in values.items() if (found := number(value)) is not None}


def _without(event: Event, *names: str) -> dict[str, Any]:
    return {name: value for name, value in event.items() if name not in ("event", "time", "step", *names)}


def _mapping(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _sqlite(folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)  # MLflow's file store is closed to new runs; its database needs the folder
    return f"sqlite:///{folder / 'mlflow.db'}"


def _mlflow_name(name: str) -> str:
    """The name as MLflow accepts it: it refuses the whole batch for one sign it does not like."""
    return posixpath.normpath(re.sub(r"[^\w\-. /]", "_", name)[:250])


def _file_name(name: str) -> str:
    return re.sub(r"[^\w\-.]", "_", name)


def _error_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
