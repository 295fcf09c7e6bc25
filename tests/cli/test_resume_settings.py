"""Tests of ``orchestrator resume`` and ``--resume``: which run, which settings, and what is refused."""

from __future__ import annotations

import hashlib
import json
import shlex
from pathlib import Path

import pytest
import yaml

from harness.faults.lock_holder import lock_holder
from harness.runs.records import by_step
from harness.runs.small_flags import CPU, SMALL
from orchestrator.record.files.reading import of_kind, read_events
from tests.cli.helpers import Answer, Call, check_answer

QUICK = (*SMALL, *CPU, "--trackers", "--no-monitor-gpu", "--batch-size", "8", "--schedule", "constant")


def begin(call: Call, *extra: str, steps: int = 4) -> Answer:
    answer = call("train", *QUICK, "--name", "one", "--max-steps", str(steps), *extra)
    assert answer.code == 0, answer
    return answer


def config_of(folder: Path, name: str = "config.yaml") -> dict[str, dict[str, object]]:
    return yaml.safe_load((folder / name).read_text(encoding="utf-8"))


def learning_rates(folder: Path) -> list[float]:
    return [event["lr"] for event in by_step(read_events(folder / "events.jsonl"))]


def digests(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_a_resumed_run_takes_its_settings_from_its_folder(call: Call, tmp_path: Path) -> None:
    begin(call, "--learning-rate", "1e-4", "--warmup-steps", "0")
    run = tmp_path / "results" / "one"
    before = (run / "config.yaml").read_text()
    answer = call("resume", "results/one", "--max-steps", "6")
    assert answer.code == 0, answer
    assert learning_rates(run) == [1e-4] * 6
    assert "resuming with the settings of" in answer.out
    assert "changed: max_steps from 4 to 6 (flag --max-steps)" in answer.out
    assert answer.out.count("changed: ") == 1
    assert (run / "config.001.yaml").read_text() == before
    assert config_of(run)["run"]["max_steps"] == 6
    (event,) = of_kind(read_events(run / "events.jsonl"), "settings")
    assert event["step"] == 4
    assert event["changes"] == [{"name": "max_steps", "before": 4, "now": 6, "origin": "flag --max-steps"}]


@pytest.mark.extended
def test_flags_given_again_win_and_each_start_keeps_its_configuration(call: Call, tmp_path: Path) -> None:
    begin(call, "--learning-rate", "1e-4", "--warmup-steps", "0")
    run = tmp_path / "results" / "one"
    given = ("--name", "one", "--resume", "auto", "--learning-rate", "3e-3")
    answer = call("train", *given, "--max-steps", "6")
    assert answer.code == 0, answer
    assert "changed: learning_rate from 0.0001 to 0.003 (flag --learning-rate)" in answer.out
    assert learning_rates(run) == [1e-4] * 4 + [3e-3] * 2
    assert call("resume", str(run), "--max-steps", "8").code == 0
    assert learning_rates(run)[-2:] == [3e-3] * 2
    assert config_of(run, "config.001.yaml")["optim"]["learning_rate"] == 1e-4
    assert config_of(run, "config.002.yaml")["run"]["max_steps"] == 6
    assert config_of(run)["optim"]["learning_rate"] == 3e-3
    assert "learning_rate from 0.0001 to 0.003" in (run / "report.html").read_text()


def test_the_same_command_again_changes_nothing(call: Call, tmp_path: Path) -> None:
    flags = ("--resume", "auto")
    first = begin(call, *flags)
    assert "no earlier start in this folder: a new run begins" in first.out
    run = tmp_path / "results" / "one"
    files = {name: (run / name).read_bytes() for name in ("config.yaml", "summary.json")}
    again = begin(call, *flags)
    assert "nothing left to do at step 4" in again.out
    assert "changed: " not in again.out
    assert not (run / "config.001.yaml").exists()
    assert (run / "config.yaml").read_bytes() == files["config.yaml"]
    before = json.loads(files["summary.json"])
    after = json.loads((run / "summary.json").read_text())
    for name in ("status", "reason", "steps", "validation", "best", "train_loss"):
        assert after[name] == before[name], name


@pytest.mark.extended(but_first=1)
@pytest.mark.parametrize(
    ("flags", "cause"),
    [
        (("--width", "16"), "width from 8 to 16 (flag --width)"),
        (("--layers", "2"), "layers from 1 to 2 (flag --layers)"),
        (("--experts", "3"), "experts from 2 to 3 (flag --experts)"),
        (("--task", "digits"), "trains the task synthetic, and digits is given (flag --task)"),
    ],
)
def test_another_model_is_refused_before_anything_is_written(
    call: Call, tmp_path: Path, flags: tuple[str, str], cause: str
) -> None:
    begin(call)
    run = tmp_path / "results" / "one"
    before = digests(run)
    for command in (("resume", "results/one"), ("train", "--name", "one", "--resume", "auto")):
        check_answer(call(*command, *flags), cause)
    assert digests(run) == before


def test_a_size_that_is_the_default_may_be_written_out(call: Call) -> None:
    """The structure of the model is compared, not the text of its settings."""
    begin(call)
    answer = call("resume", "results/one", "--expert-hidden-size", "128", "--max-steps", "5")
    assert answer.code == 0, answer
    assert "changed: expert_hidden_size from unset to [128] (flag --expert-hidden-size)" in answer.out


def test_a_resume_that_fails_leaves_the_outcome_of_a_good_run(call: Call, tmp_path: Path) -> None:
    task = (
        "from orchestrator.tasks.synthetic import Synthetic\n"
        "from pathlib import Path\n\n"
        "class Mine(Synthetic):\n"
        "    def build_optimizer(self, parameters):\n"
        "        if Path('broken').exists():\n"
        "            raise RuntimeError('no optimizer today')\n"
    )
    (tmp_path / "mine.py").write_text(task)
    begin(call, "--task", "mine:Mine")
    run = tmp_path / "results" / "one"
    summary = (run / "summary.json").read_bytes()
    (tmp_path / "broken").touch()
    answer = call("resume", "results/one", "--max-steps", "6")
    assert answer.code != 0
    assert "no optimizer today" in answer.err
    assert (run / "summary.json").read_bytes() == summary
    events = read_events(run / "events.jsonl")
    assert [event["status"] for event in of_kind(events, "end")] == ["completed"]
    (warning,) = of_kind(events, "warning")
    assert "a resume failed before its first step" in warning["message"]
    assert call("report", "results/one").code == 0
    assert "failed (" not in (run / "performance_summary.txt").read_text()


def test_resume_auto_without_a_folder_is_refused(call: Call, tmp_path: Path) -> None:
    check_answer(
        call("train", *QUICK, "--resume", "auto"), "--resume auto continues the run of a named folder"
    )
    assert not (tmp_path / "results").exists()
    assert call("train", *QUICK, "--max-steps", "2").code == 0
    (run,) = (tmp_path / "results").iterdir()
    answer = call("train", *QUICK, "--resume", "auto", "--max-steps", "3")
    check_answer(answer, f"(the newest of this task: orchestrator resume {run})")
    assert list((tmp_path / "results").iterdir()) == [run]


def test_a_path_is_continued_in_another_folder_with_its_settings(call: Call, tmp_path: Path) -> None:
    begin(call, "--learning-rate", "1e-4", "--warmup-steps", "0")
    run = tmp_path / "results" / "one"
    before = digests(run)
    checkpoint = run / "checkpoints" / "step_00000004"
    answer = call("train", "--resume", str(checkpoint), "--name", "two", "--max-steps", "6")
    assert answer.code == 0, answer
    assert learning_rates(tmp_path / "results" / "two") == [1e-4] * 2
    assert digests(run) == before
    occupied = call("train", "--resume", str(checkpoint), "--name", "two", "--max-steps", "8")
    check_answer(occupied, f"two holds a run already; continue it with orchestrator resume {tmp_path}")


@pytest.mark.extended
def test_a_run_that_still_goes_on_is_neither_resumed_nor_begun_again(call: Call, tmp_path: Path) -> None:
    begin(call)
    run = tmp_path / "results" / "one"
    with lock_holder(run) as process:
        before = digests(run)
        cause = f"the run in {run} is still going on (process {process.pid} on "
        check_answer(call("resume", str(run), "--max-steps", "6"), cause)
        check_answer(call("train", *QUICK, "--name", "one"), cause)
        assert digests(run) == before
    assert call("resume", str(run), "--max-steps", "6").code == 0


@pytest.mark.parametrize(
    ("argv", "cause"),
    [
        ((), "which run? Give its folder: orchestrator resume FOLDER"),
        (("nowhere",), "nowhere: there is no such folder"),
        (("empty",), "empty holds no run"),
        (("empty", "--name", "two"), "names the run already; leave --name out"),
        (("sweep", "--epochs", "3"), "a resumed sweep continues with the settings it began with; leave out "),
        (("object",), "continue it in Python: Trainer("),
    ],
)
def test_mistakes_of_resume(call: Call, tmp_path: Path, argv: tuple[str, ...], cause: str) -> None:
    start = '{"event": "start", "time": 0}\n'
    (tmp_path / "empty").mkdir()
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "sweep.jsonl").write_text('{"event": "sweep", "time": 0}\n')
    (tmp_path / "object").mkdir()
    (tmp_path / "object" / "events.jsonl").write_text(start)
    (tmp_path / "object" / "config.yaml").write_text("task: python:Linear\n")
    check_answer(call("resume", *argv), cause)


def test_the_command_that_continues_a_run_quotes_its_folder() -> None:
    from orchestrator.run.run_dir import resume_command

    command = resume_command(Path("my runs/one"), "10.0.0.1:6379")
    assert shlex.split(command) == [
        *("orchestrator", "resume", "my runs/one"),
        *("--ray-address", "10.0.0.1:6379"),
    ]
    assert resume_command(Path("one")) == "orchestrator resume one"
