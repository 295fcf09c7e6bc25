"""Tests of activation checkpointing of MoE blocks: gradients are the same, and no token is routed or sent
twice."""

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

from experts.balance import gated_layers
from experts.model import attach
from experts.moe.context import MoEContext
from experts.tokens.exchange import GroupExchange
from harness.hosts.ranks import run_ranks
from harness.runs.steppers import assert_gradients_equal, gradients, make_stepper, mean_loss, run_steps
from harness.runs.tiny_model import HostCase, Tiny
from orchestrator.errors import UserError
from orchestrator.train.device.recompute import recompute_blocks
from orchestrator.train.group.stores import file_store
from orchestrator.train.group.world import World, process_group_world
from orchestrator.train.stepper import Stepper

SIZES = (3, 9, 3, 5, 9, 2, 4)
HOST_OF = ((0, 1, 1, 0, 1, 0, 1), (1, 1, 0, 1, 0, 0, 1))
LAYER_OPTIONS: dict[str, dict[str, Any]] = {
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


class OperatorCounter(TorchDispatchMode):
    """Counts the operators that run while it is active, in the forward and in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted_calls(exchange: GroupExchange) -> Iterator[Counter[str]]:
    """Count the exchanges between the hosts, and the rows of each."""
    calls: Counter[str] = Counter()

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(first: Tensor, *rest: Any) -> Any:
            calls[name] += 1
            calls[f"{name} sent"] += len(first)
            return function(first, *rest)

        return call

    exchange.all_to_all_counts = counting("counts", exchange.all_to_all_counts)
    exchange.all_to_all_rows = counting("rows", exchange.all_to_all_rows)
    yield calls


def results_of(stepper: Stepper, feed: Any) -> dict[str, Any]:
    totals = run_steps(stepper, feed, STEPS)
    return {
        "loss": [mean_loss(t) for t in totals],
        "loads": [[load.tolist() for load in t.loads] for t in totals],
        "norm": [float(t.norm) for t in totals if t.norm is not None],
        "gradients": gradients(stepper.strategy.model),
        "sent": [t.exchange_stats[:2].tolist() for t in totals if t.exchange_stats is not None],
    }


def train(case: HostCase, world: World) -> dict[str, Any]:
    stepper, feed = make_stepper(
        case.task,
        case.micro_batch,
        case.global_batch,
        learning_rate=1e-2,
        world=world,
        host_of=case.host_of if world.size > 1 else None,
        chunks=case.chunks,
        recompute=case.recompute,
    )
    exchange = stepper.strategy.context.exchange
    if not isinstance(exchange, GroupExchange):
        return results_of(stepper, feed)
    with counted_calls(exchange) as calls:
        return results_of(stepper, feed) | {"calls": dict(calls)}


def train_on_host(rank: int, size: int, store: str, case: HostCase) -> list[dict[str, Any]]:
    """Train without and with recomputation."""
    results = []
    for recompute in (False, True):
        with process_group_world(
            file_store(f"{store}-{recompute}", size), rank, size, torch.device("cpu"), "gloo", 60
        ) as world:
            results.append(train(replace(case, recompute=recompute), world))
    return results


def assert_same_results(plain: Mapping[str, Any], recomputed: Mapping[str, Any]) -> None:
    assert recomputed["loss"] == pytest.approx(plain["loss"], rel=1e-14)
    assert recomputed["norm"] == pytest.approx(plain["norm"], rel=1e-13)
    assert recomputed["loads"] == plain["loads"], "a recomputed pass counted its tokens again"
    assert_gradients_equal(recomputed["gradients"], plain["gradients"], 1e-12, 1e-13)


@pytest.mark.parametrize("name", LAYER_OPTIONS)
def test_gradients_are_the_same_in_one_process(name: str) -> None:
    task = Tiny((SIZES, SIZES), tokens=3, options=LAYER_OPTIONS[name])
    case = HostCase(task, 1, (), micro_batch=4, global_batch=10)
    plain = train(case, World.single_process())
    recomputed = train(replace(case, recompute=True), World.single_process())
    assert_same_results(plain, recomputed)


@pytest.mark.extended(but_first=2)
@pytest.mark.parametrize("name", LAYER_OPTIONS)
@pytest.mark.parametrize("chunks", [3, 1])
def test_gradients_and_exchanges_are_the_same_on_two_hosts(name: str, chunks: int) -> None:
    """A step has two micro-batches; the last step has one sample, so that a host has none."""
    task = Tiny((SIZES, SIZES), samples=33, options=LAYER_OPTIONS[name])
    case = HostCase(task, 2, HOST_OF, micro_batch=4, global_batch=16, chunks=chunks)
    num_passes = 2 + 2 + 1  # micro-batches of three steps
    # A capacity limit needs the counts of all hosts before the exchange sends its own.
    count_exchanges = 2 if "capacity" in LAYER_OPTIONS[name] else 1
    for plain, recomputed in run_ranks(train_on_host, 2, case):
        assert_same_results(plain, recomputed)
        assert recomputed["calls"] == plain["calls"]
        assert recomputed["sent"] == plain["sent"]
        assert recomputed["calls"]["counts"] == num_passes * 2 * count_exchanges
        assert recomputed["calls"]["rows"] == num_passes * 2 * chunks * 4, (
            "rows are sent and returned once in the forward and once in the backward pass"
        )


# --- routing


def make_recomputed_model(context: MoEContext | None, **options: Any) -> nn.Module:
    """A model of three recomputed blocks; without a context, recomputation has no cache."""
    model = Tiny((SIZES, SIZES, SIZES), options=options).build_model()
    attach(model, context or MoEContext())
    recompute_blocks(model, context)
    return model


def make_batch(tokens: int = 11) -> Tensor:
    return torch.randn(tokens, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_experts_are_chosen_once() -> None:
    with OperatorCounter() as counter:
        logits, _ = make_recomputed_model(MoEContext())(make_batch())
        assert counter.calls["topk"] == 3
        assert counter.calls["native_layer_norm"] == 3
        logits.sum().backward()
    assert counter.calls["native_layer_norm"] == 6, "the blocks were not recomputed"
    assert counter.calls["topk"] == 3


@pytest.mark.parametrize("cached", [True, False])
def test_a_recomputed_pass_keeps_the_first_choice_of_experts(cached: bool) -> None:
    """Another choice would send experts rows that they never saw.

    It happens without the cache: so this test can fail.
    """
    model = make_recomputed_model(MoEContext() if cached else None)
    logits, routings = model(make_batch())
    for _, layer in gated_layers(model):
        layer.gate.weight_ED.data.neg_()
    if not cached:
        with pytest.raises(CheckpointError):
            logits.sum().backward()
        return
    logits.sum().backward()
    for routing, (_, layer) in zip(routings, gated_layers(model), strict=True):
        used = {
            expert
            for size_class, _, stack in layer.bank.stacks()
            for expert in experts_with_gradient(size_class.rows, stack)
        }
        assert used == set(routing.counts_E.nonzero().flatten().tolist())


def experts_with_gradient(ids: tuple[int, ...], stack: nn.Parameter) -> list[int]:
    assert stack.grad is not None
    return [expert for expert, gradient in zip(ids, stack.grad, strict=True) if gradient.any()]


def test_a_pass_without_gradients_is_the_same_and_caches_nothing() -> None:
    context = MoEContext()
    model = make_recomputed_model(context)
    plain = Tiny((SIZES, SIZES, SIZES)).build_model()
    with torch.no_grad():
        assert torch.equal(model(make_batch())[0], plain(make_batch())[0])
    assert context.cache is None


def test_names_stay_and_blocks_are_counted() -> None:
    task = Tiny((SIZES, SIZES))
    model = task.build_model()
    assert recompute_blocks(model, MoEContext()) == 2
    assert model.state_dict().keys() == task.build_model().state_dict().keys()
    with pytest.raises(UserError, match="needs repeated blocks"):
        recompute_blocks(Tiny((SIZES,)).build_model(), MoEContext())
