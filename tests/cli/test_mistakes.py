"""Tests of mistakes in a call: a few lines, the cause first, exit code 2, and nothing left behind."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.runs.small_flags import SMALL
from tests.cli.helpers import Answer, Call, check_answer, run_program

TASK = """
import torch
from torch import nn

class Mine:
    def __init__(self, config):
        {init}
    def build_model(self):
        {build_model}
        return nn.Linear(4, 2)
    def train_data(self):
        {train_data}
        return torch.randn(32, 4), torch.randint(2, (32,))
    def validation_data(self):
        {validation_data}
    def loss(self, model, batch):
        {loss}
        return nn.functional.cross_entropy(model(batch[0]), batch[1])
"""


def own_task(**code: str) -> dict[str, str]:
    """Return a module with a task; ``code`` goes into its methods, which work without it."""
    parts = dict.fromkeys(("init", "build_model", "train_data", "validation_data", "loss"), "pass")
    return {"mine.py": TASK.format(**(parts | code))}


TRAIN_OWN_TASK = ("train", "--task", "mine:Mine", "--run-dir", "run")
RESUME_CONFIG = {"cfg.yaml": "checkpoint:\n  resume: auto\n"}


@dataclass(frozen=True)
class Mistake:
    """A call with a mistake, its files, and a part of the first line of the answer."""

    argv: tuple[str, ...]
    cause: str
    files: tuple[tuple[str, str], ...] = ()


def mistake(*argv: str, cause: str, files: dict[str, str] | None = None) -> Mistake:
    return Mistake(argv, cause, tuple((files or {}).items()))


def in_file(text: str, cause: str) -> Mistake:
    return mistake("train", "--config", "cfg.yaml", cause=cause, files={"cfg.yaml": text})


MISTAKES = {
    # names
    "misspelled verb": mistake("trian", cause="unknown verb 'trian' (did you mean 'train'?)"),
    "misspelled flag": mistake(
        "train", "--epoch", "3", cause="unknown flag --epoch (did you mean --epochs?)"
    ),
    "misspelled flag of check": mistake("check", "--jsn", cause="unknown flag --jsn (did you mean --json?)"),
    "misspelled key": in_file(
        "run:\n  epoch: 3\n", "cfg.yaml:2: unknown setting 'epoch' (did you mean 'epochs'?)"
    ),
    "misspelled section": in_file(
        "optims:\n  learning_rate: 1\n", "cfg.yaml:1: unknown setting 'optims' (did you mean 'optim'?)"
    ),
    "key in the wrong section": in_file(
        "run:\n  learning_rate: 1\n", "cfg.yaml:2: learning_rate belongs under optim:"
    ),
    "old flag": mistake(
        "train", "--mixed-precision", "no", cause="unknown flag --mixed-precision; write --precision fp32"
    ),
    "old key": in_file(
        "train_batch_size: 32\n",
        "cfg.yaml:1: unknown setting 'train_batch_size'; write batch_size: 32 under batch:",
    ),
    "a flag of a launcher": mistake(
        "train", "--num_gpus=4", cause="unknown flag --num_gpus; write --workers 4"
    ),
    "a word too many": mistake("train", "digits", cause="unexpected 'digits'; see orchestrator train --help"),
    # types
    "text for a number": mistake(
        "train", "--epochs", "three", cause="--epochs is 'three'; a whole number was needed"
    ),
    "text for a number in the file": in_file(
        "run:\n  epochs: three\n", "cfg.yaml:2: run.epochs is 'three'; a whole number was needed"
    ),
    "unknown word": mistake(
        "train", "--precision", "bf17", cause="--precision is 'bf17'; 'auto' or 'fp32' or"
    ),
    "a value for a switch": mistake(
        "train", "--profile", "true", cause="--profile takes no value, but 'true' follows"
    ),
    "no value": mistake("train", "--epochs", cause="--epochs needs a value: a whole number"),
    "number out of range": mistake("train", "--epochs", "0", cause="--epochs is 0; it must be at least 1"),
    "direction of a metric": mistake(
        "train",
        "--early-stopping-metric",
        "churn:low",
        cause="--early-stopping-metric is 'churn:low'; it must be NAME, NAME:min or NAME:max",
    ),
    "not a number": in_file(
        "optim: {learning_rate: .nan}\n", "cfg.yaml:1: learning_rate is nan; it must be positive"
    ),
    # contradictions
    "deterministic and tf32": mistake(
        "train", "--deterministic", "--tf32", "on", cause="deterministic and tf32 on contradict each other"
    ),
    "three sizes that do not multiply": mistake(
        "train",
        "--batch-size",
        "8",
        "--accumulation-steps",
        "2",
        "--global-batch-size",
        "32",
        cause="batch_size 8 × accumulation_steps 2 × workers auto may or may not be global",
    ),
    "more chosen than there are experts": mistake(
        "plan", "--experts", "3", "--top-k", "4", cause="--top-k is 4 but there are only 3 experts"
    ),
    "the same, by the task's default": mistake(
        "plan", "--top-k", "64", cause="--top-k 64 needs at least as many experts; there are 4"
    ),
    "file against flag": mistake(
        "train",
        "--config",
        "cfg.yaml",
        "--init-from",
        "x",
        cause="resume auto and init_from x contradict each other",
        files=RESUME_CONFIG,
    ),
    "two contradicting lines": in_file(
        "batch: {batch_size: auto}\nrun: {auto: no}\n", "cfg.yaml:1: batch_size auto and no auto contradict"
    ),
    # files and folders
    "missing config": mistake(
        "train", "--config", "none.yaml", cause="cannot read the config none.yaml: No such file or directory"
    ),
    "config that is a folder": mistake(
        "train", "--config", ".", cause="cannot read the config .: Is a directory"
    ),
    "config without a path": mistake("train", "--config", cause="--config needs the path of a YAML file"),
    "config that is no YAML": in_file("run: {epochs: 3\n", "is not YAML"),
    "config with code in it": in_file(
        "run: !!python/object/apply:os.mkdir [ran]\n",
        "cfg.yaml:1 is not YAML: could not determine a constructor",
    ),
    "config with a month too many": in_file(
        "run:\n  name: 2026-13-01\n", "cfg.yaml:2 is not YAML: month must be in 1..12"
    ),
    "missing data": mistake("train", "--data-dir", "none", cause="none has no train-images-idx3-ubyte"),
    "missing text": mistake(
        "train", "--task", "text", "--data-dir", "none", cause="none is neither a text file nor a folder"
    ),
    "folder below a file": mistake(
        "train", *SMALL, "--run-dir", "file/run", cause="cannot write to the run folder", files={"file": ""}
    ),
    "folder where none can be": mistake(
        "train", *SMALL, "--run-dir", "/proc/run", cause="cannot write to the run folder /proc/run"
    ),
    "folder of another run": mistake(
        "train",
        *SMALL,
        "--run-dir",
        "run",
        cause="run holds a run already; continue it with orchestrator resume",
        files={"run/events.jsonl": '{"event": "start", "time": 0}\n'},
    ),
    "init over a file": mistake("init", "cfg.yaml", cause="cfg.yaml exists already", files=RESUME_CONFIG),
    "init where none can be": mistake("init", "/proc/x.yaml", cause="cannot write /proc/x.yaml"),
    "report of nothing": mistake("report", "none", cause="none does not exist"),
    "report of a folder without a run": mistake("report", ".", cause="events.jsonl"),
    # tasks
    "unknown task": mistake(
        "train", "--task", "digit", cause="unknown task 'digit' (did you mean 'digits'?)"
    ),
    "task by its file": mistake(
        "train", "--task", "mine.py:Mine", cause="task 'mine.py:Mine' is no name of a task", files=own_task()
    ),
    "module that is not there": mistake(
        "train", "--task", "nowhere.at.all:Mine", cause="there is no module 'nowhere'"
    ),
    "class that is not there": mistake(
        "train",
        "--task",
        "mine:Mien",
        cause="module mine has no 'Mien' (did you mean 'Mine'?)",
        files=own_task(),
    ),
    "task that raises when imported": mistake(
        *TRAIN_OWN_TASK,
        cause="RuntimeError: no licence",
        files={"mine.py": "import torch\nraise RuntimeError('no licence')\n"},
    ),
    "task that imports a missing package": mistake(
        *TRAIN_OWN_TASK,
        cause="ModuleNotFoundError: No module named 'not_installed'",
        files={"mine.py": "import not_installed\n"},
    ),
    "task that is no Python": mistake(
        *TRAIN_OWN_TASK,
        cause="SyntaxError: invalid syntax (mine.py, line 2)",
        files={"mine.py": "import torch\nclass class:\n"},
    ),
    "task that ends the run_program": mistake(
        *TRAIN_OWN_TASK, cause="SystemExit: 0", files={"mine.py": "raise SystemExit(0)\n"}
    ),
    "task that raises when made": mistake(
        *TRAIN_OWN_TASK, cause="KeyError: 'made'", files=own_task(init="raise KeyError('made')")
    ),
    "task that raises in build_model": mistake(
        *TRAIN_OWN_TASK,
        cause="ValueError: no model",
        files=own_task(build_model="raise ValueError('no model')"),
    ),
    "task that raises in train_data": mistake(
        *TRAIN_OWN_TASK,
        cause="FileNotFoundError: [Errno 2] No such file or directory: 'corpus.txt'",
        files=own_task(train_data="open('corpus.txt')"),
    ),
    "task that raises in loss": mistake(
        *TRAIN_OWN_TASK, cause="ZeroDivisionError: division by zero", files=own_task(loss="1 / 0")
    ),
    "task that raises at length": mistake(
        *TRAIN_OWN_TASK,
        cause="ValueError: line 0",
        files=own_task(loss="raise ValueError('\\n'.join(f'line {i}' for i in range(99)))"),
    ),
    "metric that no loss returns, of unknown direction": mistake(
        "train",
        *("--task", "digits"),
        *("--early-stopping-metric", "f2"),
        cause="--early-stopping-metric 'f2' is not among the validation metrics: loss, accuracy",
    ),
    "task that lacks loss": mistake(
        *TRAIN_OWN_TASK,
        cause="task 'mine:Mine' lacks loss",
        files={"mine.py": "class Mine:\n  def build_model(self): 0\n  def train_data(self): 0\n"},
    ),
    "task that inherits its loss from the protocol": mistake(
        *TRAIN_OWN_TASK,
        cause="task 'mine:Mine' lacks train_data, loss",
        files={
            "mine.py": "from orchestrator.tasks.task import Task\n"
            "class Mine(Task):\n  def build_model(self): 0\n"
        },
    ),
    "task whose loss is text": mistake(
        *TRAIN_OWN_TASK, cause="the task's loss is a str", files=own_task(loss="return '0.5'")
    ),
    "task without samples": mistake(
        *TRAIN_OWN_TASK,
        cause="the training data is empty",
        files=own_task(train_data="return torch.zeros(0, 4), torch.zeros(0)"),
    ),
    "empty validation data": mistake(
        *TRAIN_OWN_TASK,
        cause="the validation data is empty; at least one sample is needed, or None in its place",
        files=own_task(validation_data="return []"),
    ),
    "empty validation data with a metric": mistake(
        *TRAIN_OWN_TASK,
        *("--early-stopping-metric", "accuracy"),
        cause="the validation data is empty",
        files=own_task(validation_data="return []"),
    ),
    "task without data": mistake(
        *TRAIN_OWN_TASK, cause="the data is a NoneType", files=own_task(train_data="return None")
    ),
    # mistakes that only the start of the run finds
    "resume from nowhere": mistake(
        "train", *SMALL, "--resume", "none", cause="none: there is no such folder"
    ),
    "weights from nowhere": mistake("train", *SMALL, "--init-from", "none", cause="there is no such folder"),
    "task whose shapes do not fit": mistake(
        *TRAIN_OWN_TASK,
        cause="shapes cannot be multiplied",
        files=own_task(loss="model(batch[0].repeat(1, 2))"),
    ),
    "task whose loss has no gradient": mistake(
        *TRAIN_OWN_TASK,
        cause="does not depend on any weight",
        files=own_task(loss="return torch.tensor(1.0)"),
    ),
    # options of verbs
    "no measure of one": mistake(
        "bench", "--iterations", "1", cause="--iterations is 1; a median and a spread need at least 2"
    ),
}


def write_files(case: Mistake, folder: Path) -> None:
    for name, text in case.files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_answered_in_a_few_lines_with_its_cause_first(call: Call, tmp_path: Path, name: str):
    case = MISTAKES[name]
    write_files(case, tmp_path)
    before = set(tmp_path.rglob("*"))
    check_answer(call(*case.argv), case.cause)
    after = {path for path in tmp_path.rglob("*") if "__pycache__" not in path.parts}
    assert after == before, "a mistake leaves nothing behind"


@pytest.mark.parametrize(
    "files",
    [
        pytest.param(own_task(), id="a plain class"),
        pytest.param(
            {"mine.py": own_task()["mine.py"].replace("def validation_data", "def unused")},
            id="without validation data",
        ),
        pytest.param(
            own_task(train_data="return torch.randn(32, 4)", loss="return model(batch[0]).square().mean()"),
            id="one tensor as data",
        ),
    ],
)
def test_a_users_task_can_be_planned(call: Call, tmp_path: Path, files: dict[str, str]):
    (tmp_path / "mine.py").write_text(files["mine.py"])
    answer = call("plan", "--task", "mine:Mine", "--json")
    assert answer.code == 0, answer
    assert json.loads(answer.out)["model"]["samples"] == 32


@pytest.mark.extended(but_first=1)
@pytest.mark.parametrize("name", ["misspelled flag", "config that is no YAML", "task that raises in loss"])
def test_the_program_answers_like_the_function(tmp_path: Path, name: str):
    case = MISTAKES[name]
    write_files(case, tmp_path)
    result = run_program(tmp_path, *case.argv)
    check_answer(Answer(result.returncode, result.stdout, result.stderr), case.cause)


def test_all_unknown_flags_are_answered_at_once(call: Call):
    foreign = ("--lr", "0.1", "--gradient_accumulation_steps=2", "--wandb", "--lr", "0.2")
    answer = call("train", *foreign, "--epohcs", "3")
    assert answer.code == 2
    assert answer.lines == [
        "orchestrator: unknown flag --lr; write --learning-rate 0.1",
        "unknown flag --gradient_accumulation_steps; write --accumulation-steps 2",
        "unknown flag --wandb; write --trackers wandb",
        "unknown flag --epohcs (did you mean --epochs?); see --help",
    ]


@pytest.mark.parametrize(
    ("name", "line"),
    [("task that raises in loss", "1 / 0"), ("task that raises at length", "raise ValueError(")],
)
def test_the_error_of_a_users_task_shows_its_lines_and_not_ours(
    call: Call, tmp_path: Path, name: str, line: str
):
    write_files(MISTAKES[name], tmp_path)
    answer = call(*TRAIN_OWN_TASK)
    assert f"{tmp_path / 'mine.py'}:" in answer.err
    assert line in answer.err
    assert "orchestrator/train" not in answer.err
