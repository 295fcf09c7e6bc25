"""Tests that hostile run folders are shown as text, or refused in words: nothing is executed or
written elsewhere."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.storage.forged_files import edit_json, laughs, yaml_bomb
from orchestrator import read_run
from orchestrator.errors import UserError
from orchestrator.run.run_dir import remote_of
from orchestrator.run.run_settings import read_run_settings
from tests.security.scene import DEEP, MARKUP, Scene, Spoil, assert_harmless, call, hashes_outside, resume

LINKS = {
    "events.jsonl": lambda scene: scene.folder / "events.jsonl",
    "config.yaml": lambda scene: scene.folder / "config.yaml",
    "logs": lambda scene: scene.folder / "logs",
    "a checkpoint": lambda scene: scene.newest,
    "checkpoints": lambda scene: scene.folder / "checkpoints",
    "tensorboard": lambda scene: scene.folder / "tensorboard",
    "mlflow's database": lambda scene: new_folder(scene.folder / "mlflow") / "mlflow.db",
    "wandb's newest run": lambda scene: new_folder(scene.folder / "wandb") / "latest-run",
}


def new_folder(path: Path) -> Path:
    path.mkdir()
    return path


@pytest.mark.parametrize("name", LINKS)
def test_a_folder_with_links_to_the_outside_is_refused(scene: Scene, name: str) -> None:
    path = LINKS[name](scene)
    target = scene.outside.with_name("target")
    if path.exists():
        shutil.move(path, target)
    else:
        target.mkdir()
    path.symlink_to(target)
    before = hashes_outside(scene.outside.parent)
    code, output = resume(scene)
    assert code == 2, output
    assert "is a link to" in output
    assert hashes_outside(scene.outside.parent) == before
    path.unlink()
    if target.is_dir():
        shutil.rmtree(target)
    else:
        target.unlink()


def test_links_of_a_tracker_within_the_folder_are_allowed(scene: Scene) -> None:
    """Even if their target was removed."""
    new_folder(scene.folder / "wandb")
    (scene.folder / "wandb" / "latest-run").symlink_to("offline-run-1")
    code, output = resume(scene)
    assert code == 0, output


def test_links_in_place_of_reports_are_replaced_not_followed(scene: Scene) -> None:
    for name in ("report.html", "performance_summary.txt"):
        (scene.folder / name).unlink()
        (scene.folder / name).symlink_to(scene.outside)
    assert call("report", str(scene.folder))[0] == 0
    assert not (scene.folder / "report.html").is_symlink()


NO_FILES: dict[str, Callable[[Path], Any]] = {
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to itself": lambda path: path.symlink_to(path),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", NO_FILES)
@pytest.mark.parametrize("name", ["events.jsonl", "plan.json", "config.yaml", "summary.json"])
def test_a_path_that_is_no_file_is_not_read(scene: Scene, name: str, kind: str) -> None:
    """Reading a pipe or a device would never end."""
    (scene.folder / name).unlink()
    NO_FILES[kind](scene.folder / name)
    code, output = resume(scene)
    assert code == 2, output
    assert name in output
    code, output = call("report", str(scene.folder))
    assert code == (0 if kind == "a link to itself" and name != "events.jsonl" else 2), output


DEEPLY_NESTED = "[" * 150 + "]" * 150
"""A parser accepts it, but a recursive writer may not."""
TREES: dict[str, Callable[[Scene], str]] = {
    "nested past the stack": lambda _: DEEP,
    "deeply nested": lambda _: (
        f'{{"choices": {{"batch_size": {{"value": {DEEPLY_NESTED}}}}}, "status": {DEEPLY_NESTED}}}'
    ),
    "a tag": lambda scene: f"run: {yaml_bomb(scene.canary)}\n",
    "aliases of aliases": lambda _: laughs(),
    "markup": lambda _: json.dumps(
        {
            "run": {"name": MARKUP},
            "status": MARKUP,
            "validation": {MARKUP: MARKUP},
            "choices": {MARKUP: [MARKUP]},
        }
    ),
    "wrong types": lambda _: json.dumps(
        {"run": [], "status": {}, "validation": 7, "choices": "x", "hardware": 3, "seconds": "x"}
    ),
    "a list": lambda _: "[1, 2]",
    "no text": lambda _: "\udcff",
}


@pytest.mark.extended(but_first=1)
@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", TREES)
@pytest.mark.parametrize("name", ["config.yaml", "plan.json", "summary.json"])
def test_hostile_files_are_shown_or_refused(scene: Scene, name: str, kind: str) -> None:
    """The content is shown as it is, or refused in words. A resumed run takes its settings from
    config.yaml alone, and writes the other files anew."""
    (scene.folder / name).write_text(TREES[kind](scene), encoding="utf-8", errors="surrogateescape")
    code, output = call("report", str(scene.folder))
    assert code in (0, 2), output
    assert code == 0 or name in output
    assert_harmless(scene.folder / "report.html")
    code, output = resume(scene)
    if name == "config.yaml":
        assert code == 2, output
        assert "the settings of the run in" in output
        assert "cannot be read: " in output
    else:
        assert code == 0, output


def plan(change: Callable[[dict[str, Any]], Any]) -> Spoil:
    return lambda scene: edit_json(scene.folder / "plan.json", change)


PLANS: dict[str, Spoil] = {
    "choices of the wrong type": plan(lambda p: p.update(choices=3)),
    "an infinite batch": plan(lambda p: p["choices"]["batch_size"].update(value=float("inf"))),
    "a negative batch": plan(lambda p: p["choices"]["global_batch_size"].update(value=-4)),
    "a huge batch": plan(lambda p: p["choices"]["global_batch_size"].update(value=10**30)),
    "markup for a number": plan(lambda p: p["choices"]["batch_size"].update(value=MARKUP, reason=MARKUP)),
    "a negative speed": plan(lambda p: p.update(measured={"device_speeds": {"cpu": float("-inf")}})),
    "hosts that do not exist": plan(
        lambda p: p["measured"].update(placement=[[10**9, -1]], placement_asked="auto", placement_hosts=1)
    ),
    "hardware of the wrong type": plan(
        lambda p: p.update(hardware={"gpus": "x", "versions": 3, "ram": 10**400, "cores": {}})
    ),
    "nested past the stack": lambda scene: (scene.folder / "plan.json").write_text(DEEP),
}


@pytest.mark.extended(but_first=2)
@pytest.mark.parametrize("name", PLANS)
def test_a_hostile_plan_is_not_followed(scene: Scene, name: str) -> None:
    PLANS[name](scene)
    code, output = resume(scene)
    assert code == 0, output
    written = json.loads((scene.folder / "plan.json").read_text())
    assert written["choices"]["global_batch_size"]["value"] == 8


EVENTS: dict[str, list[Any]] = {
    "steps without a number": [
        {"event": "step", "time": 1},
        {"event": "step", "step": [1]},
        {"event": "load", "step": None},
    ],
    "steps with wrong types": [
        {"event": "step", "time": "x", "step": 5, "loss": "<b>", "seconds": [], "samples": {}, "metrics": 5}
    ],
    "huge figures": [
        {"event": "step", "time": 1e308, "step": 2**60, "loss": 1e308, "seconds": 1e308, "samples": 10**300}
    ],
    "evaluations": [
        {"event": "evaluate", "step": 5, "loss": MARKUP, "metrics": {MARKUP: MARKUP}},
        {"event": "evaluate", "step": 5},
    ],
    "epochs": [
        {"event": "epoch", "epoch": [], "memory": 7},
        {"event": "epoch", "epoch": 3, "memory": {"allocated": "x"}},
    ],
    "ends": [
        {"event": "end"},
        {"event": "end", "status": MARKUP, "reason": {"a": 1}, "memory": [], "seconds": "x"},
    ],
    "starts": [
        {"event": "start"},
        {
            "event": "start",
            "step": "x",
            "workers": MARKUP,
            "total_steps": 1e308,
            "device": [1],
            "task": MARKUP,
        },
    ],
    "recoveries": [
        {"event": "recovery", "step": "x", "workers": [1], "total_seconds": {}},
        {"event": "recovery", "lost_steps": 10**400},
    ],
    "devices": [
        {
            "event": "monitor",
            "step": 5,
            "host": [1],
            "devices": [{"name": MARKUP, "index": MARKUP, "memory_used": "x"}, 5],
        }
    ],
    "hosts": [
        {
            "event": "placement",
            "step": 0,
            "hosts": [{"rank": "x", "name": MARKUP, "node": MARKUP}],
            "layers": [{"host_of": ["x", -1]}],
        }
    ],
    "warnings": [
        {"event": "warning", "kind": MARKUP, "message": MARKUP},
        {"event": "notice"},
        {"event": "oom"},
        {"event": "resume", "skipped": "x"},
    ],
    "paths": [
        {"event": "checkpoint", "step": 5, "path": "../../x"},
        {"event": "resume", "step": 5, "path": "/etc/passwd"},
    ],
    "deeply nested": [
        f'{{"event": "{kind}", "step": 5, "message": {"[" * 400}{"]" * 400}}}'
        for kind in ("warning", "start", "load")
    ],
    "no JSON": [
        DEEP,
        "\x00\xff",
        "null",
        '{"event":5}',
        '{"event":"step","step":' + "9" * 5000 + "}",
        '{"event":"step","step":1e999}',
    ],
}


def append_events(scene: Scene, *names: str) -> None:
    lines = [line if isinstance(line, str) else json.dumps(line) for name in names for line in EVENTS[name]]
    with (scene.folder / "events.jsonl").open("a", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")


@pytest.mark.extended(but_first=3)
@pytest.mark.parametrize("name", EVENTS)
def test_a_hostile_event_log_can_be_shown_and_continued(scene: Scene, name: str) -> None:
    append_events(scene, name)
    code, output = call("report", str(scene.folder))
    assert code == 0, output
    assert_harmless(scene.folder / "report.html")
    code, output = resume(scene)
    assert code == 0, output
    assert "\x1b" not in output


def test_a_hostile_event_log_can_be_drawn(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    append_events(scene, *EVENTS)
    code, output = call("report", str(scene.folder))
    assert code == 0, output
    assert_harmless(scene.folder / "report.html")


@pytest.mark.extended(but_first=4)
@pytest.mark.parametrize("name", EVENTS)
def test_a_hostile_event_log_can_be_read_as_tables(scene: Scene, name: str) -> None:
    append_events(scene, name)
    steps = read_run(scene.folder)
    assert {1, 2, 3, 4} <= set(steps.index)
    for table in ("evaluations", "epochs", "phases", "exchanges", "checkpoints", "failures", "recoveries"):
        read_run(scene.folder, table)


@pytest.mark.extended(but_first=6)
@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", TREES)
@pytest.mark.parametrize("name", ["config.yaml", "plan.json", "summary.json"])
def test_tables_of_hostile_files_are_read_or_refused(scene: Scene, name: str, kind: str) -> None:
    (scene.folder / name).write_text(TREES[kind](scene), encoding="utf-8", errors="surrogateescape")
    is_shown = call("report", str(scene.folder))[0] == 0
    expected = contextlib.nullcontext() if is_shown else pytest.raises(UserError, match=name)
    with expected:
        assert len(read_run(scene.folder)) == 4


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", NO_FILES)
def test_tables_of_a_path_that_is_no_file_are_refused(scene: Scene, kind: str) -> None:
    (scene.folder / "events.jsonl").unlink()
    NO_FILES[kind](scene.folder / "events.jsonl")
    with pytest.raises(UserError, match=r"holds no events\.jsonl"):
        read_run(scene.folder)


ENDLESS: dict[str, Callable[[Path], Any]] = NO_FILES | {
    "nested past the stack": lambda path: path.write_text(DEEP),
    "a huge file": lambda path: truncated(path, 2**30),
    "a link to another file": lambda path: path.symlink_to(path.parents[2] / "outside.safetensors"),
}


def truncated(path: Path, num_bytes: int) -> None:
    """Write a file of zeros, which takes no place on the disk."""
    with path.open("wb") as file:
        file.truncate(num_bytes)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ENDLESS)
def test_hostile_generations_are_left_out_of_a_report(scene: Scene, kind: str) -> None:
    ENDLESS[kind](scene.folder / "checkpoints" / "step_00000004.validation.json")
    code, output = call("report", str(scene.folder))
    assert code == 0, output


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["a huge file", "a link to another file"])
@pytest.mark.parametrize("name", ["plan.json", "config.yaml", "summary.json"])
def test_files_that_no_run_writes_are_refused_unread(scene: Scene, name: str, kind: str) -> None:
    (scene.folder / name).unlink()
    ENDLESS[kind](scene.folder / name)
    code, output = call("report", str(scene.folder))
    assert code == 2, output
    assert f"{name} cannot be read: it is " in output


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["a pipe", "a device", "a link to another file"])
def test_settings_that_no_run_writes_are_refused_unread(scene: Scene, kind: str) -> None:
    """Exports and evaluations read them too."""
    (scene.folder / "config.yaml").unlink()
    ENDLESS[kind](scene.folder / "config.yaml")
    with pytest.raises(UserError, match=r"the settings of the run in .* cannot be read: it is "):
        read_run_settings(scene.folder)


@pytest.mark.timeout(60)
def test_pipes_are_neither_followed_nor_taken_for_an_address(scene: Scene) -> None:
    for name in ("events.jsonl", "remote"):
        (scene.folder / name).unlink(missing_ok=True)
        os.mkfifo(scene.folder / name)
    assert call("watch", "--once", str(scene.folder))[0] in (0, 2)
    assert remote_of(scene.folder) is None


def test_a_comparison_of_hostile_runs_sends_nothing_to_the_terminal(scene: Scene) -> None:
    other = scene.folder.with_name("other")
    shutil.copytree(scene.folder, other)
    settings = yaml.safe_load((other / "config.yaml").read_text())
    settings["run"]["name"] = MARKUP
    settings["optim"]["learning_rate"] = MARKUP
    settings[MARKUP] = {MARKUP: MARKUP}
    (other / "config.yaml").write_text(yaml.safe_dump(settings))
    append_events(scene, "evaluations", "ends", "warnings")
    edit_json(other / "plan.json", lambda plan: plan.update(hardware={"host": MARKUP, MARKUP: MARKUP}))
    edit_json(other / "summary.json", lambda summary: summary.update(status=MARKUP))
    with (other / "events.jsonl").open("a") as file:
        file.write(json.dumps({"event": "end", "status": f"[red]{MARKUP}", "time": 1}) + "\n")
    code, output = call("report", str(scene.folder), str(other), "--out", str(scene.folder.with_name("out")))
    assert code == 0, output
    assert "alert(1)" in output
    assert "[red]" in output
    assert not [character for character in output if not character.isprintable() and character != "\n"]


def test_names_in_messages_send_nothing_to_the_terminal(scene: Scene) -> None:
    other = scene.folder.with_name("other")
    shutil.copytree(scene.folder, other)
    lines = (other / "events.jsonl").read_text().splitlines()
    start = json.loads(lines[0]) | {"task": MARKUP}
    (other / "events.jsonl").write_text("\n".join([json.dumps(start), *lines[1:]]) + "\n")
    code, output = call("report", str(scene.folder), str(other))
    assert code == 2, output
    assert "alert(1)" in output
    assert "\x1b" not in output
    assert "\u202e" not in output
