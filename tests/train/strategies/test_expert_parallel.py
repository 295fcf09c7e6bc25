"""B1: the result does not depend on where the experts live. Random models, placements and batches on 1 to 4 real processes
over gloo, against the same run in one process: loss and norm of each step, every gradient, and the weights at the end."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from experts.balance import moe_layers
from experts.expert_state import split_experts, stacked_names
from experts.model import initialise
from experts.transfer import Transfer
from orchestrator.config.settings import Config
from orchestrator.train.data import Feed
from orchestrator.train.loading import LoaderOptions
from orchestrator.train.parts.stores import file_store
from orchestrator.train.parts.world import World, process_group_world
from orchestrator.train.worker.build_model import build_model, build_parts, build_stepper
from orchestrator.trainer import Trainer
from tests.support.ranks import run_ranks
from tests.support.steppers import Events, assert_gradients_equal, make_stepper, mean_loss, run_steps
from tests.support.tiny_model import HostCase, Tiny, random_case

STEPS = 10


def trained(case: HostCase, world: World, steps: int = STEPS) -> dict[str, Any]:
    """Losses, norms and loads of some steps, the gradients of the first, and the weights after the last. One process does
    not recompute: what is recomputed on hosts is held against what is not."""
    if world.size > 1 and case.data_on_main:
        world = world.with_data_on_main()
    elif world.size > 1 and case.shares:
        world = world.with_shares(case.shares)
    micro = (
        case.micro_batch if world.size > 1 else case.micro_batch * case.data_ranks
    )  # the same micro-batches, uncut
    stepper, feed = make_stepper(
        case.task,
        micro,
        case.global_batch,
        learning_rate=1e-2 if case.task.dtype == torch.float64 else 1e-3,
        world=world,
        emit=Events(),
        host_of=case.host_of,
        chunks=case.chunks,
        bucket_mb=case.bucket_mb,
        recompute=case.recompute and world.size > 1,
    )
    found: dict[str, Any] = {"loss": [], "norm": [], "loads": []}
    model, epoch = stepper.strategy.model, 0
    while len(found["loss"]) < steps:
        for portion in feed.steps(epoch):
            if len(found["loss"]) == steps:
                break
            totals = stepper.run(portion, len(found["loss"]))
            found["loss"].append(mean_loss(totals))
            found["norm"].append(float(totals.norm))  # pyright: ignore[reportArgumentType]
            found["loads"].append([load.tolist() for load in totals.loads])
            if len(found["loss"]) == 1:
                found["gradients"] = by_expert(
                    model, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
                )
        epoch += 1
    found["weights"] = by_expert(model, dict(model.named_parameters()))
    return found


def by_expert(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    stacked = stacked_names(model)
    return {name: tensor.detach().clone() for name, tensor in split_experts(tensors, stacked).items()}


def on_hosts(rank: int, size: int, store: str, cases: Sequence[HostCase]) -> list[dict[str, Any]]:
    found = []
    for number, case in enumerate(cases):
        with process_group_world(
            file_store(f"{store}-{number}", size), rank, size, torch.device("cpu"), "gloo", 60
        ) as world:
            found.append(trained(case, world, steps_of(case)))
    return found


def steps_of(case: HostCase) -> int:
    return STEPS if case.task.dtype == torch.float64 else 3


def assert_equal(hosts: Sequence[dict[str, Any]], alone: dict[str, Any], case: HostCase) -> None:
    exact = case.task.dtype == torch.float64
    close = 1e-12 if exact else 1e-6
    for host in hosts:  # one number, the same on all of them
        assert host["loss"] == hosts[0]["loss"]
        assert host["norm"] == hosts[0]["norm"]
    first = slice(None) if exact else slice(1)  # from equal weights; later steps have drifted by rounding
    assert hosts[0]["loss"][first] == pytest.approx(alone["loss"][first], rel=close, abs=close)
    assert hosts[0]["norm"][first] == pytest.approx(alone["norm"][first], rel=close, abs=close)
    assert hosts[0]["loads"][first] == alone["loads"][first]
    whole: dict[str, Tensor] = {}
    for host in hosts:
        whole |= host["gradients"]
    assert_gradients_equal(whole, alone["gradients"], *((1e-10, 1e-12) if exact else (2e-6, 1e-7)))
    if exact:
        for host in hosts:
            for name, weight in host["weights"].items():
                torch.testing.assert_close(
                    weight,
                    alone["weights"][name],
                    rtol=1e-9,
                    atol=1e-9,
                    msg=lambda text, n=name: f"{n}: {text}",
                )
        assert set().union(*(host["weights"] for host in hosts)) == alone["weights"].keys()


def check(cases: Sequence[HostCase]) -> None:
    (hosts,) = {case.hosts for case in cases}
    answers = run_ranks(on_hosts, hosts, list(cases), timeout=240.0)
    for number, case in enumerate(cases):
        try:
            assert_equal(
                [answer[number] for answer in answers],
                trained(case, World.single_process(), steps_of(case)),
                case,
            )
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from None


def few(hosts: int, dtype: torch.dtype, seeds: range) -> list[HostCase]:
    return [random_case(seed, hosts, dtype) for seed in seeds]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("hosts", [2, 3, 4])
def test_random_cases(hosts: int, dtype: torch.dtype) -> None:
    check(few(hosts, dtype, range(5)))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("hosts", [2, 3, 4])
@pytest.mark.parametrize("block", range(4))
def test_many_random_cases(hosts: int, dtype: torch.dtype, block: int) -> None:
    check(few(hosts, dtype, range(100 + 10 * block, 110 + 10 * block)))


SIZES = (3, 9, 3, 5, 9, 2, 4)
NAMED = {
    "seven experts on three hosts": HostCase(
        Tiny((SIZES, SIZES)), 3, ((0, 1, 1, 2, 1, 0, 1), (2, 2, 0, 1, 0, 0, 2)), 4, 12
    ),
    "all experts on the last host": HostCase(Tiny((SIZES,)), 3, ((2,) * 7,), 4, 24),
    "a last batch of one sample": HostCase(Tiny((SIZES,), samples=25), 3, ((0, 1, 1, 2, 1, 0, 1),), 4, 12),
    "the gate on the first host": HostCase(
        Tiny((SIZES,)), 3, ((0, 1, 1, 2, 1, 0, 1),), 5, 10, data_on_main=True
    ),
    "one expert": HostCase(Tiny(((5,),), top_k=1), 2, ((1,),), 4, 8),
    "recomputed": HostCase(
        Tiny((SIZES, SIZES)),
        2,
        ((0, 1, 1, 0, 1, 0, 1), (1, 1, 0, 1, 0, 0, 1)),
        4,
        16,
        recompute=True,
        chunks=2,
    ),
}


@pytest.mark.parametrize("name", NAMED)
def test_named_cases(name: str) -> None:
    check([NAMED[name]])


class Partly(Tiny):
    """Trains some of its parameters: the others get gradients that nobody clears but us, and count for nothing."""

    def build_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in parameters if p.ndim != 1], lr=1e-2)


class Frozen(Tiny):
    """Nothing but the experts of the first size is trained: some hosts have nothing to do for the optimizer."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("bank" in name and name.endswith("_3"))
        return model


def built_and_run(task: Tiny, world: World, host_of: Any) -> dict[str, Any]:
    """Some steps with the product's own learner, of a task that brings an optimizer or freezes a part."""
    config = Config.of(
        learning_rate=1e-2, schedule="constant", warmup_steps=0, global_batch_size=12, batch_size=12
    )
    prepared = Trainer(task=task, config=config, quiet=True).prepare()
    parts = build_parts(
        prepared.resolved.config, prepared.plan, task, world, host_of=host_of if world.size > 1 else None
    )
    stepper = build_stepper(prepared.resolved.config, world, parts, 4, Events())
    feed = Feed(
        task.train_data(),
        world,
        global_batch=12,
        micro_batch=12 // world.size,
        seed=0,
        loader=LoaderOptions(),
    )
    done = run_steps(stepper, feed, 6)
    model = parts.model
    return {
        "norm": [float(t.norm) for t in done if t.norm is not None],
        "weights": by_expert(model, dict(model.named_parameters())),
    }


def built_on_host(rank: int, size: int, store: str, task: Tiny, host_of: Any) -> dict[str, Any]:
    with process_group_world(file_store(store, size), rank, size, torch.device("cpu"), "gloo", 60) as world:
        return built_and_run(task, world, host_of)


@pytest.mark.parametrize("kind", [Partly, Frozen])
def test_what_the_optimizer_does_not_have_counts_for_nothing(kind: type[Tiny]) -> None:
    task, host_of = kind((SIZES,)), ((0, 1, 0, 1, 1, 1, 1),)  # both experts of size 3 on one host
    alone = built_and_run(task, World.single_process(), host_of)
    for host in run_ranks(built_on_host, 2, task, host_of):
        assert host["norm"] == pytest.approx(alone["norm"], rel=1e-12)
        for name, weight in host["weights"].items():
            torch.testing.assert_close(weight, alone["weights"][name], rtol=1e-9, atol=1e-9)


def journeys_left(rank: int, size: int, store: str) -> tuple[int, int]:
    """Journeys that are alive after some steps, with and without recomputation."""
    with process_group_world(file_store(store, size), rank, size, torch.device("cpu"), "gloo", 60) as world:
        left = []
        for recompute in (False, True):
            case = replace(NAMED["recomputed"], recompute=recompute)
            stepper, feed = make_stepper(
                case.task, 4, 16, world=world, host_of=case.host_of, chunks=2, recompute=recompute
            )
            run_steps(stepper, feed, 6)
            gc.collect()
            left.append(sum(isinstance(thing, Transfer) for thing in gc.get_objects()))
        return left[0], left[1]


def test_nothing_of_a_step_outlives_it() -> None:
    """The graph holds a journey, and a journey that held what arrived would hold the graph."""
    assert run_ranks(journeys_left, 2) == [(0, 0), (0, 0)]


class Tied(Tiny):
    """A buffer that is not zero, and a weight under two names: what a model built without memory must keep."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.register_buffer("mask", torch.arange(3.0))
        model.other = model.head  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
        return model

    def initialise(self, model: nn.Module) -> None:
        initialise(model, 5)
        for _, layer in moe_layers(model):
            layer.gate.weight_ED.data.mul_(30)


def test_a_model_whose_experts_live_elsewhere_is_the_same_otherwise() -> None:
    task = Tied((SIZES, SIZES), dtype=torch.float32)
    whole = build_model(Config(), task, World.single_process(), None)
    part = build_model(Config(), task, World.single_process(), [(0, 1, 1, 0, 1, 0, 1), (1, 1, 1, 1, 1, 1, 1)])
    assert part.get_buffer("mask").tolist() == [0.0, 1.0, 2.0]
    assert part.get_parameter("head.weight") is part.get_parameter("other.weight")
    theirs = by_expert(whole, dict(whole.named_parameters()))
    mine = by_expert(part, dict(part.named_parameters()))
    assert {name for name in mine if "bank" in name} == {
        f"blocks.0.ffn.bank.{e}.{role}" for e in (0, 3, 5) for role in ("up", "down")
    }
    for name, tensor in mine.items():
        assert torch.equal(tensor, theirs[name])
