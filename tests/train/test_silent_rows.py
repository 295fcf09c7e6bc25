"""Silent errors known from other MoE trainers: rows that do not exist, that nobody wrote, or that have no
weight.

Each check passes, and fails when the error is planted in the code under test.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from experts.balance import moe_layers
from experts.kernels import grouped
from experts.model import initialise
from experts.moe import bank as bank_module
from experts.moe.bank import ExpertBank
from experts.moe.layer import MoELayer
from experts.tokens.dispatch import copy_rows, sum_rows
from experts.tokens.exchange import GroupExchange
from experts.types import RowMap
from harness.faults.planted_faults import (
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
from harness.hosts.ranks import run_ranks
from harness.runs.steppers import assert_gradients_equal
from harness.runs.tiny_model import Tiny
from orchestrator.config.settings import Config

# --- experts without tokens get no gradient


def skip_experts_without_tokens(patch: pytest.MonkeyPatch) -> None:
    real: Any = ExpertBank._compute

    def skipping(self: ExpertBank, group: Any, rows_RD: Tensor, *rest: Tensor) -> Tensor:
        return real(self, group, rows_RD, *rest) if len(rows_RD) else rows_RD

    patch.setattr(ExpertBank, "_compute", skipping)


def assert_idle_experts_keep_momentum_and_decay(plant: Plant | None) -> None:
    """Experts with tokens in the first step or in none equal AdamW with zero gradients from then on."""
    case = TrainingCase(TOP_1_TASK, micro_batch=1, global_batch=2, steps=3)
    model = case.task.build_model()
    initial = by_expert(model, dict(model.named_parameters()))
    hosts = train_on_hosts(case, plant)
    first, *later = [step[0] for step in hosts[0].loads]
    idle = [expert for expert, loads in enumerate(zip(*later, strict=True)) if not any(loads)]
    assert {first[expert] > 0 for expert in idle} == {True, False}, "the case has no such experts"
    gradients = merge_hosts([host.gradients for host in hosts])
    weights = merge_hosts([host.weights for host in hosts])
    for name in (f"blocks.0.ffn.bank.{expert}.{role}" for expert in idle for role in ("up", "down")):
        expected = adamw_after_one_gradient(initial[name], gradients.get(name), case.steps)
        torch.testing.assert_close(
            weights[name], expected, rtol=1e-12, atol=1e-12, msg=f"{name}: momentum or decay diverged"
        )
    assert gradients.keys() == initial.keys()


def adamw_after_one_gradient(weight: Tensor, gradient: Tensor | None, steps: int) -> Tensor:
    """The weight after steps of AdamW, of which only the first has a gradient."""
    parameter = nn.Parameter(weight)
    decay = Config.of().optim.weight_decay
    optimizer = torch.optim.AdamW([parameter], lr=LEARNING_RATE, weight_decay=decay)
    for step in range(steps):
        has_gradient = step == 0 and gradient is not None
        parameter.grad = gradient if has_gradient else torch.zeros_like(parameter)
        optimizer.step()
    return parameter.detach()


def test_experts_without_tokens_are_updated() -> None:
    fails_when_planted(
        assert_idle_experts_keep_momentum_and_decay, skip_experts_without_tokens, "momentum or decay diverged"
    )


# --- uninitialised tail rows: neither torch's grouped product nor gloo reports more rows than were written


def accept_any_offsets(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(grouped, "checked_offsets", lambda offsets_E, rows: offsets_E)


def make_grouped_layer() -> MoELayer:
    layer = MoELayer(8, (4, 4, 4), 2)
    initialise(layer, 3)
    layer.bank.kernel = "grouped"
    return layer


def assert_short_offsets_are_refused(plant: Plant | None) -> None:
    """A count that is one short leaves the last row unwritten."""
    x_TD = torch.randn(7, 8, generator=torch.Generator().manual_seed(0))
    with planted(plant), pytest.MonkeyPatch.context() as fault:
        real = bank_module.experts_grouped

        def short(rows_RD: Tensor, up: Tensor, down: Tensor, counts_E: Tensor, *rest: Any) -> Tensor:
            counts_E = counts_E.clone()
            counts_E[-1] -= 1
            return real(rows_RD, up, down, counts_E, *rest)

        make_grouped_layer()(x_TD)  # the right counts pass
        fault.setattr(bank_module, "experts_grouped", short)
        message = message_of(lambda: make_grouped_layer()(x_TD))
    assert "do not cover 14 rows" in message, "accepted a row that nobody wrote"


def message_of(call: Callable[[], Any]) -> str:
    """The message of the error that a call raises, or its result."""
    try:
        return f"no error, {call()}"
    except (RuntimeError, ValueError) as error:
        return str(error)


def accept_any_counts(patch: pytest.MonkeyPatch) -> None:
    def unchecked(self: GroupExchange, counts_NC: Tensor, header: Sequence[int]) -> Tensor:
        received = torch.empty_like(counts_NC)
        self.group.all_to_all(received, counts_NC.contiguous(), [], []).wait()
        return received

    patch.setattr(GroupExchange, "all_to_all_counts", unchecked)


def exchange_out_of_step(rank: int, size: int, store: str, ahead: int, plant: Plant | None) -> str:
    """Each host sends the other a row; the second is some exchanges ahead, and sends other counts."""
    with planted_world(rank, size, store, plant) as world:
        exchange = GroupExchange(world.axis("expert"))
        exchange._num_exchanges = ahead * rank
        counts_NC = torch.tensor([[1 + 2 * ahead * rank], [1]])

        def num_received() -> int:
            receives = exchange.all_to_all_counts(counts_NC, (8,)).flatten().tolist()
            return len(exchange.all_to_all_rows(torch.ones(2, 3), [1, 1], receives).wait())

        return message_of(num_received)


def assert_wrong_counts_are_refused(plant: Plant | None) -> None:
    assert run_ranks(exchange_out_of_step, HOSTS, 0, plant) == ["no error, 2"] * HOSTS
    messages = run_ranks(exchange_out_of_step, HOSTS, 1, plant)
    assert all("out of step; nothing was sent" in message for message in messages), (
        f"accepted rows that nobody sent: {messages}"
    )


def test_rows_that_nobody_wrote_or_sent_are_refused() -> None:
    fails_when_planted(
        assert_short_offsets_are_refused, accept_any_offsets, "accepted a row that nobody wrote"
    )
    fails_when_planted(
        assert_wrong_counts_are_refused, accept_any_counts, "accepted rows that nobody sent: .'no error, 4'"
    )


# --- 0 × NaN from zero routing weights


@dataclass(frozen=True)
class Poisoned(Tiny):
    """One expert of the first layer has NaN weights."""

    expert: int = 0

    def build_model(self) -> nn.Module:
        model = super().build_model()
        for size_class, _, stack in moe_layers(model)[0][1].bank.stacks():
            if self.expert in size_class.rows:
                stack.data[size_class.rows.index(self.expert)] = torch.nan
        return model


def weigh_by_zero(patch: pytest.MonkeyPatch) -> None:
    """Every expert computes every row, and the weights of rows that are not its own are zero."""
    real: Any = ExpertBank.forward

    def masked(
        self: ExpertBank, x_TD: Tensor, counts_L: Tensor, weights_R: Tensor, row_map: RowMap
    ) -> Tensor:
        rows_RD = copy_rows(x_TD, row_map)
        slot_R = torch.repeat_interleave(torch.arange(len(counts_L)), counts_L)
        all_rows_LL = torch.eye(len(counts_L), dtype=counts_L.dtype) * len(rows_RD)
        outputs = [
            real(self, rows_RD, all_rows_L, weights_R * (slot_R == slot))
            for slot, all_rows_L in enumerate(all_rows_LL)
        ]
        return sum_rows(torch.stack(outputs).sum(0), row_map)

    patch.setattr(ExpertBank, "forward", masked)


def assert_unchosen_experts_change_nothing(plant: Plant | None) -> None:
    case = TrainingCase(TOP_1_TASK, micro_batch=1, global_batch=2)
    healthy = train_single_process(case, plant)
    unchosen = healthy.loads[0][0].index(0)
    poisoned = replace(case, task=Poisoned((SIZES,), top_k=1, expert=unchosen))
    hosts = train_on_hosts(poisoned, plant)
    for result in (train_single_process(poisoned, plant), *hosts):
        assert result.losses == pytest.approx(healthy.losses, rel=1e-12), (
            "an expert that no token chose reached the loss"
        )
        assert result.norms == pytest.approx(healthy.norms, rel=1e-12)
    gradients = merge_hosts([host.gradients for host in hosts])
    assert_gradients_equal(gradients, healthy.gradients, 1e-10, 1e-12)


def test_an_expert_that_no_token_chose_changes_nothing() -> None:
    fails_when_planted(
        assert_unchosen_experts_change_nothing, weigh_by_zero, "no token chose reached the loss"
    )
