"""Callbacks of a run on expert hosts, through the loss of the main one; and those that look at the model."""

from __future__ import annotations

import shlex
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.hosts.cluster import RayCluster
from harness.runs.cli_runs import finish_run, kill_worker, read_summary, start_run, wait_for_steps
from orchestrator.config.settings import Config
from orchestrator.errors import UserError
from orchestrator.live.callbacks.callbacks import Callback, CallbackRunner
from orchestrator.record.files.reading import of_kind, read_events
from orchestrator.runtime.driver import _sent_callbacks

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]
CALLBACK = """
from pathlib import Path

from orchestrator import Callback, Request


class Watch(Callback):
    def __init__(self):
        self.num_failures = 0

    def on_start(self, start):
        self.calls = (start.run_dir.parent / "calls.txt").open("w", buffering=1)
        self.calls.write(f"start of {start.workers}\\n")

    def on_failure(self, failure):
        self.num_failures += 1
        self.calls.write(f"failure of {failure.rank}\\n")
        return Request(save=True, log={"failures": self.num_failures})

    def on_checkpoint(self, checkpoint):
        self.calls.write(f"checkpoint {checkpoint.path.is_dir()}\\n")
        if self.num_failures:
            return Request(stop=f"saved after {self.num_failures} failure")

    def on_end(self, end):
        self.calls.write(f"end {end.status}\\n")
"""


@pytest.mark.extended
def test_callbacks_keep_their_state_when_the_main_host_is_lost(
    shared_cluster: RayCluster, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(CALLBACK)
    run_dir = tmp_path / "run"
    flags = "--parallel-strategy expert_parallel --workers 2 --epochs 1000 --checkpoint-every 100000"
    process = start_run(shared_cluster, run_dir, *shlex.split(flags), "--callbacks", "mine:Watch")
    wait_for_steps(process, run_dir, 20)
    kill_worker(run_dir, 0)
    finish_run(process)
    calls = (tmp_path / "calls.txt").read_text().splitlines()
    assert calls[:3] == ["start of 2", "failure of 0", "checkpoint True"]
    assert calls[-1] == "end completed"
    summary = read_summary(run_dir)
    assert (summary["status"], summary["recoveries"]) == ("completed", 1)
    assert summary["reason"] == "Watch.on_checkpoint asked to stop: saved after 1 failure"
    (logged,) = of_kind(read_events(run_dir / "events.jsonl"), "log")
    assert logged["values"] == {"failures": 1.0}


LOOK = """
from orchestrator import Callback, Request


class Look(Callback):
    def __init__(self):
        self.steps = 0

    def on_step(self, step):
        self.steps += 1

    def on_model(self, moment, model):
        norm = sum(parameter.square().sum() for parameter in model.parameters()).item()
        if moment.after != "step":
            return None
        stop = "seen five steps" if moment.step == 5 else None
        return Request(stop=stop, log={"norm": norm, "own": self.steps})
"""


@pytest.mark.extended
@pytest.mark.parametrize("strategy", ["data_parallel", "expert_parallel"])
def test_the_main_worker_shows_its_part_of_the_model(
    shared_cluster: RayCluster, tmp_path: Path, strategy: str
) -> None:
    (tmp_path / "mine.py").write_text(LOOK)
    run_dir = tmp_path / "run"
    flags = f"--parallel-strategy {strategy} --workers 2 --epochs 1000 --log-every 1 --callbacks mine:Look"
    finish_run(start_run(shared_cluster, run_dir, *shlex.split(flags)))
    summary = read_summary(run_dir)
    assert summary["reason"] == "Look.on_model asked to stop: seen five steps"
    logged = [event["values"] for event in of_kind(read_events(run_dir / "events.jsonl"), "log")]
    assert len(logged) == summary["steps"] >= 5
    assert len({values["norm"] for values in logged}) == len(logged)
    # The driver's callback counts steps; the main worker's copy does not.
    assert {values["own"] for values in logged} == {0.0}


def test_an_object_that_cannot_be_copied_to_the_worker_is_refused() -> None:
    class HasLock:
        def __init__(self) -> None:
            self.lock = threading.Lock()

        def on_model(self, moment: object, model: object) -> None:
            pass

    with pytest.raises(
        UserError, match=r"the callback HasLock has on_model.*it cannot be copied: cannot pickle"
    ):
        _sent_callbacks(Config(), CallbackRunner([HasLock()]))


def test_only_callbacks_that_look_at_the_model_are_sent() -> None:
    config = Config.of(callbacks="mine:Watch,mine:Look")
    watch = Callback()
    look = SimpleNamespace(on_model=print)
    assert _sent_callbacks(config, CallbackRunner([watch, watch, look])) == ("mine:Look",)
