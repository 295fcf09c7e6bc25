"""The loss at a model's output layer: the models that have it, the functions after that layer, and the memory
that it saves."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.lm.families import COMMON, Fp32MeansFp64, build
from harness.lm.language_models import DoubleLanguageModel, lm_config
from harness.lm.output_losses import chunks
from harness.runs.live_bytes import LiveBytes
from orchestrator.config.settings import Config
from orchestrator.measure.tracing.model_facts import model_facts
from orchestrator.tasks.lm.output_layer import call_with_labels
from orchestrator.tasks.lm.task import LanguageModel
from orchestrator.tasks.task import Loss
from orchestrator.tasks.token_loss import NO_LABEL, LogitTransform

SIZES: dict[str, Any] = {
    **COMMON,
    "head_dim": 8,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
}
TRANSFORMS: list[tuple[str, dict[str, Any], LogitTransform]] = [
    ("Llama", {"tie_word_embeddings": True}, LogitTransform()),
    ("Granite", {"logits_scaling": 3.0}, LogitTransform(1 / 3)),
    ("GraniteMoe", {"logits_scaling": 6.0, "num_local_experts": 7}, LogitTransform(1 / 6)),
    ("Cohere", {"logit_scale": 0.0625}, LogitTransform(0.0625)),
    ("Gemma2", {"final_logit_softcapping": 2.0}, LogitTransform(1.0, 2.0)),
    ("Gemma2", {"final_logit_softcapping": None}, LogitTransform()),
    ("Phi", {}, LogitTransform()),  # its output layer has a bias
]


def make_model(family: str, **sizes: Any) -> Any:
    """Return a model in fp64, whose logits are large enough for a soft cap."""
    import transformers

    config = getattr(transformers, f"{family}Config")(**{**SIZES, **sizes})
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, f"{family}ForCausalLM")(config)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.7)
    return model.double()


def make_batch(vocabulary: int = SIZES["vocab_size"], samples: int = 3, length: int = 7) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids_BS = torch.randint(vocabulary, (samples, length), generator=generator)
    labels_BS = ids_BS.roll(-1, 1)
    labels_BS[:, ::3] = NO_LABEL
    return {"input_ids": ids_BS, "labels": labels_BS}


def step(model: Any, batch: dict[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
    """Return the outputs of a pass with labels, and gradients of its loss."""
    model.zero_grad()
    inputs = {"input_ids": batch["input_ids"], "use_cache": False}
    with Fp32MeansFp64():
        outputs = call_with_labels(model, batch["labels"], inputs, pytest.fail)
    loss = outputs.loss
    if loss is None:
        loss = F.cross_entropy(outputs.logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    loss.backward()
    return outputs, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("family", "sizes", "transform"), TRANSFORMS, ids=lambda value: str(value))
def test_the_transform_of_a_family_is_found_and_its_gradients_are_those_of_whole_logits(
    family: str, sizes: dict[str, Any], transform: LogitTransform
) -> None:
    model = make_model(family, **sizes)
    batch = make_batch()
    _, expected = step(model, batch)
    with chunks() as calls:
        for _ in range(2):  # the first pass finds the transform
            _, found = step(model, batch)
            assert calls.call_args.args[-1] == transform
            assert found.keys() == expected.keys()
            for name, gradient in found.items():
                torch.testing.assert_close(gradient, expected[name], rtol=1e-10, atol=1e-10, msg=name)
        assert step(model, batch)[0].logits.numel() == 0
    # Without labels a model returns its own logits, as before.
    assert model(batch["input_ids"]).logits.shape == (*batch["input_ids"].shape, SIZES["vocab_size"])


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_a_soft_cap_is_found_in_each_precision(precision: torch.dtype) -> None:
    model = make_model("Gemma2", final_logit_softcapping=30.0).float()
    batch = make_batch()
    with chunks() as calls, torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
        call_with_labels(model, batch["labels"], {"input_ids": batch["input_ids"]}, pytest.fail)
    assert calls.call_args.args[-1] == LogitTransform(1.0, 30.0)


def test_logits_may_be_converted_to_fp32() -> None:
    model = make_model("Llama").float()
    forward = model.forward

    def converted(**inputs: Any) -> Any:
        outputs = forward(**inputs)
        outputs.logits = outputs.logits.float()
        return outputs

    model.forward = converted
    batch = make_batch()
    with chunks() as calls, torch.autocast("cpu", torch.bfloat16):
        call_with_labels(model, batch["labels"], {"input_ids": batch["input_ids"]}, pytest.fail)
    assert calls.call_args.args[-1] == LogitTransform()


# --- whole logits


def with_unknown_transform(model: Any) -> None:
    forward = model.forward

    def changed(**inputs: Any) -> Any:
        outputs = forward(**inputs)
        outputs.logits = outputs.logits + outputs.logits.square() / 1000
        return outputs

    model.forward = changed


def with_cut_logits(model: Any) -> None:
    forward = model.forward

    def changed(**inputs: Any) -> Any:
        outputs = forward(**inputs)
        outputs.logits = outputs.logits[..., :-1]
        return outputs

    model.forward = changed


def with_few_hidden_states(model: Any) -> None:
    forward = model.forward
    model.forward = lambda **inputs: forward(**inputs, logits_to_keep=7 - 1)


def with_a_hook(model: Any) -> None:
    model.lm_head.register_forward_hook(lambda *_: None)


def with_another_class(model: Any) -> None:
    class Output(nn.Linear):
        pass

    model.lm_head.__class__ = Output


def with_weights(model: Any) -> None:
    model.register_parameter("final_bias", nn.Parameter(torch.zeros(())))


def with_adapters(model: Any) -> None:
    import peft

    config = peft.LoraConfig(r=2, target_modules=["lm_head"])
    peft.inject_adapter_in_model(config, model)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (with_unknown_transform, "the model changes the products of its output layer in an unknown way"),
        (with_cut_logits, "the model does not return all products of its output layer as logits"),
        (with_few_hidden_states, "the model does not give the hidden states of all tokens to its output"),
        (with_a_hook, "the output layer has hooks"),
        (with_another_class, "the output layer is a Output"),
        (with_weights, "weights beside its body and its output layer (final_bias)"),
        (with_adapters, "the output layer has adapters"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_other_models_have_whole_logits_and_say_why_once(change: Any, reason: str) -> None:
    model = make_model("Llama")
    change(model)
    batch = make_batch()
    inputs = {"input_ids": batch["input_ids"]}
    expected = model(**inputs).logits
    notes: list[str] = []
    with chunks() as calls:
        for _ in range(3):
            found = call_with_labels(model, batch["labels"], inputs, notes.append)
            assert found.loss is None
            torch.testing.assert_close(found.logits, expected, rtol=0, atol=0)
    assert not calls.called
    assert len(notes) == 1
    assert notes[0].startswith("the loss takes the logits of all tokens at once, and memory for them: ")
    assert reason in notes[0]


def test_fp16_and_small_vocabularies_have_whole_logits() -> None:
    model = make_model("Llama").float()
    batch = make_batch()
    inputs = {"input_ids": batch["input_ids"]}
    notes: list[str] = []
    assert call_with_labels(model, batch["labels"], inputs, notes.append).loss is None
    assert not notes
    with chunks(), torch.autocast("cpu", torch.float16):
        assert call_with_labels(model, batch["labels"], inputs, notes.append).loss is None
    assert "fp16" in notes[0]


def test_a_pass_that_fails_leaves_the_model_as_it_was() -> None:
    model = make_model("Llama")
    batch = make_batch()
    with chunks():
        step(model, batch)
        with pytest.raises(IndexError):
            step(model, {**batch, "input_ids": batch["input_ids"] + 1000})
    assert model(batch["input_ids"]).logits.shape[-1] == SIZES["vocab_size"]


def test_weights_that_are_not_finite_do_not_change_the_choice() -> None:
    model = make_model("Llama")
    batch = make_batch()
    model.lm_head.weight.data[0, 0] = float("nan")
    with chunks():
        outputs, _ = step(model, batch)
    assert outputs.loss is not None


# --- memory

LARGE_VOCABULARY = 2000


def test_logits_of_all_tokens_are_never_made() -> None:
    model = make_model("Llama", vocab_size=LARGE_VOCABULARY)
    batch = make_batch(LARGE_VOCABULARY, samples=4, length=30)
    logits_bytes = 4 * 30 * LARGE_VOCABULARY * 8
    with LiveBytes() as whole:
        step(model, batch)
    assert whole.largest >= logits_bytes
    with chunks(LARGE_VOCABULARY), LiveBytes() as found:
        step(model, batch)
        step(model, batch)
    # The largest is the gradient of the output layer.
    assert found.largest == LARGE_VOCABULARY * SIZES["hidden_size"] * 8 < logits_bytes / 7


# --- the task


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return lm_config(tmp_path_factory.mktemp("lm"))


class ExactLanguageModel(DoubleLanguageModel):
    """The task in fp64, norms and routers included."""

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        with Fp32MeansFp64():
            return super().loss(model, batch)


@pytest.mark.parametrize("training", [True, False])
def test_packed_documents_have_the_loss_metrics_and_gradients_of_whole_logits(
    config: Config, training: bool
) -> None:
    task = ExactLanguageModel(config)
    model = task.build_model().train(training)
    batch = task.train_data().gather(torch.arange(9))
    # Several documents in a sample, and tokens without a label.
    assert int((batch["position_ids"] == 0).sum()) > 9
    assert bool((batch["labels"] == NO_LABEL).any())
    expected, expected_gradients = task_step(task, model, batch)
    with chunks(model.config.vocab_size) as calls:  # pyrefly: ignore[missing-attribute]
        found, gradients = task_step(task, model, batch)
    assert calls.called
    torch.testing.assert_close(found.sum, expected.sum, rtol=1e-12, atol=0)
    assert found.count == expected.count
    assert found.metrics.keys() == expected.metrics.keys() == (set() if training else {"perplexity"})
    for name in found.metrics:
        torch.testing.assert_close(found.metrics[name], expected.metrics[name], rtol=1e-12, atol=0)
    torch.testing.assert_close(found.loads, expected.loads)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-10, atol=1e-12, msg=name)


def task_step(task: LanguageModel, model: nn.Module, batch: Any) -> tuple[Loss, dict[str, Tensor]]:
    model.zero_grad()
    with torch.set_grad_enabled(model.training):
        loss = task.loss(model, batch)
    if model.training:
        loss.sum.backward()
    return loss, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_the_same_pass_has_the_same_bits(config: Config) -> None:
    task = DoubleLanguageModel(config)
    model = task.build_model().train()
    batch = task.train_data().gather(torch.arange(3))
    torch.use_deterministic_algorithms(True)
    try:
        with chunks(model.config.vocab_size):  # pyrefly: ignore[missing-attribute]
            task_step(task, model, batch)
            first, gradients = task_step(task, model, batch)
            again, same = task_step(task, model, batch)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(first.sum, again.sum)
    assert all(torch.equal(gradient, same[name]) for name, gradient in gradients.items())


@pytest.mark.extended
def test_a_compiled_model_has_the_loss_and_gradients_of_a_plain_one() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    model = make_model("Qwen3", num_hidden_layers=1).float()
    batch = make_batch()

    def compiled_step() -> tuple[Tensor, dict[str, Tensor]]:
        model.zero_grad()
        outputs = call_with_labels(
            model, batch["labels"], {"input_ids": batch["input_ids"], "use_cache": False}, pytest.fail
        )
        outputs.loss.backward()
        return outputs.loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}

    with chunks():
        expected, expected_gradients = compiled_step()
    with chunks():
        counter = CompileCounterWithBackend("aot_eager")
        model._compiled_call_impl = torch.compile(model._call_impl, backend=counter)
        found, gradients = compiled_step()
        assert counter.frame_count > 0
    torch.testing.assert_close(found, expected)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.extended
def test_the_plan_knows_that_logits_need_little_memory(config: Config) -> None:
    task = LanguageModel(config)
    vocabulary = task.model_config.vocab_size
    whole = model_facts(task, "cpu", "fp32")
    with chunks(vocabulary):
        found = model_facts(task, "cpu", "fp32")
    logits_bytes = task.units_per_sample * vocabulary * 4
    assert found.method == whole.method
    assert found.method.startswith("traced")
    slopes = [max(moment.per_sample for moment in facts.passes.saved) for facts in (found, whole)]
    assert slopes[0] <= slopes[1] - logits_bytes
    assert found.parameters == whole.parameters


def test_a_family_with_experts_collects_its_router_logits() -> None:
    model = build("Mixtral")
    batch = make_batch()
    with chunks():
        outputs = call_with_labels(
            model,
            batch["labels"],
            {"input_ids": batch["input_ids"], "output_router_logits": True},
            pytest.fail,
        )
    assert outputs.loss is not None
    assert len(outputs.router_logits) == model.config.num_hidden_layers


def test_a_copy_of_a_model_computes_with_its_own_weights() -> None:
    model = make_model("Llama")
    batch = make_batch()
    with chunks():
        expected, _ = step(model, batch)
        copied = copy.deepcopy(model)
        for parameter in model.parameters():
            parameter.data.zero_()
        found, gradients = step(copied, batch)
    assert torch.equal(found.loss, expected.loss)
    assert gradients.keys() == dict(copied.named_parameters()).keys()
