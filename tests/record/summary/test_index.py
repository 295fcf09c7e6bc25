"""The fold of a record, from saved folds or from its beginning, against plain sums over all events."""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from harness.runs.records import decoded, made
from orchestrator.record.events import kinds
from orchestrator.record.events.decoding import to_json
from orchestrator.record.events.kinds import JsonEvent as Event
from orchestrator.record.events.kinds import Step, decode_event
from orchestrator.record.events.sessions import split_sessions
from orchestrator.record.files.event_log import DriverLog, EventLog
from orchestrator.record.files.reading import START, read_events
from orchestrator.record.live.state import RunState
from orchestrator.record.summary import index, speed, thinning
from orchestrator.record.summary.fold import RunFold, fold_events
from orchestrator.record.summary.index import FoldKeeper, read_fold, save_fold
from orchestrator.record.summary.summary import summary_of

STEP_KINDS = ("step", "evaluate", "epoch", "phases", "load", "bad_samples", "monitor")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let short records be as long ones: thinned, with rounded times, and with an index."""
    monkeypatch.setattr(thinning, "NUM_RECENT", 5)
    monkeypatch.setattr(thinning, "MAX_GROUPS", 8)
    monkeypatch.setattr(index, "SAVE_BYTES", 2000)
    monkeypatch.setattr(index, "MAX_UNSAVED_BYTES", 8000)


def test_figures_equal_sums_over_all_events_of_random_records(tmp_path: Path, small: None):
    for seed in range(12):
        path = tmp_path / str(seed) / "events.jsonl"
        path.parent.mkdir()
        write_record(path, random.Random(seed))
        recorded = read_events(path)
        fold = read_fold(path)
        assert_equal(summary_of(fold), expected_figures(recorded), f"seed {seed}")
        assert_same(fold, fold_events(decoded(recorded)), f"seed {seed}")
        state, whole = RunState(fold), RunState()
        for event in recorded:
            whole(made(event))
        assert (state.counts, state.step, state.began) == (whole.counts, whole.step, whole.began), seed
        assert state.status == whole.status


def test_saved_folds_are_continued_and_the_record_is_not_read_again(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "events.jsonl"
    write_record(path, random.Random(1), num_sessions=3)
    save_fold(path)
    parsed: list[bytes] = []
    parse = index.parse_event
    monkeypatch.setattr(index, "parse_event", lambda line: parsed.append(line) or parse(line))
    assert_same(read_fold(path), fold_events(decoded(read_events(path))))
    assert len(parsed) < 20 < len(read_events(path))


def test_a_restart_from_an_old_step_takes_an_older_fold(tmp_path: Path, small: None):
    path = tmp_path / "events.jsonl"
    log = EventLog(path, [FoldKeeper(path)])
    log.write(kinds.Start(step=0))
    for step in range(1, 301):
        write_step(log, step)
    log.write(kinds.Checkpoint(step=300))
    assert read_fold(path).max_step == 300
    files = sorted((tmp_path / "events_index").iterdir())
    assert len(files) > 2
    log.write(kinds.Start(step=150))
    write_step(log, 151)
    log.close()
    fold = read_fold(path)
    assert fold.totals.num_steps == 151
    assert fold.totals.num_recorded_steps == 301
    assert_same(fold, fold_events(decoded(read_events(path))))


@pytest.mark.extended(but_first=2)
@pytest.mark.parametrize("damage", ["cut", "changed", "of another record", "deep", "forged", "a link"])
def test_a_damaged_index_is_left_aside(tmp_path: Path, small: None, damage: str):
    path = tmp_path / "events.jsonl"
    write_record(path, random.Random(2))
    save_fold(path)
    file = max((tmp_path / "events_index").iterdir())
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    elif damage == "changed":
        file.write_bytes(file.read_bytes().replace(b'"num_steps": ', b'"num_steps": 9'))
    elif damage == "deep":
        write_forged(file, b"[" * 100_000)
    elif damage == "forged":
        content = json.loads(file.read_bytes().partition(b"\n")[2])
        content["fold"]["whole"] = [[1, "start"]]
        write_forged(file, json.dumps(content).encode())
    elif damage == "a link":
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
    else:
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join([*lines[5:], *lines[:5]]))
    assert_same(read_fold(path), fold_events(decoded(read_events(path))))


def test_an_event_of_the_driver_that_arrives_late_is_not_missed(tmp_path: Path, small: None):
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log.write(kinds.Start(step=0))
    for step in range(1, 40):
        write_step(log, step)
    late = json.dumps({"event": "recovery", "step": 10, "worker_bytes": path.stat().st_size}) + "\n"
    for step in range(11, 60):
        write_step(log, step)
    save_fold(path)
    assert (tmp_path / "events_index").is_dir()
    path.with_suffix(".driver.jsonl").write_text(late)
    assert_same(read_fold(path), fold_events(decoded(read_events(path))))
    assert read_fold(path).totals.num_steps == 59


def test_a_folder_that_cannot_be_written_has_no_index(tmp_path: Path, small: None):
    path = tmp_path / "events.jsonl"
    (tmp_path / "events_index").write_text("a file in the way")
    write_record(path, random.Random(3))
    save_fold(path)
    assert_same(read_fold(path), fold_events(decoded(read_events(path))))


def test_spikes_of_a_long_run_stay_and_memory_does_not_grow(small: None):
    events: list[Event] = [{"event": "start", "step": 0, "time": 0.0}]
    for step in range(1, 5001):
        loss = 99.0 if step == 1234 else -9.0 if step == 2345 else 1.0 + step / 5000
        events.append(a_step(step, loss=loss, seconds=0.5 if step == 3456 else 0.1))
    fold = fold_events(decoded(events))
    kept = [event.step for event in fold.events() if isinstance(event, Step)]
    assert {1234, 2345, 3456, 5000} <= set(kept)
    assert len(kept) < 80
    assert fold.totals.num_steps == 5000


def test_the_median_of_many_different_times_is_exact_to_four_digits(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(speed, "MAX_EXACT_TIMES", 100)
    draws = random.Random(0)
    times = [draws.lognormvariate(-1, 0.5) for _ in range(3001)]
    exact = speed.speed_of(made(a_step(step, seconds=time)) for step, time in enumerate(times[:99], 1))
    rounded = speed.speed_of(made(a_step(step, seconds=time)) for step, time in enumerate(times, 1))
    assert exact is not None
    assert rounded is not None
    assert exact.median_step_s == median(times[:99])
    assert rounded.median_step_s == pytest.approx(median(times), rel=5e-4)
    assert rounded.mean_step_s == pytest.approx(sum(times) / len(times))


def a_step(step: int, **fields: Any) -> Event:
    defaults = {"time": 100.0 + step, "loss": 1 / (step + 1), "samples": 4, "units": 8.0, "seconds": 0.25}
    return {"event": "step", "step": step, **defaults, **fields}


def write_step(log: EventLog, step: int) -> None:
    log.write(made(a_step(step)))


def write_forged(file: Path, data: bytes) -> None:
    file.write_bytes(hashlib.sha256(data).hexdigest().encode() + b"\n" + data)


def write_record(path: Path, draws: random.Random, num_sessions: int = 6) -> None:
    """Write a record with resumes, restarts, replayed steps and damaged lines, and save folds meanwhile."""
    log = EventLog(path, [FoldKeeper(path)])
    driver = DriverLog(path)
    step, time = 0, 0.0
    for session in range(num_sessions):
        step = draws.randint(max(0, step - 40), step)
        if session and draws.random() < 0.5:
            log.write(made({"event": "resume", "time": time, "step": step}))
        if session and draws.random() < 0.4:
            driver.write(made({"event": "failure", "time": time, "step": step, "final": False}))
            recovery = {
                "event": "recovery",
                "time": time,
                "step": step,
                "lost_steps": 3,
                "total_seconds": 1.5,
            }
            driver.write(made(recovery))
        is_damaged = session and draws.random() < 0.2
        if not is_damaged and draws.random() < 0.9:
            log.write(made({"event": "start", "time": time, "step": step, "workers": session + 1}))
        for _ in range(draws.randint(0, 80)):
            step += 1
            time += draws.choice((0.5, 1.0, 40.0, -3.0))
            log.write(*decoded(events_of_step(step, time, draws)))
            if draws.random() < 0.02:
                path.open("ab").write(b'{"event": "step", "step": 7, "los\n')
        time += 500.0
        if draws.random() < 0.7:
            log.write(made({"event": "end", "time": time, "status": "stopped", "reason": "", "seconds": 5.0}))
    log.close()
    driver.close()


def events_of_step(step: int, time: float, draws: random.Random) -> list[Event]:
    losses = (draws.random(), draws.random(), "nan", None)
    warm_up = {"warm_up": True} if draws.random() < 0.1 else {}
    loss = draws.choices(losses, (45, 45, 5, 5))[0]
    events: list[Event] = [a_step(step, time=time, loss=loss, seconds=draws.choice((0.25, 0.5)), **warm_up)]
    if step % 10 == 0:
        best = draws.random() < 0.3
        evaluation = {"loss": draws.random(), "metrics": {}, "seconds": 0.5, "best": best}
        memory = {"allocated": draws.random(), "reserved": draws.random()}
        events += [
            {"event": "evaluate", "time": time, "step": step, **evaluation},
            {"event": "epoch", "time": time, "step": step, "epoch": step // 10, "memory": memory},
            {"event": "bad_samples", "time": time, "step": step, "count": 2},
            {"event": "warning", "time": time, "kind": "test", "message": "a warning"},
        ]
    if step % 15 == 0:
        events.append({"event": "checkpoint", "time": time, "step": step, "seconds": 0.25, "stall": 0.125})
        events.append({"event": "upload", "time": time, "step": step})
    return events


def counted_events(recorded: list[Event]) -> list[Event]:
    """Return the events that count by the plain rule: each restart walks through all events before it."""
    counted: list[Event] = []
    last_step = None
    for event in recorded:
        kind, step = event["event"], event.get("step") or 0
        markers = [old["event"] for old in counted if old["event"] in ("start", "failure", "recovery")]
        has_restarted = markers[-1:] == ["start"] and markers.count("start") > 1
        if kind == "start" or (kind == "recovery" and not has_restarted):
            counted = [old for old in counted if old["event"] not in STEP_KINDS or old["step"] <= step]
            last_step = None if last_step is None else min(last_step, step)
        if kind == "step":
            if last_step is not None and step <= last_step:
                counted = [old for old in counted if old["event"] not in STEP_KINDS or old["step"] < step]
            last_step = step
        counted.append(event)
    return counted


def expected_figures(recorded: list[Event]) -> dict[str, Any]:
    """Return figures of a summary from lists of all events."""
    valid = [event for event in recorded if decode_event(event) is not None]
    counted = counted_events(valid)
    steps = [event for event in counted if event["event"] == "step"]
    all_steps = [event for event in valid if event["event"] == "step"]
    settled = [step for step in steps if "warm_up" not in step] or steps
    seconds = [step["seconds"] for step in settled]
    recoveries = [event for event in counted if event["event"] == "recovery"]
    memory = [event["memory"] for event in valid if event.get("memory")]
    evaluations = [event for event in counted if event["event"] == "evaluate"]
    best = [event["step"] for event in evaluations if event["best"]]
    uploads: list[int] = []
    for event in valid:
        if event["event"] == "start":
            uploads = [step for step in uploads if step <= event["step"]]
        uploads += [event["step"]] if event["event"] == "upload" else []
    useful = sum(step["seconds"] for step in steps)
    spent = sum(step["seconds"] for step in all_steps) + sum(event["total_seconds"] for event in recoveries)
    return {
        "steps": steps[-1]["step"] if steps else 0,
        "train_loss": steps[-1].get("loss") if steps else None,
        "epochs": len({event["epoch"] for event in counted if event["event"] == "epoch"}),
        "samples_per_second": 4 * len(settled) / sum(seconds) if seconds else None,
        "median_step_seconds": median(seconds) if seconds else None,
        "warm_up_steps": len(steps) - len(settled),
        "bad_samples": sum(event["count"] for event in counted if event["event"] == "bad_samples"),
        "peak_memory_bytes": max((each["allocated"] for each in memory), default=None),
        "uploaded_step": max(uploads, default=None),
        "best": best[-1] if best else None,
        "last": evaluations[-1]["step"] if evaluations else None,
        "lost_steps": max(len(all_steps) - len(steps), sum(event["lost_steps"] for event in recoveries)),
        "failures": sum(event["event"] == "failure" for event in valid),
        "goodput": useful / spent if spent else None,
        "seconds": sum(map(session_seconds, split_sessions(decoded(valid)))),
    }


def session_seconds(session: list[Any]) -> float:
    times = [event.time for event in session]
    ends = sum(event.seconds for event in session if event.EVENT == "end")
    return max(ends, max(times) - min(times))


def assert_equal(summary: dict[str, Any], expected: dict[str, Any], where: str) -> None:
    found = {name: summary[name] for name in expected}
    found |= {name: summary[name].get("step") for name in ("best", "last")}
    assert found == pytest.approx(expected, nan_ok=True), where


def assert_same(found: RunFold, expected: RunFold, where: str = "") -> None:
    """Check that two folds are equal to the bit, but for the extent, which a list of events has not."""
    lines = [
        json.dumps(replace(fold, extent=START), default=to_json, sort_keys=True) for fold in (found, expected)
    ]
    assert lines[0] == lines[1], where
    kinds = [event.EVENT for event in found.events()]
    assert "left_out" in kinds or "step" not in kinds
