"""Files with one JSON value a line, read in order."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from orchestrator.data.files import Files, find_data_files, open_data_file
from orchestrator.data.source import Reader, Source, State, digest
from orchestrator.errors import UserError

_SUFFIXES = (".jsonl", ".jsonl.gz", ".ndjson", ".json")
_SHOWN_CHARACTERS = 60


class Line(NamedTuple):
    """A line that is not parsed yet, and where it stands; the first line has number 1."""

    file: str
    number: int
    text: bytes


class JsonLines(Source):
    """The values of JSONL files as samples; empty lines are left out.

    ``files`` is a file, a folder, a pattern, an address, or several of these. ``transform`` makes a sample of
    a value: ``lambda row: (torch.tensor(row["x"]), row["y"])``. ``collate`` makes a batch of samples.
    """

    def __init__(
        self,
        files: Files,
        *,
        transform: Callable[[Any], Any] | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self.files = find_data_files(files, _SUFFIXES)
        self._transform = transform
        if collate is not None:
            self.collate = collate
        for file in self.files:
            # A file that cannot be read should fail before training, not after hours of it.
            open_data_file(file).close()

    def read(self, epoch: int, state: State | None = None) -> Reader:
        del epoch
        return _LineReader(self.files, state or {"file": 0, "offset": 0, "line": 0})

    def name_of(self, item: Line, position: int) -> str:
        del position
        return f"{item.file}, line {item.number},"

    def digest(self, item: Line) -> str:
        # Not the file's name: a run may resume after its data was moved.
        return digest(item.text)

    def decode(self, item: Line) -> Any:
        try:
            value = json.loads(item.text)
        except ValueError as error:
            raise UserError(_bad_line(item, error)) from None
        return self._transform(value) if self._transform is not None else value


class _LineReader(Reader):
    """Reads lines file after file."""

    def __init__(self, files: list[str], state: State) -> None:
        self._files = files
        self._number, self._offset, self._line = _checked(files, state)
        self._opened: Any = None

    def take(self, count: int) -> list[Line]:
        lines: list[Line] = []
        while len(lines) < count and self._number < len(self._files):
            if self._opened is None:
                self._opened = open_data_file(self._files[self._number])
                self._opened.seek(self._offset)
            self._take_from_file(lines, count)
        return lines

    def state(self) -> State:
        return {"file": self._number, "offset": self._offset, "line": self._line}

    def _take_from_file(self, lines: list[Line], count: int) -> None:
        name = self._files[self._number]
        while len(lines) < count:
            try:
                text = self._opened.readline()
            except (OSError, EOFError) as error:
                raise UserError(f"cannot read {name} after line {self._line}: {error}") from None
            if not text:
                self._next_file()
                return
            self._offset += len(text)
            self._line += 1
            if not text.isspace():
                lines.append(Line(name, self._line, text))

    def _next_file(self) -> None:
        self._opened.close()
        self._opened = None
        self._number += 1
        self._offset = 0
        self._line = 0


def _checked(files: list[str], state: State) -> tuple[int, int, int]:
    """Return the parts of a state; raise ``UserError`` if no reader of these files wrote it."""
    parts = [state.get(name) for name in ("file", "offset", "line")]
    number, offset, line = (part if type(part) is int and part >= 0 else -1 for part in parts)
    if min(number, offset, line) < 0 or number > len(files):
        raise UserError(
            f"the saved position {parts} is in none of the {len(files)} data files; "
            "resume with the files that the run was started with"
        )
    return number, offset, line


def _bad_line(item: Line, error: ValueError) -> str:
    text = item.text.decode(errors="replace").strip()
    shown = text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
    return f"{item.file}, line {item.number} is not JSON ({error}): {shown!r}; correct or remove the line"
