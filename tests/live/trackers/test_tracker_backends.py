"""Contract tests of every tracker, including the fake of the other tests."""

import importlib.util
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.fakes.fake_tracker import CONFIG, FakeTracker, Points
from orchestrator.errors import UserError
from orchestrator.live.trackers.tracker_backends import (
    FACTORIES,
    MLflow,
    TensorBoard,
    TrackerFactory,
    WeightsAndBiases,
    find_factories,
)
from orchestrator.live.trackers.trackers import TrackerThread


def read_fake(tracker: Any, run_dir: Path) -> tuple[dict[str, Points], str]:
    return tracker.points, tracker.texts["plan"]


def read_tensorboard(tracker: Any, run_dir: Path) -> tuple[dict[str, Points], str]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(run_dir / "tensorboard"))
    accumulator.Reload()
    tags: Any = accumulator.Tags()
    points = {
        tag: [(point.step, point.value) for point in accumulator.Scalars(tag)] for tag in tags["scalars"]
    }
    assert "learning_rate" in accumulator.Tensors("config")[0].tensor_proto.string_val[0].decode()
    return points, accumulator.Tensors("plan")[0].tensor_proto.string_val[0].decode()


def read_wandb(tracker: Any, run_dir: Path) -> tuple[dict[str, Points], str]:
    import wandb
    from wandb.proto import wandb_internal_pb2

    # Offline, finish() returns shortly before the last lines are on disk. The end of a process
    # waits for them, and so does teardown.
    wandb.teardown()
    (run_file,) = (run_dir / "wandb").glob("offline-run-*/run-*.wandb")
    data = run_file.read_bytes()
    offset = 7  # after the header; a record is checksum, length, kind, content
    points: dict[str, Points] = {}
    while offset < len(data):
        end = offset + 7 + int.from_bytes(data[offset + 4 : offset + 6], "little")
        record: Any = wandb_internal_pb2.Record()
        record.ParseFromString(data[offset + 7 : end])
        row = {
            "".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item
        }
        for name in (name for name in row if "/" in name):
            points.setdefault(name, []).append((row["step"], float(row[name])))
        offset = end
    return points, (run_file.parent / "files" / "plan.txt").read_text()


def read_mlflow(tracker: Any, run_dir: Path) -> tuple[dict[str, Points], str]:
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{run_dir / 'mlflow' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("expert-orchestrator")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "run-1"
    assert run.info.status == "FINISHED"
    assert run.data.params["optim.learning_rate"] == "0.003"
    points = {
        name: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)]
        for name in run.data.metrics
    }
    (text,) = (run_dir / "mlflow" / "artifacts").rglob("plan.txt")
    return points, text.read_text()


Reader = Callable[[Any, Path], tuple[dict[str, Points], str]]
KINDS: list[tuple[TrackerFactory, Reader]] = [
    (FakeTracker, read_fake),
    (TensorBoard, read_tensorboard),
    (WeightsAndBiases, read_wandb),
    (MLflow, read_mlflow),
]


@pytest.mark.extended(but_first=2)
@pytest.mark.parametrize(("factory", "read"), KINDS, ids=lambda kind: kind.__name__)
def test_trackers_keep_the_contract(
    factory: TrackerFactory, read: Reader, tmp_path: Path, elsewhere: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "results" / "run-1"
    run_dir.mkdir(parents=True)
    tracker = factory(run_dir, "run-1", CONFIG)
    for step, loss in ((1, 1.0), (2, 0.5), (3, 0.25), (2, 0.75)):  # a step may come again, after a recovery
        tracker.log(step, {"train/loss": loss, "train/grad_norm": 2.0})
    tracker.log(3, {"validation/loss": 0.25, "validation/top@5 %": 0.5, "validation/odd": math.nan})
    tracker.text("plan", "two workers")
    tracker.close()
    points, text = read(tracker, run_dir)
    assert sorted(points["train/loss"]) == [(1, 1.0), (2, 0.5), (2, 0.75), (3, 0.25)]
    assert points["validation/loss"] == [(3, 0.25)]
    top = [values for name, values in points.items() if name.startswith("validation/top")]
    assert 0.5 in [value for values in top for _, value in values]
    assert text == "two workers"
    assert not list(elsewhere.iterdir()), "a tracker writes to the run folder only"
    assert "".join(capfd.readouterr()) == "", "a tracker prints nothing"


@pytest.mark.extended
def test_mlflow_uses_the_tracking_uri_of_the_user(
    tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow

    uri = f"sqlite:///{tmp_path / 'own.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    tracker = MLflow(tmp_path / "run", "run-1", CONFIG)
    tracker.log(1, {"train/loss": 0.5})
    tracker.close()
    assert not (tmp_path / "run").exists()
    assert len(mlflow.MlflowClient(uri).search_experiments(filter_string="name = 'expert-orchestrator'")) == 1


@pytest.mark.extended
def test_wandb_stores_neither_the_command_line_nor_git_data(
    tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each may hold a password, and W&B would upload it."""
    import wandb

    wandb.teardown()  # it keeps its first settings
    (elsewhere / "train.py").write_text("TOKEN = 'x'\n")
    for command in ("init -q", "remote add origin https://me:canary-of-git@git.example/x", "add train.py"):
        subprocess.run(["git", *command.split()], check=True)
    subprocess.run(["git", "-c", "user.name=x", "-c", "user.email=x@x", "commit", "-qm", "x"], check=True)
    (elsewhere / "train.py").write_text("TOKEN = 'canary-uncommitted'\n")
    monkeypatch.setattr(sys, "argv", ["train.py", "--data-dir", "s3://me:canary-of-the-command@host/x"])
    tracker = WeightsAndBiases(tmp_path, "run-1", CONFIG)
    tracker.log(1, {"train/loss": 0.5})
    tracker.close()
    wandb.teardown()
    files = [path for path in (tmp_path / "wandb").rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if b"canary" in path.read_bytes()]


def test_wandb_without_a_key_does_not_ask_on_the_terminal(
    tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no_netrc"))
    with pytest.raises(UserError, match="wandb login"):
        WeightsAndBiases(tmp_path, "run-1", CONFIG)


def test_unknown_and_missing_trackers_are_user_errors(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="'tensorbord'; known are tensorboard, wandb, mlflow"):
        find_factories(["tensorbord"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'expert-orchestrator\[wandb\]'"):
        TrackerThread(["wandb"], tmp_path, "run-1", CONFIG)


def test_a_folder_called_wandb_is_not_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(UserError, match="not installed"):
        find_factories(["wandb"])


def test_the_names_are_those_of_the_settings() -> None:
    from typing import get_args

    from orchestrator.config.sections.outputs import Tracker

    assert tuple(FACTORIES) == get_args(Tracker)
    assert list(find_factories(FACTORIES)) == list(FACTORIES)
