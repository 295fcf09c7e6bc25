"""Timed steps: warm-up, synchronisation, blocks, median and spread."""

from __future__ import annotations

from time import sleep

import pytest
import torch

from orchestrator.config.settings import Config
from orchestrator.measure.timed_steps import (
    Summary,
    block_seconds,
    build_step_runner,
    phase_seconds,
    step_seconds,
    submit_seconds,
)
from orchestrator.tasks.digits import Digits
from orchestrator.train.group.world import World
from orchestrator.trainer import Trainer

GPU = torch.device("cuda", 0)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls of steps and synchronisations, with a fake GPU."""
    recorded: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: recorded.append("sync"))
    return recorded


def test_the_spread_is_half_the_interquartile_range() -> None:
    assert Summary.of([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]) == Summary(median=4.0, spread=2.0)
    assert Summary.of([3.0]) == Summary(median=3.0, spread=0.0)


def test_each_step_is_submitted_to_an_idle_device(calls: list[str]) -> None:
    seconds = submit_seconds(lambda step: calls.append(f"step {step}"), 2, 1, GPU)
    assert len(seconds) == 2
    assert calls == ["sync", "step 0", "sync", "step 1", "sync", "step 2", "sync"]


def test_steps_of_a_gpu_are_timed_in_blocks_after_a_warm_up(calls: list[str]) -> None:
    seconds = step_seconds(lambda step: calls.append(str(step)), steps=8, warm_up=2, device=GPU)
    assert len(seconds) == 2
    assert calls == ["0", "1", "sync", "2", "3", "4", "5", "sync", "6", "7", "8", "9", "sync"]


def test_steps_of_a_cpu_are_timed_one_by_one() -> None:
    seconds = step_seconds(lambda step: sleep(0.02 if step == 3 else 0.0), steps=3, warm_up=2)
    assert len(seconds) == 3
    assert seconds[1] >= 0.02
    assert max(seconds[0], seconds[2]) < 0.02


def test_a_block_takes_the_time_of_its_steps() -> None:
    assert block_seconds(lambda _: sleep(0.01), range(3), None) >= 0.03


def test_the_phases_of_a_step_sum_to_its_total() -> None:
    config = Config.of(width=8, expert_hidden_size=(8,), experts=2, layers=1, batch_size=16, gpu_mode="cpu")
    world = World.single_process()
    runner = build_step_runner(config, Trainer(config=config).prepare().plan, Digits(config), world, 16)
    times, loss = phase_seconds(runner, 5, world.device)
    assert set(times) == {"data", "forward", "backward", "optimizer", "total"}
    assert {len(seconds) for seconds in times.values()} == {5}
    for step in range(5):
        phases = sum(seconds[step] for phase, seconds in times.items() if phase != "total")
        # A busy machine may stop the process between two phases, but no phase counts twice.
        assert 0 < phases <= times["total"][step] * (1 + 1e-9)
    assert loss > 0
