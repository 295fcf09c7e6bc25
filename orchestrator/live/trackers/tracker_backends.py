"""TensorBoard, Weights & Biases and MLflow behind one protocol. Each is imported when it is built."""

from __future__ import annotations

import importlib.util
import json
import logging
import posixpath
import re
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from orchestrator.errors import UserError

PROJECT = "expert-orchestrator"
MLFLOW_MAX_PARAMS = 100  # of one call
MLFLOW_MAX_METRICS = 1000  # of one call


class Tracker(Protocol):
    """An experiment tracker. It is built, called and closed in one thread of its own."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def text(self, name: str, content: str) -> None: ...

    def close(self) -> None: ...


TrackerFactory = Callable[[Path, str, Mapping[str, Any]], Tracker]
"""Builds a tracker from the run's folder, its name and its config."""


class TensorBoard:
    """Writer of event files in RUN/tensorboard. It needs the tensorboard package only."""

    def __init__(self, run_dir: Path, run_name: str, config: Mapping[str, Any]) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._events: Any = event_pb2  # generated classes, unknown to a type checker
        self._summaries: Any = summary_pb2
        self._writer = EventFileWriter(str(run_dir / "tensorboard"), flush_secs=10)
        self.text("config", f"# {run_name}\n\n```json\n{json.dumps(config, indent=2, default=str)}\n```")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        new_value = self._summaries.Summary.Value
        self._write(step, [new_value(tag=name, simple_value=value) for name, value in values.items()])

    def text(self, name: str, content: str) -> None:
        from tensorboard.plugins.text.metadata import create_summary_metadata
        from tensorboard.util.tensor_util import make_tensor_proto

        metadata = create_summary_metadata(name, "")
        tensor = make_tensor_proto([content])
        self._write(0, [self._summaries.Summary.Value(tag=name, metadata=metadata, tensor=tensor)])

    def _write(self, step: int, values: list[Any]) -> None:
        summary = self._summaries.Summary(value=values)
        self._writer.add_event(self._events.Event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run in W&B's project "expert-orchestrator"; its files are in RUN/wandb."""

    def __init__(self, run_dir: Path, run_name: str, config: Mapping[str, Any]) -> None:
        import wandb

        settings = _logged_in_wandb()
        # wandb creates the folder "wandb" in the folder it is given.
        self._run = wandb.init(
            project=PROJECT, name=run_name, dir=str(run_dir), config=dict(config), settings=settings
        )
        # A step axis of our own: W&B's axis refuses a step that comes again, as after a recovery.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "step": step})

    def text(self, name: str, content: str) -> None:
        # W&B uploads this folder.
        path = Path(self._run.dir) / f"{_file_name(name)}.txt"
        path.write_text(content, encoding="utf-8")

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """A run in MLflow: in RUN/mlflow/mlflow.db, unless mlflow itself has a tracking URI."""

    def __init__(self, run_dir: Path, run_name: str, config: Mapping[str, Any]) -> None:
        import mlflow
        from mlflow.entities import Metric, Param

        # Both announce each table of a new database on the user's screen.
        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)
        self._metric = Metric
        self._pending: list[Metric] = []
        self._last_write_s = time.monotonic()
        folder = None if mlflow.is_tracking_uri_set() else (run_dir / "mlflow").resolve()
        self._client = mlflow.MlflowClient(tracking_uri=_sqlite(folder) if folder else None)
        self._run_id = self._client.create_run(self._experiment(folder), run_name=run_name).info.run_id
        params = [Param(_mlflow_name(name), str(value)[:500]) for name, value in _flat(config)]
        for start in range(0, len(params), MLFLOW_MAX_PARAMS):
            self._client.log_batch(self._run_id, params=params[start : start + MLFLOW_MAX_PARAMS])

    def _experiment(self, folder: Path | None) -> str:
        known = self._client.get_experiment_by_name(PROJECT)
        if known:
            return known.experiment_id
        artifacts = (folder / "artifacts").as_uri() if folder else None
        return self._client.create_experiment(PROJECT, artifacts)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        self._pending += [
            self._metric(_mlflow_name(name), value, now_ms, step) for name, value in values.items()
        ]
        # A write costs about 10 ms, longer than many training steps: several steps share one.
        if len(self._pending) >= 500 or time.monotonic() - self._last_write_s > 2:
            self._write()

    def _write(self) -> None:
        pending = self._pending
        self._pending = []
        self._last_write_s = time.monotonic()
        for start in range(0, len(pending), MLFLOW_MAX_METRICS):
            self._client.log_batch(self._run_id, metrics=pending[start : start + MLFLOW_MAX_METRICS])

    def text(self, name: str, content: str) -> None:
        self._client.log_text(self._run_id, content, f"{_file_name(name)}.txt")

    def close(self) -> None:
        self._write()
        self._client.set_terminated(self._run_id)


FACTORIES: Mapping[str, TrackerFactory] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}


def find_factories(names: Iterable[str]) -> dict[str, TrackerFactory]:
    """Return the factories of these trackers; UserError for one that is unknown or not installed.

    The check needs no import of a tracker, so it is done before anything starts.
    """
    chosen: dict[str, TrackerFactory] = {}
    for name in names:
        if name not in FACTORIES:
            raise UserError(f"unknown tracker {name!r}; known are {', '.join(FACTORIES)}")
        spec = importlib.util.find_spec(name)
        # Without an origin it is a folder of that name in the working directory, such as wandb
        # leaves behind.
        if spec is None or spec.origin is None:
            raise UserError(
                f"the tracker {name} is not installed. Install it: pip install '{PROJECT}[{name}]'"
            )
        chosen[name] = FACTORIES[name]
    return chosen


def check_trackers(names: Iterable[str]) -> None:
    """Raise UserError for a tracker that cannot start: unknown, not installed, or without a key.

    Without this check a run would train for hours and leave no record where its user looks for it.
    """
    if "wandb" in find_factories(names):
        _logged_in_wandb()


def _logged_in_wandb() -> Any:
    """Return the settings of W&B's run; UserError if it would ask for a key."""
    import wandb

    # Its messages and its capture of the console would break up the progress bar. Without a
    # limit, wandb's own hook at the end of the process would wait for a lost network for ever;
    # updates that were not sent stay in the folder for 'wandb sync'. The command line, git's
    # addresses and uncommitted changes may hold secrets, and W&B would upload them.
    settings = wandb.Settings(
        silent=True, console="off", finish_timeout=60, x_disable_meta=True, disable_git=True
    )
    # Without an API key wandb would ask for one on the terminal, in the middle of the training.
    is_online = wandb.setup(settings).settings.mode in ("online", "run", "shared")
    if is_online and not wandb.login(prompt=False):
        raise UserError(
            "the tracker wandb found no API key. Run 'wandb login' first, "
            "or set WANDB_MODE=offline to log to files alone."
        )
    return settings


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _sqlite(folder: Path) -> str:
    # MLflow's file store is closed to new runs; its database needs the folder.
    folder.mkdir(parents=True, exist_ok=True)
    return f"sqlite:///{folder / 'mlflow.db'}"


def _mlflow_name(name: str) -> str:
    """Return a name that MLflow accepts: it refuses a whole batch for one character that it does
    not allow."""
    return posixpath.normpath(re.sub(r"[^\w\-. /]", "_", name)[:250])


def _file_name(name: str) -> str:
    return re.sub(r"[^\w\-.]", "_", name)
