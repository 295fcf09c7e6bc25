"""Activation checkpointing of MoE blocks: the same gradients, and nothing is routed or travels a second time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointError

from experts.balance import moe_layers
from experts.context import MoEContext, RecomputeCache
from experts.exchange import GroupExchange
from experts.model import attach
from orchestrator.errors import UserError
from orchestrator.train.parts.memory import recompute_blocks
from orchestrator.train.parts.stores import file_store
from orchestrator.train.parts.world import World, process_group_world
from orchestrator.train.step import Stepper
from tests.support.ranks import run_ranks
from tests.support.steppers import assert_gradients_equal, gradients, make_stepper, mean_loss, run_steps
from tests.support.tiny_model import HostCase, Tiny

SIZES = (3, 9, 3, 5, 9, 2, 4)
HOMES = ((0, 1, 1, 0, 1, 0, 1), (1, 1, 0, 1, 0, 0, 1))
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all": {
        "kind": "ffn",
        "scores": "sigmoid",
        "normalise": False,
        "shared": 3,
        "bias_rate": 0.01,
        "jitter": 0.2,
        "capacity": 0.7,
    },
}
STEPS = 3


class Seen(TorchDispatchMode):
    """Counts the operators that run while it is on, in the forward and in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted(exchange: GroupExchange) -> Iterator[Counter[str]]:
    """How often the hosts meet, and how many rows leave or stay."""
    calls: Counter[str] = Counter()

    def watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(first: Tensor, *rest: Any) -> Any:
            calls[name] += 1
            calls[f"{name} sent"] += len(first)
            return function(first, *rest)

        return call

    exchange.all_to_all_counts = watched("counts", exchange.all_to_all_counts)
    exchange.all_to_all_rows = watched("rows", exchange.all_to_all_rows)
    yield calls


def outcome(stepper: Stepper, feed: Any) -> dict[str, Any]:
    totals = run_steps(stepper, feed, STEPS)
    found: dict[str, Any] = {
        "loss": [mean_loss(t) for t in totals],
        "loads": [[load.tolist() for load in t.loads] for t in totals],
    }
    found |= {
        "norm": [float(t.norm) for t in totals if t.norm is not None],
        "gradients": gradients(stepper.strategy.model),
    }
    return found | {"travel": [t.exchange_stats[:2].tolist() for t in totals if t.exchange_stats is not None]}


def trained(case: HostCase, world: World) -> dict[str, Any]:
    stepper, feed = make_stepper(
        case.task,
        case.micro,
        case.whole,
        learning_rate=1e-2,
        world=world,
        host_of=case.host_of if world.size > 1 else None,
        chunks=case.chunks,
        recompute=case.recompute,
    )
    exchange = stepper.strategy.context.exchange
    if not isinstance(exchange, GroupExchange):
        return outcome(stepper, feed)
    with counted(exchange) as calls:
        return outcome(stepper, feed) | {"calls": dict(calls)}


def on_hosts(rank: int, size: int, store: str, case: HostCase) -> list[dict[str, Any]]:
    found = []
    for recompute in (False, True):
        with process_group_world(
            file_store(f"{store}-{recompute}", size), rank, size, torch.device("cpu"), "gloo", 60
        ) as world:
            found.append(trained(replace(case, recompute=recompute), world))
    return found


def assert_same(plain: Mapping[str, Any], again: Mapping[str, Any]) -> None:
    assert again["loss"] == pytest.approx(plain["loss"], rel=1e-14)
    assert again["norm"] == pytest.approx(plain["norm"], rel=1e-13)
    assert again["loads"] == plain["loads"], "counted once"
    assert_gradients_equal(again["gradients"], plain["gradients"], 1e-12, 1e-13)


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_are_the_same_in_one_process(name: str) -> None:
    case = HostCase(Tiny((SIZES, SIZES), tokens=3, options=OPTIONS[name]), 1, (), micro=4, whole=10)
    assert_same(
        trained(case, World.single_process()), trained(replace(case, recompute=True), World.single_process())
    )


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_and_exchanges_are_the_same_on_two_hosts(name: str, chunks: int) -> None:
    """Two micro-batches a step; the last step has one sample, so that a host has none."""
    case = HostCase(
        Tiny((SIZES, SIZES), samples=33, options=OPTIONS[name]), 2, HOMES, micro=4, whole=16, chunks=chunks
    )
    for plain, again in run_ranks(on_hosts, 2, case):
        assert_same(plain, again)
        assert again["calls"] == plain["calls"]
        assert again["travel"] == plain["travel"]
        passes = 2 + 2 + 1  # micro-batches of three steps
        meetings = 2 if "capacity" in OPTIONS[name] else 1
        assert again["calls"]["counts"] == passes * 2 * meetings
        assert again["calls"]["rows"] == passes * 2 * chunks * 4, (
            "out and back, in the forward and in the backward pass"
        )


# --- where the routing comes from


def tiny(hosts: MoEContext | None, **options: Any) -> nn.Module:
    model = Tiny((SIZES, SIZES, SIZES), options=options).build_model()
    known = hosts or MoEContext()
    attach(model, known)
    recompute_blocks(model, hosts)
    return model


def batch(tokens: int = 11) -> Tensor:
    return torch.randn(tokens, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_experts_are_chosen_once() -> None:
    with Seen() as seen:
        logits, _ = tiny(MoEContext())(batch())
        assert seen.calls["topk"] == 3
        assert seen.calls["native_layer_norm"] == 3
        logits.sum().backward()
    assert seen.calls["native_layer_norm"] == 6, "the blocks were run again"
    assert seen.calls["topk"] == 3


@pytest.mark.parametrize("taped", [True, False])
def test_a_gate_that_has_changed_since_does_not_choose_again(taped: bool) -> None:
    """The choice is the one that was made: another would give experts rows that they never saw. Without the tape that is
    what happens, which is how this test fails."""
    model = tiny(MoEContext() if taped else None)
    logits, routings = model(batch())
    for _, layer in moe_layers(model):
        layer.gate.weight_ED.data.neg_()
    if not taped:
        with pytest.raises(CheckpointError):
            logits.sum().backward()
        return
    logits.sum().backward()
    for routing, (_, layer) in zip(routings, moe_layers(model), strict=True):
        used = {expert for group, _, stack in layer.bank.stacks() for expert in used_of(group.ids, stack)}
        assert used == set(routing.counts_E.nonzero().flatten().tolist())


def used_of(ids: tuple[int, ...], stack: nn.Parameter) -> list[int]:
    assert stack.grad is not None
    return [expert for expert, gradient in zip(ids, stack.grad, strict=True) if gradient.any()]


def test_a_pass_without_gradients_is_the_same_and_keeps_nothing() -> None:
    hosts = MoEContext()
    model, plain = tiny(hosts), Tiny((SIZES, SIZES, SIZES)).build_model()
    with torch.no_grad():
        assert torch.equal(model(batch())[0], plain(batch())[0])
    assert hosts.cache is None


def test_names_stay_and_blocks_are_counted() -> None:
    task = Tiny((SIZES, SIZES))
    model = task.build_model()
    assert recompute_blocks(model, MoEContext()) == 2
    assert model.state_dict().keys() == task.build_model().state_dict().keys()
    with pytest.raises(UserError, match="needs repeated blocks"):
        recompute_blocks(Tiny((SIZES,)).build_model(), MoEContext())


# --- the tape


def test_what_was_made_once_is_handed_out_again_in_order() -> None:
    hosts, tape, made = MoEContext(), RecomputeCache(), []

    def make() -> int:
        made.append(len(made))
        return made[-1]

    assert [hosts.replayed(make), hosts.replayed(make)] == [0, 1], "without a tape, each time anew"
    with tape.recording(hosts):
        assert not hosts.replaying
        assert [hosts.replayed(make), hosts.replayed(make)] == [2, 3]
    for _ in range(2):
        with tape.replaying(hosts):
            assert hosts.replaying
            assert [hosts.replayed(make), hosts.replayed(make)] == [2, 3]
    assert made == [0, 1, 2, 3]
    assert hosts.cache is None


def test_a_tape_keeps_values_without_their_history() -> None:
    hosts, tape = MoEContext(), RecomputeCache()
    leaf = torch.ones(3, requires_grad=True)
    with tape.recording(hosts):
        made = hosts.replayed(lambda: (leaf * 2, torch.arange(2)))
    with tape.replaying(hosts):
        again = hosts.replayed(lambda: made)
    assert made[0].grad_fn is not None
    assert again[0].grad_fn is None
    assert again[0].requires_grad
    assert not again[1].requires_grad
    assert torch.equal(again[0], made[0])


def test_a_pass_that_fails_leaves_no_tape_behind() -> None:
    hosts, outer = MoEContext(), RecomputeCache()
    with outer.recording(hosts):
        with pytest.raises(ZeroDivisionError), RecomputeCache().recording(hosts):
            raise ZeroDivisionError
        assert hosts.cache is outer
    assert hosts.cache is None
