"""Tests of ``orchestrator sweep`` without a cluster: mistakes, infeasible spaces, and sweeps
that continue."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.cli.main import main
from orchestrator.config.settings import Config
from orchestrator.config.sweep.space_parser import parse_space
from orchestrator.config.sweep.sweep import Sweep
from orchestrator.record.files.ledger import Ledger, TrialRow
from orchestrator.trainer import Trainer


def write_ledger(folder: Path, space: list[str], *rows: TrialRow, **header: Any) -> Path:
    folder.mkdir()
    ledger = Ledger(folder)
    defaults = {"task": "digits", "settings": {}, "kind": "cpu", "cores_per_worker": 1}
    ledger.begin(defaults | Sweep(parse_space(space)).header() | header)
    for row in rows:
        ledger.add(row)
    ledger.close()
    return folder


@pytest.fixture
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a test that starts or joins a cluster."""

    def refuse(*arguments: Any) -> Any:
        raise AssertionError("a cluster was started")

    monkeypatch.setattr("orchestrator.runtime.cluster.session.session", refuse)


@pytest.mark.usefixtures("no_cluster")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sweep", "bath-size=1,2"], "did you mean 'batch_size'"),
        (["--sweep", "batch-size=1..9"], "give it steps"),
        ([], "nothing to sweep"),
        (["--sweep", "batch-size=1,2", "--search", "random"], "give --trials"),
        (["--resume", "nowhere"], "holds no sweep"),
        (["--resume", "nowhere", "--sweep", "batch-size=1,2", "--task", "text"], "leave out --sweep, --task"),
        (["--sweep", "batch-size=1,2", "--space", "x.yaml"], "were both given"),
        (["--sweep", "batch-size=1,2", "--init-from", "x"], "--init-from x: trials of a sweep begin"),
        (["--sweep", "batch-size=1,2", "--task", "nowhere:Thing"], "there is no module 'nowhere'"),
        (
            ["--sweep", "width=8,16", "--batch-size", "auto"],
            "--batch-size auto measures a batch size by itself",
        ),
    ],
)
def test_a_mistake_is_found_before_a_cluster_starts(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("no_cluster")
def test_a_space_without_a_feasible_point_starts_no_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["sweep", "--gpu-mode", "cpu", "--ray-address", "local", "--sweep", "batch-size=8,16"]
    assert main([*arguments, "workers=500,600"]) == 3
    assert "none of the 4 points can be tried here; the first: --workers 500 needs" in capsys.readouterr().err
    with pytest.raises(AssertionError, match="a cluster was started"):
        main([*arguments, "workers=500,1"])


@pytest.mark.usefixtures("no_cluster")
@pytest.mark.parametrize("command", [("sweep", "--resume"), ("resume",)])
def test_a_finished_sweep_is_drawn_again_without_a_cluster(
    command: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        TrialRow(n, {"workers": n}, "completed", workers=n, samples_per_second=float(n), interval=0.01)
        for n in (1, 2, 3, 4)
    ]
    space = ["workers=1,2,3,4"]
    finished = write_ledger(tmp_path / "finished", space, *rows)
    assert main([*command, str(finished)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "are done already" in shown
    assert "the best is number 4" in shown
    assert (finished / "report.html").is_file()
    with pytest.raises(AssertionError, match="a cluster was started"):
        main([*command, str(write_ledger(tmp_path / "unfinished", space, *rows[:3]))])


@pytest.mark.parametrize(
    ("last_status", "code", "message"),
    [
        ("infeasible", 3, "for lack of devices or memory"),
        ("out_of_memory", 3, "for lack of"),
        ("failed", 4, "none of the 4 trials completed;"),
    ],
)
def test_the_exit_code_of_a_sweep_without_a_result_says_why(
    last_status: str, code: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    statuses = ("infeasible", "infeasible", "infeasible", last_status)
    rows = [
        TrialRow(n, {"workers": n}, status, "16 GPUs were asked for") for n, status in enumerate(statuses, 1)
    ]
    folder = write_ledger(tmp_path / "sweep", ["workers=1,2,3,4"], *rows)
    assert main(["sweep", "--resume", str(folder)]) == code
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_masked_setting_must_be_given_again_to_continue(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    configs: list[Config] = []
    monkeypatch.setattr(Trainer, "sweep", lambda self, *_, **__: configs.append(self.resolved.config))
    masked = {"data_dir": "/data/***", "width": 8}
    folder = write_ledger(tmp_path / "s", ["workers=1,2"], settings=masked, objective="throughput")
    assert main(["sweep", "--resume", str(folder)]) == 2
    message = "keeps data_dir without the secret in it; give it again, as --data-dir VALUE"
    assert message in capsys.readouterr().err
    assert main(["sweep", "--resume", str(folder), "--data-dir", "/mine", "--width", "8"]) == 2
    assert "leave out --width" in capsys.readouterr().err
    assert main(["sweep", "--resume", str(folder), "--data-dir", "/mine"]) == 0
    assert configs == [Config.of(data_dir="/mine", width=8)]
