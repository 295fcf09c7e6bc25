"""Tests of expert parallel: untrained parameters, batch norm statistics and dummy passes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.hosts.ranks import run_ranks
from harness.runs.host_runs import merge_hosts, step_batches, total_norm
from harness.runs.steppers import Events, assert_gradients_equal, make_stepper, run_steps
from harness.runs.tiny_model import Tiny
from orchestrator.config.settings import Config
from orchestrator.train.data.indexed import IndexedFeed
from orchestrator.train.data.loading import LoaderOptions
from orchestrator.train.data.opening import open_feed
from orchestrator.train.data.steps import Feed
from orchestrator.train.group.stores import file_store
from orchestrator.train.group.world import World, process_group_world
from orchestrator.train.optim.optimizer import ScheduledOptimizer, warmup_schedule
from orchestrator.train.step.totals import Totals
from orchestrator.train.stepper import Stepper
from orchestrator.train.strategies.buffers import running_statistics
from orchestrator.train.worker.build_model import build_parts, build_stepper
from orchestrator.train.worker.placed_experts import PlacedExperts
from orchestrator.trainer import Trainer
from tests.train.strategies.test_expert_parallel import (
    CPU,
    HOST_OF_7,
    NAMED_CASES,
    SIZES,
    assert_weights_close,
    gradients_by_expert,
    norms_of,
    weights_by_expert,
)

# --- parameters that the optimizer does not have


class TrainsMatrices(Tiny):
    """Trains some parameters only: the others get gradients that the optimizer does not clear."""

    settings_read = ("learning_rate", "schedule", "warmup_steps")

    def build_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in parameters if p.ndim != 1], lr=1e-2)


class TrainsOneSizeClass(Tiny):
    """Trains the experts of the first size only: the optimizers of some hosts have no parameters."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("bank" in name and name.endswith("_3"))
        return model


def build_product_stepper(task: Tiny, world: World, host_of: Any) -> tuple[Stepper, Feed]:
    """Build a stepper as a run does, for a task with its own optimizer, frozen parameters or batch norm."""
    config = Config.of(
        learning_rate=1e-2, schedule="constant", warmup_steps=0, global_batch_size=12, batch_size=12
    )
    prepared = Trainer(task=task, config=config, quiet=True).prepare()
    config = prepared.resolved.config
    experts = PlacedExperts(host_of=host_of if world.size > 1 else None)
    parts = build_parts(config, prepared.plan, task, world, experts=experts)
    feed = open_feed(
        task.train_data(),
        world,
        global_batch=12,
        micro_batch=12 // world.data_ranks,
        seed=0,
        loader=LoaderOptions(),
    )
    return build_stepper(config, world, parts, feed.largest_micro_batch, Events()), feed


def train_built(task: Tiny, world: World, host_of: Any) -> dict[str, Any]:
    """Return norms, the gradients of the last step, untrained parameters included, and weights."""
    stepper, feed = build_product_stepper(task, world, host_of)
    model = stepper.strategy.model
    totals: list[Totals] = []
    for step, batch in enumerate(step_batches(feed, 6)):
        if world.size == 1:
            model.zero_grad()  # the optimizer of one process leaves untrained gradients to accumulate
        totals.append(stepper.run(batch, step))
    return {
        "norm": norms_of(totals),
        "gradients": gradients_by_expert(model),
        "weights": weights_by_expert(model),
    }


def train_built_on_host(rank: int, size: int, store: str, task: Tiny, host_of: Any) -> dict[str, Any]:
    with process_group_world(file_store(store, size), rank, size, CPU, "gloo", 60) as world:
        return train_built(task, world, host_of)


@pytest.mark.parametrize("kind", [TrainsMatrices, TrainsOneSizeClass])
def test_parameters_that_are_not_trained_do_not_enter_the_norm(kind: type[Tiny]) -> None:
    task = kind((SIZES,))
    host_of = ((0, 1, 0, 1, 1, 1, 1),)  # both experts of size 3 are on one host
    expected = train_built(task, World.single_process(), host_of)
    hosts = run_ranks(train_built_on_host, 2, task, host_of)
    for host in hosts:
        assert host["norm"] == pytest.approx(expected["norm"], rel=1e-12)
        assert_weights_close(host["weights"], expected["weights"])
    gradients = merge_hosts([host["gradients"] for host in hosts])
    assert_gradients_equal(gradients, expected["gradients"], 1e-10, 1e-12)


def train_dense_part(world: World, clip_norm: float) -> dict[str, Any]:
    """Train with an optimizer that has the dense parameters only; the experts get gradients all the same."""
    case = NAMED_CASES["seven experts on three hosts"]
    micro_batch = 4 if world.size > 1 else 12
    stepper, feed = make_stepper(
        case.task, micro_batch, 12, clip_norm=clip_norm, world=world, host_of=case.host_of
    )
    model = stepper.strategy.model
    dense = {name: p for name, p in model.named_parameters() if ".bank." not in name}
    adamw = torch.optim.AdamW(dense.values(), lr=1e-2, fused=True)
    optimizer = ScheduledOptimizer(adamw, warmup_schedule("constant", 0, 1000))
    stepper = replace(stepper, optimizer=optimizer)
    totals = run_steps(stepper, feed, 3)
    gradients = gradients_by_expert(model)
    return {
        "norm": norms_of(totals),
        "dense": {name: gradients[name] for name in dense if name in gradients},
        "experts": {name: gradient for name, gradient in gradients.items() if ".bank." in name},
        "weights": weights_by_expert(model),
    }


def train_dense_part_on_host(rank: int, size: int, store: str, clip_norm: float) -> dict[str, Any]:
    with process_group_world(file_store(store, size), rank, size, CPU, "gloo", 60) as world:
        return train_dense_part(world, clip_norm)


@pytest.mark.parametrize("clip_norm", [0.0, 0.05])
def test_the_clip_norm_of_an_optimizer_without_experts_is_that_of_the_dense_part(clip_norm: float) -> None:
    """Gradients of experts exist and are not small, but they are not trained: the clip norm must not count
    them."""
    expected = train_dense_part(World.single_process(), clip_norm)
    initial = weights_by_expert(NAMED_CASES["seven experts on three hosts"].task.build_model())
    hosts = run_ranks(train_dense_part_on_host, 3, clip_norm)
    experts = merge_hosts([host["experts"] for host in hosts])
    for host in hosts:
        assert host["norm"] == pytest.approx(expected["norm"], rel=1e-12)
        assert_gradients_equal(host["dense"], expected["dense"], 1e-10, 1e-12)
        assert_weights_close(host["weights"], expected["weights"])
        trained_norm = clip_norm or host["norm"][-1]
        assert total_norm(host["dense"]) == pytest.approx(trained_norm, rel=1e-12)
        assert total_norm(experts) > 0.2 * host["norm"][-1], "too small to be seen in the norm"
        for name, weight in host["weights"].items():
            if ".bank." in name:
                assert torch.equal(weight, initial[name]), "an expert was trained"


# --- batch norm


class InputNormed(Tiny):
    """Normalises its input by batch norm, whose running statistics therefore depend on the samples alone."""

    def build_model(self) -> nn.Module:
        return InputNorm(super().build_model())


class InputNorm(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.input_norm = nn.BatchNorm1d(7, dtype=torch.float64)
        self.model = model

    def forward(self, x: Tensor) -> Any:
        return self.model(self.input_norm(x.transpose(1, 2)).transpose(1, 2))


def statistics_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers() if "input_norm" in name}


def train_normed(task: Tiny, world: World, data_on_main: bool) -> dict[str, Any]:
    """Train one epoch; return the statistics after it, and those that all hosts begin the next step with."""
    if data_on_main:
        world = world.with_data_on_main()
    stepper, feed = build_product_stepper(task, world, HOST_OF_7)
    model = stepper.strategy.model
    batches = list(feed.steps(0))
    for step, batch in enumerate(batches):
        stepper.run(batch, step)
    after_epoch = statistics_of(model)
    stepper.strategy.begin_step(all_have_samples=True)
    return {
        "samples": [[micro.num_samples for micro in batch.micro_batches] for batch in batches],
        "own": after_epoch,
        "shared": statistics_of(model),
    }


def train_normed_on_host(rank: int, size: int, store: str, task: Tiny, data_on_main: bool) -> dict[str, Any]:
    with process_group_world(file_store(store, size), rank, size, CPU, "gloo", 60) as world:
        return train_normed(task, world, data_on_main)


def statistics_over(task: Tiny, shares: Sequence[slice]) -> dict[str, Tensor]:
    """The statistics of a batch norm that sees these samples of the first epoch, one slice after another."""
    model = task.build_model()
    feed = IndexedFeed(
        task.train_data(),
        World.single_process(),
        global_batch=12,
        micro_batch=12,
        seed=0,
        loader=LoaderOptions(),
    )
    samples = task.train_data().tensors[0][feed.order(0)]
    for share in shares:
        model.get_submodule("input_norm")(samples[share].transpose(1, 2))
    return statistics_of(model)


def assert_same_statistics(statistics: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert statistics.keys() == expected.keys()
    for name, buffer in statistics.items():
        torch.testing.assert_close(buffer, expected[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("samples", "last_counts", "main_shares"),
    [
        # 12 + 12 + 2: the main host has a dummy pass in the last step, which must leave no trace.
        (26, [0, 1, 1], [slice(0, 4), slice(12, 16)]),
        # 12 + 12 + 8: the last shares are uneven.
        (32, [2, 3, 3], [slice(0, 4), slice(12, 16), slice(24, 26)]),
    ],
)
def test_batch_norm_statistics_on_hosts_are_those_of_the_main_hosts_samples(
    samples: int, last_counts: list[int], main_shares: list[slice]
) -> None:
    task = InputNormed((SIZES,), tokens=3, samples=samples)
    hosts = run_ranks(train_normed_on_host, 3, task, False)
    assert [host["samples"][-1][0] for host in hosts] == last_counts
    expected = statistics_over(task, main_shares)
    assert_same_statistics(hosts[0]["own"], expected)
    for host in hosts:
        assert_same_statistics(host["shared"], expected)


def test_batch_norm_statistics_equal_one_process_if_the_main_host_has_all_samples() -> None:
    """The other hosts compute dummy samples only, in every step, also in a short last one."""
    task = InputNormed((SIZES,), tokens=3, samples=26)
    expected = train_normed(task, World.single_process(), data_on_main=False)["own"]
    assert int(expected["input_norm.num_batches_tracked"]) == 3
    hosts = run_ranks(train_normed_on_host, 3, task, True)
    assert [host["samples"] for host in hosts] == [[[12], [12], [2]], [[0]] * 3, [[0]] * 3]
    for host in hosts:
        assert_same_statistics(host["shared"], expected)


# --- dummy passes


def disturb_in_dummy_pass(rank: int, size: int, store: str) -> list[bool]:
    """Overwrite gradients and statistics in a dummy pass; return whether each is restored after it.

    A gradient that was not there before must be zero, as in one process."""
    with process_group_world(file_store(store, size), rank, size, CPU, "gloo", 60) as world:
        stepper, feed = build_product_stepper(InputNormed((SIZES,), tokens=3), world, HOST_OF_7)
        run_steps(stepper, feed, 1)
        model = stepper.strategy.model
        dense = [p for name, p in model.named_parameters() if ".bank." not in name]
        dense[-1].grad = None
        tensors = [p.grad for p in dense[:-1] if p.grad is not None] + list(statistics_of(model).values())
        expected = [tensor.clone() for tensor in tensors]
        with stepper.strategy.dummy_pass():
            for parameter in dense:
                parameter.grad = torch.full_like(parameter, torch.nan)
            for buffer in running_statistics(model):
                buffer.zero_()
        after = [p.grad for p in dense[:-1] if p.grad is not None] + list(statistics_of(model).values())
        same = [torch.equal(tensor, other) for tensor, other in zip(after, expected, strict=True)]
        newest = dense[-1].grad
        return [*same, newest is not None and not newest.any()]


def test_a_dummy_pass_leaves_no_gradients_and_no_statistics() -> None:
    """Zero times an infinite value of a dummy sample is NaN, and must not reach the other hosts."""
    for restored in run_ranks(disturb_in_dummy_pass, 3):
        assert len(restored) > 8
        assert all(restored)
