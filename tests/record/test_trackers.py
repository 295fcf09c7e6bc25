"""Every tracker keeps the same contract, and none, however hostile, holds up the training."""

import importlib.util
import json
import math
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import UserError
from orchestrator.record.events import EventLog
from orchestrator.record.trackers import (
    FACTORIES,
    Factory,
    MLflow,
    TensorBoard,
    Tracker,
    TrackerThread,
    WeightsAndBiases,
    factories,
    scalars,
)

CONFIG = {"task": "digits", "run": {"epochs": 3, "name": None}, "optim": {"learning_rate": 0.003}}
Points = list[tuple[int, float]]


class Fake:
    """Remembers what it is told."""

    def __init__(self, run_dir: Path, run_name: str, config: Mapping[str, Any]) -> None:
        self.name, self.config = run_name, config
        self.points: dict[str, Points] = {}
        self.texts: dict[str, str] = {}
        self.closed = 0
        self.threads = {threading.get_ident()}

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.threads.add(threading.get_ident())
        for name, value in values.items():
            self.points.setdefault(name, []).append((step, value))

    def text(self, name: str, content: str) -> None:
        self.texts[name] = content

    def close(self) -> None:
        self.threads.add(threading.get_ident())
        self.closed += 1


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working folder, and trackers that neither reach the network nor write to the home folder."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for name in ("CONFIG_DIR", "CACHE_DIR", "DATA_DIR"):
        monkeypatch.setenv(f"WANDB_{name}", str(tmp_path / "wandb_home"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    yield folder
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()


def read_fake(tracker: Any, run_dir: Path) -> tuple[dict[str, Points], str]:
    return tracker.points, tracker.texts["plan"]


def read_tensorboard(tracker: Any, run_dir: Path) -> tuple[dict[str, Points], str]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(run_dir / "tensorboard"))
    accumulator.Reload()
    tags: Any = accumulator.Tags()
    points = {tag: [(point.step, point.value) for point in accumulator.Scalars(tag)] for tag in tags["scalars"]}
    assert "learning_rate" in accumulator.Tensors("config")[0].tensor_proto.string_val[0].decode()
    return points, accumulator.Tensors("plan")[0].tensor_proto.string_val[0].decode()


def read_wandb(tracker: Any, run_dir: Path) -> tuple[dict[str, Points], str]:
    import wandb
    from wandb.proto import wandb_internal_pb2

    wandb.teardown()  # offline, finish() returns a moment before the last lines are on disk; the end of a process waits, as this does
    (run_file,) = (run_dir / "wandb").glob("offline-run-*/run-*.wandb")
    data, at = run_file.read_bytes(), 7  # a header, then records: checksum, length, kind, content
    points: dict[str, Points] = {}
    while at < len(data):
        end = at + 7 + int.from_bytes(data[at + 4 : at + 6], "little")
        record: Any = wandb_internal_pb2.Record()  # pyright: ignore[reportAttributeAccessIssue]
        record.ParseFromString(data[at + 7 : end])
        row = {"".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for name in (name for name in row if "/" in name):
            points.setdefault(name, []).append((row["step"], float(row[name])))
        at = end
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
    points = {name: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)] for name in run.data.metrics}
    (text,) = (run_dir / "mlflow" / "artifacts").rglob("plan.txt")
    return points, text.read_text()


Reader = Callable[[Any, Path], tuple[dict[str, Points], str]]
KINDS: list[tuple[Factory, Reader]] = [
    (Fake, read_fake),
    (TensorBoard, read_tensorboard),
    (WeightsAndBiases, read_wandb),
    (MLflow, read_mlflow),
]


@pytest.mark.parametrize(("factory", "read"), KINDS, ids=lambda kind: kind.__name__)
def test_the_contract(factory: Factory, read: Reader, tmp_path: Path, elsewhere: Path, capfd: pytest.CaptureFixture[str]) -> None:
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
    assert 0.5 in [value for name, values in points.items() if name.startswith("validation/top") for _, value in values]
    assert text == "two workers"
    assert not list(elsewhere.iterdir()), "a tracker keeps to the run folder"
    assert "".join(capfd.readouterr()) == "", "a tracker keeps off the screen"


def test_mlflow_goes_where_it_was_told_to(tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    uri = f"sqlite:///{tmp_path / 'own.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    tracker = MLflow(tmp_path / "run", "run-1", CONFIG)
    tracker.log(1, {"train/loss": 0.5})
    tracker.close()
    assert not (tmp_path / "run").exists()
    assert len(mlflow.MlflowClient(uri).search_experiments(filter_string="name = 'expert-orchestrator'")) == 1


def test_wandb_without_a_key_does_not_ask_on_the_terminal(tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no_netrc"))
    with pytest.raises(UserError, match="wandb login"):
        WeightsAndBiases(tmp_path, "run-1", CONFIG)


def test_unknown_and_missing_trackers_are_the_users_to_mend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'tensorbord'; known are tensorboard, wandb, mlflow"):
        factories(["tensorbord"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'expert-orchestrator\[wandb\]'"):
        TrackerThread(["wandb"], tmp_path, "run-1", CONFIG)


def test_a_folder_called_wandb_is_not_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(UserError, match="not installed"):
        factories(["wandb"])


def test_the_names_are_those_of_the_settings() -> None:
    from typing import get_args

    from orchestrator.config import settings

    assert tuple(FACTORIES) == get_args(settings.Tracker)
    assert list(factories(FACTORIES)) == list(FACTORIES)


# --- events to numbers ---------------------------------------------------------------------------------------------


def test_step_events() -> None:
    event = {"event": "step", "time": 1.0, "step": 7, "epoch": 0, "loss": 0.5, "grad_norm": "nan", "lr": 0.003}
    event |= {
        "samples": 64,
        "units": 64,
        "seconds": 0.5,
        "metrics": {"accuracy": 0.9, "aux": "inf", "note": "text", "flag": True, "none": None},
    }
    values = scalars(event)
    assert math.isnan(values.pop("train/grad_norm"))
    assert values == {
        "train/loss": 0.5,
        "train/learning_rate": 0.003,
        "train/samples_per_second": 128.0,
        "train/accuracy": 0.9,
        "train/aux": math.inf,
    }


NUMBERS = [
    (
        {
            "event": "evaluate",
            "step": 7,
            "epoch": 1,
            "loss": 0.25,
            "metrics": {"accuracy": 0.9},
            "samples": 9,
            "seconds": 1.0,
            "best": True,
        },
        {"validation/loss": 0.25, "validation/accuracy": 0.9},
    ),
    (
        {
            "event": "phases",
            "time": 1.0,
            "step": 7,
            "steps": 5,
            "data": 0.1,
            "forward": 0.2,
            "backward": 0.4,
            "optimizer": 0.1,
            "total": 0.8,
        },
        {"phases/data": 0.1, "phases/forward": 0.2, "phases/backward": 0.4, "phases/optimizer": 0.1, "phases/total": 0.8},
    ),
    ({"event": "phases", "step": 7, "steps": 5, "seconds": {"data": 0.1}, "total": 0.8}, {"phases/data": 0.1, "phases/total": 0.8}),
    (
        {
            "event": "epoch",
            "epoch": 2,
            "step": 7,
            "seconds": 3.0,
            "samples": 100,
            "loss": 0.5,
            "memory": {"allocated": 10, "reserved": None},
        },
        {"epoch/seconds": 3.0, "epoch/samples": 100.0, "epoch/loss": 0.5, "epoch/memory_allocated": 10.0},
    ),
    (
        {
            "event": "monitor",
            "step": 7,
            "host": {"cpu_percent": 50},
            "devices": [{"index": 1, "name": "H200", "memory_used": 10, "power": None}],
        },
        {"monitor/host_cpu_percent": 50.0, "monitor/gpu1_memory_used": 10.0},
    ),
    (
        {"event": "load", "step": 7, "steps": 1, "loads": [[4, 4, 4, 4], [6, 0, 0, 2], [0, 0], []]},
        {"experts/layer0_imbalance": 1.0, "experts/layer1_imbalance": 3.0},
    ),
    ({"event": "end", "status": "completed", "steps": 4}, {}),
    ({"event": "step", "step": 1}, {}),
    ({"event": "monitor", "host": None, "devices": None}, {}),
]


@pytest.mark.parametrize(("event", "values"), NUMBERS)
def test_events_become_named_numbers(event: dict[str, Any], values: dict[str, float]) -> None:
    assert scalars(event) == values


# --- the threads ---------------------------------------------------------------------------------------------------


def step(number: int) -> dict[str, Any]:
    return {"event": "step", "step": number, "loss": 1.0 / number}


def keeping(made: list[Any], kind: type[Fake] = Fake) -> Factory:
    def build(run_dir: Path, run_name: str, config: Mapping[str, Any]) -> Tracker:
        made.append(kind(run_dir, run_name, config))
        return made[-1]

    return build


def test_a_tracker_gets_all_numbers_in_one_thread_of_its_own(tmp_path: Path) -> None:
    made: list[Fake] = []
    warnings: list[str] = []
    thread = TrackerThread({"one": keeping(made), "two": keeping(made)}, tmp_path, "run-1", CONFIG, warnings.append)
    log = EventLog(tmp_path / "events.jsonl", [thread])
    log.write("start", task="digits", step=0)
    for number in range(1, 101):
        log.write("step", step=number, loss=1.0 / number)
    thread.text("plan", "two workers")
    thread.close()
    thread.close()
    log.write("step", step=101, loss=0.0)  # too late, and harmless
    for fake in made:
        assert (fake.name, fake.config, fake.closed) == ("run-1", CONFIG, 1)
        assert fake.points["train/loss"] == [(number, 1.0 / number) for number in range(1, 101)]
        assert fake.texts["plan"] == "two workers"
        assert "task: digits" in fake.texts["start"]
        assert len(fake.threads) == 1
        assert threading.get_ident() not in fake.threads
    assert len(made) == 2
    assert warnings == []


def test_a_tracker_that_raises_is_reported_once_and_switched_off(tmp_path: Path) -> None:
    calls: list[int] = []

    class Raising(Fake):
        def log(self, step: int, values: Mapping[str, float]) -> None:
            calls.append(step)
            raise OSError("no route to host")

    made: list[Any] = []
    warnings: list[str] = []
    thread = TrackerThread({"bad": keeping(made, Raising), "good": keeping(made)}, tmp_path, "run-1", CONFIG, warnings.append)
    for number in range(1, 21):
        thread(step(number))
    thread.close()
    good = next(fake for fake in made if type(fake) is Fake)
    bad = next(fake for fake in made if type(fake) is Raising)
    assert calls == [1, 2, 3]
    assert len(good.points["train/loss"]) == 20
    assert bad.closed == 1
    assert len(warnings) == 2
    assert "the tracker bad failed: OSError: no route to host" in warnings[0]
    assert "3 times in a row and is switched off" in warnings[1]


def test_a_tracker_that_raises_now_and_then_stays(tmp_path: Path) -> None:
    class Moody(Fake):
        def log(self, step: int, values: Mapping[str, float]) -> None:
            if step % 3:
                raise OSError("not now")
            super().log(step, values)

    made: list[Fake] = []
    warnings: list[str] = []
    thread = TrackerThread({"moody": keeping(made, Moody)}, tmp_path, "run-1", CONFIG, warnings.append)
    for number in range(1, 31):
        thread(step(number))
    thread.close()
    assert len(made[0].points["train/loss"]) == 10
    assert len(warnings) == 1


def test_warnings_come_in_the_callers_thread(tmp_path: Path) -> None:
    """Their receiver writes to the event log, which is not made for two threads; it may do so from within the listener."""

    class Raising(Fake):
        def log(self, step: int, values: Mapping[str, float]) -> None:
            raise OSError("no route to host")

    threads: set[int] = set()

    def on_warning(message: str) -> None:
        threads.add(threading.get_ident())
        log.write("warning", kind="tracker", message=message)

    thread = TrackerThread({"bad": keeping([], Raising)}, tmp_path, "run-1", CONFIG, on_warning)
    log = EventLog(tmp_path / "events.jsonl", [thread])
    for number in range(1, 50):
        log.write("step", step=number, loss=0.5)
    thread.close()
    log.close()
    assert threads == {threading.get_ident()}


def test_one_that_does_not_start_is_reported(tmp_path: Path) -> None:
    def refuse(run_dir: Path, run_name: str, config: Mapping[str, Any]) -> Tracker:
        raise UserError("no API key")

    warnings: list[str] = []
    thread = TrackerThread({"bad": refuse}, tmp_path, "run-1", CONFIG, warnings.append)
    thread(step(1))
    thread.close()
    assert len(warnings) == 1
    assert "did not start: UserError: no API key" in warnings[0]


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """Lets hanging trackers go at the end of the test."""
    event = threading.Event()
    yield event
    event.set()


def test_one_that_hangs_in_log_delays_nobody(tmp_path: Path, release: threading.Event) -> None:
    entered = threading.Event()

    class Hanging(Fake):
        def log(self, step: int, values: Mapping[str, float]) -> None:
            entered.set()
            release.wait(60)

    made: list[Any] = []
    warnings: list[str] = []
    chosen = {"hanging": keeping(made, Hanging), "good": keeping(made)}
    thread = TrackerThread(chosen, tmp_path, "run-1", CONFIG, warnings.append, close_timeout_s=0.2)
    thread(step(1))
    assert entered.wait(30)
    for number in range(2, 101):
        thread(step(number))  # returns, though the tracker still hangs in its first call
    thread.close()
    assert not release.is_set()
    good = next(fake for fake in made if type(fake) is Fake)
    assert len(good.points["train/loss"]) == 100
    assert good.closed == 1
    assert len(warnings) == 1
    assert "the tracker hanging did not finish in time and is left behind; about 100 updates" in warnings[0]


@pytest.mark.parametrize("where", ["construction", "close"])
def test_one_that_hangs_elsewhere_is_left_behind(where: str, tmp_path: Path, release: threading.Event) -> None:
    entered = threading.Event()

    def hang() -> None:
        entered.set()
        release.wait(60)

    class Hanging(Fake):
        def __init__(self, run_dir: Path, run_name: str, config: Mapping[str, Any]) -> None:
            super().__init__(run_dir, run_name, config)
            if where == "construction":
                hang()

        def close(self) -> None:
            if where == "close":
                hang()

    warnings: list[str] = []
    thread = TrackerThread({"hanging": Hanging}, tmp_path, "run-1", CONFIG, warnings.append, close_timeout_s=0.2)
    thread(step(1))
    thread.close()
    assert entered.wait(30)
    assert not release.is_set()
    assert len(warnings) == 1
    assert "left behind" in warnings[0]


def test_a_full_queue_drops_and_counts(tmp_path: Path, release: threading.Event) -> None:
    entered = threading.Event()

    class Slow(Fake):
        def log(self, step: int, values: Mapping[str, float]) -> None:
            entered.set()
            release.wait(60)
            super().log(step, values)

    made: list[Fake] = []
    warnings: list[str] = []
    thread = TrackerThread({"slow": keeping(made, Slow)}, tmp_path, "run-1", CONFIG, warnings.append, queue_size=4)
    thread(step(1))
    assert entered.wait(30)
    for number in range(2, 12):
        thread(step(number))
    assert thread.dropped == {"slow": 6}
    release.set()
    thread.close()
    assert [number for number, _ in made[0].points["train/loss"]] == [1, 2, 3, 4, 5]
    assert made[0].closed == 1
    assert warnings == ["the tracker slow was too slow: 6 updates were dropped there; events.jsonl has them all"]


def test_the_real_trackers_run_side_by_side(tmp_path: Path, elsewhere: Path) -> None:
    warnings: list[str] = []
    thread = TrackerThread(["tensorboard", "wandb"], tmp_path / "run", "run-1", CONFIG, warnings.append, close_timeout_s=120)
    thread(step(1))
    thread.close()
    assert warnings == []
    assert list((tmp_path / "run" / "tensorboard").glob("events.out.tfevents.*"))
    assert list((tmp_path / "run" / "wandb").rglob("*.wandb"))


def test_nothing_heavy_is_imported_before_it_is_used() -> None:
    code = """if True:
        import sys, orchestrator.record.trackers, orchestrator.record.screen, orchestrator.record.monitor
        heavy = {"torch", "ray", "tensorboard", "wandb", "mlflow", "pynvml", "psutil", "rich", "numpy"} & set(sys.modules)
        assert not heavy, heavy"""
    subprocess.run([sys.executable, "-c", code], check=True)
