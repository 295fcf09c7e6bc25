"""Tests that hostile checkpoints are skipped or refused in words: nothing is executed or written
elsewhere."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch

from harness.storage.forged_files import edit_json, edit_tensors, pickled, reseal, tensors_file
from tests.security.scene import DEEP, RUN, Scene, Spoil, call, resume


def member(name: str, data: Callable[[Scene], bytes]) -> Spoil:
    """Replace a file of the newest checkpoint; its hash fits."""

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


def every(slot: str, replace: Callable[[Any], Any]) -> Callable[[dict[str, Any]], Any]:
    """Change what the optimizer stores under one name for all parameters; None removes it."""

    def change(tensors: dict[str, Any]) -> dict[str, Any]:
        changed = {
            key: replace(tensor) if key.startswith(f"{slot}/") else tensor for key, tensor in tensors.items()
        }
        return {key: tensor for key, tensor in changed.items() if tensor is not None}

    return change


def first_ending_with(tensors: dict[str, Any], ending: str) -> str:
    return next(key for key in sorted(tensors) if key.endswith(ending))


def manifest(change: Callable[[dict[str, Any]], Any]) -> Spoil:
    return lambda scene: reseal(scene.newest, change)


def _link_member(scene: Scene) -> None:
    (scene.newest / "model_00000.safetensors").unlink()
    (scene.newest / "model_00000.safetensors").symlink_to(scene.outside)


def pipe_for(name: str) -> Spoil:
    def spoil(scene: Scene) -> None:
        (scene.newest / name).unlink()
        os.mkfifo(scene.newest / name)

    return spoil


def _link_manifest(scene: Scene) -> None:
    manifest_path = scene.newest / "manifest.json"
    manifest_path.rename(scene.folder / "other.json")
    manifest_path.symlink_to(scene.folder / "other.json")


def negative_size(name: str) -> bytes:
    return tensors_file({name: {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}, b"\0" * 8)


OVERLAP = {
    name: {"dtype": "F32", "shape": [2], "data_offsets": [start, start + 8]}
    for name, start in (("a", 0), ("b", 4))
}
SKIPPED: dict[str, Spoil] = {
    "a pickle for tensors": member("model_00000.safetensors", lambda scene: pickled(scene.canary)),
    "a pickle for the state": member("state.json", lambda scene: pickled(scene.canary)),
    "a huge header length": member("model_00000.safetensors", lambda _: tensors_file(b"{}", length=2**62)),
    "overlapping tensors": member("model_00000.safetensors", lambda _: tensors_file(OVERLAP, b"\0" * 12)),
    "a huge tensor": member(
        "model_00000.safetensors",
        lambda _: tensors_file(
            {"a": {"dtype": "F32", "shape": [2**40] * 2, "data_offsets": [0, 8]}}, b"\0" * 8
        ),
    ),
    "a path to the parent folder": manifest(
        lambda m: m["files"].update({"../x": m["files"].pop("model_00000.safetensors")})
    ),
    "a name that is a folder": manifest(
        lambda m: m["files"].update({"..": m["files"].pop("model_00000.safetensors")})
    ),
    "an absolute path": manifest(
        lambda m: m["files"].update({"/etc/passwd": m["files"].pop("model_00000.safetensors")})
    ),
    "a name with a zero": manifest(
        lambda m: m["files"].update({"a\0b": m["files"].pop("model_00000.safetensors")})
    ),
    "a very long name": manifest(
        lambda m: m["files"].update({"x" * 5000: m["files"].pop("model_00000.safetensors")})
    ),
    "a huge piece": manifest(lambda m: m["files"]["model_00000.safetensors"][0].__setitem__(0, 10**30)),
    "a negative piece": manifest(lambda m: m["files"]["model_00000.safetensors"][0].__setitem__(0, -8)),
    "a piece that is a fraction": manifest(lambda m: m["files"]["state.json"][0].__setitem__(0, 1.5)),
    "too many pieces": manifest(lambda m: m["files"]["state.json"].extend([[1, "0" * 64]] * 10**4)),
    "a hash that is no hash": manifest(lambda m: m["files"]["state.json"][0].__setitem__(1, "x")),
    "wrong types": manifest(
        lambda m: m["files"].update({"model_00000.safetensors": {"bytes": [], "sha256": {}}})
    ),
    "a tensor in two files": lambda scene: (
        shutil.copy(scene.newest / "model_00000.safetensors", scene.newest / "model_00001.safetensors"),
        reseal(scene.newest),
    ),
    "a file that no run writes": member("model_1.safetensors", lambda _: tensors_file({})),
    "values that are a list": member("values_00001.json", lambda _: b"[1]"),
    "a shape with a fraction": member(
        "model_00000.safetensors",
        lambda _: tensors_file({"a": {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}}, b"\0" * 8),
    ),
    "a gap between tensors": member(
        "model_00000.safetensors",
        lambda _: tensors_file({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, b"\0" * 8),
    ),
    "bytes of no tensor": member("model_00000.safetensors", lambda _: tensors_file({}, b"\0" * 8)),
    "an empty file": member("model_00000.safetensors", lambda _: b""),
    "an empty tensor of huge sizes": member(
        "model_00000.safetensors",
        lambda _: tensors_file({"a": {"dtype": "F32", "shape": [2**62, 2**62, 0], "data_offsets": [0, 0]}}),
    ),
    "no format": manifest(lambda m: m.pop("format")),
    "a deeply nested manifest": lambda scene: (scene.newest / "manifest.json").write_text(DEEP),
    "a deeply nested state": member("state.json", lambda _: DEEP.encode()),
    "a state that is a list": member("state.json", lambda _: b"[]"),
    "a link for a member": _link_member,
    "a pipe for a member": pipe_for("model_00000.safetensors"),
    "a pipe for the manifest": pipe_for("manifest.json"),
    "a link for the manifest": _link_manifest,
    "a very long manifest": lambda scene: (scene.newest / "manifest.json").write_bytes(b" " * 2**27 + b"{}"),
    "a deeply nested header": member(
        "model_00000.safetensors", lambda _: tensors_file(b'{"a":' + b"[" * 10**6)
    ),
    "a header that is a list": member("model_00000.safetensors", lambda _: tensors_file(b"[]")),
    "a tensor of negative size": member("optimizer_00000.safetensors", lambda _: negative_size("exp_avg/a")),
    "an unknown dtype": member(
        "model_00000.safetensors",
        lambda _: tensors_file({"a": {"dtype": "object", "shape": [1], "data_offsets": [0, 8]}}, b"\0" * 8),
    ),
    "a member that is a folder": lambda scene: (
        (scene.newest / "state.json").unlink(),
        (scene.newest / "state.json").mkdir(),
    ),
}


def test_names_of_tensors_are_not_paths(scene: Scene) -> None:
    """A tensor may have any name; no file of that name is written."""
    header = {"../../../canary": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    member("model_00000.safetensors", lambda _: tensors_file(header, b"\0" * 8))(scene)
    code, output = resume(scene)
    assert code == 2, output
    assert "the checkpoint has no" in output


@pytest.mark.extended(but_first=1)
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
def test_a_folder_with_a_foreign_name_is_no_checkpoint(scene: Scene, name: str) -> None:
    shutil.copytree(scene.newest, scene.newest.with_name("step_00000009"))
    reseal(scene.newest.with_name("step_00000009"))
    scene.newest.with_name("step_00000009").rename(scene.newest.with_name(name))
    code, output = resume(scene)
    assert code == 0, output
    assert "resumed at step 4" in output


@pytest.mark.extended(but_first=1)
@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", SKIPPED)
def test_a_hostile_checkpoint_is_skipped_with_a_message(scene: Scene, name: str) -> None:
    SKIPPED[name](scene)
    code, output = resume(scene)
    assert code == 0, output
    assert "skipped checkpoint step_00000004" in output
    assert "resumed at step 2" in output


MOMENT = "exp_avg/blocks.0.attention.out.bias"
REFUSED: dict[str, Spoil] = {
    "no progress": state(lambda s: s.pop("progress")),
    "progress of the wrong type": state(lambda s: s["progress"].update(step="x")),
    "a negative step": state(lambda s: s["progress"].update(step=-(10**30))),
    "progress with an unknown field": state(lambda s: s["progress"].update({"__class__": "x"})),
    "a random state of the wrong type": state(lambda s: s["random"].update(python="x")),
    "a random state that is too short": state(
        lambda s: s["random"].update(numpy=["MT19937", [1], 10**9, 0, 0.0])
    ),
    "an optimizer of the wrong type": state(lambda s: s.update(optimizer=7)),
    "an optimizer of another model": state(lambda s: s["optimizer"].update(values={"lr/nothing": 3})),
    "no weights": lambda scene: ((scene.newest / "model_00000.safetensors").unlink(), reseal(scene.newest)),
    "an expert of another size": tensors(
        "model_00000.safetensors", lambda t: t.update({first_ending_with(t, ".0.up"): torch.zeros(3, 3)})
    ),
    "moments of another shape": tensors(
        "optimizer_00000.safetensors", every("exp_avg", lambda tensor: tensor[..., :1].clone())
    ),
    "moments of another dtype": tensors(
        "optimizer_00000.safetensors", every("exp_avg_sq", lambda tensor: tensor.to(torch.int8))
    ),
    "moments of one expert of another shape": tensors(
        "optimizer_00000.safetensors", lambda t: t.update({first_ending_with(t, ".0.up"): torch.zeros(2)})
    ),
    "no moments": tensors("optimizer_00000.safetensors", every("exp_avg", lambda _: None)),
    "moments of one parameter missing": tensors(
        "optimizer_00000.safetensors", lambda t: {key: t[key] for key in t if key != MOMENT}
    ),
    "step counters that are matrices": tensors(
        "optimizer_00000.safetensors", every("step", lambda _: torch.zeros(2, 2))
    ),
    "unknown moments": tensors(
        "optimizer_00000.safetensors", lambda t: t.update({f"x{key}": t[key].clone() for key in list(t)})
    ),
    "a text for a moment": state(lambda s: s["optimizer"]["values"].update({MOMENT: "x"})),
    "a list for a moment": state(lambda s: s["optimizer"]["values"].update({MOMENT: [1, 2]})),
}


@pytest.mark.extended(but_first=1)
@pytest.mark.parametrize("name", REFUSED)
def test_a_hostile_state_is_refused(scene: Scene, name: str) -> None:
    """Its hashes are right, so it is the newest valid checkpoint, but its content is not."""
    REFUSED[name](scene)
    code, output = resume(scene)
    assert code == 2, output
    assert "the checkpoint" in output


@pytest.mark.parametrize("flag", ["--init-from", "--resume"])
def test_a_hostile_checkpoint_given_by_name_is_refused(scene: Scene, flag: str) -> None:
    SKIPPED["a pickle for tensors"](scene)
    flags = ("--run-dir", str(scene.folder.parent / "new"), "--max-steps", "5", flag, str(scene.newest))
    code, output = call("train", *RUN, *flags)
    assert code == 4, output
    assert "step_00000004: cannot be read" in output
