"""Tests of ``evaluate --tasks``: with a stand-in for ``lm_eval``, and the real one where it is installed."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from harness.lm.language_models import lm_config
from harness.runs.loop_runs import SMALL
from orchestrator.cli.benchmark_tasks import rows_of
from orchestrator.cli.main import main
from orchestrator.trainer import Trainer

STAND_IN = {
    "__init__.py": """
def simple_evaluate(model, tasks, task_manager, log_samples):
    numbers = {"acc,none": 0.25, "acc_stderr,none": 0.125}
    return {"results": {name: {"alias": name, **numbers} for name in tasks}}
""",
    "tasks.py": """
class TaskManager:
    all_tasks = ["arc_easy", "hellaswag"]

    def __init__(self, include_path=None):
        self.include_path = include_path
""",
    "models/__init__.py": "",
    "models/huggingface.py": """
import transformers


class HFLM:
    def __init__(self, pretrained, device, batch_size, trust_remote_code):
        assert not trust_remote_code
        self.model = transformers.AutoModelForCausalLM.from_pretrained(pretrained)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(pretrained)
""",
}
needs_no_lm_eval = pytest.mark.skipif(find_spec("lm_eval") is not None, reason="lm_eval is installed")


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder = tmp_path / "packages"
    for name, text in STAND_IN.items():
        file = folder / "lm_eval" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    metadata = folder / "lm_eval-0.4.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: lm_eval\nVersion: 0.4.0\n")
    monkeypatch.syspath_prepend(folder)
    importlib.invalidate_caches()
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "lm_eval"]:
        del sys.modules[name]


def train(folder: Path, **settings: Any) -> Path:
    quick: dict[str, Any] = {
        "max_steps": 1,
        "batch_size": 2,
        "trackers": (),
        "monitor_gpu": False,
        "run_dir": folder / "run",
    }
    Trainer(config=lm_config(folder, **quick, **settings), quiet=True).fit()
    return folder / "run"


@needs_no_lm_eval
@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("lora", [None, 4])
def test_the_exported_model_is_evaluated_and_the_result_lies_beside_the_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lora: int | None
) -> None:
    run = train(tmp_path, lora=lora)
    assert main(["evaluate", str(run), "--tasks", "hellaswag,arc_easy"]) == 0
    (file,) = (run / "checkpoints").glob("step_*.tasks-*.json")
    content = json.loads(file.read_text())
    assert content["results"]["hellaswag"]["acc,none"] == 0.25
    assert (content["step"], content["tasks"], content["lm_eval"]) == (1, ["hellaswag", "arc_easy"], "0.4.0")
    shown = capsys.readouterr().out
    assert "hellaswag" in shown
    assert "0.1250" in shown


@needs_no_lm_eval
@pytest.mark.usefixtures("stand_in")
def test_an_unknown_task_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "run", "--tasks", "helaswag"]) == 2
    assert "--tasks helaswag: lm-eval has no such task" in capsys.readouterr().err


@needs_no_lm_eval
@pytest.mark.usefixtures("stand_in")
def test_a_run_of_another_task_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = {**SMALL, "max_steps": 1, "trackers": (), "monitor_gpu": False, "run_dir": tmp_path / "run"}
    from orchestrator.config.settings import Config

    Trainer(config=Config.of(**flags), quiet=True).fit()
    assert main(["evaluate", str(tmp_path / "run"), "--tasks", "hellaswag"]) == 2
    assert "is of the task digits; --tasks evaluates language models" in capsys.readouterr().err


@needs_no_lm_eval
@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tasks", "hellaswag", "--split", "train"], "--split has no effect with --tasks"),
        (["--tasks", "hellaswag", "--workers", "2"], "--workers has no effect with --tasks"),
        (["--tasks", ","], "--tasks names no task"),
    ],
)
def test_flags_without_an_effect_are_refused(
    capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert main(["evaluate", "run", *flags]) == 2
    assert message in capsys.readouterr().err


@needs_no_lm_eval
def test_without_lm_eval_the_command_that_installs_it_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "run", "--tasks", "hellaswag"]) == 2
    assert "pip install 'lm_eval[hf]'" in capsys.readouterr().err


def test_a_folder_of_tasks_without_tasks_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "run", "--tasks-dir", "mine"]) == 2
    assert "--tasks-dir mine defines tasks; name those to evaluate" in capsys.readouterr().err


def test_rows_have_the_error_of_their_metric() -> None:
    values = {"alias": "gsm8k", "exact,strict": 0.5, "exact_stderr,strict": "N/A", "acc,none": 1.0}
    assert rows_of({"gsm8k": values}) == [
        ("gsm8k", "exact (strict)", "0.5000", ""),
        ("gsm8k", "acc", "1.0000", ""),
    ]


def test_the_real_lm_eval_evaluates_a_task_of_local_files(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    rows = [{"question": f"1 plus {n}", "choices": ["it is 2", "no"], "answer": n % 2} for n in range(6)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    definitions = tmp_path / "definitions"
    definitions.mkdir()
    (definitions / "sums.yaml").write_text(
        "task: my_sums\ndataset_path: json\n"
        f"dataset_kwargs:\n  data_files:\n    test: {tmp_path}/rows.jsonl\n"
        "output_type: multiple_choice\ntest_split: test\n"
        'doc_to_text: "{{question}}"\ndoc_to_choice: "{{choices}}"\ndoc_to_target: answer\n'
        "metric_list:\n  - metric: acc\n    aggregation: mean\n    higher_is_better: true\n"
        "metadata:\n  version: 1.0\n"
    )
    run = train(tmp_path)
    flags = ["--tasks", "my_sums", "--tasks-dir", str(definitions), "--eval-batch-size", "2"]
    assert main(["evaluate", str(run), *flags]) == 0
    (file,) = (run / "checkpoints").glob("step_*.tasks-*.json")
    content = json.loads(file.read_text())
    assert 0 <= content["results"]["my_sums"]["acc,none"] <= 1
    assert content["samples"]["my_sums"]["effective"] == 6
