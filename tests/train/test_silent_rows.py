"""Silent errors of other MoE trainers, one test each, as in the table in ``facts.md``: rows that are none, that nobody wrote, or that
weigh nothing. Each check fails where its error is planted in our own code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from experts import bank as banks
from experts.balance import moe_layers
from experts.bank import ExpertBank
from experts.exchange import GroupExchange
from experts.group import Group
from experts.kernels import grouped
from experts.layer import MoELayer
from experts.model import initialise
from orchestrator.config.settings import Config
from tests.support.planted_faults import (
    HOSTS,
    LEARNING_RATE,
    SIZES,
    TOP_1_TASK,
    Plant,
    TrainingCase,
    by_expert,
    fails_when_planted,
    merge_hosts,
    planted,
    planted_world,
    train_on_hosts,
    train_single_process,
)
from tests.support.ranks import run_ranks
from tests.support.steppers import assert_gradients_equal
from tests.support.tiny_model import Tiny

# Experts without tokens get no gradient.


def skips_experts_without_tokens(patch: pytest.MonkeyPatch) -> None:
    real: Any = ExpertBank._compute

    def skipping(self: ExpertBank, group: Any, rows_RD: Tensor, *rest: Tensor) -> Tensor:
        return real(self, group, rows_RD, *rest) if len(rows_RD) else rows_RD

    patch.setattr(ExpertBank, "_compute", skipping)


def idle_experts_keep_momentum_and_decay(plant: Plant | None) -> None:
    """Experts that had tokens in the first step or never, against AdamW with gradients of zero from then on."""
    case = TrainingCase(TOP_1_TASK, micro_batch=1, global_batch=2, steps=3)
    model = case.task.build_model()
    begun = by_expert(model, dict(model.named_parameters()))
    hosts = train_on_hosts(case, plant)
    first, *later = [step[0] for step in hosts[0].loads]
    idle = [expert for expert, loads in enumerate(zip(*later, strict=True)) if not any(loads)]
    assert {first[expert] > 0 for expert in idle} == {True, False}, "the case has no such experts"
    gradients, weights = (
        merge_hosts([host.gradients for host in hosts]),
        merge_hosts([host.weights for host in hosts]),
    )
    for name in (f"blocks.0.ffn.bank.{expert}.{role}" for expert in idle for role in ("up", "down")):
        expected = nn.Parameter(begun[name])
        optimizer = torch.optim.AdamW(
            [expected], lr=LEARNING_RATE, weight_decay=Config.of().optim.weight_decay
        )
        for step in range(case.steps):
            expected.grad = (
                torch.zeros_like(expected) if step else gradients.get(name, torch.zeros_like(expected))
            )
            optimizer.step()
        torch.testing.assert_close(
            weights[name],
            expected.detach(),
            rtol=1e-12,
            atol=1e-12,
            msg=f"{name}: momentum or decay diverged",
        )
    assert gradients.keys() == begun.keys()


def test_experts_without_tokens_get_no_gradient() -> None:
    fails_when_planted(
        idle_experts_keep_momentum_and_decay, skips_experts_without_tokens, "momentum or decay diverged"
    )


# Uninitialised tail rows: neither torch's grouped product nor gloo says a word where there are more rows than were written.


def takes_any_offsets(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(grouped, "check_offsets", lambda offsets_E, rows: None)


def grouped_layer() -> MoELayer:
    layer = MoELayer(8, (4, 4, 4), 2)
    initialise(layer, 3)
    layer.bank.kernel = "grouped"
    return layer


def short_offsets_are_refused(plant: Plant | None) -> None:
    """A count that is one short leaves the last row unwritten."""
    x_TD = torch.randn(7, 8, generator=torch.Generator().manual_seed(0))
    with planted(plant), pytest.MonkeyPatch.context() as fault:
        real = banks.experts_grouped

        def short(rows_RD: Tensor, up: Tensor, down: Tensor, counts_E: Tensor, *rest: Any) -> Tensor:
            counts_E = counts_E.clone()
            counts_E[-1] -= 1
            return real(rows_RD, up, down, counts_E, *rest)

        grouped_layer()(x_TD)  # the right counts pass
        fault.setattr(banks, "experts_grouped", short)
        said = refusal(lambda: grouped_layer()(x_TD))
    assert "do not cover 14 rows" in said, "took a row that nobody wrote"


def refusal(call: Callable[[], Any]) -> str:
    try:
        return f"no word, {call()}"
    except (RuntimeError, ValueError) as error:
        return str(error)


def takes_any_counts(patch: pytest.MonkeyPatch) -> None:
    def unchecked(self: GroupExchange, mine_NC: Tensor, agreed: Sequence[int]) -> list[list[int]]:
        received = torch.empty_like(mine_NC)
        self.group.all_to_all(received, mine_NC.contiguous(), [], []).wait()
        return received.tolist()

    patch.setattr(GroupExchange, "all_to_all_counts", unchecked)


def out_of_step(rank: int, size: int, store: str, ahead: int, plant: Plant | None) -> str:
    """Each sends the other a row; the second host is some exchanges ahead, and tells of the rows of the one it is at."""
    with planted_world(rank, size, store, plant) as world:
        exchange = GroupExchange(Group(rank, size, world.process_group))
        exchange._num_exchanges = ahead * rank
        told_NC = torch.tensor([[1 + 2 * ahead * rank], [1]])

        def exchanged() -> int:
            receives = [row[0] for row in exchange.all_to_all_counts(told_NC, (8,))]
            return len(exchange.all_to_all_rows(torch.ones(2, 3), [1, 1], receives).wait())

        return refusal(exchanged)


def wrong_counts_are_refused(plant: Plant | None) -> None:
    assert run_ranks(out_of_step, HOSTS, 0, plant) == ["no word, 2"] * HOSTS
    said = run_ranks(out_of_step, HOSTS, 1, plant)
    assert all("out of step; nothing was sent" in words for words in said), (
        f"took rows that nobody sent: {said}"
    )


def test_uninitialised_tail_rows() -> None:
    fails_when_planted(short_offsets_are_refused, takes_any_offsets, "took a row that nobody wrote")
    fails_when_planted(
        wrong_counts_are_refused, takes_any_counts, "took rows that nobody sent: .'no word, 4'"
    )


# 0 × NaN from zero routing weights.


@dataclass(frozen=True)
class Poisoned(Tiny):
    """An expert of the first layer that makes NaN of everything."""

    expert: int = 0

    def build_model(self) -> nn.Module:
        model = super().build_model()
        for group, _, stack in moe_layers(model)[0][1].bank.stacks():
            if self.expert in group.ids:
                stack.data[group.ids.index(self.expert)] = torch.nan
        return model


def weighs_by_zero(patch: pytest.MonkeyPatch) -> None:
    """Every expert computes every row, and the weights of those that are not its own are zero."""
    real: Any = ExpertBank.forward

    def masked(self: ExpertBank, rows_RD: Tensor, counts_S: Tensor, weights_R: Tensor) -> Tensor:
        slot_R = torch.repeat_interleave(torch.arange(len(counts_S)), counts_S)
        all_SS = torch.eye(len(counts_S), dtype=counts_S.dtype) * len(rows_RD)
        made = [real(self, rows_RD, all_S, weights_R * (slot_R == slot)) for slot, all_S in enumerate(all_SS)]
        return torch.stack(made).sum(0)

    patch.setattr(ExpertBank, "forward", masked)


def an_expert_that_nobody_chose_changes_nothing(plant: Plant | None) -> None:
    case = TrainingCase(TOP_1_TASK, micro_batch=1, global_batch=2)
    healthy = train_single_process(case, plant)
    expert = healthy.loads[0][0].index(0)
    ill = replace(case, task=Poisoned((SIZES,), top_k=1, expert=expert))
    hosts = train_on_hosts(ill, plant)
    for found in (train_single_process(ill, plant), *hosts):
        assert found.losses == pytest.approx(healthy.losses, rel=1e-12), (
            "an expert that nobody chose reached the loss"
        )
        assert found.norms == pytest.approx(healthy.norms, rel=1e-12)
    assert_gradients_equal(merge_hosts([host.gradients for host in hosts]), healthy.gradients, 1e-10, 1e-12)


def test_zero_times_nan_from_zero_routing_weights() -> None:
    fails_when_planted(
        an_expert_that_nobody_chose_changes_nothing, weighs_by_zero, "nobody chose reached the loss"
    )
