"""Cross-entropy in chunks: tokens without labels, a bias and a transform, against torch on whole logits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from orchestrator.tasks import token_loss as module
from orchestrator.tasks.token_loss import NO_LABEL, PLAIN, LogitTransform, token_loss

TOKENS = 23
WIDTH = 5
VOCABULARY = 11
COLUMNS = 64
"""The vocabulary with rows of zeros."""
TRANSFORMS = [PLAIN, LogitTransform(0.3), LogitTransform(1.0, 2.0), LogitTransform(1.7, 3.0)]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of four tokens, the last one of three or fewer."""
    monkeypatch.setattr(module, "CHUNK_LOGITS", 4 * COLUMNS)


def make_inputs(labelled: float = 0.6, vocabulary: int = VOCABULARY) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden_TD = torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64) * 3
    output_VD = torch.randn(vocabulary, WIDTH, generator=generator, dtype=torch.float64)
    bias_V = torch.randn(vocabulary, generator=generator, dtype=torch.float64)
    labels_T = torch.randint(vocabulary, (TOKENS,), generator=generator)
    labels_T[torch.rand(TOKENS, generator=generator) >= labelled] = NO_LABEL
    return hidden_TD.requires_grad_(), output_VD.requires_grad_(), bias_V.requires_grad_(), labels_T


def labelled_loss(
    hidden_TD: Tensor,
    output_VD: Tensor,
    bias_V: Tensor | None,
    labels_T: Tensor,
    transform: LogitTransform = PLAIN,
) -> Tensor:
    return token_loss(hidden_TD, output_VD, labels_T, bias_V, transform, ignore=True).sum


def whole_loss(
    hidden_TD: Tensor, output_VD: Tensor, bias_V: Tensor | None, labels_T: Tensor, transform: LogitTransform
) -> Tensor:
    logits_TV = F.linear(hidden_TD, output_VD, bias_V) * transform.scale
    if transform.softcap:
        logits_TV = transform.softcap * torch.tanh(logits_TV / transform.softcap)
    return F.cross_entropy(logits_TV, labels_T, ignore_index=NO_LABEL, reduction="sum")


@pytest.mark.parametrize("transform", TRANSFORMS, ids=str)
@pytest.mark.parametrize("labelled", [1.0, 0.6, 0.0])
@pytest.mark.parametrize("vocabulary", [VOCABULARY, 16])
def test_loss_and_gradients_are_those_of_whole_logits(
    transform: LogitTransform, labelled: float, vocabulary: int
) -> None:
    hidden_TD, output_VD, bias_V, labels_T = make_inputs(labelled, vocabulary)
    leaves = (hidden_TD, output_VD, bias_V)
    found = labelled_loss(*leaves, labels_T, transform)
    expected = whole_loss(*leaves, labels_T, transform)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    gradients = torch.autograd.grad(found * 0.3, leaves)
    for gradient, other in zip(gradients, torch.autograd.grad(expected * 0.3, leaves), strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        evaluated = labelled_loss(*leaves, labels_T, transform)
    torch.testing.assert_close(evaluated, expected, rtol=1e-12, atol=1e-12)


def test_logits_are_computed_for_labelled_tokens_and_gradients_for_trained_weights() -> None:
    hidden_TD, output_VD, bias_V, labels_T = make_inputs()
    num_labels = int((labels_T != NO_LABEL).sum())
    assert 0 < num_labels < TOKENS
    product_flop = 2 * num_labels * WIDTH * COLUMNS
    with FlopCounterMode(display=False) as trained:
        labelled_loss(hidden_TD, output_VD, bias_V, labels_T).backward()
    assert trained.get_total_flops() == 3 * product_flop
    hidden_TD.grad = None
    with FlopCounterMode(display=False) as frozen:
        labelled_loss(hidden_TD, output_VD.detach(), None, labels_T).backward()
    assert frozen.get_total_flops() == 2 * product_flop
    assert hidden_TD.grad is not None


def test_products_are_those_of_autocast_and_the_loss_is_fp32() -> None:
    *doubles, labels_T = make_inputs()
    hidden_TD, output_VD, bias_V = [leaf.detach().float().requires_grad_() for leaf in doubles]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = labelled_loss(hidden_TD, output_VD, bias_V, labels_T)
        logits_TV = F.linear(hidden_TD, output_VD, bias_V)
    expected = F.cross_entropy(logits_TV.float(), labels_T, reduction="sum")
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=0)
    for gradient in torch.autograd.grad(found, (hidden_TD, output_VD, bias_V)):
        assert gradient.dtype == torch.float32


@pytest.mark.extended(but_first=1)
@pytest.mark.parametrize("transform", TRANSFORMS[::-3], ids=str)
def test_compiled_code_has_the_same_values_and_gradients(transform: LogitTransform) -> None:
    *leaves, labels_T = make_inputs()

    def loss(*tensors: Tensor) -> Tensor:
        hidden_TD, output_VD, bias_V = tensors
        return labelled_loss(hidden_TD * 2, output_VD, bias_V, labels_T, transform)

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    found = torch.autograd.grad(compiled(*leaves), leaves)
    torch.testing.assert_close(found, torch.autograd.grad(loss(*leaves), leaves))
    with torch.no_grad():
        torch.testing.assert_close(compiled(*leaves), loss(*leaves))
