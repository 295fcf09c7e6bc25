"""A position in a source: found again from a saved place, and checked to be the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from orchestrator.data.source import Reader, SavedPlace, Source
from orchestrator.errors import UserError

_OTHER_DATA = "resume with the data that the run was started with, or start a new run"


@dataclass
class CursorHooks:
    """Connections of a cursor to the code around it."""

    on_progress: Callable[[], None] = lambda: None
    """Called now and then while items are skipped."""
    on_warning: Callable[[str], None] = lambda message: None  # noqa: ARG005


class Cursor:
    """A reader that counts its items and can look at the next one."""

    def __init__(self, source: Source, reader: Reader, position: int, hooks: CursorHooks) -> None:
        self.position = position
        self._source = source
        self._reader = reader
        self._hooks = hooks
        self._next: list[Any] = []
        self._place: SavedPlace | None = None

    def place(self) -> SavedPlace | None:
        """Return the current place; None at the end of the source."""
        if not self._next:
            state = self._reader.state()
            self._next = self._reader.take(1)
            self._place = None
            if self._next:
                self._place = SavedPlace(self.position, state, self._source.digest(self._next[0]))
        return self._place

    def take(self, count: int) -> list[Any]:
        """Return the next items: ``count`` of them, or fewer at the end."""
        items = self._next + self._reader.take(count - len(self._next))
        self._next = []
        self.position += len(items)
        return items

    def skip_to(self, position: int) -> None:
        """Read on to a position; raise ``UserError`` if the source ends before it."""
        if position > self.position:
            self.take(1)
            self.position += self._reader.skip(position - self.position, self._hooks.on_progress)
        if self.position < position:
            raise UserError(
                f"the data ends after {self.position} samples; the run was at sample {position} of it: "
                f"{_OTHER_DATA}"
            )


def open_cursor(
    source: Source, epoch: int, position: int, saved: SavedPlace | None, hooks: CursorHooks
) -> Cursor:
    """Return a cursor at a position of an epoch.

    ``saved`` is a place that was seen at or before the position. Raises ``UserError`` if the source now has
    another item there.
    """
    if saved is None or saved.position > position:
        cursor = Cursor(source, source.read(epoch), 0, hooks)
    else:
        cursor = _restored(source, epoch, saved, hooks) or _read_up_to(source, epoch, saved, hooks)
    cursor.skip_to(position)
    return cursor


def _restored(source: Source, epoch: int, saved: SavedPlace, hooks: CursorHooks) -> Cursor | None:
    """Return a cursor at a saved place; None if its state does not lead there."""
    if saved.state is None:
        return None
    cursor = Cursor(source, source.read(epoch, saved.state), saved.position, hooks)
    if _is_at(cursor, saved):
        return cursor
    hooks.on_warning(
        "the saved state of the data leads to another sample than the run was at; "
        "the epoch is read again from its beginning"
    )
    return None


def _read_up_to(source: Source, epoch: int, saved: SavedPlace, hooks: CursorHooks) -> Cursor:
    cursor = Cursor(source, source.read(epoch), 0, hooks)
    cursor.skip_to(saved.position)
    if not _is_at(cursor, saved):
        raise UserError(
            f"sample {saved.position} of the epoch is another one than when the checkpoint was written; "
            f"{_OTHER_DATA}"
        )
    return cursor


def _is_at(cursor: Cursor, saved: SavedPlace) -> bool:
    place = cursor.place()
    return place is not None and place.digest == saved.digest
