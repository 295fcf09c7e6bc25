"""Watching a run: follow its record, and draw a frame at intervals until the run ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.errors import UserError
from orchestrator.live.watch.frame import Size, frame
from orchestrator.live.watch.lines import plain
from orchestrator.record.files.ledger import holds_sweep
from orchestrator.record.files.remote_record import EVENTS, holds_record
from orchestrator.record.files.tail import Follower
from orchestrator.record.live.state import RunState
from orchestrator.record.summary.index import read_fold
from orchestrator.storage.address import as_url
from orchestrator.storage.folder import RemoteError, open_folder
from orchestrator.types import first_line

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_MADE_BEFORE_EVENTS = {"checkpoints", "hf", "logs", "remote", "tensorboard"}
"""Files and folders that a run makes before it records its first event."""


class Watch:
    """The view of one run folder, local or remote."""

    def __init__(self, location: Path, console: Console, now: Callable[[], float] = time.time) -> None:
        """Raises ``UserError`` if there is no run."""
        self._console = console
        self._now = now
        self._trouble = ""
        self._state, self._follower = _follow(location)
        self.name = location.resolve().name if as_url(location) is None else location.name

    @property
    def has_ended(self) -> bool:
        return self._state.end is not None

    def read(self) -> bool:
        """Read the new events. Return whether there is something new to show."""
        trouble = self._trouble
        try:
            num_events = self._follower.poll()
            self._trouble = ""
        except (RemoteError, OSError) as error:
            # A storage or a network drive may be away for a while.
            num_events = 0
            self._trouble = f"cannot read the record, trying again: {first_line(error)}"
        return bool(num_events) or trouble != self._trouble

    def lines(self) -> list[Text]:
        """Return the frame as of the last events."""
        console = self._console
        # The cursor needs a row of its own.
        height = console.height - 1 if console.is_terminal else None
        lines = frame(self._state, self.name, Size(console.width, height), self._now(), self._trouble)
        if not console.encoding.startswith("utf"):
            for each in lines:
                each.plain = plain(each.plain).encode(console.encoding, "replace").decode(console.encoding)
        return lines


def _follow(location: Path) -> tuple[RunState, Follower]:
    if as_url(location) is not None:
        folder = open_folder("the run folder", location)
        if not holds_record(folder):
            raise UserError(
                f"there is no run at {folder.url}: it holds no {EVENTS}; give the folder of a run"
            )
        state = RunState()
        return state, Follower(Path(EVENTS), [state], remote=folder)
    if not location.is_dir():
        raise UserError(f"there is no folder {location}; give the folder of a run, as in results/NAME")
    if holds_sweep(location):
        raise UserError(f"{location} holds a sweep; see it with: orchestrator report {location}")
    if not (location / EVENTS).exists() and not (location / "config.yaml").exists():
        raise UserError(f"there is no run in {location}: it holds no {EVENTS}; give the folder of a run")
    # Only the newest part of a long record is read.
    fold = read_fold(location / EVENTS)
    state = RunState(fold)
    return state, Follower(location / EVENTS, [state], fold.extent)


def wait_for_run(location: Path, console: Console, interval_s: float) -> None:
    """Wait for the first events of a run that has not begun, as that of a job which was submitted."""
    if not _may_begin(location):
        return
    text = f"there is no run in {location} yet; waiting for it (Ctrl-C leaves)"
    console.print(text, markup=False, soft_wrap=True)
    while _may_begin(location):
        time.sleep(interval_s)


def _may_begin(location: Path) -> bool:
    """Whether there is neither a run nor anything else in the folder."""
    if as_url(location) is not None:
        return not holds_record(open_folder("the run folder", location))
    if not location.is_dir():
        return not location.exists() and location.absolute().parent.is_dir()
    names = {path.name for path in location.iterdir() if not path.name.startswith(".")}
    return names <= _MADE_BEFORE_EVENTS


def show_once(watch: Watch, console: Console) -> None:
    """Draw one frame."""
    from rich.text import Text

    watch.read()
    console.print(Text("\n").join(watch.lines()), no_wrap=True, overflow="crop", crop=False)


def show_until_end(watch: Watch, console: Console, interval_s: float) -> None:
    """Draw frames until the run ends: in place on a terminal, else one below the other when events come."""
    if not console.is_terminal or console.is_dumb_terminal:
        _print_frames(watch, console, interval_s)
        return
    watch.read()
    with _live(watch, console) as refresh:
        while not watch.has_ended:
            time.sleep(interval_s)
            watch.read()
            refresh()


def _print_frames(watch: Watch, console: Console, interval_s: float) -> None:
    show_once(watch, console)
    while not watch.has_ended:
        time.sleep(interval_s)
        if watch.read():
            console.print()
            show_once(watch, console)


@contextmanager
def _live(watch: Watch, console: Console) -> Iterator[Callable[[], None]]:
    """Yield a function that draws the frame again in its place."""
    from rich.live import Live
    from rich.text import Text

    def drawn() -> Text:
        return Text("\n", no_wrap=True).join(watch.lines())

    with Live(drawn(), console=console, auto_refresh=False, vertical_overflow="crop") as live:
        yield lambda: live.update(drawn(), refresh=True)
