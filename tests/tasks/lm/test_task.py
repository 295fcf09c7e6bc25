"""Tests of the task lm: its loss, gradients and auxiliary loss are those of ``transformers`` for the whole
batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.lm.language_models import EXPERTS, DoubleLanguageModel, lm_config, save_tiny_glm
from harness.moe.bias_runs import biases_of, move_each, recorded_choices
from harness.runs.steppers import make_stepper, mean_loss, run_steps
from orchestrator.config.settings import Config
from orchestrator.errors import UserError
from orchestrator.measure.tracing.fake_batches import fake_tensor_mode
from orchestrator.tasks.lm.task import LanguageModel
from orchestrator.trainer import Trainer

GLOBAL_BATCH = 8
"""Norms and routers of ``transformers`` compute in fp32 in a model of fp64: equal to about 1e-7."""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return lm_config(tmp_path_factory.mktemp("lm"))


@pytest.mark.parametrize("lora", [None, 4])
def test_the_model_is_built_on_the_default_device(config: Config, lora: int | None) -> None:
    """A plan traces it on a GPU, with fake tensors. The meta device is another one on any machine."""
    with fake_tensor_mode(), torch.device("meta"):
        model = LanguageModel(config.but(lora=lora)).build_model()
    assert {tensor.device.type for tensor in [*model.parameters(), *model.buffers()]} == {"meta"}


def reference(
    task: LanguageModel, weight: float, batch: dict[str, Tensor]
) -> tuple[float, dict[str, Tensor]]:
    """Return the mean loss of a batch by ``transformers`` alone, and gradients."""
    from transformers import AutoModelForCausalLM
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    model: Any = AutoModelForCausalLM.from_pretrained(
        task.folder, dtype=torch.float64, experts_implementation="eager"
    )
    model.train()
    outputs = model(
        input_ids=batch["input_ids"],
        position_ids=batch["position_ids"],
        use_cache=False,
        output_router_logits=True,
    )
    labels = batch["labels"].flatten()
    cross_entropy = nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels)
    config = model.config
    balance = load_balancing_loss_func(
        outputs.router_logits, config.num_experts, config.num_experts_per_tok, batch["mask"]
    )
    loss = cross_entropy + weight * balance
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def first_batch(task: LanguageModel) -> dict[str, Tensor]:
    _, feed = make_stepper(task, GLOBAL_BATCH, GLOBAL_BATCH)
    return next(feed.steps(0)).micro_batches[0].fetch()


def our_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return gradients by the names of ``transformers``."""
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        if ".hosted.bank.up_" in name:
            found[name.partition(".hosted")[0] + ".gate_up_proj"] = parameter.grad.transpose(1, 2)
        elif ".hosted.bank.down_" in name:
            found[name.partition(".hosted")[0] + ".down_proj"] = parameter.grad.transpose(1, 2)
        else:
            found[name] = parameter.grad
    return found


@pytest.mark.parametrize("micro_batch", [8, 3])
@pytest.mark.parametrize("weight", [0.0, 0.3])
def test_loss_and_gradients_are_those_of_transformers_for_the_whole_batch(
    config: Config, micro_batch: int, weight: float
) -> None:
    task = DoubleLanguageModel(config.but(balance_loss=weight))
    expected_loss, expected = reference(task, weight, first_batch(task))
    stepper, feed = make_stepper(task, micro_batch, GLOBAL_BATCH, clip_norm=1e9)
    totals = run_steps(stepper, feed, 1)[0]
    assert mean_loss(totals) == pytest.approx(expected_loss, rel=1e-6)
    found = our_gradients(stepper.strategy.model)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(
            found[name], gradient, rtol=1e-5, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_a_short_step_after_one_of_several_passes_has_the_loss_of_transformers(config: Config) -> None:
    """Its one pass counts its own choices of experts, not those of the step before."""
    task = DoubleLanguageModel(config.but(balance_loss=0.3))
    num_samples = len(task.train_data())
    size = next(size for size in range(4, num_samples) if 0 < num_samples % size < 3)
    stepper, feed = make_stepper(task, 3, size, 1e-30, clip_norm=1e9)
    several, *_, short = feed.steps(0)
    assert len(several.micro_batches) > 1
    assert len(short.micro_batches) == 1
    expected, _ = reference(task, 0.3, short.micro_batches[0].fetch())
    stepper.run(several, 0)
    assert mean_loss(stepper.run(short, 1)) == pytest.approx(expected, rel=1e-6)


def test_a_plan_needs_no_data_and_a_training_does(config: Config) -> None:
    without = config.but(data=[])
    prepared = Trainer(config=without).prepare()
    assert prepared.facts.experts == EXPERTS
    with pytest.raises(UserError, match="the task lm needs --data"):
        Trainer(config=without).fit()


def test_a_family_without_a_routing_bias_refuses_balance_bias(config: Config) -> None:
    with pytest.raises(
        UserError, match=r"--balance-bias is 0.001, but Qwen3MoeForCausalLM has no routing bias"
    ):
        LanguageModel(config.but(balance_bias=0.001)).build_model()


def test_adapters_refuse_balance_bias(config: Config) -> None:
    with pytest.raises(UserError, match="--lora leaves the model's weights as they are"):
        LanguageModel(config.but(balance_bias=0.001, lora=4)).build_model()


@pytest.mark.parametrize("micro_batch", [8, 3])
def test_biases_balance_the_tokens_of_documents_alone(tmp_path: Path, micro_batch: int) -> None:
    config = lm_config(tmp_path, save_tiny_glm, balance_bias=0.25, packing=False)
    task = DoubleLanguageModel(config)
    stepper, feed = make_stepper(task, micro_batch, GLOBAL_BATCH)
    model = stepper.strategy.model
    start = biases_of(model)
    batch = first_batch(task)
    model.train()
    with recorded_choices(model) as choices:
        task.loss(model, batch)
    totals = run_steps(stepper, feed, 1)[0]
    counted = batch["mask"].flatten().bool()
    assert not counted.all()
    for (name, chosen), load_E in zip(choices.items(), totals.loads, strict=True):
        chosen_TK = torch.tensor(chosen).reshape(len(counted), -1)
        of_documents = chosen_TK[counted].flatten().tolist()
        assert load_E.tolist() == [of_documents.count(expert) for expert in range(len(load_E))]
        bias_name = name.removesuffix("experts") + "gate.e_score_correction_bias"
        expected_E = start[bias_name].clone()
        move_each(expected_E, of_documents, 0.25)
        torch.testing.assert_close(biases_of(model)[bias_name], expected_E, rtol=0, atol=0)


@pytest.mark.parametrize(("share", "held_out"), [(None, 3), (0.25, 15), (0.0, 0)])
def test_a_share_of_the_documents_is_held_out(config: Config, share: float | None, held_out: int) -> None:
    task: Any = LanguageModel(config.but(validation_share=share))
    validation = task.validation_data()
    count = 0 if validation is None else validation.counts.documents
    assert (task.train_data().counts.documents, count) == (60 - held_out, held_out)


def test_nothing_is_held_out_beside_documents_for_validation(config: Config) -> None:
    task: Any = LanguageModel(config.but(validation_data=config.data.data))
    assert task.train_data().counts.documents == task.validation_data().counts.documents == 60


def test_a_chat_template_of_a_file_is_used_and_kept(config: Config, tmp_path: Path) -> None:
    template = tmp_path / "mine.jinja"
    template.write_text(
        "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"
    )
    given = config.but(chat_template=template)
    task = LanguageModel(given)
    chat = [{"role": "user", "content": "so?"}]
    assert task.tokenizer.apply_chat_template(chat, tokenize=False) == "[user] so?\n"
    assert "im_start" in LanguageModel(config).tokenizer.apply_chat_template(chat, tokenize=False)
    run = tmp_path / "run"
    run.mkdir()
    task.keep_files(run)
    template.write_text("another")
    with pytest.raises(UserError, match=r"mine.jinja: the run began with another template"):
        _ = LanguageModel(given, run).tokenizer
    template.unlink()
    assert LanguageModel(given, run).tokenizer.apply_chat_template(chat, tokenize=False) == "[user] so?\n"
    with pytest.raises(UserError, match=r"mine.jinja: there is no such file; a file with a Jinja"):
        _ = LanguageModel(given).tokenizer
