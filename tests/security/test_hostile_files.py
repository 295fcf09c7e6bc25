"""Files made by an enemy, given to the command line: each is refused in words, or passed over and told; none is executed, and nothing
is written but in the folder at hand."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator.cli.main import main
from orchestrator.config.space_parser import parse_space
from orchestrator.config.sweep import Sweep
from orchestrator.redaction import MASK
from tests.support.audit_writes import changes
from tests.support.fake_sweep import EVIL, FakeSweep, write_sweep
from tests.support.forged_files import (
    edit_json,
    edit_tensors,
    laughs,
    pickled,
    reseal,
    tensors_file,
    yaml_bomb,
)

SMALL = (
    "--task",
    "synthetic",
    "--width",
    "8",
    "--context-length",
    "8",
    "--layers",
    "1",
    "--experts",
    "2",
    "--samples",
    "32",
)
RUN = (
    *SMALL,
    "--gpu-mode",
    "cpu",
    "--trackers",
    "--no-monitor-gpu",
    "--batch-size",
    "8",
    "--epochs",
    "50",
    "--checkpoint-every",
    "2",
)
DEEP = "[" * 100_000 + "]" * 100_000
MARK = "<script>alert(1)</script>\x1b[2J\u202e"


@dataclass(frozen=True)
class Scene:
    """A run folder to be spoilt, a file outside that must stay as it is, and a canary that must never be there."""

    folder: Path
    outside: Path
    canary: Path

    @property
    def newest(self) -> Path:
        return self.folder / "checkpoints" / "step_00000004"


Spoil = Callable[[Scene], Any]


def call(*argv: str) -> tuple[int, str]:
    """``orchestrator …`` in this process. A traceback fails the test."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            code = main(argv)
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
    return code, said.getvalue()


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good") / "run"
    assert call("train", *RUN, "--run-dir", str(folder), "--max-steps", "4")[0] == 0
    return folder


@pytest.fixture
def scene(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    made = Scene(work / "run", tmp_path / "outside.safetensors", tmp_path / "canary")
    shutil.copytree(good, made.folder)
    monkeypatch.setattr(
        "orchestrator.report.run.page.draw_all", lambda *_: []
    )  # most of the time of a short run
    shutil.copy(made.newest / "model.safetensors", made.outside)
    before = _outside(tmp_path)
    with changes() as changed:
        yield made
    assert not made.canary.exists(), "something was executed"
    assert _outside(tmp_path) == before, "something was written outside the folder"
    assert not [path for path in changed if not path.is_relative_to(tmp_path)], (
        "something was written elsewhere"
    )


def _outside(root: Path) -> dict[str, str]:
    """All that lies outside the folder that is being worked in."""
    files = [path for path in root.rglob("*") if path.is_file() and not path.is_relative_to(root / "work")]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


# --- checkpoints


def member(name: str, data: Callable[[Scene], bytes]) -> Spoil:
    def spoil(scene: Scene) -> None:
        (scene.newest / name).write_bytes(data(scene))
        reseal(scene.newest)

    return spoil


def state(change: Callable[[dict[str, Any]], Any]) -> Spoil:
    def spoil(scene: Scene) -> None:
        edit_json(scene.newest / "state.json", change)
        reseal(scene.newest)

    return spoil


def tensors(name: str, change: Callable[[dict[str, Any]], Any]) -> Spoil:
    def spoil(scene: Scene) -> None:
        edit_tensors(scene.newest / name, change)
        reseal(scene.newest)

    return spoil


def every(slot: str, make: Callable[[Any], Any]) -> Callable[[dict[str, Any]], Any]:
    """What an optimizer keeps of all parameters under one name, made into something else; None leaves it out."""

    def change(tensors: dict[str, Any]) -> dict[str, Any]:
        made = {
            key: make(tensor) if key.startswith(f"{slot}/") else tensor for key, tensor in tensors.items()
        }
        return {key: tensor for key, tensor in made.items() if tensor is not None}

    return change


def one_of(tensors: dict[str, Any], ending: str) -> str:
    return next(key for key in sorted(tensors) if key.endswith(ending))


def manifest(change: Callable[[dict[str, Any]], Any]) -> Spoil:
    return lambda scene: reseal(scene.newest, change)


def _link(scene: Scene) -> None:
    (scene.newest / "model.safetensors").unlink()
    (scene.newest / "model.safetensors").symlink_to(scene.outside)


def pipe_for(name: str) -> Spoil:
    def spoil(scene: Scene) -> None:
        (scene.newest / name).unlink()
        os.mkfifo(scene.newest / name)

    return spoil


def _manifest_elsewhere(scene: Scene) -> None:
    whole = scene.newest / "manifest.json"
    whole.rename(scene.folder / "other.json")
    whole.symlink_to(scene.folder / "other.json")


def backwards(name: str) -> bytes:
    return tensors_file({name: {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}, b"\0" * 8)


OVERLAP = {n: {"dtype": "F32", "shape": [2], "data_offsets": [at, at + 8]} for n, at in (("a", 0), ("b", 4))}
SKIPPED: dict[str, Spoil] = {
    "a pickle for tensors": member("model.safetensors", lambda scene: pickled(scene.canary)),
    "a pickle for the state": member("state.json", lambda scene: pickled(scene.canary)),
    "a header without end": member("model.safetensors", lambda _: tensors_file(b"{}", length=2**62)),
    "tensors over each other": member("model.safetensors", lambda _: tensors_file(OVERLAP, b"\0" * 12)),
    "a tensor larger than all": member(
        "model.safetensors",
        lambda _: tensors_file(
            {"a": {"dtype": "F32", "shape": [2**40] * 2, "data_offsets": [0, 8]}}, b"\0" * 8
        ),
    ),
    "a path that climbs": manifest(
        lambda m: m["files"].update({"../x": m["files"].pop("model.safetensors")})
    ),
    "a name that is a folder": manifest(
        lambda m: m["files"].update({"..": m["files"].pop("model.safetensors")})
    ),
    "an absolute path": manifest(
        lambda m: m["files"].update({"/etc/passwd": m["files"].pop("model.safetensors")})
    ),
    "a name with a zero": manifest(
        lambda m: m["files"].update({"a\0b": m["files"].pop("model.safetensors")})
    ),
    "a name without end": manifest(
        lambda m: m["files"].update({"x" * 5000: m["files"].pop("model.safetensors")})
    ),
    "a size beyond all": manifest(lambda m: m["files"]["model.safetensors"].update(bytes=10**30)),
    "kinds mixed up": manifest(
        lambda m: m["files"].update({"model.safetensors": {"bytes": [], "sha256": {}}})
    ),
    "no format": manifest(lambda m: m.pop("format")),
    "a manifest nested without end": lambda scene: (scene.newest / "manifest.json").write_text(DEEP),
    "a state nested without end": member("state.json", lambda _: DEEP.encode()),
    "a state that is a list": member("state.json", lambda _: b"[]"),
    "a link for a member": _link,
    "a pipe for a member": pipe_for("model.safetensors"),
    "a pipe for the manifest": pipe_for("manifest.json"),
    "a link for the manifest": _manifest_elsewhere,
    "a manifest longer than all": lambda scene: (scene.newest / "manifest.json").write_bytes(
        b" " * 2**24 + b"{}"
    ),
    "a header nested without end": member(
        "model.safetensors", lambda _: tensors_file(b'{"a":' + b"[" * 10**6)
    ),
    "a header that is a list": member("model.safetensors", lambda _: tensors_file(b"[]")),
    "a tensor that ends before it begins": member("optimizer.safetensors", lambda _: backwards("exp_avg/a")),
    "a kind of number that is none": member(
        "model.safetensors",
        lambda _: tensors_file({"a": {"dtype": "object", "shape": [1], "data_offsets": [0, 8]}}, b"\0" * 8),
    ),
    "a member that is a folder": lambda scene: (
        (scene.newest / "state.json").unlink(),
        (scene.newest / "state.json").mkdir(),
    ),
}


def test_a_tensor_may_be_called_anything(scene: Scene) -> None:
    """Names of tensors are no paths: none is written to."""
    header = {"../../../canary": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    member("model.safetensors", lambda _: tensors_file(header, b"\0" * 8))(scene)
    code, said = call("train", *RUN, "--run-dir", str(scene.folder), "--max-steps", "5", "--resume", "auto")
    assert code == 2, said
    assert "the checkpoint has no" in said


@pytest.mark.parametrize(
    "name",
    [
        "step_000000009",
        "step_٠٠٠٠٠٠٠٩",
        "step_99999999999999999999",
        "step_00000009\n",
        ".removing_step_00000009",
    ],
)
def test_a_name_that_we_would_not_write_is_no_checkpoint(scene: Scene, name: str) -> None:
    shutil.copytree(scene.newest, scene.newest.with_name("step_00000009"))
    reseal(scene.newest.with_name("step_00000009"))
    scene.newest.with_name("step_00000009").rename(scene.newest.with_name(name))
    code, said = call("train", *RUN, "--run-dir", str(scene.folder), "--max-steps", "5", "--resume", "auto")
    assert code == 0, said
    assert "resumed at step 4" in said


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", SKIPPED)
def test_a_hostile_checkpoint_is_passed_over_and_told(scene: Scene, name: str) -> None:
    SKIPPED[name](scene)
    code, said = call("train", *RUN, "--run-dir", str(scene.folder), "--max-steps", "5", "--resume", "auto")
    assert code == 0, said
    assert "skipped checkpoint step_00000004" in said
    assert "resumed at step 2" in said


KEPT = "exp_avg/blocks.0.attention.out.bias"
REFUSED: dict[str, Spoil] = {
    "no progress": state(lambda s: s.pop("progress")),
    "progress of another kind": state(lambda s: s["progress"].update(step="x")),
    "progress before the beginning": state(lambda s: s["progress"].update(step=-(10**30))),
    "progress with more to it": state(lambda s: s["progress"].update({"__class__": "x"})),
    "random numbers of another kind": state(lambda s: s["random"].update(python="x")),
    "too few random numbers": state(lambda s: s["random"].update(numpy=["MT19937", [1], 10**9, 0, 0.0])),
    "an optimizer of another kind": state(lambda s: s.update(optimizer=7)),
    "an optimizer of another model": state(lambda s: s["optimizer"].update(values={"lr/nothing": 3})),
    "no weights": lambda scene: ((scene.newest / "model.safetensors").unlink(), reseal(scene.newest)),
    "an expert of another size": tensors(
        "model.safetensors", lambda t: t.update({one_of(t, ".0.up"): torch.zeros(3, 3)})
    ),
    "moments of another shape": tensors(
        "optimizer.safetensors", every("exp_avg", lambda tensor: tensor[..., :1].clone())
    ),
    "moments of another kind": tensors(
        "optimizer.safetensors", every("exp_avg_sq", lambda tensor: tensor.to(torch.int8))
    ),
    "moments of one expert of another shape": tensors(
        "optimizer.safetensors", lambda t: t.update({one_of(t, ".0.up"): torch.zeros(2)})
    ),
    "no moments": tensors("optimizer.safetensors", every("exp_avg", lambda _: None)),
    "moments of one parameter missing": tensors(
        "optimizer.safetensors", lambda t: {key: t[key] for key in t if key != KEPT}
    ),
    "counters that are tables": tensors("optimizer.safetensors", every("step", lambda _: torch.zeros(2, 2))),
    "moments that nothing knows": tensors(
        "optimizer.safetensors", lambda t: t.update({f"x{key}": t[key].clone() for key in list(t)})
    ),
    "a text for a moment": state(lambda s: s["optimizer"]["values"].update({KEPT: "x"})),
    "a list for a moment": state(lambda s: s["optimizer"]["values"].update({KEPT: [1, 2]})),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_hostile_state_is_refused(scene: Scene, name: str) -> None:
    """Its hashes are right, so it is the newest good one; what is in it is not."""
    REFUSED[name](scene)
    code, said = call("train", *RUN, "--run-dir", str(scene.folder), "--max-steps", "5", "--resume", "auto")
    assert code == 2, said
    assert "the checkpoint" in said


@pytest.mark.parametrize("flag", ["--init-from", "--resume"])
def test_a_hostile_checkpoint_that_is_named_is_refused(scene: Scene, flag: str) -> None:
    SKIPPED["a pickle for tensors"](scene)
    code, said = call(
        "train",
        *RUN,
        "--run-dir",
        str(scene.folder.parent / "new"),
        "--max-steps",
        "5",
        flag,
        str(scene.newest),
    )
    assert code == 4, said
    assert "step_00000004: cannot be read" in said


# --- the folder of a run


LINKS = {
    "events.jsonl": lambda scene: scene.folder / "events.jsonl",
    "config.yaml": lambda scene: scene.folder / "config.yaml",
    "logs": lambda scene: scene.folder / "logs",
    "a checkpoint": lambda scene: scene.newest,
    "checkpoints": lambda scene: scene.folder / "checkpoints",
    "tensorboard": lambda scene: scene.folder / "tensorboard",
    "mlflow's database": lambda scene: made_folder(scene.folder / "mlflow") / "mlflow.db",
    "wandb's newest run": lambda scene: made_folder(scene.folder / "wandb") / "latest-run",
}


def made_folder(path: Path) -> Path:
    path.mkdir()
    return path


@pytest.mark.parametrize("name", LINKS)
def test_a_folder_whose_links_lead_out_is_not_written_to(scene: Scene, name: str) -> None:
    path = LINKS[name](scene)
    target = scene.outside.with_name("target")
    shutil.move(path, target) if path.exists() else target.mkdir()
    path.symlink_to(target)
    before = _outside(scene.outside.parent)
    code, said = call("train", *RUN, "--run-dir", str(scene.folder), "--max-steps", "5", "--resume", "auto")
    assert code == 2, said
    assert "is a link to" in said
    assert _outside(scene.outside.parent) == before
    path.unlink()
    shutil.rmtree(target) if target.is_dir() else target.unlink()


def test_links_that_a_tracker_leaves_are_no_harm(scene: Scene) -> None:
    """Also where what they lead to has been cleared away."""
    made_folder(scene.folder / "wandb")
    (scene.folder / "wandb" / "latest-run").symlink_to("offline-run-1")
    code, said = call("train", *RUN, "--run-dir", str(scene.folder), "--max-steps", "5", "--resume", "auto")
    assert code == 0, said


def test_links_that_lie_in_wait_are_written_over_not_through(scene: Scene) -> None:
    for name in ("report.html", "performance_summary.txt"):
        (scene.folder / name).unlink()
        (scene.folder / name).symlink_to(scene.outside)
    assert call("report", str(scene.folder))[0] == 0
    assert not (scene.folder / "report.html").is_symlink()


ODD: dict[str, Callable[[Path], Any]] = {
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to itself": lambda path: path.symlink_to(path),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("name", ["events.jsonl", "plan.json", "config.yaml", "summary.json"])
def test_what_is_no_file_is_not_read(scene: Scene, name: str, kind: str) -> None:
    """A pipe would be waited for, and a device read, for ever."""
    (scene.folder / name).unlink()
    ODD[kind](scene.folder / name)
    code, said = call("train", *RUN, "--run-dir", str(scene.folder), "--max-steps", "5", "--resume", "auto")
    assert code == 2, said
    assert name in said
    code, said = call("report", str(scene.folder))
    assert code == (0 if kind == "a link to itself" and name != "events.jsonl" else 2), said


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ODD)
def test_a_ledger_that_is_no_file_is_not_read(scene: Scene, kind: str) -> None:
    folder = write_sweep(Path("swept"), FakeSweep())
    (folder / "sweep.jsonl").unlink()
    ODD[kind](folder / "sweep.jsonl")
    for argv in (
        ("train", "--tuned", str(folder)),
        ("sweep", "--resume", str(folder)),
        ("report", str(folder)),
    ):
        code, said = call(*argv)
        assert code == 2, said


DEEP_ENOUGH = "[" * 150 + "]" * 150  # that a reader takes it, and those who show it do not
TREES: dict[str, Callable[[Scene], str]] = {
    "nested without end": lambda _: DEEP,
    "nested deep enough": lambda _: (
        f'{{"choices": {{"batch_size": {{"value": {DEEP_ENOUGH}}}}}, "status": {DEEP_ENOUGH}}}'
    ),
    "a tag": lambda scene: f"run: {yaml_bomb(scene.canary)}\n",
    "aliases of aliases": lambda _: laughs(),
    "markup": lambda _: json.dumps(
        {"run": {"name": MARK}, "status": MARK, "validation": {MARK: MARK}, "choices": {MARK: [MARK]}}
    ),
    "kinds mixed up": lambda _: json.dumps(
        {"run": [], "status": {}, "validation": 7, "choices": "x", "hardware": 3, "seconds": "x"}
    ),
    "a list": lambda _: "[1, 2]",
    "no text": lambda _: "\udcff",
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", TREES)
@pytest.mark.parametrize("name", ["config.yaml", "plan.json", "summary.json"])
def test_a_report_of_hostile_files(scene: Scene, name: str, kind: str) -> None:
    """Shown as it is, or refused in words; and a run that goes on writes its own."""
    (scene.folder / name).write_text(TREES[kind](scene), encoding="utf-8", errors="surrogateescape")
    code, said = call("report", str(scene.folder))
    assert code in (0, 2), said
    assert code == 0 or name in said
    assert_harmless(scene.folder / "report.html")
    code, said = call("train", *RUN, "--run-dir", str(scene.folder), "--max-steps", "5", "--resume", "auto")
    assert code == 0, said


def plan_of(change: Callable[[dict[str, Any]], Any]) -> Spoil:
    return lambda scene: edit_json(scene.folder / "plan.json", change)


PLANS: dict[str, Spoil] = {
    "choices of another kind": plan_of(lambda p: p.update(choices=3)),
    "a batch without end": plan_of(lambda p: p["choices"]["batch_size"].update(value=float("inf"))),
    "a batch below nothing": plan_of(lambda p: p["choices"]["global_batch_size"].update(value=-4)),
    "a batch beyond all": plan_of(lambda p: p["choices"]["global_batch_size"].update(value=10**30)),
    "markup for a number": plan_of(lambda p: p["choices"]["batch_size"].update(value=MARK, reason=MARK)),
    "speeds below nothing": plan_of(lambda p: p.update(measured={"device_speeds": {"cpu": float("-inf")}})),
    "hosts that are not there": plan_of(
        lambda p: p["measured"].update(placement=[[10**9, -1]], placement_asked="auto", placement_hosts=1)
    ),
    "hardware of another kind": plan_of(
        lambda p: p.update(hardware={"gpus": "x", "versions": 3, "ram": 10**400, "cores": {}})
    ),
    "nested without end": lambda scene: (scene.folder / "plan.json").write_text(DEEP),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_hostile_plan_is_not_followed(scene: Scene, name: str) -> None:
    PLANS[name](scene)
    code, said = call("train", *RUN, "--run-dir", str(scene.folder), "--max-steps", "5", "--resume", "auto")
    assert code == 0, said
    written = json.loads((scene.folder / "plan.json").read_text())
    assert written["choices"]["global_batch_size"]["value"] == 8


EVENTS: dict[str, list[Any]] = {
    "steps without a number": [
        {"event": "step", "time": 1},
        {"event": "step", "step": [1]},
        {"event": "load", "step": None},
    ],
    "steps of another kind": [
        {"event": "step", "time": "x", "step": 5, "loss": "<b>", "seconds": [], "samples": {}, "metrics": 5}
    ],
    "figures without end": [
        {"event": "step", "time": 1e308, "step": 2**60, "loss": 1e308, "seconds": 1e308, "samples": 10**300}
    ],
    "evaluations": [
        {"event": "evaluate", "step": 5, "loss": MARK, "metrics": {MARK: MARK}},
        {"event": "evaluate", "step": 5},
    ],
    "epochs": [
        {"event": "epoch", "epoch": [], "memory": 7},
        {"event": "epoch", "epoch": 3, "memory": {"allocated": "x"}},
    ],
    "ends": [
        {"event": "end"},
        {"event": "end", "status": MARK, "reason": {"a": 1}, "memory": [], "seconds": "x"},
    ],
    "starts": [
        {"event": "start"},
        {"event": "start", "step": "x", "workers": MARK, "total_steps": 1e308, "device": [1], "task": MARK},
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
            "devices": [{"name": MARK, "index": MARK, "memory_used": "x"}, 5],
        }
    ],
    "hosts": [
        {
            "event": "placement",
            "step": 0,
            "hosts": [{"rank": "x", "name": MARK, "node": MARK}],
            "layers": [{"host_of": ["x", -1]}],
        }
    ],
    "warnings": [
        {"event": "warning", "kind": MARK, "message": MARK},
        {"event": "notice"},
        {"event": "oom"},
        {"event": "resume", "skipped": "x"},
    ],
    "paths": [
        {"event": "checkpoint", "step": 5, "path": "../../x"},
        {"event": "resume", "step": 5, "path": "/etc/passwd"},
    ],
    "nested deep enough": [
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


def spoil_events(scene: Scene, *names: str) -> None:
    lines = [line if isinstance(line, str) else json.dumps(line) for name in names for line in EVENTS[name]]
    with (scene.folder / "events.jsonl").open("a", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")


def assert_harmless(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "<script>alert" not in text
    assert "\x1b" not in text
    assert "\u202e" not in text


@pytest.mark.parametrize("name", EVENTS)
def test_a_hostile_record_can_be_shown_and_continued(scene: Scene, name: str) -> None:
    spoil_events(scene, name)
    code, said = call("report", str(scene.folder))
    assert code == 0, said
    assert_harmless(scene.folder / "report.html")
    code, said = call("train", *RUN, "--run-dir", str(scene.folder), "--max-steps", "5", "--resume", "auto")
    assert code == 0, said
    assert "\x1b" not in said


def test_a_hostile_record_can_be_drawn(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    spoil_events(scene, *EVENTS)
    code, said = call("report", str(scene.folder))
    assert code == 0, said
    assert_harmless(scene.folder / "report.html")


# --- settings


CONFIGS = {
    "a tag for the task": (lambda scene: f"task: {yaml_bomb(scene.canary)}\n", "is not YAML"),
    "a tag for a name": (lambda scene: f"run:\n  name: {yaml_bomb(scene.canary)}\n", "is not YAML"),
    "aliases of aliases": (lambda _: laughs(), "stand for more than"),
    "merges of merges": (
        lambda _: (
            "a0: &a0 {x: 1}\n"
            + "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 12))
        ),
        "stand for more than",
    ),
    "an alias of itself": (lambda _: "run: &r\n  <<: *r\n", "what it is part of"),
    "nested without end": (lambda _: "run: " + "[" * 5000, "nested too deeply"),
    "a name that climbs": (lambda _: 'run: {name: "../x"}\n', "name is '../x'"),
    "a name that is a path": (lambda _: 'run: {name: "/tmp/x"}\n', "name is '/tmp/x'"),
    "a name with a zero": (lambda _: 'run: {name: "a\\0b"}\n', "use letters, digits"),
    "a name without end": (lambda _: f"run: {{name: {'x' * 5000}}}\n", "at most 100"),
    "a folder with a zero": (lambda _: 'run: {run_dir: "a\\0b"}\n', "without control characters"),
    "a folder without end": (lambda _: f"run: {{run_dir: {'x' * 5000}}}\n", "at most 255"),
    "data with a zero": (lambda _: 'data: {data_dir: "a\\0b"}\n', "without control characters"),
    "a checkpoint with a zero": (lambda _: 'checkpoint: {resume: "a\\0b"}\n', "without control characters"),
    "a number without end": (lambda _: f"run: {{epochs: 0x{'f' * 6000}}}\n", "of at most 63"),
    "a task that is a path": (lambda _: 'task: "../../x:Y"\n', "is no name of a task"),
    "no text": (lambda _: "\x00", "is not YAML"),
    "more text than anyone writes": (lambda _: "#" * 2_000_000 + "\n", "longer than 1,000,000 characters"),
    "a cluster of a stranger's": (
        lambda _: "parallel: {ray_address: 'evil.example:6379'}\n",
        "give --ray-address evil.example:6379 if",
    ),
    "a cluster of a stranger's, merged in": (
        lambda _: "parallel: {<<: {ray_address: '127.0.0.1:6379', workers: 2}}\n",
        "which cluster a run joins, and shows your token to, is yours to say",
    ),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_hostile_config_is_refused(scene: Scene, name: str) -> None:
    text, answer = CONFIGS[name]
    Path("c.yaml").write_text(text(scene), encoding="utf-8")
    code, said = call("train", "--config", "c.yaml", "--max-steps", "1", "--gpu-mode", "cpu", "--trackers")
    assert code == 2, said
    assert answer in said
    assert not Path("results").exists()


SPACES = {
    "a tag": lambda scene: f"batch_size: {yaml_bomb(scene.canary)}\n",
    "aliases of aliases": lambda _: laughs(),
    "nested without end": lambda _: "batch_size: " + "[" * 5000,
    "a number without end": lambda _: "batch_size: [1" + "0" * 6000 + "]\n",
    "a folder to sweep over": lambda _: "run_dir: [/tmp/a, /tmp/b]\n",
    "a cluster to sweep over": lambda _: "ray_address: ['evil.example:6379']\n",
    "keys that are lists": lambda _: "? [a]\n: 1\n",
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", SPACES)
def test_a_hostile_space_is_refused(scene: Scene, name: str) -> None:
    Path("space.yaml").write_text(SPACES[name](scene), encoding="utf-8")
    code, said = call("sweep", "--space", "space.yaml", "--gpu-mode", "cpu")
    assert code == 2, said
    assert "space.yaml" in said


PLACEMENTS = {
    "nested without end": DEEP,
    "a host below nothing": '{"host_of": [-1, 0]}',
    "a host beyond all": '{"host_of": [0, 99999999999999999999]}',
    "truth for a host": '{"host_of": [true, 0]}',
    "text for hosts": '{"host_of": "00"}',
    "markup": json.dumps({MARK: [0, 0]}),
    "layers without lists": '{"layers": [1, 2]}',
    "a number without end": '{"host_of": [' + "9" * 5000 + "]}",
}


@pytest.mark.parametrize("name", PLACEMENTS)
def test_a_hostile_placement_is_refused(scene: Scene, name: str) -> None:
    Path("p.json").write_text(PLACEMENTS[name], encoding="utf-8")
    code, said = call(
        "train", *RUN, "--workers", "2", "--parallel-strategy", "expert_parallel", "--placement", "p.json"
    )
    assert code == 2, said
    assert "p.json" in said


CALIBRATIONS = {
    "nested without end": DEEP,
    "of another kind": "[1]",
    "figures of another kind": '{"version": 1, "made": [], "machine": {}, "profiles": "x"}',
    "markup": json.dumps({"version": MARK}),
    "no text": "\udcff",
}


@pytest.mark.parametrize("name", CALIBRATIONS)
def test_a_hostile_calibration_is_refused(scene: Scene, name: str) -> None:
    Path("c.json").write_text(CALIBRATIONS[name], encoding="utf-8", errors="surrogateescape")
    code, said = call("plan", *SMALL, "--gpu-mode", "cpu", "--calibration", "c.json")
    assert code == 2, said
    assert "c.json" in said


# --- a sweep's ledger


@pytest.mark.parametrize("setting", ["run_dir", "name", "resume", "ray_address"])
@pytest.mark.parametrize("verb", ["tuned", "resumed"])
def test_a_ledger_does_not_say_where_a_run_goes(scene: Scene, setting: str, verb: str) -> None:
    evil = {
        "run_dir": str(scene.outside.with_name("evil")),
        "name": "x",
        "resume": "auto",
        "ray_address": "127.0.0.1:1",
    }
    folder = write_sweep(Path("swept"), FakeSweep(settings={setting: evil[setting]}))
    argv = ("train", "--tuned", str(folder)) if verb == "tuned" else ("sweep", "--resume", str(folder))
    code, said = call(*argv)
    assert code == 2, said
    assert f"sets {setting}" in said


def header_of(**changes: Any) -> dict[str, Any]:
    return (
        {"task": "synthetic", "kind": "cpu", "settings": {}}
        | Sweep(parse_space(["batch-size=4,8"])).header()
        | changes
    )


def domains(**given: Any) -> dict[str, Any]:
    return header_of(domains=given, search="random", trials=3)


def learning_rates(**changes: Any) -> dict[str, Any]:
    return domains(learning_rate={"low": 1e-4, "high": 1e-2, "log": True, "integer": False} | changes)


LEDGERS: dict[str, dict[str, Any]] = {
    "a range that is upside down": learning_rates(low=1.0),
    "a range without end": learning_rates(high=float("inf")),
    "a range below nothing": learning_rates(low=-1.0),
    "a range of words": learning_rates(low="a", high="b"),
    "a range of lists": learning_rates(low=[1], high=[2]),
    "a range with more to it": learning_rates(__class__="x"),
    "a range of whole numbers without end": domains(
        batch_size={"low": 1, "high": float("inf"), "log": False, "integer": True}
    ),
    "a range of another kind": domains(precision={"low": 1, "high": 2, "log": False, "integer": True}),
    "no values": domains(batch_size=[]),
    "values of another kind": domains(batch_size=7),
    "values that nothing knows": domains(batch_size=["x"]),
    "domains of another kind": header_of(domains=[1, 2]),
    "points of another kind": header_of(points=[1, 2]),
    "points that are no list": header_of(points=7),
    "trials without end": learning_rates() | {"trials": 10**12},
    "trials of another kind": learning_rates() | {"trials": "x"},
    "part of a trial": learning_rates() | {"trials": 2.5},
    "a search that nothing knows": learning_rates() | {"search": "x"},
    "an objective that nothing knows": header_of(objective="x"),
    "seconds without end": header_of(trial_seconds=float("inf")),
    "seconds of another kind": header_of(trial_seconds=[]),
    "steps below nothing": header_of(objective="validation_loss", trial_steps=-5),
    "settings of another kind": header_of(settings={"epochs": "x"}),
    "settings out of range": header_of(settings={"epochs": -1}),
    "a mask for a setting": header_of(settings={"data_dir": f"/data/{MASK}"}),
    "masks for values": header_of(domains={"data_dir": [f"/data/{MASK}", "/data"]}),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", LEDGERS)
def test_a_hostile_ledger_is_not_gone_on_with(scene: Scene, name: str) -> None:
    Path("swept").mkdir()
    line = json.dumps({"event": "sweep", "time": 1.0, **LEDGERS[name]})
    (Path("swept") / "sweep.jsonl").write_text(line + "\n")
    code, said = call("sweep", "--resume", "swept", "--ray-address", "local")
    assert code == 2, said


@pytest.mark.parametrize(
    "settings", [{"__class__": "x"}, {"../x": 1}, {EVIL: 1}], ids=["dunder", "path", "markup"]
)
def test_a_ledger_names_known_settings_alone(scene: Scene, settings: dict[str, Any]) -> None:
    folder = write_sweep(Path("swept"), FakeSweep(gpu=False, settings=settings))
    code, said = call("train", "--tuned", str(folder), "--gpu-mode", "cpu")
    assert code == 2, said
    assert "setting" in said


def test_a_hostile_ledger_can_be_shown(scene: Scene) -> None:
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
    code, said = call("report", str(folder))
    assert code == 0, said
    assert_harmless(folder / "report.html")
