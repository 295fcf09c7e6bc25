"""A sweep on a cluster that runs already, by the command line: killed in the middle, resumed, and used by train."""

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

from orchestrator.cli.main import main
from orchestrator.cli.tuned import tuned
from orchestrator.config.reader import Resolved
from orchestrator.config.settings import Config
from orchestrator.config.space import Point, Space
from orchestrator.config.space_parser import parse_space, points_space
from orchestrator.config.sweep import Sweep
from orchestrator.errors import ResourceError, UserError
from orchestrator.measure.trial import TrialResult
from orchestrator.plan.inventory.cluster import Cluster as Planned
from orchestrator.plan.inventory.cluster import Node
from orchestrator.record.ledger import LEDGER, Ledger, TrialRow, holds_sweep, read_sweep_record
from orchestrator.runtime.sweep.run import Ground, planned_point, source_of, trial_error
from orchestrator.runtime.sweep.trial import Trial, check_batch, measured_row
from orchestrator.trainer import Trainer
from tests.support.cli_runs import actors, finish, summary
from tests.support.cluster import Cluster
from tests.support.inventories import machine

SIZES = ["--width", "16", "--expert-hidden-size", "8", "--experts", "3", "--layers", "1"]


def started(here: Cluster, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "orchestrator", "sweep", *arguments, "--ray-address", here.address]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env=here.environment,
        start_new_session=True,
    )


def rows_of(folder: Path) -> list[TrialRow]:
    return list(read_sweep_record(folder).rows) if holds_sweep(folder) else []


def wait_for_completed(process: subprocess.Popen[str], folder: Path, count: int) -> None:
    deadline = time.monotonic() + 120
    while sum(row.status == "completed" for row in rows_of(folder)) < count:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, rows_of(folder)
        time.sleep(0.02)


POINTS: list[dict[str, Any]] = [{"batch_size": 25}, {"workers": 9}, {"top_k": 5}, {"batch_size": 2000}]


@pytest.mark.ray
@pytest.mark.timeout(600)
def test_killed_and_resumed(shared_cluster: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    (tmp_path / "points.yaml").write_text(json.dumps([{"batch_size": 10}, *POINTS]))
    begun = ["--space", "points.yaml", "--workers", "2", "--trial-seconds", "0.5", "--run-dir", str(folder)]
    killed = started(shared_cluster, tmp_path, *SIZES, *begun, "--concurrent", "1")
    wait_for_completed(killed, folder, 1)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    before = (folder / LEDGER).read_text()
    assert len(rows_of(folder)) < 5
    output = finish(started(shared_cluster, tmp_path, "--resume", str(folder), "--concurrent", "1"))
    assert (folder / LEDGER).read_text().startswith(before)  # what was done stands
    rows = rows_of(folder)
    assert [row.point for row in rows[1:]] == POINTS  # in the order of the list
    assert [row.status for row in rows] == ["completed", "completed", "infeasible", "failed", "failed"]
    for row, said in zip(
        rows[2:5], ("9", "top_k is 5 but there are only 3 experts", "more than the 1,438"), strict=True
    ):
        assert said in row.reason
    assert [(row.workers, row.strategy, row.global_batch_size) for row in rows[:2]] == [
        (2, "data_parallel", n) for n in (20, 50)
    ]
    assert "train with it: orchestrator train --tuned" in output
    assert "trial 2 of 5  started  batch_size 25" in output
    assert not any(word in output for word in ("Traceback", "WARNING", "ray.tune"))
    made = {path.name for path in folder.iterdir()}
    assert {"sweep.csv", "scaling.md", "scaling.csv", "parallel_coordinates.png", "report.html"} <= made
    assert actors(shared_cluster) == []


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_by_the_loss_with_early_stops_and_on_hosts(shared_cluster: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / "loss"
    rates = "learning-rate=1e-5,1e-4,3e-3,1e-2"
    by_loss = [
        "--objective",
        "validation_loss",
        "--trial-steps",
        "64",
        "--asha",
        "--workers",
        "1",
        "--batch-size",
        "32",
    ]
    finish(
        started(
            shared_cluster,
            tmp_path,
            *SIZES,
            "--sweep",
            rates,
            *by_loss,
            "--concurrent",
            "1",
            "--run-dir",
            str(folder),
        )
    )
    record = read_sweep_record(folder)
    best = record.best()
    assert best is not None
    assert best.point["learning_rate"] >= 3e-3
    assert all(row.validation_loss is not None for row in record.rows)
    hosts = tmp_path / "hosts"
    strategies = [
        "--sweep",
        "parallel-strategy=data_parallel,expert_parallel",
        "--workers",
        "2",
        "--batch-size",
        "16",
    ]
    finish(
        started(
            shared_cluster, tmp_path, *SIZES, *strategies, "--trial-seconds", "0.5", "--run-dir", str(hosts)
        )
    )
    assert [(row.status, row.strategy) for row in read_sweep_record(hosts).rows] == [
        ("completed", "data_parallel"),
        ("completed", "expert_parallel"),
    ]


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_train_takes_what_a_sweep_found(shared_cluster: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    space = ["--sweep", "batch-size=10,25", "workers=1,2", "--trial-seconds", "0.5"]
    finish(started(shared_cluster, tmp_path, *SIZES, *space, "--run-dir", str(folder)))
    run_dir = tmp_path / "run"
    trained = [
        sys.executable,
        "-m",
        "orchestrator",
        "train",
        "--tuned",
        str(folder),
        "--max-steps",
        "5",
        "--run-dir",
        str(run_dir),
    ]
    finish(subprocess.Popen([*trained, "--ray-address", shared_cluster.address, "--trackers"], stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True, cwd=tmp_path, env=shared_cluster.environment))  # fmt: skip
    best = read_sweep_record(folder).best()
    assert best is not None
    assert (summary(run_dir)["workers"], summary(run_dir)["global_batch_size"]) == (
        best.workers,
        best.global_batch_size,
    )
    settings = {entry["name"]: entry for entry in json.loads((run_dir / "plan.json").read_text())["settings"]}
    assert settings["batch.batch_size"]["origin"] == f"sweep {folder.name}, trial {best.trial}"


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_worker_that_is_killed_is_a_row_and_interrupted_sweeps_say_how_to_go_on(
    shared_cluster: Cluster, tmp_path: Path
) -> None:
    folder = tmp_path / "sweep"
    (tmp_path / "deadly.py").write_text(
        "import os, signal\nfrom orchestrator.tasks.digits import Digits\n\n\nclass Deadly(Digits):\n    def loss(self, model, batch):\n"
        "        if len(batch[0]) == 13:\n            os.kill(os.getpid(), signal.SIGKILL)\n        return super().loss(model, batch)\n"
    )
    arguments = [
        *SIZES,
        "--task",
        "deadly:Deadly",
        "--sweep",
        "batch-size=10,13,25,30",
        "--workers",
        "1",
        "--trial-seconds",
        "0.5",
    ]
    finish(started(shared_cluster, tmp_path, *arguments, "--concurrent", "1", "--run-dir", str(folder)))
    rows = rows_of(folder)
    assert [row.status for row in rows] == ["completed", "failed", "completed", "completed"]
    assert "was lost" in rows[1].reason
    again = tmp_path / "again"
    process = started(
        shared_cluster,
        tmp_path,
        *SIZES,
        "--sweep",
        "batch-size=1..40:1",
        "--workers",
        "1",
        "--run-dir",
        str(again),
    )
    wait_for_completed(process, again, 1)
    os.kill(process.pid, signal.SIGINT)
    output = finish(process, code=130)
    assert f"go on with: orchestrator sweep --resume {again}" in output
    assert 1 <= len(rows_of(again)) < 40
    assert actors(shared_cluster) == []


def test_what_workers_are_given() -> None:
    space, four = parse_space(["workers=1,2,3,16"]), Planned((Node("here", 4, 0, 4),), joined=False)
    ground = Ground.of(Config(), space, machine(cores=4), four)
    assert (ground.cores, ground.devices, ground.on_gpu) == (1, 4, False)
    assert [ground.workers(Config.of(workers=n)) for n in (1, 2, 3)] == [1, 2, 3]
    with pytest.raises(
        ResourceError, match="16 workers with 1 core each were asked for; this machine has 4 CPUs"
    ):
        ground.workers(Config.of(workers=16))
    alone = Ground.of(Config(), parse_space(["batch-size=1,2"]), machine(cores=4), four)
    assert (alone.cores, alone.workers(Config())) == (4, 1)


def test_workers_left_to_the_plan_can_be_had() -> None:
    here = Planned((Node("here", 2, 0, 2),), joined=False)
    asked = Config.of(parallel_strategy="data_parallel")
    ground = Ground.of(asked, parse_space(["batch-size=1,2"]), machine(cores=2), here)
    assert (ground.cores, ground.workers(asked)) == (1, 2)
    one = Planned((Node("here", 1, 0, 2),), joined=True)
    ground = Ground.of(Config(), parse_space(["workers=1,2"]), machine(cores=2), one)
    assert (ground.cores, ground.devices, ground.workers(Config.of(workers=1))) == (1, 1, 1)
    listed = points_space([{"workers": 1}, {"batch_size": 8}], "points.yaml")
    for asked in (Config.of(workers=2), Config.of(parallel_strategy="data_parallel")):
        ground = Ground.of(asked, listed, machine(cores=2), here)
        assert (ground.cores, ground.workers(asked.but(batch_size=8))) == (1, 2)
    assert Ground.of(Config.of(workers=64), listed, machine(cores=2), here).cores == 2
    uneven = Planned(tuple(Node(f"n{n}", 3, 0, 3) for n in range(3)), joined=True)
    ground = Ground.of(Config(), parse_space(["workers=1,3"]), machine(cores=3), uneven)
    assert (ground.cores, ground.devices) == (3, 3)


def swept(folder: Path, *rows: TrialRow, **header: Any) -> Path:
    folder.mkdir()
    ledger = Ledger(folder)
    ledger.begin(
        {
            "task": "digits",
            "kind": "cpu",
            "cores_per_worker": 1,
            "settings": {"width": 8},
            "objective": "throughput",
        }
        | header
    )
    for row in rows:
        ledger.add(row)
    ledger.close()
    return folder


ROWS = tuple(
    TrialRow(n, {"batch_size": 8 * n}, "completed", workers=w, samples_per_second=float(w))
    for n, w in enumerate((1, 2, 8), 1)
)


def test_tuned_takes_the_best_row_that_fits_and_flags_win(tmp_path: Path) -> None:
    folder = swept(tmp_path / "s", *ROWS)
    for devices, workers in ((1, 1), (4, 2), (8, 8)):
        found, words = tuned(folder, Resolved(Config(), {}), lambda _, n=devices: ("cpu", n))
        assert (found.config.parallel.workers, found.config.batch.batch_size, found.config.model.width) == (
            workers,
            ROWS[(1, 2, 8).index(workers)].point["batch_size"],
            8,
        )
        assert "settings of trial" in words
    flags = Resolved(Config.of(workers=2, width=32), {"workers": "flag --workers", "width": "flag --width"})
    found, words = tuned(folder, flags, lambda _: ("cpu", 8))
    assert (found.config.parallel.workers, found.config.batch.batch_size, found.config.model.width) == (
        2,
        16,
        32,
    )
    assert found.origins["batch_size"] == "sweep s, trial 2"
    assert "passed over trial 3 (8 samples/s): it has 8 workers, and --workers 2 was asked for" in words
    assert "your flags won, so it is not the trial that was measured: --width 32 over 8" in words


def test_tuned_tells_what_was_passed_over_and_what_gave_way(tmp_path: Path) -> None:
    folder = swept(tmp_path / "s", *ROWS)
    given = Resolved(
        Config.of(batch_size=2, width=8), {"batch_size": "file x.yaml:3", "width": "file x.yaml:4"}
    )
    found, words = tuned(folder, given, lambda _: ("cpu", 1))
    assert found.config.batch.batch_size == 8
    assert words.splitlines()[1:] == [
        "passed over trial 3 (8 samples/s): it has 8 workers, and 1 device is here",
        "settings of your file gave way: batch_size 2 (file x.yaml:3) to 8; give them as flags to keep them",
    ]
    _, words = tuned(folder, Resolved(Config(), {}), lambda _: ("cpu", 8))
    assert len(words.splitlines()) == 1
    with pytest.raises(UserError, match="swept in Python"):
        tuned(swept(tmp_path / "own", *ROWS, task="python:Net"), Resolved(Config(), {}), lambda _: ("cpu", 8))


@pytest.mark.parametrize(
    ("resolved", "devices", "said"),
    [
        (
            Resolved(Config.of(task="text"), {"task": "file c.yaml:1"}),
            ("cpu", 8),
            "is a sweep of digits, and text is to be trained",
        ),
        (Resolved(Config(), {}), ("gpu", 8), "was swept on cpus, and this run has gpus"),
        (Resolved(Config.of(workers=3), {"workers": "flag --workers"}), ("cpu", 8), "none fits --workers 3"),
        (Resolved(Config(), {}), ("cpu", 0), "none fits 0 devices"),
    ],
)
def test_tuned_refuses_what_does_not_compare(
    tmp_path: Path, resolved: Resolved, devices: tuple[str, int], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        tuned(swept(tmp_path / "s", *ROWS), resolved, lambda _: devices)


HIDDEN = {"data_dir": "/data/***", "width": 8}


def test_what_a_ledger_keeps_masked_is_given_again_for_train(tmp_path: Path) -> None:
    for name, folder in (
        ("data_dir", swept(tmp_path / "s", *ROWS, settings=HIDDEN)),
        (
            "placement",
            swept(
                tmp_path / "p",
                TrialRow(1, {"placement": "***.json"}, "completed", workers=1, samples_per_second=1.0),
            ),
        ),
    ):
        with pytest.raises(
            UserError,
            match=f"keeps {name} without the secret in it; give it again, as --{name.replace('_', '-')} VALUE",
        ):
            tuned(folder, Resolved(Config(), {}), lambda _: ("cpu", 8))
        given = Resolved(Config.of(**{name: "mine.json"}), {name: "flag --x"})
        found, _ = tuned(folder, given, lambda _: ("cpu", 8))
        assert "mine.json" in (str(found.config.data.data_dir), found.config.parallel.placement)


def test_what_a_ledger_keeps_masked_is_given_again_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Config] = []
    monkeypatch.setattr(Trainer, "sweep", lambda self, *_, **__: seen.append(self.resolved.config))
    folder = swept(tmp_path / "s", settings=HIDDEN, **Sweep(parse_space(["workers=1,2"])).header())
    assert main(["sweep", "--resume", str(folder)]) == 2
    assert (
        "keeps data_dir without the secret in it; give it again, as --data-dir VALUE"
        in capsys.readouterr().err
    )
    assert main(["sweep", "--resume", str(folder), "--data-dir", "/mine", "--width", "8"]) == 2
    assert "leave out --width" in capsys.readouterr().err
    assert main(["sweep", "--resume", str(folder), "--data-dir", "/mine"]) == 0
    assert seen == [Config.of(data_dir="/mine", width=8)]


def test_what_tune_wrote_of_an_error_is_told(tmp_path: Path) -> None:
    class Failed:
        error_file = str(tmp_path / "error.txt")

    assert trial_error(Failed()) == ""
    (tmp_path / "error.txt").write_text("Failure # 1\nTraceback\n  File x\nValueError: no such thing\n\n")
    assert trial_error(Failed()) == "ValueError: no such thing"
    assert trial_error(object()) == ""


def test_workers_are_renewed_after_so_many_trials_however_they_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that failed or were stopped early have left sockets open."""
    ended: list[int] = []
    leader = object.__new__(Trial)
    monkeypatch.setattr(leader, "_trials", 0, raising=False)
    monkeypatch.setattr(
        leader, "_gang", SimpleNamespace(end=lambda: ended.append(leader._trials)), raising=False
    )
    for number in range(1, 100):
        assert leader.reset_config({"trial": number, "point": {}, "workers": 1})
    assert ended == [40, 80]


def test_two_at_a_time_is_one_too_many(tmp_path: Path) -> None:
    first = Ledger(tmp_path)
    with pytest.raises(UserError, match="is being swept by another process"):
        Ledger(tmp_path)
    first.close()
    second = Ledger(tmp_path)
    second.add(TrialRow(1, {"data_dir": Path("/data")}, "failed", "no"))
    second.close()
    assert '"data_dir": "/data"' in (tmp_path / LEDGER).read_text()


def test_a_search_begins_at_the_plan() -> None:
    config = Config.of(batch_size=48)
    plan = Trainer(config=config).prepare().plan
    space = parse_space(
        [
            "batch-size=16,64",
            "precision=bf16,fp32",
            "learning-rate=1e-3..1e-2",
            "accumulation-steps=1..8",
            "compile=on,off",
        ]
    )
    point = planned_point(space, config, plan)
    assert point == {
        "batch_size": 64,
        "precision": "fp32",
        "learning_rate": 3e-3,
        "accumulation_steps": 1,
        "compile": "off",
    }


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--sweep", "bath-size=1,2"], "did you mean 'batch_size'"),
        (["--sweep", "batch-size=1..9"], "give it steps"),
        ([], "nothing to sweep"),
        (["--sweep", "batch-size=1,2", "--search", "random"], "give --trials"),
        (["--resume", "nowhere"], "holds no sweep"),
        (["--resume", "nowhere", "--sweep", "batch-size=1,2", "--task", "text"], "leave out --sweep, --task"),
        (["--sweep", "batch-size=1,2", "--space", "x.yaml"], "were both given"),
        (["--sweep", "batch-size=1,2", "--task", "nowhere:Thing"], "there is no module 'nowhere'"),
        (
            ["--sweep", "width=8,16", "--batch-size", "auto"],
            "--batch-size auto measures a batch size by itself",
        ),
    ],
)
def test_mistakes_cost_no_cluster(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.runtime.cluster.session.session", no_cluster)
    assert main(["sweep", *arguments]) == 2
    assert said in capsys.readouterr().err


def no_cluster(*arguments: Any) -> Any:
    raise AssertionError("a cluster was started")


def test_a_sweep_that_cannot_be_had_costs_no_cluster(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.runtime.cluster.session.session", no_cluster)
    asked = ["sweep", "--gpu-mode", "cpu", "--ray-address", "local", "--sweep", "batch-size=8,16"]
    assert main([*asked, "workers=500,600"]) == 3
    assert "none of the 4 points can be tried here; the first: --workers 500 needs" in capsys.readouterr().err
    with pytest.raises(AssertionError, match="a cluster was started"):
        main([*asked, "workers=500,1"])


def made_before(folder: Path, *rows: TrialRow) -> Path:
    """A sweep over four batch sizes, of which these trials were made."""
    folder.mkdir()
    ledger = Ledger(folder)
    ledger.begin(
        {"task": "digits", "settings": {}, "kind": "cpu", "cores_per_worker": 1}
        | Sweep(parse_space(["workers=1,2,3,4"])).header()
    )
    for row in rows:
        ledger.add(row)
    ledger.close()
    return folder


def test_a_finished_sweep_is_drawn_again_without_a_cluster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.runtime.cluster.session.session", no_cluster)
    rows = [
        TrialRow(n, {"workers": n}, "completed", workers=n, samples_per_second=float(n), interval=0.01)
        for n in (1, 2, 3, 4)
    ]
    folder = made_before(tmp_path / "done", *rows)
    assert main(["sweep", "--resume", str(folder)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "are made already" in shown
    assert "the best is number 4" in shown
    assert (folder / "report.html").is_file()
    with pytest.raises(AssertionError, match="a cluster was started"):
        main(["sweep", "--resume", str(made_before(tmp_path / "open", *rows[:3]))])


@pytest.mark.parametrize(
    ("last", "code", "said"),
    [
        ("infeasible", 3, "for want of devices or memory"),
        ("out_of_memory", 3, "for want of"),
        ("failed", 4, "none of the 4 trials completed;"),
    ],
)
def test_a_sweep_without_a_result_says_whose_fault_it_is(
    last: str, code: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        TrialRow(n, {"workers": n}, "infeasible" if n < 4 else last, "16 GPUs were asked for")
        for n in (1, 2, 3, 4)
    ]
    assert main(["sweep", "--resume", str(made_before(tmp_path / "sweep", *rows))]) == code
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_list_of_points_keeps_its_order() -> None:
    listed = [
        {"workers": workers, "batch_size": batch}
        for workers, batch in ((2, 8), (1, 16), (9, 8), (1, 8), (2, 16))
    ]
    plan = Trainer(config=Config()).prepare().plan

    def order(space: Space) -> list[Point]:
        needs = lambda point: TrialRow(0, point, "infeasible") if point["workers"] == 9 else point["workers"]  # noqa: E731
        source = source_of(Sweep(space), Config(), plan, (), needs)
        return list(iter(source.ask, None))

    assert order(points_space(listed, "points.yaml")) == listed
    assert [point["workers"] for point in order(parse_space(["workers=2,9,1", "batch-size=8,16"]))] == [
        9,
        9,
        1,
        1,
        2,
        2,
    ]


def test_a_step_of_more_samples_than_there_are_is_refused_where_it_is_swept() -> None:
    asked = Config.of(batch_size=64, accumulation_steps=4)
    check_batch(asked, {"batch_size": 64}, 2, samples=512)
    with pytest.raises(UserError, match=r"a step of 512 samples .* is more than the 511 that the data has"):
        check_batch(asked, {"batch_size": 64}, 2, samples=511)
    with pytest.raises(UserError, match=r"1,000 samples \(--global-batch-size\)"):
        check_batch(Config.of(global_batch_size=1000), {"global_batch_size": 1000}, 1, samples=511)
    check_batch(asked, {"precision": "fp32"}, 2, samples=511)  # cut alike in all trials, as train cuts it


def test_a_single_block_of_steps_has_no_interval() -> None:
    for interval, kept in ((float("inf"), None), (0.02, 0.02)):
        found = TrialResult(True, 100.0, interval, 100.0, 0.1, 3, 0.3, 0, {}, 1.0)
        assert measured_row(TrialRow(1, {}, "completed"), found, {}).interval == kept
