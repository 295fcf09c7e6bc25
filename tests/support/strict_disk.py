"""A disk as unkind as POSIX allows: what was not synced may be lost, all of it or any part. A file's bytes are safe once the file was
synced; a name, new, changed or gone, once its folder was."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from tests.support.traced_disk import Operation


@dataclass
class _Node:
    """A file or a folder: as the process sees it, and as a loss of power leaves it at the least."""

    is_folder: bool
    names: dict[str, int] = field(default_factory=dict)
    safe_names: dict[str, int] = field(default_factory=dict)
    pending: list[tuple[str, str, int]] = field(
        default_factory=list
    )  # old name, new name, node: since the folder was synced
    data: bytes = b""
    safe_data: bytes = b""


class StrictDisk:
    """Begins as ``folder`` is, all of it safe; ``apply`` what a process did; ``lose_power`` into another folder."""

    def __init__(self, folder: Path) -> None:
        self.nodes: list[_Node] = []
        self.root = self._read(folder)

    def _read(self, path: Path) -> int:
        node = _Node(path.is_dir())
        self.nodes.append(node)
        number = len(self.nodes) - 1
        if node.is_folder:
            node.names = {entry.name: self._read(entry) for entry in sorted(path.iterdir())}
            node.safe_names = dict(node.names)
        else:
            node.data = node.safe_data = path.read_bytes()
        return number

    def _at(self, path: str) -> _Node:
        number = self.root
        for part in PurePosixPath(path).parts:
            number = self.nodes[number].names[part]
        return self.nodes[number]

    def _rename(self, old: str, new: str, number: int) -> None:
        """A name that appears (no old one), changes, or goes (no new one)."""
        folder = self._at(str(PurePosixPath(old or new).parent))
        before, after = PurePosixPath(old).name, PurePosixPath(new).name
        assert not (old and new) or PurePosixPath(old).parent == PurePosixPath(new).parent, (
            "a move between folders is not modelled"
        )
        folder.names.pop(before, None)
        if after:
            folder.names[after] = number
        folder.pending.append((before, after, number))

    def apply(self, operation: Operation) -> None:
        match operation.kind:
            case "mkdir" | "open" if operation.kind == "mkdir" or not self._there(operation.path):
                self.nodes.append(_Node(operation.kind == "mkdir"))
                self._rename("", operation.path, len(self.nodes) - 1)
            case "open" if operation.at & os.O_TRUNC:
                self._at(operation.path).data = b""
            case "write":
                node = self._at(operation.path)
                node.data = (
                    node.data[: operation.at]
                    + operation.content
                    + node.data[operation.at + len(operation.content) :]
                )
            case "truncate":
                node = self._at(operation.path)
                node.data = node.data[: operation.at].ljust(operation.at, b"\0")
            case "sync":
                node = self._at(operation.path)
                node.safe_names, node.safe_data, node.pending = dict(node.names), node.data, []
            case "rename" | "unlink" | "rmdir":
                self._rename(operation.path, operation.to, self._number(operation.path))

    def _number(self, path: str) -> int:
        return self._at(str(PurePosixPath(path).parent)).names[PurePosixPath(path).name]

    def _there(self, path: str) -> bool:
        return PurePosixPath(path).name in self._at(str(PurePosixPath(path).parent)).names

    def lose_power(self, into: Path, luck: float, generator: random.Random) -> None:
        """What is found afterwards. ``luck`` is the part of what was not synced that is there nevertheless: 0 none, 1 every name,
        but the bytes of no file; in between, any."""
        self._write(self.root, into, luck, generator)

    def _write(self, number: int, path: Path, luck: float, generator: random.Random) -> None:
        node = self.nodes[number]
        if not node.is_folder:
            path.write_bytes(node.data if node.data == node.safe_data else _spoilt(node, luck, generator))
            return
        path.mkdir()
        for name, inner in _survivors(node, luck, generator).items():
            self._write(inner, path / name, luck, generator)


def _survivors(node: _Node, luck: float, generator: random.Random) -> dict[str, int]:
    names = dict(node.safe_names)
    for before, after, number in node.pending:
        possible = not before or names.get(before) == number  # what it builds on may itself be lost
        if possible and generator.random() < luck:
            names.pop(before, None)
            if after:
                names[after] = number
    return names


def _spoilt(node: _Node, luck: float, generator: random.Random) -> bytes:
    """Bytes that were not synced: those of before, none, zeros, or half of them."""
    forms = [node.safe_data, b"", bytes(len(node.data)), node.data[: len(node.data) // 2]]
    return node.safe_data if luck == 0 else generator.choice(forms)
