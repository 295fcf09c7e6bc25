"""Calibrations are kept and read back; damaged ones are told."""

from __future__ import annotations

import json
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
from orchestrator.plan.cost.model import Interconnect, Link
from tests.plan.cost.test_model import device

LINKS = Interconnect(Link("shared memory", 1e-3, 1e9), Link("shared memory", 2e-3, 1e9))
FOUND = Calibration(
    VERSION, "2026-11-15", "a CPU, 2 cores", 2, 30.0, 0.01,
    (Profile(1, 2, device(asynchronous=False), yardstick_s=(1.0, 2.0)), Profile(2, 1, device(asynchronous=False, operation_s=1.0), LINKS)),
)  # fmt: skip


def test_kept_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "results" / "calibration.json"
    write_calibration(FOUND, path)
    assert read_calibration(path) == FOUND


def test_the_profile_of_as_many_workers() -> None:
    assert FOUND.profile(1).threads == 2
    assert [FOUND.profile(workers).workers for workers in (2, 3, 8)] == [2, 2, 2]
    machine, crowding = FOUND.machine_for(3)
    assert (machine.devices, machine.inner, crowding) == (3, LINKS, 1.5)
    assert FOUND.machine_for(1)[1] == 1.0


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="bench --calibrate"):
        read_calibration(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("change", "said"),
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
def test_a_damaged_one_is_told_with_the_place(change, said: str, tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    write_calibration(FOUND, path)
    text = json.dumps(json.loads(path.read_text()))
    with pytest.raises(UserError, match=said):
        parse_calibration(change(text), "it")
