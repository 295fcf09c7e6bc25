"""Any number of hosts, in any placement, resumes from the snapshots of three hosts."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from harness.hosts.ranks import run_ranks
from harness.runs.steppers import make_stepper, mean_loss, run_steps
from harness.storage.snapshots import (
    CPU,
    PROGRESS,
    TASK,
    CountingSource,
    HostSnapshots,
    assert_same_contents,
    captured_contents,
    merge_all,
    merge_parts,
    seed_generators,
    state_of,
)
from orchestrator.checkpoint.files import Contents, HostPart
from orchestrator.checkpoint.progress import Progress
from orchestrator.config.settings import Config
from orchestrator.errors import UserError
from orchestrator.train.checkpoint.capture import capture
from orchestrator.train.checkpoint.pinned_buffers import PinnedBuffers
from orchestrator.train.checkpoint.restore import restore
from orchestrator.train.checkpoint.snapshot_source import fetch_contents
from orchestrator.train.checkpoint.state import TrainState
from orchestrator.train.device.precision import Precision
from orchestrator.train.group.stores import file_store
from orchestrator.train.group.world import process_group_world
from orchestrator.train.optim.named_optimizers import build_named_optimizer


def untrained_state() -> TrainState:
    """The state of a single process whose parameters are all zero."""
    model = TASK.build_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer = build_named_optimizer(model, Config().optim, fused=True)
    return TrainState(model, optimizer, Precision("fp32", CPU))


@pytest.mark.parametrize("kind", ["model", "optimizer"])
def test_a_checkpoint_without_an_expert_is_refused(
    three_hosts: tuple[HostSnapshots, Contents], kind: str
) -> None:
    """With the experts of one host alone a run would resume in silence."""
    _, contents = three_hosts
    tensors = {key: tensor for key, tensor in contents.tensors[kind].items() if ".bank.1." not in key}
    incomplete = replace(contents, tensors={**contents.tensors, kind: tensors})
    with pytest.raises(UserError, match=r"has no blocks\.0\.ffn\.bank\.1\.\w+; the model has that expert"):
        restore(incomplete, untrained_state())


def draw_numbers() -> tuple[float, float, list[float]]:
    return random.gauss(0, 1), random.random(), np.random.randn(2).tolist()


def test_a_host_draws_the_random_numbers_of_its_rank(
    three_hosts: tuple[HostSnapshots, Contents],
) -> None:
    python_state = random.getstate()
    numpy_state = np.random.get_state(legacy=True)
    try:
        restore(merge_all(three_hosts[0], 2), untrained_state())
        drawn = draw_numbers()
        seed_generators(2)
        assert drawn == draw_numbers()
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def test_one_process_resumes_from_three_hosts(
    three_hosts: tuple[HostSnapshots, Contents],
) -> None:
    snapshots, contents = three_hosts
    state = untrained_state()
    assert restore(fetch_contents(CountingSource(snapshots), 0, state.model), state) == PROGRESS
    captured = captured_contents(state, PROGRESS)
    same_random = replace(captured, state={**captured.state, "random": contents.state["random"]})
    assert_same_contents(same_random, contents)


def resume_on_host(
    rank: int, size: int, store: str, snapshots: HostSnapshots, host_of: Any
) -> tuple[HostPart, Progress]:
    with process_group_world(file_store(store, size), rank, size, CPU, "gloo", 60) as world:
        stepper, _ = make_stepper(TASK, 4, 12, learning_rate=1e-2, world=world, host_of=host_of)
        state = state_of(stepper)
        progress = restore(fetch_contents(CountingSource(snapshots), rank, state.model), state)
        return capture(state, progress, world, PinnedBuffers(CPU)).part, progress


@pytest.mark.parametrize(
    "host_of",
    [
        pytest.param(((1, 0, 0, 1, 0, 1, 0), (0, 0, 1, 0, 1, 1, 0)), id="two hosts"),
        pytest.param(
            ((2, 0, 0, 1, 2, 1, 0), (0, 1, 1, 2, 1, 2, 0)),
            id="three hosts, another placement",
        ),
        pytest.param(((3, 0, 0, 1, 0, 1, 2), (0, 3, 1, 0, 3, 1, 0)), id="four hosts"),
        pytest.param(((1,) * 7, (1,) * 7), id="all experts on the last host"),
    ],
)
def test_other_hosts_resume_from_three_hosts(
    three_hosts: tuple[HostSnapshots, Contents], host_of: Any
) -> None:
    snapshots, contents = three_hosts
    size = 1 + max(max(layer) for layer in host_of)
    results = run_ranks(resume_on_host, size, snapshots, host_of)
    assert_same_contents(merge_parts([part for part, _ in results]), contents)
    assert [progress for _, progress in results] == [PROGRESS] * size


def test_the_losses_after_a_resume_are_those_of_an_undisturbed_run(
    three_hosts: tuple[HostSnapshots, Contents],
) -> None:
    stepper, feed = make_stepper(TASK, 4, 12, learning_rate=1e-2)
    expected = [mean_loss(totals) for totals in run_steps(stepper, feed, 8)][4:]
    resumed, _ = make_stepper(TASK, 4, 12, learning_rate=1e-2)
    restore(merge_all(three_hosts[0]), state_of(resumed))
    batches = [batch for epoch in range(3) for batch in feed.steps(epoch)]
    losses = [mean_loss(resumed.run(batches[step], step)) for step in range(4, 8)]
    assert losses == pytest.approx(expected, rel=1e-10)
