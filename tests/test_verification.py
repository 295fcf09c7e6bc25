"""Tests of ``Trainer.verify`` and ``orchestrator verify``: equal runs, planted faults, mistakes."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.hosts.ranks import run_ranks
from harness.runs.verified_runs import (
    FLIPPED,
    TRAIN_FLAGS,
    WithDropout,
    a_device_of_its_own,
    flipped_bit,
    numbers_by_rank,
    record_here,
    record_on_hosts,
    sums_in_order_of_ranks,
    tiny_task,
)
from orchestrator import Config, Trainer
from orchestrator.cli.main import main
from orchestrator.errors import CheckpointDamaged, UserError
from orchestrator.report.run.figures.outcome import identity_code
from orchestrator.report.run.figures.read import read_run_record
from orchestrator.report.run.page import draw_report
from orchestrator.run.comparison import Difference
from orchestrator.run.manifest import MANIFEST
from orchestrator.verification import VerificationResult


def verify(run: Path, steps: str | None = None, task: Any = None, **options: Any) -> VerificationResult:
    other_machine = options.pop("other_machine", False)
    trainer = Trainer(task=task or tiny_task(), config=Config.of(**options), quiet=True)
    return trainer.verify(run, steps, other_machine)


def record_with_fault(run_dir: Path, fault: Callable[..., Any], *arguments: Any, **settings: Any) -> None:
    task = settings.pop("task", tiny_task())
    run_ranks(record_on_hosts, 2, task, settings, run_dir, fault, arguments)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of twelve steps in one process, with checkpoints of steps 4, 8 and 12."""
    return record_here(tmp_path_factory.mktemp("recorded") / "run")


@pytest.fixture
def run(recorded: Path, tmp_path: Path) -> Path:
    """A copy of the run that a test may change."""
    return shutil.copytree(recorded, tmp_path / "run")


def changed_lines(run: Path, change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
    """Change the events of a record; None removes one."""
    path = run / "events.jsonl"
    events = [change(json.loads(line)) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(event) + "\n" for event in events if event is not None))


def changed_manifest(run: Path, **changes: Any) -> None:
    content = json.loads((run / MANIFEST).read_text())
    (run / MANIFEST).write_text(json.dumps(content | changes))


# Equal runs


def test_a_run_is_equal_to_its_record_and_is_only_read(recorded: Path):
    before = {path: path.stat().st_mtime_ns for path in recorded.rglob("*")}
    result = verify(recorded)
    assert result.equal, result.lines
    assert (result.first_step, result.last_step, result.steps, result.digests) == (4, 12, 8, 5)
    assert {path: path.stat().st_mtime_ns for path in recorded.rglob("*")} == before


def test_a_stretch_begins_at_a_checkpoint_or_at_the_beginning(recorded: Path):
    result = verify(recorded, "9..11")
    assert (result.equal, result.first_step, result.steps) == (True, 8, 3)
    result = verify(recorded, "0..3")
    assert (result.equal, result.first_step, result.steps, result.digests) == (True, 0, 3, 1)


def test_the_record_of_two_hosts_is_equal_in_one_process(tmp_path: Path):
    run_ranks(record_on_hosts, 2, tiny_task(), {}, tmp_path / "run")
    assert verify(tmp_path / "run").equal


# Faults


@pytest.mark.extended(but_first=1)
@pytest.mark.parametrize("every", [1, 10])
def test_a_flipped_bit_is_named_with_step_tensor_and_expert(tmp_path: Path, every: int):
    run = tmp_path / "run"
    settings = {"max_steps": 60, "checkpoint_every": 50, "digest_every": every}
    record_with_fault(run, flipped_bit, 57, **settings)
    difference = verify(run).difference
    assert difference is not None
    first = difference.tensors[0]
    if every == 1:
        assert (difference.step, difference.digest_step) == (57, 57)
        assert (first.name, first.experts, first.slot) == (FLIPPED[0], (FLIPPED[1],), "")
        assert len(difference.tensors) == 1
        assert f"{FLIPPED[0]}, expert {FLIPPED[1]} (the weights): " in difference.lines[0]
    else:
        # The digests of step 60 have all that the bit has changed since.
        assert (difference.equal_digest_step, difference.digest_step) == (50, 60)
        assert difference.step in (58, 59, 60)
        assert "--digest-every 1" in difference.lines[-1]


def names_an_expert(difference: Difference) -> bool:
    """Whether the message has the first tensor, and the first one of an expert."""
    text = "\n".join(difference.lines)
    assert f"state after step {difference.digest_step}: {difference.tensors[0].name}" in text
    return bool(re.search(r"blocks\.0\.ffn\.bank\.up, expert \d", text))


def test_a_sum_in_the_order_of_ranks_is_named(tmp_path: Path):
    run = tmp_path / "run"
    record_with_fault(run, sums_in_order_of_ranks, digest_every=1)
    difference = verify(run, "0..12").difference
    assert difference is not None
    # Losses of the first step are not touched: its gradients are.
    assert (difference.step, difference.figure, difference.digest_step) == (1, "gradient norm", 1)
    assert names_an_expert(difference)


@pytest.mark.extended
def test_a_random_number_drawn_by_rank_is_named(tmp_path: Path):
    run = tmp_path / "run"
    task = tiny_task(WithDropout)
    record_with_fault(run, numbers_by_rank, task=task, digest_every=1)
    difference = verify(run, "0..12", task).difference
    assert difference is not None
    assert (difference.step, difference.figure, difference.digest_step) == (1, "loss", 1)
    assert names_an_expert(difference)
    run_ranks(record_on_hosts, 2, task, {"digest_every": 1}, tmp_path / "good")
    assert verify(tmp_path / "good", "0..12", task).equal


def test_a_figure_that_was_changed_in_the_record_is_named(run: Path):
    def change(event: dict[str, Any]) -> dict[str, Any]:
        if event["event"] == "step" and event["step"] == 7:
            event["loss"] *= 1 + 2**-52
        return event

    changed_lines(run, change)
    difference = verify(run).difference
    assert difference is not None
    assert (difference.step, difference.figure, difference.tensors) == (7, "loss", ())


def test_a_checkpoint_that_was_exchanged_is_named(run: Path, tmp_path: Path):
    other = record_here(tmp_path / "other", seed=1)
    shutil.rmtree(run / "checkpoints")
    shutil.copytree(other / "checkpoints", run / "checkpoints")
    difference = verify(run, "8..12").difference
    assert difference is not None
    assert difference.step == 8


def test_the_command_answers_with_exit_codes_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = str(tmp_path / "run")
    assert main(["train", *TRAIN_FLAGS, "--run-dir", run]) == 0
    capsys.readouterr()
    assert main(["verify", run]) == 0
    assert "equal: 2 steps and the digests of 3 steps were compared" in capsys.readouterr().out
    changed_lines(Path(run), lambda event: event | ({"loss": 1.0} if event["event"] == "step" else {}))
    assert main(["verify", run, "--steps", "2..4", "--json"]) == 4
    answer = json.loads(capsys.readouterr().out)
    assert (answer["equal"], answer["difference"]["step"], answer["difference"]["figure"]) == (
        False,
        3,
        "loss",
    )


# Mistakes


def test_a_flag_that_names_another_run_is_refused(recorded: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["verify", str(recorded), "--name", "other"]) == 2
    assert "names the run already; leave --name out\n" in capsys.readouterr().err


def refusal(run: Path, steps: str | None = None, **options: Any) -> str:
    with pytest.raises(UserError) as raised:
        verify(run, steps, **options)
    return str(raised.value)


def test_a_folder_without_a_run_is_refused(tmp_path: Path):
    assert "there is no such folder" in refusal(tmp_path / "none")
    assert "holds no run" in refusal(tmp_path)


def test_a_run_without_the_flag_is_refused(tmp_path: Path):
    run = record_here(tmp_path / "run", reproducible=False, batch_size=None, max_steps=2)
    assert "without --reproducible" in refusal(run)
    assert not (run / MANIFEST).exists()


def test_a_record_without_digests_is_refused(run: Path):
    changed_lines(run, lambda event: None if event["event"] == "digest" else event)
    assert "no digests of steps 5 to 12: there are none" in refusal(run)


def test_steps_without_a_checkpoint_before_them_are_refused(run: Path):
    message = refusal(run, "3..9")
    assert "no checkpoint" in message
    assert "steps 4, 8, 12" in message
    assert "--steps 0..9" in message
    assert "nothing to recompute" in refusal(run, "12..13") or "ends after" in refusal(run, "12..13")
    for step in (4, 8):
        shutil.rmtree(run / "checkpoints" / f"step_{step:08d}")
    assert "nothing to recompute" in refusal(run)


@pytest.mark.parametrize("steps", ["9", "9..8", "..9", "a..b"])
def test_steps_that_are_no_stretch_are_refused(run: Path, steps: str):
    assert f"--steps {steps}" in refusal(run, steps)


def test_steps_that_were_not_recorded_are_refused(run: Path):
    assert "has done 12 steps" in refusal(run, "4..13")
    lines = (run / "events.jsonl").read_text().splitlines()
    number = next(i for i, line in enumerate(lines) if '"event": "step"' in line and '"step": 10' in line)
    lines[number] = lines[number][:20]
    (run / "events.jsonl").write_text("\n".join(lines) + "\n")
    assert "lacks 1 step of 5 to 12: 10" in refusal(run)


def test_a_damaged_manifest_or_checkpoint_is_refused(run: Path):
    model = run / "checkpoints" / "step_00000004" / "model_00000.safetensors"
    data = bytearray(model.read_bytes())
    data[-1] ^= 1
    model.write_bytes(data)
    with pytest.raises(CheckpointDamaged):
        verify(run)
    (run / MANIFEST).write_text("{}")
    assert f"{MANIFEST} cannot be read" in refusal(run)
    (run / MANIFEST).unlink()
    assert f"has no {MANIFEST}" in refusal(run)


def test_another_device_is_refused_unless_it_is_asked_for(run: Path):
    environment = {"step": 0, "devices": ["NVIDIA H200"], "versions": {"torch": "2.0"}}
    changed_manifest(run, environments=[environment])
    message = refusal(run)
    assert "computed on NVIDIA H200 with torch 2.0; here is " in message
    assert "may reproduce the run: NVIDIA H200" in message
    assert verify(run, other_machine=True).equal


def test_other_data_is_refused(run: Path):
    data = json.loads((run / MANIFEST).read_text())["data"]
    changed_manifest(run, data=data | {"samples": 17})
    assert "data: samples: 17 then, 16 now" in refusal(run)


def test_settings_that_decide_on_the_bits_are_refused(run: Path):
    assert "--learning-rate decides on the bits" in refusal(run, learning_rate=0.5)
    assert "--batch-size decides on the bits" in refusal(run, batch_size=1)


def test_a_stretch_over_changed_settings_is_refused(run: Path):
    config = Config.of(run_dir=run, resume="auto", max_steps=16, learning_rate=2e-2)
    Trainer(task=tiny_task(), config=config, quiet=True).fit()
    message = refusal(run, "8..14")
    assert "resumed at step 12 with other settings (max_steps, learning_rate)" in message
    assert "--steps 8..12 and --steps 12..14" in message
    assert verify(run, "8..12").equal
    assert verify(run, "12..16").equal
    (run / "config.001.yaml").unlink()
    assert "settings 1 time and has 0 files" in refusal(run, "8..12")


def test_a_resume_on_another_device_warns_and_is_in_the_manifest(run: Path):
    environment = {"step": 0, "devices": ["NVIDIA H200"], "versions": {"torch": "2.0"}}
    changed_manifest(run, environments=[environment])
    config = Config.of(run_dir=run, resume="auto", max_steps=14)
    Trainer(task=tiny_task(), config=config, quiet=True).fit()
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    (warning,) = [event for event in events if event.get("kind") == "reproducible"]
    assert "from step 13 on the run is computed on " in warning["message"]
    assert "before on NVIDIA H200" in warning["message"]
    environments = json.loads((run / MANIFEST).read_text())["environments"]
    assert [each["step"] for each in environments] == [0, 12]
    assert "NVIDIA H200" in refusal(run, "8..12")
    assert verify(run, "12..14").equal


def test_devices_of_several_kinds_warn(tmp_path: Path):
    run = tmp_path / "run"
    record_with_fault(run, a_device_of_its_own, max_steps=2)
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    (warning,) = [event for event in events if event.get("kind") == "reproducible"]
    assert re.search(
        r"devices of 2 kinds \(device of process \d+ and device of process \d+\)", warning["message"]
    )
    assert len(json.loads((run / MANIFEST).read_text())["environments"][0]["devices"]) == 2
    assert "were computed on device of process" in refusal(run, "0..2")


# The identity of a run in reports


def test_runs_with_equal_weights_have_one_code_in_reports(recorded: Path, tmp_path: Path):
    same = record_here(tmp_path / "same", checkpoint_every=3, digest_every=4)
    other = record_here(tmp_path / "other", seed=1)
    codes = [identity_code(read_run_record(folder)) for folder in (recorded, same, other)]
    assert re.fullmatch(r"([0-9a-f]{4}-){3}[0-9a-f]{4}", codes[0])
    assert codes[0] == codes[1] != codes[2]
    draw_report(recorded)
    assert codes[0] in (recorded / "report.html").read_text()
    summary = (recorded / "performance_summary.txt").read_text()
    assert f"{codes[0]} (weights after step 12)" in summary


def test_a_comparison_shows_the_code_of_each_run(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    other = record_here(tmp_path / "other", seed=1)
    plain = record_here(tmp_path / "plain", reproducible=False, batch_size=None)
    codes = [identity_code(read_run_record(folder)) for folder in (recorded, other, plain)]
    assert codes[2] == ""
    assert main(["report", str(recorded), str(other), "--out", str(tmp_path / "both")]) == 0
    page = (tmp_path / "both" / "comparison.html").read_text()
    data = json.loads((tmp_path / "both" / "comparison.json").read_text())
    assert all(code in page for code in codes[:2])
    assert [run["identity"] for run in data["runs"]] == codes[:2]
    assert "identity" in capsys.readouterr().out
    copy = shutil.copytree(plain, tmp_path / "copy")
    assert main(["report", str(plain), str(copy), "--out", str(tmp_path / "none")]) == 0
    assert "identity" not in capsys.readouterr().out
