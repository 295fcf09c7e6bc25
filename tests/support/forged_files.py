"""Artefacts as an enemy would make them: right in every hash, and wrong in all else."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

Change = Callable[[dict[str, Any]], Any]


class Bomb:
    """Whoever unpickles it makes a file."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch '{self.canary}'",)


def pickled(canary: Path) -> bytes:
    return pickle.dumps(Bomb(canary))


def yaml_bomb(canary: Path) -> str:
    return f"!!python/object/apply:os.system ['touch {canary}']"


def laughs(levels: int = 12) -> str:
    """A YAML text of few lines whose content has 9 ** levels entries."""
    lines = ["a0: &a0 [ha, ha, ha, ha, ha, ha, ha, ha, ha]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, levels)]
    return "\n".join(lines) + "\n"


def reseal(checkpoint: Path, change: Change | None = None) -> None:
    """Write a manifest that fits the files as they are; ``change`` may then do what it likes to it, before it is signed."""
    members = sorted(path for path in checkpoint.iterdir() if path.name != "manifest.json")
    files = {path.name: {"bytes": path.stat().st_size, "sha256": _sha(path)} for path in members}
    manifest: dict[str, Any] = {"format": 1, "step": int(checkpoint.name.rpartition("_")[2]), "files": files}
    if change is not None:
        change(manifest)
    manifest["digest"] = hashlib.sha256(_text(manifest)).hexdigest()
    (checkpoint / "manifest.json").write_bytes(_text(manifest))


def _sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _text(content: dict[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, indent=1).encode()


def tensors_file(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file with a header of one's own, said to be ``length`` bytes long."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def edit_tensors(path: Path, change: Change) -> None:
    """Change what a safetensors file holds; ``change`` may return other tensors."""
    from safetensors.torch import load_file, save_file

    content: dict[str, Any] = load_file(path)
    made = change(content)
    save_file(made if isinstance(made, dict) else content, path)


def edit_json(path: Path, change: Change) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    made = change(content)
    path.write_text(json.dumps(made if made is not None else content), encoding="utf-8")
