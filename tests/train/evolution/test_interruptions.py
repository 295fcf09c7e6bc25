"""Random sequences of births, merges, prunes, moves, copies, checkpoints, resumptions on one to four hosts,
and losses of hosts, in fp64, against one process that is never interrupted."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from harness.faults.interrupted import (
    Interruption,
    Segment,
    SegmentResult,
    plan_segments,
    run_interrupted,
)
from harness.moe.evolving import random_script, train_evolving
from harness.runs.host_runs import merge_hosts
from harness.runs.tiny_model import Tiny
from orchestrator.train.group.world import World

STEPS = 8
SAMPLES = 26  # two whole batches and a short one

interruptions = st.dictionaries(
    st.integers(1, STEPS - 1),
    st.sampled_from(["save", "resume", "lost in the step", "lost in the change"]),
    min_size=1,
    max_size=4,
)
hosts_of_segments = st.lists(st.integers(1, 4), min_size=1, max_size=4)
seeds = st.integers(0, 2**32 - 1)


def make_case(seed: int) -> tuple[Tiny, Any]:
    """Return a task, and a script of changes for up to four hosts."""
    draw = random.Random(f"interruptions/{seed}")
    sizes = tuple(tuple(draw.choice([4, 4, 6]) for _ in range(draw.randint(3, 6))) for _ in range(2))
    task = Tiny(sizes, draw.choice([1, 2, 2, 6]), samples=SAMPLES)
    host_of = tuple(tuple(draw.randrange(4) for _ in layer) for layer in sizes)
    return task, random_script(draw, task, host_of, 4, STEPS)


def assert_equal_to_one_process(
    seed: int, interruptions: dict[int, Interruption], hosts: Sequence[int]
) -> None:
    task, script = make_case(seed)
    expected = train_evolving(task, script, World.single_process(), None, STEPS)
    segments = plan_segments(interruptions, hosts, STEPS)
    results = run_interrupted(task, script, segments, random.Random(seed))
    for segment, of_hosts in zip(segments, results, strict=True):
        assert_steps_equal(segment, of_hosts, expected)
    assert_each_sample_once(task, results)
    for name in ("weights", "moments"):
        merged = merge_hosts([getattr(host, name) for host in results[-1]])
        assert merged.keys() == expected[name].keys()
        for key, tensor in expected[name].items():
            torch.testing.assert_close(merged[key], tensor, rtol=1e-9, atol=1e-11, msg=key)


def assert_steps_equal(segment: Segment, hosts: Sequence[SegmentResult], expected: dict[str, Any]) -> None:
    """No step is lost, and each is the step of the run that was never interrupted."""
    end = segment.last - 1 if segment.lost == "step" else segment.last
    for host in hosts:
        assert list(host.steps) == list(range(segment.first + 1, end + 1))
        for step, record in host.steps.items():
            assert record.loss == pytest.approx(expected["loss"][step - 1], rel=1e-9)
            assert record.norm == pytest.approx(expected["norm"][step - 1], rel=1e-9)
            assert record.use == expected["use"][step - 1]


def assert_each_sample_once(task: Tiny, results: Sequence[Sequence[SegmentResult]]) -> None:
    """Of each step the last repetition counts. A whole epoch has each sample once."""
    seen: dict[int, tuple[int, list[float]]] = {}
    for hosts in results:
        for step, record in hosts[0].steps.items():
            seen[step] = record.epoch, [sample for host in hosts for sample in host.steps[step].samples]
    assert list(seen) == list(range(1, STEPS + 1))
    of_epoch: dict[int, list[float]] = {}
    for epoch, samples in seen.values():
        of_epoch.setdefault(epoch, []).extend(samples)
    all_samples = sorted(task.train_data().tensors[0][:, 0].tolist())
    for epoch, samples in of_epoch.items():
        assert len(set(samples)) == len(samples), "a sample was seen twice"
        if epoch < max(of_epoch):
            assert sorted(samples) == all_samples


@pytest.mark.extended
@settings(max_examples=4, derandomize=True, phases=(Phase.explicit, Phase.generate))
@given(seeds, interruptions, hosts_of_segments)
@example(1, {2: "save", 5: "lost in the change", 7: "resume"}, [4, 3, 2])
@example(2, {2: "resume", 4: "save", 6: "lost in the step"}, [1, 3, 4])
def test_an_interrupted_run_equals_one_process(
    seed: int, interruptions: dict[int, Interruption], hosts: list[int]
) -> None:
    assert_equal_to_one_process(seed, interruptions, hosts)


@pytest.mark.slow
@settings(max_examples=60)
@given(seeds, interruptions, hosts_of_segments)
def test_many_interrupted_runs_equal_one_process(
    seed: int, interruptions: dict[int, Interruption], hosts: list[int]
) -> None:
    assert_equal_to_one_process(seed, interruptions, hosts)
