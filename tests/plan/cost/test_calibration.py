"""Calibration files are written and read back; damaged ones are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from harness.fakes.cost_machines import device
from orchestrator.errors import UserError
from orchestrator.plan.cost.calibration import (
    VERSION,
    Calibration,
    Profile,
    parse_calibration,
    read_calibration,
    write_calibration,
)
from orchestrator.plan.cost.machine import NO_LINK, Interconnect, Link

LINKS = Interconnect(Link("shared memory", 1e-3, 1e9), Link("shared memory", 2e-3, 1e9))
ONE_WORKER = Profile(1, 2, device(asynchronous=False), yardstick_s=(1.0, 2.0))
TWO_WORKERS = Profile(2, 1, device(asynchronous=False, operation_s=1.0), LINKS)
CALIBRATION = Calibration(
    version=VERSION,
    made="2026-11-15",
    machine="a CPU, 2 cores",
    cores=2,
    seconds=30.0,
    others=0.01,
    profiles=(ONE_WORKER, TWO_WORKERS),
)


def test_a_written_calibration_is_read_back(tmp_path: Path):
    path = tmp_path / "results" / "calibration.json"
    write_calibration(CALIBRATION, path)
    assert read_calibration(path) == CALIBRATION


def test_the_nearest_profile_is_used():
    assert CALIBRATION.profile(1).threads == 2
    assert [CALIBRATION.profile(workers).workers for workers in (2, 3, 8)] == [2, 2, 2]
    machine, crowding = CALIBRATION.machine_for(3)
    assert (machine.devices, machine.inner, crowding) == (3, LINKS, 1.5)
    assert CALIBRATION.machine_for(1)[1] == 1.0


@pytest.mark.parametrize(
    ("workers", "nearest"), [(1, 1), (2, 4), (3, 4), (4, 4), (5, 4), (7, 8), (8, 8), (100, 8)]
)
def test_one_worker_and_several_are_never_mixed(workers: int, nearest: int):
    """A profile of one worker is nearer to two, but nothing was shared while it was measured."""
    profiles = tuple(replace(TWO_WORKERS, workers=number) for number in (8, 1, 4))
    assert replace(CALIBRATION, profiles=profiles).profile(workers).workers == nearest


def test_two_workers_are_several():
    profiles = tuple(replace(TWO_WORKERS, workers=number) for number in (4, 1, 2))
    assert replace(CALIBRATION, profiles=profiles).profile(2).workers == 2
    assert replace(CALIBRATION, profiles=profiles[:2]).profile(2).workers == 4


def test_the_only_kind_of_profile_is_used_for_all():
    assert replace(CALIBRATION, profiles=(ONE_WORKER,)).profile(4) == ONE_WORKER
    assert replace(CALIBRATION, profiles=(TWO_WORKERS,)).profile(1) == TWO_WORKERS


@pytest.mark.parametrize(
    ("workers", "threads", "cores", "crowding"),
    [(3, 1, 2, 1.5), (2, 4, 2, 4.0), (2, 1, 8, 1.0), (2, 3, 0, 6.0)],
)
def test_workers_crowd_each_other_if_they_have_more_threads_than_cores(
    workers: int, threads: int, cores: int, crowding: float
):
    on_cpu = replace(TWO_WORKERS, threads=threads)
    on_gpu = replace(on_cpu, device=device(asynchronous=True))
    assert replace(CALIBRATION, cores=cores, profiles=(on_cpu,)).machine_for(workers)[1] == crowding
    assert replace(CALIBRATION, cores=cores, profiles=(on_gpu,)).machine_for(workers)[1] == 1.0


def test_a_machine_has_one_node_with_the_links_of_its_profile():
    machine, _ = CALIBRATION.machine_for(5)
    assert (machine.nodes, machine.per_node) == (1, 5)
    assert (machine.inner, machine.outer, machine.device) == (LINKS, LINKS, TWO_WORKERS.device)
    alone, _ = CALIBRATION.machine_for(1)
    assert (alone.nodes, alone.per_node, alone.inner) == (1, 1, Interconnect(NO_LINK, NO_LINK))


def test_a_file_that_is_no_text_is_refused_with_the_reason(tmp_path: Path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="cannot be read: it is not text"):
        read_calibration(tmp_path / "binary")
    with pytest.raises(UserError, match="cannot be read: No such file or directory"):
        read_calibration(tmp_path / "none.json")


def test_a_file_is_written_into_a_new_folder_or_one_that_exists(tmp_path: Path):
    for path in (tmp_path / "a" / "b" / "first.json", tmp_path / "a" / "b" / "second.json"):
        write_calibration(CALIBRATION, path)
        assert path.is_file()
    with pytest.raises(UserError, match="choose another file with --calibration FILE"):
        write_calibration(CALIBRATION, tmp_path)


def test_a_missing_file_is_refused_with_the_command(tmp_path: Path):
    with pytest.raises(UserError, match="bench --calibrate"):
        read_calibration(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[:200], "damaged"),
        (lambda _: "[]", "version None"),
        (lambda text: text.replace('"version": 2', '"version": 1'), "version 1"),
        (lambda text: text.replace('"cores": 2', '"cores": "two"'), "damaged at cores"),
        (lambda text: text.replace('"profiles"', '"profile"'), "damaged at profiles"),
        (lambda text: text.replace('"name": "a device"', '"name": 3'), r"profiles.0.device.name"),
        (lambda text: text.replace('"sizes": [1.0, ', '"sizes": [-1.0, ', 1), "above 0"),
    ],
)
def test_a_damaged_file_is_refused_with_the_location(
    change: Callable[[str], str], message: str, tmp_path: Path
):
    path = tmp_path / "calibration.json"
    write_calibration(CALIBRATION, path)
    text = json.dumps(json.loads(path.read_text()))
    with pytest.raises(UserError, match=message):
        parse_calibration(change(text), "it")
