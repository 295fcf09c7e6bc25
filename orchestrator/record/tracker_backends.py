"""TensorBoard, Weights & Biases and MLflow behind one protocol. Each is imported when it is built, not before."""

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


class Tracker(Protocol):
    """What a tracker must do. It is built, called and closed in one thread of its own."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def text(self, name: str, content: str) -> None: ...

    def close(self) -> None: ...


TrackerFactory = Callable[[Path, str, Mapping[str, Any]], Tracker]
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
        self._write(
            step,
            [self._summaries.Summary.Value(tag=name, simple_value=value) for name, value in values.items()],
        )

    def text(self, name: str, content: str) -> None:
        from tensorboard.plugins.text.metadata import create_summary_metadata
        from tensorboard.util.tensor_util import make_tensor_proto

        metadata = create_summary_metadata(name, "")
        self._write(
            0,
            [self._summaries.Summary.Value(tag=name, metadata=metadata, tensor=make_tensor_proto([content]))],
        )

    def _write(self, step: int, values: list[Any]) -> None:
        self._writer.add_event(
            self._events.Event(
                wall_time=time.time(), step=step, summary=self._summaries.Summary(value=values)
            )
        )

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run in W&B's project "expert-orchestrator"; its files are in RUN/wandb."""

    def __init__(self, run_dir: Path, run_name: str, config: Mapping[str, Any]) -> None:
        import wandb

        # Its messages and its capture of the console would break up the progress bar; without a limit, wandb's own hook at
        # the end of the process would wait for a lost network for ever (what was not sent stays in the folder for 'wandb sync').
        # The command line, git's addresses and what was changed since the last commit may hold secrets: W&B would upload them.
        settings = wandb.Settings(
            silent=True, console="off", finish_timeout=60, x_disable_meta=True, disable_git=True
        )
        # Without an API key wandb would ask for one on the terminal, from this thread, in the middle of the training.
        if wandb.setup(settings).settings.mode in ("online", "run", "shared") and not wandb.login(
            prompt=False
        ):
            raise UserError(
                "the tracker wandb found no API key. Run 'wandb login' first, or set WANDB_MODE=offline to log to files alone."
            )
        # wandb makes the folder "wandb" in the one it is given.
        self._run = wandb.init(
            project=PROJECT, name=run_name, dir=str(run_dir), config=dict(config), settings=settings
        )
        # An axis of our own: W&B's refuses a step that comes again, as one replayed after a recovery does.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "step": step})

    def text(self, name: str, content: str) -> None:
        (Path(self._run.dir) / f"{_file_name(name)}.txt").write_text(
            content, encoding="utf-8"
        )  # W&B uploads this folder

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
        return (
            known.experiment_id
            if known
            else self._client.create_experiment(PROJECT, folder and (folder / "artifacts").as_uri())
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        self._waiting += [
            self._metric(_mlflow_name(name), value, now, step) for name, value in values.items()
        ]
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


FACTORIES: Mapping[str, TrackerFactory] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "mlflow": MLflow}


def find_factories(names: Iterable[str]) -> dict[str, TrackerFactory]:
    """The trackers of these names. One that is unknown or not installed is a UserError, before anything is started."""
    chosen: dict[str, TrackerFactory] = {}
    for name in names:
        if name not in FACTORIES:
            raise UserError(f"unknown tracker {name!r}; known are {', '.join(FACTORIES)}")
        spec = importlib.util.find_spec(name)
        if (
            spec is None or spec.origin is None
        ):  # no origin: a folder that happens to be called wandb, as wandb leaves behind
            raise UserError(
                f"the tracker {name} was asked for, but it is not installed. Install it: pip install '{PROJECT}[{name}]'"
            )
        chosen[name] = FACTORIES[name]
    return chosen


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _sqlite(folder: Path) -> str:
    folder.mkdir(
        parents=True, exist_ok=True
    )  # MLflow's file store is closed to new runs; its database needs the folder
    return f"sqlite:///{folder / 'mlflow.db'}"


def _mlflow_name(name: str) -> str:
    """The name as MLflow accepts it: it refuses the whole batch for one sign it does not like."""
    return posixpath.normpath(re.sub(r"[^\w\-. /]", "_", name)[:250])


def _file_name(name: str) -> str:
    return re.sub(r"[^\w\-.]", "_", name)
