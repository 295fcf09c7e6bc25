"""Tests that hostile ledgers of sweeps are shown as text, or refused in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.fakes.fake_sweep import EVIL, FakeSweep, write_sweep
from orchestrator import read_sweep
from orchestrator.config.sweep.space_parser import parse_space
from orchestrator.config.sweep.sweep import Sweep
from orchestrator.errors import UserError
from orchestrator.redaction import MASK
from tests.security.scene import DEEP, Scene, assert_harmless, call
from tests.security.test_hostile_run_folders import NO_FILES


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", NO_FILES)
def test_a_ledger_that_is_no_file_is_not_read(scene: Scene, kind: str) -> None:
    folder = write_sweep(Path("swept"), FakeSweep())
    (folder / "sweep.jsonl").unlink()
    NO_FILES[kind](folder / "sweep.jsonl")
    for argv in (("train", "--tuned"), ("sweep", "--resume"), ("report",)):
        code, output = call(*argv, str(folder))
        assert code == 2, output
    with pytest.raises(UserError, match="holds no sweep"):
        read_sweep(folder)


@pytest.mark.parametrize("setting", ["run_dir", "name", "resume", "ray_address"])
@pytest.mark.parametrize("verb", ["tuned", "resumed"])
def test_a_ledger_chooses_neither_folder_nor_cluster(scene: Scene, setting: str, verb: str) -> None:
    values = {
        "run_dir": str(scene.outside.with_name("evil")),
        "name": "x",
        "resume": "auto",
        "ray_address": "127.0.0.1:1",
    }
    folder = write_sweep(Path("swept"), FakeSweep(settings={setting: values[setting]}))
    argv = ("train", "--tuned", str(folder)) if verb == "tuned" else ("sweep", "--resume", str(folder))
    code, output = call(*argv)
    assert code == 2, output
    assert f"sets {setting}" in output
    with pytest.raises(UserError, match=f"sets {setting}"):
        read_sweep(folder)


def header(**changes: Any) -> dict[str, Any]:
    header = {"task": "synthetic", "kind": "cpu", "settings": {}}
    return header | Sweep(parse_space(["batch-size=4,8"])).header() | changes


def domains(**given: Any) -> dict[str, Any]:
    return header(domains=given, search="random", trials=3)


def learning_rates(**changes: Any) -> dict[str, Any]:
    return domains(learning_rate={"low": 1e-4, "high": 1e-2, "log": True, "integer": False} | changes)


LEDGERS: dict[str, dict[str, Any]] = {
    "a reversed range": learning_rates(low=1.0),
    "an infinite range": learning_rates(high=float("inf")),
    "a negative range": learning_rates(low=-1.0),
    "a range of words": learning_rates(low="a", high="b"),
    "a range of lists": learning_rates(low=[1], high=[2]),
    "a range with an unknown field": learning_rates(__class__="x"),
    "an infinite range of integers": domains(
        batch_size={"low": 1, "high": float("inf"), "log": False, "integer": True}
    ),
    "a range of words as numbers": domains(precision={"low": 1, "high": 2, "log": False, "integer": True}),
    "no values": domains(batch_size=[]),
    "values of the wrong type": domains(batch_size=7),
    "unknown values": domains(batch_size=["x"]),
    "domains of the wrong type": header(domains=[1, 2]),
    "points of the wrong type": header(points=[1, 2]),
    "points that are no list": header(points=7),
    "a huge number of trials": learning_rates() | {"trials": 10**12},
    "trials of the wrong type": learning_rates() | {"trials": "x"},
    "a fraction of a trial": learning_rates() | {"trials": 2.5},
    "an unknown search": learning_rates() | {"search": "x"},
    "an unknown objective": header(objective="x"),
    "infinite seconds": header(trial_seconds=float("inf")),
    "seconds of the wrong type": header(trial_seconds=[]),
    "negative steps": header(objective="validation_loss", trial_steps=-5),
    "settings of the wrong type": header(settings={"epochs": "x"}),
    "settings out of range": header(settings={"epochs": -1}),
    "a mask for a setting": header(settings={"data_dir": f"/data/{MASK}"}),
    "masks for values": header(domains={"data_dir": [f"/data/{MASK}", "/data"]}),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", LEDGERS)
def test_a_hostile_ledger_is_not_continued(scene: Scene, name: str) -> None:
    Path("swept").mkdir()
    line = json.dumps({"event": "sweep", "time": 1.0, **LEDGERS[name]})
    (Path("swept") / "sweep.jsonl").write_text(line + "\n")
    code, output = call("sweep", "--resume", "swept", "--ray-address", "local")
    assert code == 2, output


@pytest.mark.parametrize(
    "settings", [{"__class__": "x"}, {"../x": 1}, {EVIL: 1}], ids=["dunder", "path", "markup"]
)
def test_unknown_settings_in_a_ledger_are_refused(scene: Scene, settings: dict[str, Any]) -> None:
    folder = write_sweep(Path("swept"), FakeSweep(gpu=False, settings=settings))
    code, output = call("train", "--tuned", str(folder), "--gpu-mode", "cpu")
    assert code == 2, output
    assert "setting" in output


@pytest.mark.extended
def test_a_hostile_ledger_can_be_shown_and_read(scene: Scene) -> None:
    folder = write_sweep(
        Path("swept"),
        FakeSweep(failing=(2, 3), reason=EVIL, device_name=EVIL, task=EVIL, settings={EVIL: EVIL}),
    )
    lines = [
        {
            "event": "trial",
            "trial": 10**18,
            "point": {EVIL: EVIL, "../x": {"a": [1]}},
            "status": "completed",
            "samples_per_second": 1e308,
        },
        {
            "event": "trial",
            "trial": -5,
            "point": {},
            "status": "completed",
            "samples_per_second": -1.0,
            "phases": {EVIL: EVIL},
        },
        {
            "event": "trial",
            "trial": 7,
            "point": {"workers": "x"},
            "status": "completed",
            "samples_per_second": 5,
            "workers": 10**30,
        },
        {"event": "trial", "trial": {}, "point": 5, "status": EVIL},
        {"event": "trial", "trial": True, "point": {}, "status": "completed"},
        {"event": "trial", "trial": 10**400, "point": {}, "status": "completed"},
        {
            "event": "trial",
            "trial": 11,
            "point": {"workers": 1},
            "status": "completed",
            "validation_loss": 10**400,
            "workers": 10**400,
        },
        {
            "event": "trial",
            "trial": 8,
            "point": {"batch_size": json.loads("[" * 500 + "]" * 500)},
            "status": "completed",
        },
    ]
    with (folder / "sweep.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
        file.write(f'{{"event": "trial", "trial": 9, "point": {DEEP}, "status": "completed"}}\n')
    code, output = call("report", str(folder))
    assert code == 0, output
    assert_harmless(folder / "report.html")
    trials = read_sweep(folder)
    assert set(trials.index) == set(range(1, 37)), "lines that are no trials are left out"
    assert trials.loc[8, "batch_size"] == 64, "a deeply nested line does not replace a trial"
