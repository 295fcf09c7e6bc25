"""Tests of sweeps on a cluster, by the command line: killed and resumed, with failing trials,
and used by train."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.hosts.cluster import RayCluster
from harness.runs.cli_runs import complete, finish_run, living_actors, read_summary
from orchestrator.config.settings import Config
from orchestrator.config.sweep.space import Point, Space
from orchestrator.config.sweep.space_parser import parse_space, points_space
from orchestrator.config.sweep.sweep import Sweep
from orchestrator.errors import UserError
from orchestrator.record.files.ledger import LEDGER, Ledger, TrialRow, holds_sweep, read_sweep_record
from orchestrator.runtime.sweep import run as run_module
from orchestrator.runtime.sweep.run import SweepRun, make_source, trial_error
from orchestrator.runtime.sweep.trial_worker import TrialSetup
from orchestrator.trainer import Trainer

SIZES = ("--width", "16", "--expert-hidden-size", "8", "--experts", "3", "--layers", "1")


def sweep_arguments(run_dir: Path, *arguments: str) -> list[str]:
    return ["sweep", *SIZES, *arguments, "--run-dir", str(run_dir)]


def start_sweep(cluster: RayCluster, run_dir: Path, *arguments: str) -> subprocess.Popen[str]:
    program = [sys.executable, "-m", "orchestrator", *sweep_arguments(run_dir, *arguments)]
    return subprocess.Popen(
        [*program, "--ray-address", cluster.address],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=run_dir.parent,
        env=cluster.environment,
        start_new_session=True,
    )


def complete_sweep(cluster: RayCluster, run_dir: Path, *arguments: str) -> None:
    complete(cluster, run_dir.parent, sweep_arguments(run_dir, *arguments))


def rows_of(run_dir: Path) -> list[TrialRow]:
    return list(read_sweep_record(run_dir).rows) if holds_sweep(run_dir) else []


def wait_for_completed(process: subprocess.Popen[str], run_dir: Path, count: int) -> None:
    deadline = time.monotonic() + 120
    while sum(row.status == "completed" for row in rows_of(run_dir)) < count:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, rows_of(run_dir)
        time.sleep(0.02)


POINTS: list[dict[str, Any]] = [{"batch_size": 25}, {"workers": 9}, {"top_k": 5}, {"batch_size": 8000}]
REASONS = ("9", "top_k is 5 but there are only 3 experts", "more than the 7,190")


@pytest.mark.extended
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_a_killed_sweep_continues_from_its_ledger(shared_cluster: RayCluster, tmp_path: Path) -> None:
    run_dir = tmp_path / "sweep"
    (tmp_path / "points.yaml").write_text(json.dumps([{"batch_size": 10}, *POINTS]))
    arguments = ("--space", "points.yaml", "--workers", "2", "--trial-seconds", "0.5", "--concurrent", "1")
    killed = start_sweep(shared_cluster, run_dir, *arguments)
    wait_for_completed(killed, run_dir, 1)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    before = (run_dir / LEDGER).read_text()
    assert len(rows_of(run_dir)) < 5
    output = complete(shared_cluster, tmp_path, ["resume", str(run_dir)])
    assert (run_dir / LEDGER).read_text().startswith(before), "finished trials count"
    rows = rows_of(run_dir)
    assert [row.point for row in rows[1:]] == POINTS, "in the order of the file"
    assert [row.status for row in rows] == ["completed", "completed", "infeasible", "failed", "failed"]
    for row, reason in zip(rows[2:5], REASONS, strict=True):
        assert reason in row.reason
    measured = [(row.workers, row.strategy, row.global_batch_size) for row in rows[:2]]
    assert measured == [(2, "data_parallel", 20), (2, "data_parallel", 50)]
    assert "train with it: orchestrator train --tuned" in output
    assert "trial 2 of 5  started  batch_size 25" in output
    assert not any(word in output for word in ("Traceback", "WARNING", "ray.tune"))
    written = {path.name for path in run_dir.iterdir()}
    assert {"sweep.csv", "scaling.md", "scaling.csv", "parallel_coordinates.png", "report.html"} <= written
    assert living_actors(shared_cluster) == []


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_sweep_by_validation_loss_with_asha(shared_cluster: RayCluster, tmp_path: Path) -> None:
    run_dir = tmp_path / "loss"
    space = ("--sweep", "learning-rate=1e-5,1e-4,3e-3,1e-2", "--workers", "1", "--batch-size", "32")
    objective = ("--objective", "validation_loss", "--trial-steps", "64", "--asha", "--concurrent", "1")
    complete_sweep(shared_cluster, run_dir, *space, *objective)
    record = read_sweep_record(run_dir)
    best = record.best()
    assert best is not None
    assert best.point["learning_rate"] >= 3e-3
    assert all(row.validation_loss is not None for row in record.rows)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_sweep_by_a_metric_of_the_task(shared_cluster: RayCluster, tmp_path: Path) -> None:
    run_dir = tmp_path / "accuracy"
    space = ("--sweep", "learning-rate=1e-6,1e-2", "--workers", "1", "--batch-size", "32")
    length = ("--trial-steps", "40", "--concurrent", "1")
    complete_sweep(shared_cluster, run_dir, *space, *length, "--objective", "accuracy")
    record = read_sweep_record(run_dir)
    best = record.best()
    assert record.objective == "accuracy:max"
    assert best is not None
    assert best.point["learning_rate"] == 1e-2
    assert best.metrics["accuracy"] == max(row.metrics["accuracy"] for row in record.rows)
    unknown = (*space, *length, "--objective", "f1")
    output = complete(shared_cluster, tmp_path, sweep_arguments(tmp_path / "unknown", *unknown), code=4)
    assert "--objective 'f1' is not among the validation metrics: loss, accuracy" in output


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_sweep_over_strategies(shared_cluster: RayCluster, tmp_path: Path) -> None:
    run_dir = tmp_path / "strategies"
    space = ("--sweep", "parallel-strategy=data_parallel,expert_parallel", "--workers", "2")
    complete_sweep(shared_cluster, run_dir, *space, "--batch-size", "16", "--trial-seconds", "0.5")
    assert [(row.status, row.strategy) for row in read_sweep_record(run_dir).rows] == [
        ("completed", "data_parallel"),
        ("completed", "expert_parallel"),
    ]


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_train_uses_the_best_settings_of_a_sweep(shared_cluster: RayCluster, tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    space = ("--sweep", "batch-size=10,25", "workers=1,2", "--trial-seconds", "0.5")
    complete_sweep(shared_cluster, folder, *space)
    run_dir = tmp_path / "run"
    arguments = ["train", "--tuned", str(folder), "--max-steps", "5", "--run-dir", str(run_dir), "--trackers"]
    complete(shared_cluster, tmp_path, arguments)
    best = read_sweep_record(folder).best()
    assert best is not None
    summary = read_summary(run_dir)
    assert (summary["workers"], summary["global_batch_size"]) == (best.workers, best.global_batch_size)
    settings = {entry["name"]: entry for entry in json.loads((run_dir / "plan.json").read_text())["settings"]}
    assert settings["batch.batch_size"]["origin"] == f"sweep {folder.name}, trial {best.trial}"


DEADLY_TASK = """
import os, signal
from orchestrator.tasks.digits import Digits

class Deadly(Digits):
    def loss(self, model, batch):
        if len(batch[0]) == 13:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch)
"""


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_worker_is_a_row(shared_cluster: RayCluster, tmp_path: Path) -> None:
    run_dir = tmp_path / "sweep"
    (tmp_path / "deadly.py").write_text(DEADLY_TASK)
    space = ("--task", "deadly:Deadly", "--sweep", "batch-size=10,13,25,30", "--workers", "1")
    complete_sweep(shared_cluster, run_dir, *space, "--trial-seconds", "0.5", "--concurrent", "1")
    rows = rows_of(run_dir)
    assert [row.status for row in rows] == ["completed", "failed", "completed", "completed"]
    assert "was lost" in rows[1].reason
    assert (rows[1].reason[-9:], rows[1].retries) == ("(3 tries)", 2)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_interrupted_sweep_says_how_to_continue(shared_cluster: RayCluster, tmp_path: Path) -> None:
    run_dir = tmp_path / "sweep"
    process = start_sweep(shared_cluster, run_dir, "--sweep", "batch-size=1..40:1", "--workers", "1")
    wait_for_completed(process, run_dir, 1)
    os.kill(process.pid, signal.SIGINT)
    output = finish_run(process, code=130)
    assert f"continue with: orchestrator resume {run_dir}" in output
    assert 1 <= len(rows_of(run_dir)) < 40
    assert living_actors(shared_cluster) == []


# --- without Ray


def test_two_sweeps_do_not_share_a_ledger(tmp_path: Path) -> None:
    first = Ledger(tmp_path)
    with pytest.raises(UserError, match="another process is running the sweep"):
        Ledger(tmp_path)
    first.close()
    second = Ledger(tmp_path)
    second.add(TrialRow(1, {"data_dir": Path("/data")}, "failed", "no"))
    second.close()
    assert '"data_dir": "/data"' in (tmp_path / LEDGER).read_text()


def test_the_reason_of_a_lost_trial_is_the_last_line_of_tunes_error_file(tmp_path: Path) -> None:
    class FailedTrial:
        error_file = str(tmp_path / "error.txt")

    assert trial_error(FailedTrial()) == ""
    (tmp_path / "error.txt").write_text("Failure # 1\nTraceback\n  File x\nValueError: no such thing\n\n")
    assert trial_error(FailedTrial()) == "ValueError: no such thing"
    assert trial_error(object()) == ""


def test_given_points_keep_their_order_and_a_grid_is_sorted_by_workers() -> None:
    plan = Trainer(config=Config()).prepare().plan

    def workers_or_refusal(point: Point) -> int | TrialRow:
        return TrialRow(0, point, "infeasible") if point["workers"] == 9 else point["workers"]

    def order(space: Space) -> list[Point]:
        source = make_source(Sweep(space), Config(), plan, (), workers_or_refusal)
        return list(iter(source.ask, None))

    pairs = ((2, 8), (1, 16), (9, 8), (1, 8), (2, 16))
    points = [{"workers": workers, "batch_size": batch} for workers, batch in pairs]
    assert order(points_space(points, "points.yaml")) == points
    grid = order(parse_space(["workers=2,9,1", "batch-size=8,16"]))
    assert [point["workers"] for point in grid] == [9, 9, 1, 1, 2, 2]


def test_settings_of_a_sweep_reach_its_trials() -> None:
    devices: Any = SimpleNamespace(inventory=None, cluster=None, on_gpu=False, cores=5)
    nothing: Any = None
    prepared = Trainer(config=Config()).prepare()
    space = parse_space(["batch-size=8,16"])

    def setup_of(sweep: Sweep) -> TrialSetup:
        return SweepRun(sweep, prepared, devices, nothing, (), nothing, lambda: False)._setup()

    by_time = setup_of(Sweep(space, trial_seconds=3.0))
    assert (by_time.seconds, by_time.steps, by_time.slices, by_time.cores) == (3.0, None, 1, 5)
    by_loss = setup_of(Sweep(space, objective="validation_loss", trial_steps=7, asha=True))
    assert (by_loss.objective, by_loss.steps, by_loss.slices) == ("validation_loss", 7, 8)


def test_a_search_draws_by_the_seed_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(run_module, "OptunaSource", lambda _, seed, __: seeds.append(seed))
    plan = Trainer(config=Config()).prepare().plan
    sweep = Sweep(parse_space(["batch-size=8,16"]), search="optuna", trials=2)
    make_source(sweep, Config.of(seed=5), plan, (), lambda _: 1)
    assert seeds == [5]
