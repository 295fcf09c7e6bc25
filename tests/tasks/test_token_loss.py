"""Cross-entropy in chunks against torch's on whole logits: values, gradients, counts, decoders, compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from harness.runs.live_bytes import LiveBytes
from orchestrator.config.settings import Config
from orchestrator.tasks import token_loss as module
from orchestrator.tasks.nets import Decoder
from orchestrator.tasks.synthetic import Synthetic
from orchestrator.tasks.task import Loss
from orchestrator.tasks.token_loss import (
    LogitTransform,
    TokenLoss,
    counting_gradient_flop,
    counting_logit_memory,
    has_large_logits,
    token_loss,
)

TOKENS = 23
WIDTH = 5
VOCABULARY = 11
COLUMNS = 64
"""The vocabulary with rows of zeros."""
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-6}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of four tokens, the last one of three."""
    monkeypatch.setattr(module, "CHUNK_LOGITS", 4 * COLUMNS)


def make_inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden_TD = torch.randn(TOKENS, WIDTH, generator=generator, dtype=dtype) * 3
    output_VD = torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=dtype)
    targets_T = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    return hidden_TD.requires_grad_(), output_VD.requires_grad_(), targets_T


def test_weights_stored_in_bf16_take_their_gradient_in_fp32() -> None:
    hidden_TD, output_VD, targets_T = make_inputs(torch.float32)
    stored_VD = output_VD.detach().bfloat16().requires_grad_()
    stored_VD.grad_dtype = torch.float32
    whole_VD = stored_VD.detach().float().requires_grad_()
    for weights_VD in (stored_VD, whole_VD):
        with torch.autocast("cpu", torch.bfloat16):
            token_loss(hidden_TD, weights_VD, targets_T).sum.backward()
    assert stored_VD.grad is not None
    assert whole_VD.grad is not None
    assert torch.equal(stored_VD.grad, whole_VD.grad)


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_loss_and_gradients_are_those_of_whole_logits(dtype: torch.dtype, factor: float) -> None:
    hidden_TD, output_VD, targets_T = make_inputs(dtype)
    found = token_loss(hidden_TD, output_VD, targets_T)
    found_gradients = torch.autograd.grad(found.sum * factor, (hidden_TD, output_VD))
    expected = F.cross_entropy(hidden_TD @ output_VD.T, targets_T, reduction="sum")
    expected_gradients = torch.autograd.grad(expected * factor, (hidden_TD, output_VD))
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(found.sum, expected, rtol=tolerance, atol=tolerance)
    for gradient, other in zip(found_gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, other, rtol=tolerance, atol=4 * tolerance)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_frozen_output_matrix_costs_no_gradient(compiled: bool) -> None:
    """Beside adapters it is frozen: its gradient would be as large as the matrix, in fp32."""
    hidden_TD, output_VD, targets_T = make_inputs(torch.float64)
    expected = F.cross_entropy(hidden_TD @ output_VD.T, targets_T, reduction="sum")
    (expected_gradient,) = torch.autograd.grad(expected, hidden_TD)
    output_VD.requires_grad_(False)

    def loss(hidden: Tensor) -> Tensor:
        return token_loss(hidden, output_VD, targets_T).sum

    compute = torch.compile(loss, backend="aot_eager") if compiled else loss
    with FlopCounterMode(display=False) as flops:
        found = compute(hidden_TD)
    (gradient,) = torch.autograd.grad(found, hidden_TD)
    torch.testing.assert_close(found.detach(), expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-12)
    if not compiled:
        assert flops.get_total_flops() == 2 * 2 * TOKENS * COLUMNS * WIDTH, "logits, and their gradient"


@pytest.mark.parametrize(
    ("vocabulary", "columns"), [(16, 16), (64, 64), (9, 64), (67, 128), (50_257, 50_304)]
)
def test_rows_of_logits_begin_at_multiples_of_16_bytes(vocabulary: int, columns: int) -> None:
    """Products of other rows take 5 to 7 times as long on a GPU in bf16."""
    hidden_TD = torch.randn(2, WIDTH, dtype=torch.float64, requires_grad=True)
    output_VD = torch.randn(vocabulary, WIDTH, dtype=torch.float64, requires_grad=True)
    targets_T = torch.tensor([0, vocabulary - 1])
    expected = F.cross_entropy(hidden_TD @ output_VD.T, targets_T, reduction="sum")
    expected_gradients = torch.autograd.grad(expected, (hidden_TD, output_VD))
    with FlopCounterMode(display=False) as flops:
        found = token_loss(hidden_TD, output_VD, targets_T).sum
    torch.testing.assert_close(found.detach(), expected.detach())
    torch.testing.assert_close(torch.autograd.grad(found, (hidden_TD, output_VD)), expected_gradients)
    assert flops.get_total_flops() == 3 * 2 * 2 * columns * WIDTH


def test_four_million_logits_of_a_sample_are_large() -> None:
    assert has_large_logits(84, 50_257)
    assert not has_large_logits(83, 50_257)


@pytest.mark.parametrize(
    ("vocabulary", "dtype", "is_copied"),
    [
        (1000, torch.bfloat16, False),
        (1004, torch.bfloat16, True),
        (1004, torch.float32, False),
        (1006, torch.float32, True),
    ],
    ids=str,
)
def test_only_an_unaligned_output_matrix_is_copied(
    vocabulary: int, dtype: torch.dtype, is_copied: bool
) -> None:
    output_VD = torch.randn(vocabulary, WIDTH, dtype=dtype)
    output_PD, _ = module._padded(output_VD, None, dtype)
    assert (output_PD is not output_VD) == is_copied
    assert len(output_PD) == (1024 if is_copied else vocabulary)
    assert output_PD[:vocabulary].equal(output_VD)
    assert not output_PD[vocabulary:].any()


def test_the_forward_pass_counts_the_gradients_that_it_computes() -> None:
    hidden_TD, output_VD, targets_T = make_inputs(torch.float64)
    product_flop = 2 * TOKENS * COLUMNS * WIDTH
    with counting_gradient_flop() as both, FlopCounterMode(display=False) as flop:
        token_loss(hidden_TD, output_VD, targets_T)
    assert flop.get_total_flops() - both() == product_flop
    with counting_gradient_flop() as one, FlopCounterMode(display=False) as flop:
        token_loss(hidden_TD, output_VD.detach(), targets_T)
    assert flop.get_total_flops() - one() == product_flop
    assert both() == 2 * product_flop + one(), "it counts on"


def test_products_are_those_of_autocast_and_the_loss_is_fp32() -> None:
    hidden_TD, output_VD, targets_T = make_inputs(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = token_loss(hidden_TD, output_VD, targets_T).sum
    gradients = torch.autograd.grad(found, (hidden_TD, output_VD))
    logits = (hidden_TD.bfloat16() @ output_VD.bfloat16().T).float()
    expected = F.cross_entropy(logits, targets_T, reduction="sum")
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    for gradient, other in zip(gradients, torch.autograd.grad(expected, (hidden_TD, output_VD)), strict=True):
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(gradient, other, rtol=2e-2, atol=2e-2)


def test_without_gradients_the_right_guesses_are_counted() -> None:
    hidden_TD, output_VD, targets_T = make_inputs(torch.float64)
    with torch.no_grad():
        found = token_loss(hidden_TD, output_VD, targets_T)
        logits = hidden_TD @ output_VD.T
    assert found.num_correct is not None
    assert int(found.num_correct) == int((logits.argmax(-1) == targets_T).sum())
    torch.testing.assert_close(found.sum, F.cross_entropy(logits, targets_T, reduction="sum"))


def test_compiled_code_has_the_same_gradients() -> None:
    hidden_TD, output_VD, targets_T = make_inputs(torch.float64)

    def loss(hidden: Tensor, output: Tensor) -> Tensor:
        return token_loss(hidden * 2, output, targets_T).sum

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    found = torch.autograd.grad(compiled(hidden_TD, output_VD), (hidden_TD, output_VD))
    expected = torch.autograd.grad(loss(hidden_TD, output_VD), (hidden_TD, output_VD))
    torch.testing.assert_close(found, expected)


# --- decoders

LARGE_VOCABULARY = 67  # over fewer than 65 classes all logits are needed: for the accuracy in training


def decoder_loss(training: bool, vocabulary: int = LARGE_VOCABULARY) -> tuple[Loss, dict[str, Tensor]]:
    config = Config.of(width=16, layers=1, sequence_length=6, vocabulary=vocabulary, experts=3, samples=8)
    task = Synthetic(config)
    model = task.build_model().double().train(training)
    batch = task.train_data().gather(torch.arange(5))
    with torch.set_grad_enabled(training):
        loss = task.loss(model, batch)
    if training:
        loss.sum.backward()
    return loss, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("vocabulary", [LARGE_VOCABULARY, VOCABULARY])
@pytest.mark.parametrize("training", [True, False])
def test_a_decoder_with_large_logits_trains_and_evaluates_alike(
    training: bool, vocabulary: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, whole_gradients = decoder_loss(training, vocabulary)
    monkeypatch.setattr(module, "LARGE_LOGITS", 1)
    chunked, gradients = decoder_loss(training, vocabulary)
    torch.testing.assert_close(chunked.sum, whole.sum)
    assert chunked.count == whole.count
    # A step sums the metrics of all its batches: those of large and of short batches have the same names.
    assert chunked.metrics.keys() == whole.metrics.keys()
    for name in chunked.metrics:
        torch.testing.assert_close(chunked.metrics[name], whole.metrics[name])
    assert gradients.keys() == whole_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, whole_gradients[name], msg=name)


def test_a_decoder_returns_logits_without_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGE_LOGITS", 1)
    config = Config.of(width=16, layers=1, sequence_length=6, vocabulary=LARGE_VOCABULARY, experts=0)
    task = Synthetic(config)
    model: nn.Module = task.build_model()
    assert isinstance(model, Decoder)
    tokens = torch.zeros(2, 6, dtype=torch.int64)
    assert isinstance(model(tokens)[0], Tensor)
    assert isinstance(model(tokens, tokens)[0], TokenLoss)


class PeakBytes(LiveBytes):
    """Notes the most bytes that were alive after an operation."""

    peak = 0

    def __torch_dispatch__(self, *args: Any, **kwargs: Any) -> Any:
        result = super().__torch_dispatch__(*args, **kwargs)
        self.peak = max(self.peak, self.total())
        return result


@pytest.mark.parametrize("transform", [LogitTransform(), LogitTransform(0.5), LogitTransform(0.5, 3.0)])
@pytest.mark.parametrize("vocabulary", [4096, 4095], ids=["aligned", "padded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_the_memory_of_logits_is_what_is_alive(
    dtype: torch.dtype, vocabulary: int, transform: LogitTransform, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of 32 tokens. Beside the logits there are matrices of the width, which is small."""
    monkeypatch.setattr(module, "CHUNK_LOGITS", 32 * 4096)
    hidden_TD = torch.randn(70, 2, dtype=dtype).requires_grad_()
    output_VD = torch.randn(vocabulary, 2, dtype=dtype).requires_grad_()
    targets_T = torch.randint(vocabulary, (70,))
    with counting_logit_memory() as memory, PeakBytes() as alive:
        token_loss(hidden_TD, output_VD, targets_T, transform=transform)
    assert memory.whole / memory.chunk == pytest.approx(70 / 32)
    assert memory.chunk == pytest.approx(alive.peak, rel=0.2)


def test_logits_are_counted_where_memory_is_asked_for() -> None:
    hidden_TD, output_VD, targets_T = make_inputs(torch.float32)
    with counting_logit_memory() as outer:
        with counting_logit_memory() as inner:
            token_loss(hidden_TD, output_VD, targets_T)
        assert (outer.whole, outer.chunk) == (0, 0)
    token_loss(hidden_TD, output_VD, targets_T)
    assert inner.whole == 3 * TOKENS * COLUMNS * 4, "logits, their softmax, and a padded gradient"
    assert (outer.whole, outer.chunk) == (0, 0)
