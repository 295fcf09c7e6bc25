"""Dropout by the step, the layer and the position of a token."""

from __future__ import annotations

import pytest
import torch

from experts.moe.context import MoEContext, StepContext
from experts.moe.token_dropout import TokenDropout


def dropped(share: float, x: torch.Tensor, step: StepContext, layer_id: int = 0) -> torch.Tensor:
    dropout = TokenDropout(share)
    dropout.context = MoEContext(step=step)
    dropout.layer_id = layer_id
    return dropout(x)


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_a_share_of_the_features_is_dropped_and_the_mean_stays(share: float) -> None:
    y = dropped(share, torch.ones(8, 64, 64, dtype=torch.float64), StepContext(seed=3))
    assert (y == 0).double().mean().item() == pytest.approx(share, abs=0.01)
    torch.testing.assert_close(y[y != 0], torch.full_like(y[y != 0], 1 / (1 - share)))


def test_a_token_has_the_same_dropout_whatever_pass_it_is_in() -> None:
    x = torch.ones(6, 5, 16)
    whole = dropped(0.5, x, StepContext(seed=3, num_samples=6))
    for first, last in ((0, 2), (2, 5), (5, 6)):
        step = StepContext(seed=3, first_sample=first, num_samples=last - first)
        assert torch.equal(dropped(0.5, x[first:last], step), whole[first:last])
        # Shared experts may get tokens without the dimension of samples.
        assert torch.equal(dropped(0.5, x[first:last].flatten(0, 1), step), whole[first:last].flatten(0, 1))


def test_steps_and_layers_have_numbers_of_their_own() -> None:
    x = torch.ones(4, 5, 16)
    first = dropped(0.5, x, StepContext(seed=3))
    assert not torch.equal(first, dropped(0.5, x, StepContext(seed=4)))
    assert not torch.equal(first, dropped(0.5, x, StepContext(seed=3), layer_id=1))


def test_nothing_is_dropped_in_evaluation() -> None:
    x = torch.ones(4, 5)
    assert torch.equal(TokenDropout(0.5).eval()(x), x)


def test_without_a_context_it_is_the_dropout_of_torch() -> None:
    """An own loop sets no steps: a constant seed would drop the same features for ever."""
    dropout = TokenDropout(0.5).train()
    ones_TD = torch.ones(50, 20)
    torch.manual_seed(0)
    first_TD = dropout(ones_TD)
    assert not torch.equal(first_TD, dropout(ones_TD))
    assert set(first_TD.unique().tolist()) == {0.0, 2.0}
