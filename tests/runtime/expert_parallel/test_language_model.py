"""Language models on expert hosts that are killed: losses and weights are those of the undisturbed run."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.faults.chaos_runs import FinishedRun, Job, run_with_faults
from harness.faults.fault_schedule import FaultSchedule
from harness.faults.run_checks import (
    check_losses,
    check_steps,
    check_weights,
    newest_checkpoint,
    recoveries,
)
from harness.hosts.cluster import RayCluster
from harness.lm.language_models import save_sums, save_tiny_model
from orchestrator.checkpoint.files import load
from orchestrator.cli.main import main
from orchestrator.record.files.reading import of_kind
from orchestrator.run.run_settings import read_run_settings
from orchestrator.tasks.lm.task import LanguageModel
from orchestrator.train.checkpoint.restore import restore_model

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]
STEPS = 40
SETTINGS = shlex.split("""
    --task lm --sequence-length 96 --global-batch-size 7 --balance-loss 0.01 --learning-rate 1e-2
    --parallel-strategy expert_parallel --deterministic --share-by-speed off --epochs 1000 --keep-last
    --log-every 1 --evaluate-every 100 --trackers --no-monitor-gpu --max-failures 10
""")
TWO_KILLS = FaultSchedule().kill(1, step=12).kill(0, step=28)


@pytest.fixture(scope="module")
def job(shared_cluster: RayCluster, tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("lm")
    model = save_tiny_model(folder / "model")
    data = save_sums(folder / "sums.jsonl")
    settings = (*SETTINGS, "--model", str(model), "--data", str(data))
    return Job(STEPS, snapshot_every=5, settings=settings, cluster=shared_cluster)


def run_unharmed(job: Job, folder: Path, schedule: FaultSchedule) -> FinishedRun:
    """Run under a schedule. All its faults happen, and the result is that of the undisturbed run."""
    calm = run_with_faults(replace(job, spares=0), folder / "calm", FaultSchedule())
    assert calm.exit_code == 0, calm.output
    run = run_with_faults(job, folder / "run", schedule)
    assert run.exit_code == 0, run.output
    assert check_steps(run.events, job.steps) == []
    assert check_losses(run.events, calm.events) == []
    assert check_weights(run.run_dir, calm.run_dir) == []
    assert run.leftovers == []
    assert len(run.fired) == len(schedule.faults)
    assert len(recoveries(run.events)) == len(schedule.faults)
    assert {event["source"] for event in recoveries(run.events)} == {"memory"}
    return run


def trained_model(run_dir: Path) -> tuple[LanguageModel, nn.Module]:
    """Return the task of a run, and its model with all experts in this process."""
    task = LanguageModel(read_run_settings(run_dir))
    model = task.build_model()
    task.initialise(model)
    restore_model(load(newest_checkpoint(run_dir)), model)
    return task, model.eval()


@torch.no_grad()
def logits_of(model: Any, task: LanguageModel) -> Tensor:
    data = task.validation_data()
    assert data is not None
    batch = data.gather(torch.arange(2))
    inputs = {name: batch[name] for name in ("input_ids", "position_ids")}
    return model(**inputs, use_cache=False).logits


@pytest.mark.extended
def test_adapters_are_trained_through_a_kill_and_exported(job: Job, tmp_path: Path) -> None:
    """Snapshots hold the adapters alone: a new host reads the weights of its experts from the files."""
    import peft
    from transformers import AutoModelForCausalLM

    lora = replace(job, steps=16, extra=("--lora", "4", "--lora-targets", "experts", "q_proj"))
    run = run_unharmed(lora, tmp_path, FaultSchedule().kill(1, step=8))
    checkpoint = newest_checkpoint(run.run_dir)
    saved = load(checkpoint).tensors["model"]
    assert {"lora_" in name for name in saved if not name.endswith(".load_E")} == {True}
    for name, flags in (("adapters", []), ("merged", ["--merge"])):
        assert main(["export", str(checkpoint), str(tmp_path / name), *flags]) == 0
    task, trained = trained_model(run.run_dir)
    base = AutoModelForCausalLM.from_pretrained(str(task.config.model.model), experts_implementation="eager")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", experts_implementation="eager")
    expected = logits_of(trained, task)
    assert not torch.allclose(logits_of(base, task), expected, rtol=0, atol=1e-3)
    beside = peft.PeftModel.from_pretrained(base, tmp_path / "adapters")
    for model in (merged, beside):
        torch.testing.assert_close(logits_of(model, task), expected, rtol=0, atol=1e-5)


@pytest.mark.extended
def test_a_fine_tuned_model_is_exported_after_two_kills(job: Job, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = run_unharmed(job, tmp_path, TWO_KILLS)
    losses = [event["loss"] for event in of_kind(run.events, "step")]
    assert losses[-1] < losses[0] / 2
    target = tmp_path / "exported"
    assert main(["export", str(run.run_dir), str(target)]) == 0
    task, trained = trained_model(run.run_dir)
    loaded = AutoModelForCausalLM.from_pretrained(target, experts_implementation="eager")
    torch.testing.assert_close(logits_of(loaded, task), logits_of(trained, task), rtol=0, atol=1e-5)
    tokenizer: Any = AutoTokenizer.from_pretrained(target)
    assert tokenizer.get_vocab() == task.tokenizer.get_vocab()
