"""Checkpoints and snapshots of adapters, without the frozen weights of their model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.hosts.ranks import run_ranks
from harness.lm.family_runs import CPU, GLOBAL_BATCH, placement
from harness.lm.lora_runs import LoraTask, PackedOptions
from harness.runs.host_runs import by_expert, step_batches
from harness.runs.steppers import make_stepper, mean_loss
from harness.storage.snapshots import CopyingSink, HostSnapshot, merge_all
from orchestrator.checkpoint.files import Contents
from orchestrator.checkpoint.progress import Progress
from orchestrator.errors import UserError
from orchestrator.train.checkpoint.capture import capture
from orchestrator.train.checkpoint.pinned_buffers import PinnedBuffers
from orchestrator.train.checkpoint.restore import restore, restore_model
from orchestrator.train.checkpoint.snapshots import Snapshots, SnapshotTarget
from orchestrator.train.checkpoint.state import TrainState
from orchestrator.train.device.precision import Precision
from orchestrator.train.group.stores import file_store
from orchestrator.train.group.world import World, process_group_world
from orchestrator.train.stepper import Stepper

NAME = "GPT-OSS"
BASE = "fingerprint"


class BaseTask(LoraTask):
    """Adapters on a model whose weights are those of a file."""

    def build_model(self) -> nn.Module:
        model: Any = super().build_model()
        model.frozen_base = BASE
        return model


def make(world: World | None = None) -> tuple[TrainState, Stepper, Iterator[Any]]:
    world = world or World.single_process()
    host_of = placement(NAME, world.size)
    stepper, feed = make_stepper(BaseTask(NAME), 2, GLOBAL_BATCH, 1e-3, world=world, host_of=host_of)
    state = TrainState(stepper.strategy.model, stepper.optimizer.inner, Precision("fp32", CPU))
    return state, stepper, iter(step_batches(feed, 4))


def captured(state: TrainState, world: World | None = None) -> Contents:
    part = capture(state, Progress(), world or World.single_process(), PinnedBuffers(CPU, 1)).part
    assert part.state is not None
    return Contents(part.tensors, part.state)


def test_only_trained_weights_and_buffers_are_saved() -> None:
    state, stepper, batches = make()
    stepper.run(next(batches), 0)
    contents = captured(state)
    trained = {name for name, p in state.model.named_parameters() if p.requires_grad}
    saved = contents.tensors["model"]
    assert all("lora_" in name for name in saved if name not in dict(state.model.named_buffers()))
    assert trained - {name for name in trained if "bank" in name} <= saved.keys()
    assert "model.layers.0.mlp.experts.hosted.bank.3.up_lora_a" in saved
    assert contents.state["frozen_base"] == BASE


def test_a_run_continues_from_adapters_alone() -> None:
    state, stepper, batches = make()
    stepper.run(next(batches), 0)
    contents = captured(state)
    expected = [mean_loss(stepper.run(batch, step)) for step, batch in enumerate(batches, 1)]
    again, stepper, batches = make()
    with torch.no_grad():
        for parameter in again.model.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    restore(contents, again)
    next(batches)
    assert [mean_loss(stepper.run(batch, step)) for step, batch in enumerate(batches, 1)] == expected


def snapshot_of_a_step(rank: int, size: int, store: str) -> tuple[HostSnapshot, dict[str, Tensor]]:
    """Return a host's snapshot after a step, and its trained weights."""
    with process_group_world(file_store(store, size), rank, size, CPU, "gloo", 60) as world:
        state, stepper, batches = make(world)
        stepper.run(next(batches), 0)
        sink = CopyingSink()
        Snapshots(state, world, SnapshotTarget(sink, PinnedBuffers(CPU), 0)).take(Progress(step=1))
        return sink.snapshots[-1], trained_weights(state.model)


def trained_weights(model: nn.Module) -> dict[str, Tensor]:
    return by_expert(model, {name: p for name, p in model.named_parameters() if p.requires_grad})


@pytest.mark.extended
def test_one_process_continues_from_the_snapshots_of_three_hosts() -> None:
    hosts = run_ranks(snapshot_of_a_step, 3)
    contents = merge_all([snapshot for snapshot, _ in hosts])
    assert not [name for name in contents.tensors["model"] if name.endswith((".up", ".down", "_bias"))]
    state, _, _ = make()
    restore(contents, state)
    expected = {name: tensor for _, weights in hosts for name, tensor in weights.items()}
    restored = trained_weights(state.model)
    assert restored.keys() == expected.keys()
    assert all(torch.equal(restored[name], tensor) for name, tensor in expected.items())


class PackedTask(LoraTask):
    """Adapters beside packed weights that no file has, as with --from-scratch."""

    def __init__(self, name: str) -> None:
        super().__init__(name, options=PackedOptions(rank=3, alpha=5.0))


def packed_state(world: World) -> tuple[TrainState, Stepper, Iterator[Any]]:
    host_of = placement(NAME, world.size)
    stepper, feed = make_stepper(PackedTask(NAME), 2, GLOBAL_BATCH, 1e-3, world=world, host_of=host_of)
    state = TrainState(stepper.strategy.model, stepper.optimizer.inner, Precision("fp32", CPU))
    return state, stepper, iter(step_batches(feed, 4))


def packed_snapshot(rank: int, size: int, store: str) -> HostSnapshot:
    with process_group_world(file_store(store, size), rank, size, CPU, "gloo", 60) as world:
        state, stepper, batches = packed_state(world)
        stepper.run(next(batches), 0)
        sink = CopyingSink()
        Snapshots(state, world, SnapshotTarget(sink, PinnedBuffers(CPU), 0)).take(Progress(step=1))
        return sink.snapshots[-1]


@pytest.mark.extended
def test_packed_weights_that_no_file_has_are_in_snapshots_and_restored_to_the_byte() -> None:
    contents = merge_all(run_ranks(packed_snapshot, 3))
    model = PackedTask(NAME).build_model()
    expected = by_expert(model, dict(model.named_parameters()))
    packed = {name: tensor for name, tensor in expected.items() if tensor.dtype == torch.uint8}
    assert len(packed) > 16
    state, stepper, batches = packed_state(World.single_process())
    with torch.no_grad():
        for parameter in state.model.parameters():
            parameter.zero_()
    restore(contents, state)
    restored = by_expert(state.model, dict(state.model.named_parameters()))
    assert all(torch.equal(restored[name], tensor) for name, tensor in packed.items())
    _, undisturbed, all_batches = packed_state(World.single_process())
    expected_losses = [mean_loss(undisturbed.run(batch, step)) for step, batch in enumerate(all_batches)]
    next(batches)
    losses = [mean_loss(stepper.run(batch, step)) for step, batch in enumerate(batches, 1)]
    assert losses == pytest.approx(expected_losses[1:], rel=1e-6)


def test_adapters_of_another_model_are_refused() -> None:
    state, _, _ = make()
    contents = captured(state)
    model: Any = BaseTask(NAME).build_model()
    model.frozen_base = "another"
    with pytest.raises(UserError, match="adapters of another model"):
        restore_model(contents, model)


def test_adapters_alone_are_refused_without_their_model() -> None:
    state, _, _ = make()
    with pytest.raises(UserError, match=r"adapters alone.*give --model and --lora"):
        restore_model(captured(state), LoraTask(NAME).build_model())
