"""Tests that secrets reach neither logs, ledgers, configs, checkpoints, nor anything else that a
run leaves behind."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from harness.faults.canaries import CANARIES, ENVIRONMENT, PATH, URL, assert_none_in, leaky_task
from orchestrator.checkpoint.files import Contents, load, step_name
from orchestrator.checkpoint.progress import Progress
from orchestrator.checkpoint.store import CheckpointStore
from orchestrator.cli.train import TrainOptions
from orchestrator.config.reading.flags import read_flags
from orchestrator.config.reading.reader import Resolved, read_file
from orchestrator.config.settings import Config
from orchestrator.config.writer import dump
from orchestrator.live.screen.screen import Screen
from orchestrator.record.events import kinds
from orchestrator.record.files.event_log import EventLog
from orchestrator.record.files.ledger import LEDGER, Ledger, TrialRow, read_sweep_record
from orchestrator.record.files.log import SilentLog
from orchestrator.record.files.log_copy import copy_masked
from orchestrator.record.files.reading import read_events
from orchestrator.redaction import (
    MASK,
    secrets_of,
)
from orchestrator.run.plan_file import read_earlier_plan, write_config_and_plan
from orchestrator.train.checkpoint.restore import restore
from orchestrator.train.checkpoint.state import TrainState
from orchestrator.train.checkpoint.writer import CheckpointWriter
from orchestrator.train.device.precision import Precision
from orchestrator.train.group.world import World
from orchestrator.trainer import Trainer

ROOT = Path(__file__).resolve().parents[2]
SIZES = (
    *("--width", "8", "--sequence-length", "8", "--layers", "1"),
    *("--experts", "2", "--samples", "64", "--batch-size", "8"),
)
SECRETS = secrets_of(ENVIRONMENT)
WORDS = {
    "SORT_KEY": "position",
    "GROUP_KEY": "samples",
    "PARTITION_KEY": "progress",
    "STEP_TOKEN": "weight",
    "A_SECRET": "optimizer",
    "B_SECRET": "evaluate",
    "C_SECRET": "settings",
    "D_SECRET": "batch_size",
    "E_SECRET": "choices",
}
"""Values that are parts of names of ours."""


def test_an_event_log_holds_no_secret_and_all_events(tmp_path: Path) -> None:
    received: list[Any] = []
    log = EventLog(tmp_path / "events.jsonl", [received.append], secrets=SECRETS)
    for number, canary in enumerate(CANARIES):
        log.write(
            kinds.Warned(kind=canary, message=f'"{canary}" and {URL}', step=number),
            kinds.Settings(changes=(kinds.ChangedSetting(now=[canary], origin=canary),)),
            kinds.Evaluation(step=number, metrics={canary: 0.5}),
        )
    log.close()
    assert_none_in(tmp_path)
    assert_none_in(str(received))
    assert [event.get("step") for event in read_events(tmp_path / "events.jsonl")] == [
        step for number in range(len(CANARIES)) for step in (number, None, number)
    ]


def test_names_of_ours_are_not_masked_in_events(tmp_path: Path) -> None:
    secrets = secrets_of(WORDS)
    log = EventLog(tmp_path / "events.jsonl", secrets=secrets)
    log.write(
        kinds.Evaluation(
            step=3,
            samples=8,
            metrics={"weight": 1.5},
        ),
        kinds.Epoch(step=3, epoch=0, memory=kinds.Memory(2, parts={"samples": 3})),
        kinds.Notice(message="sort by position"),
    )
    log.close()
    event, epoch, notice = read_events(tmp_path / "events.jsonl")
    assert (event["event"], event["step"], event["samples"]) == ("evaluate", 3, 8)
    assert event["metrics"] == {MASK: 1.5}
    assert epoch["memory"]["parts"] == {"samples": 3}
    assert notice["message"] == f"sort by {MASK}"


def test_names_of_ours_are_not_masked_in_a_ledger(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, secrets_of(WORDS))
    ledger.begin({"settings": {"batch_size": 4}})
    ledger.add(TrialRow(1, {"batch_size": 4}, "failed", "no position"))
    ledger.close()
    record = read_sweep_record(tmp_path)
    assert record.header["settings"] == record.rows[0].point == {"batch_size": 4}
    assert record.rows[0].reason == f"no {MASK}"


def test_a_ledger_holds_no_secret(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, SECRETS)
    ledger.begin({"settings": {"data_dir": URL}, "task": CANARIES[0]})
    ledger.add(TrialRow(1, {"batch_size": 4}, "failed", f"cannot log in with {CANARIES[1]}"))
    ledger.close()
    assert_none_in((tmp_path / LEDGER).read_text())


def test_a_config_holds_no_secret_and_can_be_read_back(tmp_path: Path) -> None:
    config = Config.of(data_dir=f"/data/{CANARIES[0]}", resume=f"/r/{CANARIES[1]}", epochs=7)
    path = tmp_path / "c.yaml"
    path.write_text(dump(Resolved(config, {"epochs": f"file {CANARIES[2]}:3"}), secrets=SECRETS))
    assert_none_in(path.read_text())
    assert str(read_file(path).config.data.data_dir) == f"/data/{MASK}"
    assert read_file(path).config.run.epochs == 7


@pytest.fixture
def train_state() -> TrainState:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return TrainState(model, optimizer, Precision("fp32", torch.device("cpu")))


def save_and_load(folder: Path, state: TrainState, progress: Progress) -> Contents:
    writer = CheckpointWriter(CheckpointStore(folder), state, World.single_process(), SilentLog())
    writer.save(progress)
    writer.finish()
    writer.close()
    return load(folder / step_name(progress.step))


def test_a_checkpoint_holds_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train_state: Any
) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    contents = save_and_load(tmp_path, train_state, Progress(step=3, validation=dict.fromkeys(CANARIES, 1.5)))
    assert_none_in(tmp_path)
    assert contents.state["progress"]["validation"] == {MASK: 1.5}


def test_names_of_ours_are_not_masked_in_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train_state: Any
) -> None:
    for name, value in WORDS.items():
        monkeypatch.setenv(name, value)
    progress = Progress(step=3, position=5, samples=40, validation={"loss": 0.5})
    assert restore(save_and_load(tmp_path, train_state, progress), train_state) == progress


def test_names_of_ours_are_not_masked_in_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run finds the choices of its plan."""
    for name, value in WORDS.items():
        monkeypatch.setenv(name, value)
    argv = ["--task", "synthetic", *SIZES, "--gpu-mode", "cpu", "--run-dir", str(tmp_path / "run")]
    prepared = Trainer(config=read_flags(TrainOptions, argv, "orchestrator train")[1]).prepare()
    (tmp_path / "run").mkdir()
    write_config_and_plan(prepared, tmp_path / "run", {})
    assert read_earlier_plan(tmp_path / "run")["batch_size"] == 8


def test_secrets_of_the_driver_are_masked_on_other_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment of a node may have none of them."""
    with monkeypatch.context() as driver:
        for name, value in ENVIRONMENT.items():
            driver.setenv(name, value)
        data = tmp_path / "data" / CANARIES[3]
        data.mkdir(parents=True)
        (data / "a.txt").write_text("To be, or not to be. " * 500)
        argv = [
            *("--task", "text", "--width", "8", "--layers", "1", "--gpu-mode", "cpu"),
            *("--data-dir", str(data), "--run-dir", f"/r/{CANARIES[4]}"),
        ]
        resolved = read_flags(TrainOptions, argv, "orchestrator train")[1]
        prepared = Trainer(config=resolved).prepare().with_secrets()
    assert set(prepared.secrets) == set(secrets_of({"A_KEY": CANARIES[3], "B_KEY": CANARIES[4]})), (
        "those in the settings, and no others"
    )
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    write_config_and_plan(prepared, run_dir, {})
    log = EventLog(run_dir / "events.jsonl", secrets=prepared.hidden)
    log.write(kinds.Warned(kind="data", message=f"nothing in /data/{CANARIES[3]}"))
    log.close()
    assert_none_in(run_dir)
    assert f"/data/{MASK}" in (run_dir / "config.yaml").read_text()


def test_a_screen_shows_no_secret(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen(secrets=SECRETS)
    screen.note(f"no login with {CANARIES[0]}")
    screen.banner([("data", URL)], "x")
    assert_none_in(capsys.readouterr().out)


def test_a_log_is_copied_without_secrets(tmp_path: Path) -> None:
    log = tmp_path / "worker_0.log"
    log.write_bytes(b"\xff\xfe plain\r\n" + CANARIES[3].encode() + b"\nno end " + URL.encode())
    copy_masked(log, tmp_path / "copy.log", SECRETS)
    assert CANARIES[3] in log.read_text(errors="replace")
    copy_masked(log, log, SECRETS)
    assert_none_in(tmp_path)
    assert log.read_bytes().startswith(b"\xff\xfe plain\r\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy.log", "worker_0.log"]


def test_a_log_without_secrets_is_not_rewritten(tmp_path: Path) -> None:
    log = tmp_path / "worker_0.log"
    log.write_text("plain\n")
    before = log.stat().st_ino
    copy_masked(log, log, SECRETS)
    assert log.stat().st_ino == before


def test_every_log_is_opened_with_the_secrets() -> None:
    """A log without the secrets would write them."""
    without_secrets = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in (ROOT / "orchestrator").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("EventLog", "Ledger", "write_file", "SweepScreen")
        if "secret" not in ast.unparse(node)
    ]
    assert not without_secrets


def test_a_run_that_leaks_everything_leaves_no_secret(tmp_path: Path) -> None:
    """No secret is found in prints, warnings, names of metrics, settings, the final error or checkpoints."""
    leaky_task(tmp_path, raises=True)
    argv = [
        *("--task", "leaky:Leaky", "--run-dir", "run", "--data-dir", PATH, "--gpu-mode", "cpu", *SIZES),
        *("--max-steps", "30", "--log-every", "1", "--checkpoint-every", "4", "--evaluate-every", "2"),
    ]
    result = subprocess.run(
        [sys.executable, "-m", "orchestrator", "train", *argv],
        cwd=tmp_path,
        env=os.environ | ENVIRONMENT | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 2, result.stdout + result.stderr
    assert "cannot log in" in result.stderr
    assert "printed" in result.stdout
    run = tmp_path / "run"
    names = {path.name for path in run.iterdir()}
    assert {"config.yaml", "plan.json", "events.jsonl", "report.html", "summary.json", "tensorboard"} <= names
    assert "cannot log in" in (run / "report.html").read_text()
    assert MASK in (run / "config.yaml").read_text()
    assert MASK in (run / "checkpoints" / "step_00000004" / "state.json").read_text()
    assert_none_in(run)
    assert_none_in(result.stdout + result.stderr)
