"""Tests of batch shares by device speed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harness.fakes.inventories import machine, model
from harness.hosts.ranks import run_ranks
from orchestrator.config.settings import Config
from orchestrator.plan.planning import plan
from orchestrator.train.group.stores import file_store
from orchestrator.train.group.world import World, process_group_world
from orchestrator.train.strategies import shares
from orchestrator.train.strategies.shares import (
    MeasuredDevice,
    assign_shares,
    measure_devices,
    measure_speed,
    shares_from_speeds,
)


def test_shares_follow_speeds_unless_they_differ_by_noise_only() -> None:
    assert shares_from_speeds([1.0, 0.97]) == [1.0, 1.0]
    assert shares_from_speeds([400.0, 100.0, 396.0]) == [1.0, 0.25, 0.99]
    assert shares_from_speeds([100.0, 95.0]) == [1.0, 1.0]
    assert shares_from_speeds([100.0, 94.0, 0.1]) == [1.0, 0.94, 0.01]


def measure_on_rank(
    rank: int, size: int, store: str, names: list[str], speeds: list[float], known: dict[str, Any]
) -> list[MeasuredDevice]:
    """Measure the devices of ranks that have the given names and would measure the given speeds."""
    config = Config.of(parallel_strategy="data_parallel", workers=size)
    chosen = plan(config, machine(), model())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shares, "device_name", lambda _: names[rank])
        patch.setattr(shares, "measure_speed", lambda *_: speeds[rank])
        with process_group_world(
            file_store(store, size), rank, size, torch.device("cpu"), "gloo", 60
        ) as world:
            return measure_devices(chosen, world, known)


def test_devices_of_one_name_have_the_mean_of_their_speeds_on_every_rank() -> None:
    expected = [MeasuredDevice("a", 200.0), MeasuredDevice("a", 200.0)]
    assert run_ranks(measure_on_rank, 2, ["a", "a"], [100.0, 300.0], {}) == [expected, expected]


def test_devices_of_another_name_do_not_enter_the_mean() -> None:
    expected = [MeasuredDevice("a", 200.0), MeasuredDevice("b", 50.0), MeasuredDevice("a", 200.0)]
    assert run_ranks(measure_on_rank, 3, ["a", "b", "a"], [100.0, 50.0, 300.0], {}) == [expected] * 3


def test_speeds_that_are_known_are_not_measured_again() -> None:
    """A resumed run keeps its shares, though a new measurement would give other speeds."""
    expected = [MeasuredDevice("a", 7.0), MeasuredDevice("b", 50.0)]
    known = {"device_speeds": {"a": 7.0}}
    assert run_ranks(measure_on_rank, 2, ["a", "b"], [100.0, 50.0], known) == [expected] * 2


def test_the_speed_is_the_arithmetic_of_whole_products_over_their_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The clock shows the start, two checks that allow a product each, one past 0.2 s, and the end."""
    clock = iter([0.0, 0.1, 0.19, 0.2, 0.5])
    monkeypatch.setattr(shares, "perf_counter", lambda: next(clock))
    speed = measure_speed(torch.device("cpu"), plan(Config(), machine(), model()))
    assert speed == pytest.approx(2 * 384**3 * 2 / 0.5)


def assign_on_rank(
    rank: int, size: int, store: str, names: list[str], settings: dict[str, Any]
) -> tuple[tuple[float, ...], dict[str, float]]:
    """Assign shares to ranks of the given names; a rank measures a speed of 100, and the last one 25."""
    config = Config.of(workers=size, **settings)
    chosen = plan(config, machine(), model())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shares, "device_name", lambda _: names[rank])
        patch.setattr(shares, "measure_speed", lambda *_: 25.0 if rank == size - 1 else 100.0)
        joined = process_group_world(file_store(store, size), rank, size, torch.device("cpu"), "gloo", 60)
        with joined as world:
            assigned, speeds = assign_shares(config, chosen, world, {})
    return assigned.shares, speeds


@pytest.mark.extended(but_first=2)
@pytest.mark.parametrize(
    ("names", "settings", "expected"),
    [
        (["a", "a", "b"], {}, ((1.0, 1.0, 0.25), {"a": 100.0, "b": 25.0})),
        (["a", "a", "a"], {}, ((), {})),
        (["a", "a", "a"], {"share_by_speed": "on"}, ((), {"a": 75.0})),
        (["a", "a", "b"], {"share_by_speed": "off"}, ((), {})),
        (["a", "a", "b"], {"deterministic": True}, ((), {})),
    ],
)
def test_shares_are_assigned_where_devices_differ(
    names: list[str], settings: dict[str, Any], expected: tuple[tuple[float, ...], dict[str, float]]
) -> None:
    assert run_ranks(assign_on_rank, 3, names, settings) == [expected] * 3


def test_one_process_has_no_shares() -> None:
    world = World.single_process()
    config = Config.of(share_by_speed="on")
    assert assign_shares(config, plan(config, machine(), model()), world, {}) == (world, {})
