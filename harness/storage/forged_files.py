"""Files as an attacker would make them: every hash is right, and the content is wrong."""

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


class PickleBomb:
    """An object that creates a file when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch '{self.canary}'",)


def pickled(canary: Path) -> bytes:
    return pickle.dumps(PickleBomb(canary))


def yaml_bomb(canary: Path) -> str:
    return f"!!python/object/apply:os.system ['touch {canary}']"


def laughs(levels: int = 12) -> str:
    """Return a short YAML text whose content has 9 ** levels entries ("billion laughs")."""
    lines = ["a0: &a0 [ha, ha, ha, ha, ha, ha, ha, ha, ha]"]
    for level in range(1, levels):
        aliases = ", ".join([f"*a{level - 1}"] * 9)
        lines.append(f"a{level}: &a{level} [{aliases}]")
    return "\n".join(lines) + "\n"


def reseal(checkpoint: Path, change: Change | None = None) -> None:
    """Write a manifest that fits the files as they are; ``change`` may edit it before it is signed."""
    members = sorted(path for path in checkpoint.iterdir() if path.name != "manifest.json")
    files = {path.name: [[path.stat().st_size, _sha256(path)]] for path in members}
    manifest: dict[str, Any] = {"format": 2, "step": int(checkpoint.name.rpartition("_")[2]), "files": files}
    if change is not None:
        change(manifest)
    manifest["digest"] = hashlib.sha256(_encoded(manifest)).hexdigest()
    (checkpoint / "manifest.json").write_bytes(_encoded(manifest))


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _encoded(content: dict[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, indent=1).encode()


def tensors_file(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """Return a safetensors file with any header, whose length may be stated as any number."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def edit_tensors(path: Path, change: Change) -> None:
    """Change the content of a safetensors file; ``change`` may return other tensors."""
    from safetensors.torch import load_file, save_file

    content: dict[str, Any] = load_file(path)
    changed = change(content)
    save_file(changed if isinstance(changed, dict) else content, path)


def edit_json(path: Path, change: Change) -> None:
    """Change the content of a JSON file; ``change`` may return another one."""
    content = json.loads(path.read_text(encoding="utf-8"))
    changed = change(content)
    path.write_text(json.dumps(changed if changed is not None else content), encoding="utf-8")
