"""Calibration files are written and read back; damaged ones are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.errors import UserError
from orchestrator.plan.cost.calibration import (
    VERSION,
    Calibration,
    Profile,
    parse_calibration,
    read_calibration,
    write_calibration,
)
from orchestrator.plan.cost.machine import Interconnect, Link
from tests.support.cost_machines import device

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
