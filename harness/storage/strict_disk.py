"""A disk that loses as much as POSIX allows: anything that was not synced, all of it or any part.

The bytes of a file are safe once the file was synced. A name that appears, changes or goes is
safe once its folder was synced."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from harness.storage.traced_disk import Operation


@dataclass
class _Node:
    """A file or a folder, as the process sees it and as it is safe on disk."""

    is_folder: bool
    names: dict[str, int] = field(default_factory=dict)
    safe_names: dict[str, int] = field(default_factory=dict)
    unsynced_renames: list[tuple[str, str, int]] = field(default_factory=list)
    """The old name, the new name and the node of each change since the folder was synced."""
    data: bytes = b""
    safe_data: bytes = b""


class StrictDisk:
    """A model of a disk: it starts as ``folder``, all of it safe, and changes by ``apply``."""

    def __init__(self, folder: Path) -> None:
        self.nodes: list[_Node] = []
        self.root = self._read(folder)

    def _read(self, path: Path) -> int:
        node = _Node(path.is_dir())
        self.nodes.append(node)
        index = len(self.nodes) - 1
        if node.is_folder:
            node.names = {entry.name: self._read(entry) for entry in sorted(path.iterdir())}
            node.safe_names = dict(node.names)
        else:
            node.data = path.read_bytes()
            node.safe_data = node.data
        return index

    def apply(self, operation: Operation) -> None:
        """Change the disk as a process did."""
        path = PurePosixPath(operation.path)
        match operation.kind:
            case "mkdir":
                self._create(path, is_folder=True)
            case "open" if path.name not in self._node(path.parent).names:
                self._create(path, is_folder=False)
            case "open" if operation.number & os.O_TRUNC:
                self._node(path).data = b""
            case "write":
                node = self._node(path)
                end = operation.number + len(operation.content)
                node.data = node.data[: operation.number] + operation.content + node.data[end:]
            case "truncate":
                node = self._node(path)
                node.data = node.data[: operation.number].ljust(operation.number, b"\0")
            case "sync":
                node = self._node(path)
                node.safe_names = dict(node.names)
                node.safe_data = node.data
                node.unsynced_renames = []
            case "rename" | "unlink" | "rmdir":
                target = PurePosixPath(operation.target) if operation.target else None
                self._rename(path, target, self._node(path.parent).names[path.name])

    def _create(self, path: PurePosixPath, is_folder: bool) -> None:
        self.nodes.append(_Node(is_folder))
        self._rename(None, path, len(self.nodes) - 1)

    def _rename(self, old: PurePosixPath | None, new: PurePosixPath | None, index: int) -> None:
        """Change a name. It appears if there is no old one, and goes if there is no new one."""
        folders = {path.parent for path in (old, new) if path is not None}
        assert len(folders) == 1, "a move between folders is not modelled"
        folder = self._node(folders.pop())
        old_name = old.name if old else ""
        new_name = new.name if new else ""
        folder.names.pop(old_name, None)
        if new_name:
            folder.names[new_name] = index
        folder.unsynced_renames.append((old_name, new_name, index))

    def _node(self, path: PurePosixPath) -> _Node:
        index = self.root
        for part in path.parts:
            index = self.nodes[index].names[part]
        return self.nodes[index]

    def lose_power(self, into: Path, luck: float, generator: random.Random) -> None:
        """Write what is on disk after a loss of power.

        ``luck`` is the part of the unsynced changes that survive: 0 none, 1 every name but the
        bytes of no file, and in between any of them."""
        self._write(self.root, into, luck, generator)

    def _write(self, index: int, path: Path, luck: float, generator: random.Random) -> None:
        node = self.nodes[index]
        if not node.is_folder:
            path.write_bytes(_surviving_data(node, luck, generator))
            return
        path.mkdir()
        for name, inner in _surviving_names(node, luck, generator).items():
            self._write(inner, path / name, luck, generator)


def _surviving_names(node: _Node, luck: float, generator: random.Random) -> dict[str, int]:
    names = dict(node.safe_names)
    for old_name, new_name, index in node.unsynced_renames:
        # A change that builds on a lost one is lost too.
        is_possible = not old_name or names.get(old_name) == index
        if is_possible and generator.random() < luck:
            names.pop(old_name, None)
            if new_name:
                names[new_name] = index
    return names


def _surviving_data(node: _Node, luck: float, generator: random.Random) -> bytes:
    """Return the bytes of a file.

    Unsynced ones are those of before, none, zeros, or half of them."""
    if node.data == node.safe_data:
        return node.data
    forms = [node.safe_data, b"", bytes(len(node.data)), node.data[: len(node.data) // 2]]
    return node.safe_data if luck == 0 else generator.choice(forms)
