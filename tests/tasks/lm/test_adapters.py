"""The task lm with adapters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from experts.moe.bank import ExpertBank
from experts.transformers.files.shards import fingerprint
from experts.transformers.lora.adapters import LoraOptions
from harness.lm.language_models import FilledLanguageModel, lm_config
from harness.runs.steppers import make_stepper, mean_loss, run_steps
from orchestrator.config.sections.model import ModelSettings
from orchestrator.config.settings import Config
from orchestrator.errors import UserError
from orchestrator.measure.tracing.model_facts import model_facts
from orchestrator.measure.tracing.step_trace import TraceOptions, trace_micro_batch
from orchestrator.plan.reasons import trained_text
from orchestrator.tasks.lm.building import lora_options
from orchestrator.tasks.lm.task import LanguageModel
from orchestrator.train.checkpoint.state import model_tensors


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return lm_config(tmp_path_factory.mktemp("lm"), lora=4)


def test_adapters_alone_are_trained_and_saved(config: Config) -> None:
    task = FilledLanguageModel(config)
    stepper, feed = make_stepper(task, 2, 4)
    model: Any = stepper.strategy.model
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses = [mean_loss(totals) for totals in run_steps(stepper, feed, 2)]
    assert losses[1] < losses[0]
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed
    assert all("lora_" in name for name in changed)
    assert model.frozen_base == fingerprint(task.folder)
    saved = model_tensors(model).keys() & dict(model.named_parameters()).keys()
    assert saved == {name for name, p in model.named_parameters() if p.requires_grad}


def test_a_model_with_new_adapters_computes_what_its_files_do(config: Config) -> None:
    from transformers import AutoModelForCausalLM

    task = FilledLanguageModel(config)
    batch = task.train_data().gather(torch.arange(2))
    inputs = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"]}
    expected: Any = AutoModelForCausalLM.from_pretrained(task.folder, dtype=torch.float32)
    with torch.no_grad():
        ours = task.build_model()(**inputs).logits
        torch.testing.assert_close(ours, expected(**inputs).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.extended
def test_the_plan_knows_that_few_weights_are_trained(config: Config) -> None:
    facts = model_facts(LanguageModel(config), "cpu", "bf16")
    model = LanguageModel(config).build_model()
    assert facts.trainable == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert facts.trainable < facts.parameters / 2
    assert facts.unsaved == facts.parameters - facts.trainable
    assert facts.method.startswith("traced")
    assert (trained_text(facts) or "").startswith(f"{facts.trainable:,} of ")
    assert trained_text(replace(facts, trainable=facts.parameters)) is None
    assert facts.weight_bytes < 4.0
    banks = [bank for bank in model.modules() if isinstance(bank, ExpertBank)]
    adapters = [p for bank in banks for p in bank.parameters() if p.requires_grad]
    assert 0 < facts.trained_experts == sum(p.numel() for p in adapters) < facts.trainable
    whole = trace_micro_batch(LanguageModel(config), 2, TraceOptions(precision="bf16"))
    assert 4 * whole.trained + whole.frozen_bytes == facts.weight_bytes * facts.parameters


def test_alpha_is_twice_the_rank_unless_it_is_given() -> None:
    settings = ModelSettings(model="a", lora=4)
    assert lora_options(settings) == LoraOptions(4, 8.0)
    given = replace(settings, lora_alpha=2.0, lora_targets=("experts",))
    assert lora_options(given) == LoraOptions(4, 2.0, ("experts",))
    assert lora_options(ModelSettings()) is None


def test_unknown_targets_are_named_with_the_known_ones(tmp_path: Any) -> None:
    config = lm_config(tmp_path, lora=4, lora_targets=("c_attn",))
    with pytest.raises(UserError, match=r"--lora 4: .*'c_attn'; it has experts"):
        LanguageModel(config).build_model()
