"""Tests of ``Trainer.evaluate`` and ``orchestrator evaluate``: the checkpoint, the result, mistakes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from harness.lm.language_models import lm_config
from harness.runs.blob_trainers import Blobs, blobs, settings
from orchestrator import Config, Loss, TensorData, Trainer
from orchestrator.checkpoint.store import CheckpointStore
from orchestrator.cli.main import main
from orchestrator.errors import CheckpointDamaged, UserError
from orchestrator.record.files.reading import of_kind, read_events
from orchestrator.report.run.page import draw_report
from orchestrator.storage.folder import RemoteError, RemoteFolder
from orchestrator.train.evaluation.evaluate import Evaluation
from orchestrator.train.remote import mirror


class Splits(Blobs):
    """A task with a validation and a test split, and a model of any width."""

    def __init__(self, width: int = 3) -> None:
        self.width = width

    def build_model(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(4, self.width)

    def validation_data(self) -> TensorData:
        return TensorData(*blobs(41, seed=1))

    def test_data(self) -> TensorData:
        return TensorData(*blobs(13, seed=2))

    def hidden_data(self) -> None:
        return None


class NeverEvaluated(Splits):
    """Fails where the data is evaluated."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        raise AssertionError("the data was evaluated")


def trainer(folder: Path, task: Any = None, **changes: Any) -> Trainer:
    return Trainer(task=task or Splits(), config=settings(folder, **changes), quiet=True)


def evaluating(task: Any = None, **changes: Any) -> Trainer:
    """Return a trainer with no other settings than ``changes``."""
    return Trainer(task=task or Splits(), config=Config.of(**changes), quiet=True)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of three epochs, all of them saved, the second one the best."""
    trainer(tmp_path, keep=9, checkpoint_every=7).fit()
    run_dir = tmp_path / "run"
    evaluated = of_kind(read_events(run_dir / "events.jsonl"), "evaluate")
    mark_best(run_dir, evaluated[1]["step"])
    return run_dir


def mark_best(run_dir: Path, *steps: int) -> None:
    """Change the record: these steps were the best so far when they were evaluated."""
    path = run_dir / "events.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for event in lines:
        if event["event"] == "evaluate":
            event["best"] = event["step"] in steps
    path.write_text("".join(f"{json.dumps(event)}\n" for event in lines))


def recorded(run_dir: Path, step: int) -> dict[str, Any]:
    evaluated = of_kind(read_events(run_dir / "events.jsonl"), "evaluate")
    return next(event for event in evaluated if event["step"] == step)


def steps_of(run_dir: Path) -> list[int]:
    return [step for step, _ in CheckpointStore(run_dir / "checkpoints", repair=False).newest_first()]


def test_the_best_checkpoint_of_a_run_is_evaluated_as_in_the_run(run: Path) -> None:
    result = evaluating().evaluate(run)
    best = recorded(run, result.step)
    assert best["best"]
    assert result.step < max(steps_of(run))
    assert (result.loss, result.metrics, result.samples) == (best["loss"], best["metrics"], 41)
    content = json.loads(Path(result.path).read_text())
    assert Path(result.path) == run / "checkpoints" / f"step_{result.step:08d}.validation.json"
    assert (content["loss"], content["metrics"]) == (result.loss, result.metrics)
    assert (content["workers"], content["weights"], content["split"]) == (1, "trained", "validation")


def test_the_batches_are_those_of_the_run_unless_others_are_given(run: Path) -> None:
    plan = json.loads((run / "plan.json").read_text())
    plan["choices"]["eval_batch_size"]["value"] = 6
    (run / "plan.json").write_text(json.dumps(plan))

    def size(**given: Any) -> int:
        result = evaluating(**given).evaluate(run)
        return json.loads(Path(result.path).read_text())["eval_batch_size"]

    assert size() == 6
    assert size(eval_batch_size=7) == 7


def test_a_named_checkpoint_is_evaluated_and_the_run_stays_as_it_was(run: Path) -> None:
    steps = steps_of(run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    result = evaluating().evaluate(run / "checkpoints" / f"step_{max(steps):08d}")
    assert (result.step, result.loss) == (max(steps), recorded(run, max(steps))["loss"])
    after = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert {path.name for path in after.keys() - before.keys()} == {f"step_{max(steps):08d}.validation.json"}
    assert {path: after[path] for path in before} == before
    assert steps_of(run) == steps


def test_without_a_best_checkpoint_the_newest_is_evaluated(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = max(steps_of(run))
    loud = Trainer(task=Splits(), config=Config())
    shutil.rmtree(run / "checkpoints" / f"step_{evaluating().evaluate(run).step:08d}")
    assert loud.evaluate(run).step == newest
    assert "the newest of the run; the best, of step 14, is not there" in capsys.readouterr().out
    mark_best(run)
    assert loud.evaluate(run).step == newest
    assert "the newest of the run, which has no validation result" in capsys.readouterr().out


def test_another_split_is_evaluated_and_written_beside_the_first(run: Path) -> None:
    step = evaluating().evaluate(run).step
    result = evaluating().evaluate(run, split="test")
    assert (result.step, result.samples) == (step, 13)
    assert result.path.endswith(f"step_{step:08d}.test.json")
    train = evaluating().evaluate(run, split="train")
    assert train.samples == 100
    assert len(list((run / "checkpoints").glob("*.json"))) == 3


def test_own_objects_are_evaluated_on_any_data(tmp_path: Path) -> None:
    def loss(model: nn.Module, batch: Any) -> Loss:
        logits = model(batch[0])
        hits = (logits.argmax(-1) == batch[1]).sum()
        return Loss(F.cross_entropy(logits, batch[1], reduction="sum"), len(logits), {"accuracy": hits})

    parts: dict[str, Any] = {"data": blobs(32), "loss": loss, "quiet": True}
    fitted = Trainer(nn.Linear(4, 3), config=settings(tmp_path), **parts).fit()
    result = Trainer(nn.Linear(4, 3), validation=blobs(29, seed=5), **parts).evaluate(fitted.run_dir)
    x, labels = blobs(29, seed=5)
    with torch.no_grad():
        logits = fitted.model(x)
    assert result.loss == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-6)
    assert result.metrics == {"accuracy": pytest.approx((logits.argmax(-1) == labels).float().mean().item())}


def test_the_same_trainer_trains_as_before(tmp_path: Path, run: Path) -> None:
    """The settings of the evaluated run are not those of the next one."""
    both = trainer(tmp_path / "second", epochs=1)
    both.evaluate(run)
    assert both.fit().summary["steps"] == 7
    assert both.evaluate(tmp_path / "second" / "run").step == 7


def test_a_checkpoint_apart_from_its_run_needs_the_settings(tmp_path: Path, run: Path) -> None:
    copy = tmp_path / "elsewhere" / "copy"
    shutil.copytree(run / "checkpoints" / "step_00000007", copy)
    result = evaluating().evaluate(copy)
    assert result.path == f"{copy}.validation.json"
    assert result.loss == pytest.approx(recorded(run, 7)["loss"], rel=1e-6)


# Remote folders


@pytest.fixture
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of a run in a remote folder, whose second epoch was the best."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(mirror, "_LOOK_SECONDS", 0.01)
    url = f"memory://{uuid4().hex}/run1"
    Trainer(task=Splits(), config=settings(tmp_path, run_dir=url, epochs=2), quiet=True).fit()
    return url


def test_a_remote_run_is_evaluated_and_its_result_uploaded(remote: str, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    result = evaluating().evaluate(remote)
    assert result.step == 14
    assert result.path == f"{remote}/checkpoints/step_00000014.validation.json"
    data = RemoteFolder(remote).read("checkpoints/step_00000014.validation.json", 10_000)
    assert data is not None
    assert json.loads(data)["loss"] == result.loss
    (local,) = (tmp_path / "results").glob("run1-*")
    assert result.loss == recorded(local, 14)["loss"]
    assert sorted(tmp_path.rglob("*")) == before, "the copy is removed"
    named = evaluating().evaluate(f"{remote}/checkpoints/step_00000014")
    assert named.loss == result.loss


def test_errors_of_the_evaluation_of_a_remote_run_name_its_address(remote: str) -> None:
    with pytest.raises(UserError, match="has another model") as raised:
        evaluating(Splits(width=5)).evaluate(remote)
    assert remote in str(raised.value)
    assert ".downloaded-" not in str(raised.value)


def test_a_remote_result_is_no_checkpoint(remote: str, tmp_path: Path) -> None:
    """The run resumes after an evaluation, and keeps its result."""
    evaluating().evaluate(remote)
    config = settings(tmp_path, run_dir=remote, epochs=3, resume="auto")
    assert Trainer(task=Splits(), config=config, quiet=True).fit().summary["steps"] == 21
    assert "checkpoints/step_00000014.validation.json" in RemoteFolder(remote).files()


# Mistakes


def test_mistakes_are_told_before_anything_is_evaluated(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no such folder; give the folder of a run"):
        evaluating().evaluate(tmp_path / "nothing")
    with pytest.raises(UserError, match="holds no checkpoint"):
        evaluating().evaluate(tmp_path)
    with pytest.raises(UserError, match="memory://none/run: there is nothing"):
        evaluating().evaluate("memory://none/run")
    with pytest.raises(UserError, match="ftp:// is not known"):
        evaluating().evaluate("ftp://host/run")
    with pytest.raises(
        UserError, match=r"no tests_data \(did you mean 'test'\?\); its splits are hidden, test"
    ):
        evaluating().evaluate(run, split="tests")
    with pytest.raises(UserError, match="the task has no such data"):
        evaluating().evaluate(run, split="hidden")
    with pytest.raises(UserError, match="has another model"):
        evaluating(Splits(width=5)).evaluate(run)
    with pytest.raises(UserError, match="--prompts: the task generates no text"):
        evaluating(NeverEvaluated()).evaluate(run, prompts=["a"])
    assert not list((run / "checkpoints").glob("*.json"))


def test_another_model_without_its_plan_is_refused_by_its_weights(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run / "checkpoints" / "step_00000007", tmp_path / "copy")
    with pytest.raises(UserError, match=r"is \(3, 4\) in the checkpoint and \(5, 4\) in the model"):
        evaluating(Splits(width=5)).evaluate(copy)


def test_a_damaged_checkpoint_is_named_and_not_passed_over(run: Path) -> None:
    checkpoint = run / "checkpoints" / "step_00000014"
    (file,) = checkpoint.glob("model_*.safetensors")
    data = bytearray(file.read_bytes())
    data[-2] ^= 4
    file.write_bytes(data)
    with pytest.raises(CheckpointDamaged, match=r"step_00000014 is damaged: .*; evaluate another checkpoint"):
        evaluating().evaluate(run)
    (checkpoint / "manifest.json").unlink()
    with pytest.raises(CheckpointDamaged, match=r"step_00000014 is damaged: .*no readable manifest"):
        evaluating().evaluate(checkpoint)


def test_a_folder_that_cannot_be_written_is_told_before_the_evaluation(
    remote: str, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    def refuse_remotely(*_: Any) -> None:
        raise RemoteError("cannot write: denied")

    monkeypatch.setattr(Path, "touch", refuse)
    monkeypatch.setattr(RemoteFolder, "write", refuse_remotely)
    monkeypatch.setattr(Splits, "build_model", refuse)
    for location in (run, remote):
        with pytest.raises(UserError, match=r"cannot write beside .*denied; the result of an evaluation"):
            evaluating().evaluate(location)


def test_the_command_line_shows_the_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = {"task": "synthetic", "width": 8, "sequence_length": 8, "layers": 1, "experts": 7, "samples": 40}
    Trainer(config=settings(tmp_path, **small, epochs=1), quiet=True).fit()
    run_dir = tmp_path / "run"
    (step,) = steps_of(run_dir)
    assert main(["evaluate", str(run_dir), "--split", "train", "--eval-batch-size", "9"]) == 0
    out = capsys.readouterr().out
    assert "changed: eval_batch_size from unset to 9 (flag --eval-batch-size)" in out
    assert f"step {step}  train loss " in out
    assert "(40 samples in " in out
    assert f"written: {run_dir}/checkpoints/step_{step:08d}.train.json" in out
    assert main(["evaluate"]) == 2
    assert "orchestrator evaluate FOLDER" in capsys.readouterr().err
    assert main(["evaluate", str(run_dir), "--resume", "auto"]) == 2
    assert "names the checkpoint already; leave --resume out" in capsys.readouterr().err
    assert main(["evaluate", str(run_dir), "--split", "valid"]) == 2
    assert "did you mean 'validation'?" in capsys.readouterr().err


def test_the_command_line_cannot_name_objects_of_a_program(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(run)]) == 2
    assert f"evaluate it in Python: Trainer(...).evaluate('{run}" in capsys.readouterr().err


# --- language models


@pytest.mark.extended
def test_generations_of_a_language_model_are_in_the_result_and_on_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = lm_config(tmp_path, run_dir=tmp_path / "run", max_steps=4, trackers=(), monitor_gpu=False)
    Trainer(config=config, quiet=True).fit()
    run_dir = tmp_path / "run"
    for step in of_kind(read_events(run_dir / "events.jsonl"), "step"):
        # Tokens that were computed, though half of them have no loss.
        assert step["units"] == step["samples"] * config.model.sequence_length
    prompt = "what is the sum of <b>2</b> and 3?"
    assert main(["evaluate", str(run_dir), "--prompts", prompt, "--max-new-tokens", "6"]) == 0
    (path,) = (run_dir / "checkpoints").glob("*.validation.json")
    result = json.loads(path.read_text())
    (generation,) = result["generations"]
    held_out_samples = result["samples"]
    assert prompt in generation["prompt"]
    assert generation["text"]
    assert "generated  " in capsys.readouterr().out
    draw_report(run_dir)
    page = (run_dir / "report.html").read_text()
    assert "Generations" in page
    assert "prompts of --prompts, continued by the weights of step 4" in page
    assert "&lt;b&gt;2&lt;/b&gt; and 3?" in page
    (data,) = config.data.data
    assert main(["evaluate", str(run_dir), "--validation-data", data, "--max-new-tokens", "0"]) == 0
    assert json.loads(path.read_text())["samples"] > held_out_samples


@pytest.mark.extended(but_first=1)
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prompts", "a\udcff"], r"--prompts 'a\udcff': the tokenizer refuses the text"),
        (["--max-new-tokens", "256"], "--max-new-tokens is 256, but the model has positions for 256 tokens"),
    ],
    ids=["half a character", "no room for a prompt"],
)
def test_prompts_are_refused_before_the_evaluation(
    flags: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = lm_config(tmp_path, run_dir=tmp_path / "run", max_steps=1, trackers=(), monitor_gpu=False)
    Trainer(config=config, quiet=True).fit()
    capsys.readouterr()

    def evaluate(_: Evaluation) -> None:
        raise AssertionError("the data was evaluated")

    monkeypatch.setattr(Evaluation, "__call__", evaluate)
    assert main(["evaluate", str(tmp_path / "run"), *flags]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
