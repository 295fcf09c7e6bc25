"""Tests of watching: a folder that grows, remote folders, terminals and pipes."""

from __future__ import annotations

import io
import threading
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from harness.fakes.fake_events import START_TIME, FakeRun, run_events
from harness.fakes.fake_run import write_events, write_run
from harness.fakes.fake_sweep import write_sweep
from harness.runs.records import decoded
from orchestrator.errors import UserError
from orchestrator.live.watch import watching
from orchestrator.live.watch.watching import Watch, show_once, show_until_end
from orchestrator.record.events import kinds
from orchestrator.record.events.kinds import JsonEvent as Event
from orchestrator.record.files.event_log import DriverLog, EventLog, encode_event
from orchestrator.storage.folder import RemoteError, RemoteFolder

ESCAPE = "\x1b"


def console(width: int = 80, terminal: bool = False, **options: object) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    environment = {"TERM": "xterm", **{str(key): str(value) for key, value in options.items()}}
    return Console(
        file=out, width=width, height=50, force_terminal=terminal, highlight=False, _environ=environment
    ), out


def watch(location: Path, target: Console) -> Watch:
    return Watch(location, target, now=lambda: START_TIME + 30)


def frame_of(location: Path) -> str:
    target, out = console()
    show_once(watch(location, target), target)
    return out.getvalue()


def lines_of(events: list[Event]) -> bytes:
    return "".join(encode_event(event) + "\n" for event in events).encode()


def test_one_frame_of_a_finished_run_with_a_recovery(tmp_path: Path) -> None:
    text = frame_of(write_run(tmp_path / "run1", FakeRun(workers=3, recover_at=70)))
    assert text.splitlines()[0].split() == ["run1", "completed"]
    assert "1 failure, 1 recovery, 10 steps repeated" in text
    assert "recovered in 12.3 s on 2 workers instead of 3" in text
    assert ESCAPE not in text


def test_a_torn_last_line_waits_for_its_rest(tmp_path: Path) -> None:
    events = run_events(FakeRun(ends="killed"))
    steps = [index for index, event in enumerate(events) if event["event"] == "step"]
    folder = write_events(tmp_path, events[: steps[-1]])
    path = folder / "events.jsonl"
    line = lines_of([events[steps[-1]]])
    target, _ = console()
    view = watch(folder, target)
    view.read()
    with path.open("ab") as file:
        file.write(line[:20])
    assert not view.read()
    with path.open("ab") as file:
        file.write(line[20:])
    assert view.read()
    assert any("step 120 of 120" in each.plain for each in view.lines())


def test_events_of_driver_and_workers_are_one_list(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    events = run_events(FakeRun(ends="killed"))
    workers = EventLog(path)
    workers.write(*decoded(events))
    DriverLog(path).write(
        kinds.Failure(kind="worker", message="worker 1 was lost", rank=1, step=120, final=False)
    )
    assert "worker 1 was lost" in frame_of(tmp_path)
    assert "recovering" in frame_of(tmp_path).splitlines()[0]


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_a_remote_run_is_watched_while_it_grows(tmp_path: Path, kind: str) -> None:
    url = f"memory://{uuid.uuid4().hex}/run1" if kind == "memory" else f"file://{tmp_path}/remote/run1"
    remote = RemoteFolder(url)
    events = run_events(FakeRun())
    remote.write("events.jsonl", lines_of(events[:100]))
    target, _ = console()
    # Settings are paths, which keep one slash of two.
    view = watch(Path(url), target)
    assert view.read()
    assert not view.has_ended
    assert view.name == "run1"
    remote.write("events.jsonl", lines_of(events))
    assert view.read()
    assert view.has_ended


def test_a_storage_that_is_away_is_said_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"file://{tmp_path}/remote/run1"
    RemoteFolder(url).write("events.jsonl", lines_of(run_events(FakeRun(ends="killed"))))
    target, _ = console()
    view = watch(Path(url), target)

    def fail(*_: object) -> int:
        raise RemoteError("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(RemoteFolder, "size", fail)
        assert view.read()
        assert "cannot read the record, trying again: no answer" in view.lines()[1].plain
    assert view.read()
    assert not any("no answer" in line.plain for line in view.lines())


def missing(tmp_path: Path) -> Path:
    return tmp_path / "none"


def without_run(tmp_path: Path) -> Path:
    return tmp_path


def remote_without_run(tmp_path: Path) -> Path:
    return Path(f"file://{tmp_path}/none")


@pytest.mark.parametrize("place", [missing, without_run, remote_without_run])
def test_a_folder_without_a_run_is_refused(tmp_path: Path, place: Callable[[Path], Path]) -> None:
    with pytest.raises(UserError, match=r"there is no (folder|run) .*give the folder of a run"):
        watch(place(tmp_path), console()[0])


def test_a_folder_of_a_sweep_is_refused_with_the_verb_that_shows_it(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path / "sweep")
    with pytest.raises(UserError, match="orchestrator report"):
        watch(folder, console()[0])


def test_a_run_that_has_not_written_yet_is_awaited(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("task: digits\n")
    assert "no events yet" in frame_of(tmp_path)


def growing(folder: Path, monkeypatch: pytest.MonkeyPatch, *parts: list[Event]) -> list[float]:
    """Append one part of the events each time that the view waits. Return the waits."""
    remaining = list(parts)
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if remaining:
            with (folder / "events.jsonl").open("ab") as file:
                file.write(lines_of(remaining.pop(0)))

    monkeypatch.setattr(watching.time, "sleep", sleep)
    return waits


def test_a_pipe_gets_plain_frames_when_events_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = run_events(FakeRun())
    folder = write_events(tmp_path, events[:50])
    waits = growing(folder, monkeypatch, [], events[50:100], [], events[100:])
    target, out = console()
    show_until_end(watch(folder, target), target, 0.5)
    assert waits == [0.5] * 4
    assert ESCAPE not in out.getvalue()
    assert "\r" not in out.getvalue()
    assert out.getvalue().count("progress ") == 3
    assert out.getvalue().rstrip().endswith("completed: all epochs done")


def test_a_terminal_is_drawn_in_place_until_the_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = run_events(FakeRun())
    folder = write_events(tmp_path, events[:50])
    growing(folder, monkeypatch, events[50:100], events[100:])
    target, out = console(terminal=True)
    show_until_end(watch(folder, target), target, 0.5)
    assert f"{ESCAPE}[1A" in out.getvalue()
    assert "completed: all epochs done" in out.getvalue()
    assert threading.active_count() < 20


def test_colours_are_left_out_where_the_user_wants_none(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run1", FakeRun(experts=8, workers=2, hosted=True))
    coloured, out = console(terminal=True)
    show_once(watch(folder, coloured), coloured)
    assert f"{ESCAPE}[36m" in out.getvalue()
    plain, out = console(terminal=True, NO_COLOR=1)
    show_once(watch(folder, plain), plain)
    assert f"{ESCAPE}[36m" not in out.getvalue()


def test_an_output_without_unicode_gets_ascii(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run1", FakeRun(experts=8, workers=2, hosted=True))
    raw = io.BytesIO()
    target = Console(file=io.TextIOWrapper(raw, encoding="ascii"), width=80, force_terminal=False)
    show_once(watch(folder, target), target)
    target.file.flush()
    text = raw.getvalue().decode("ascii")
    assert "####" in text
    assert "?" not in text
