"""A run with a long record: time and memory of resume, exit, report and watch.

    python -m benchmarks.storage.long_records [--lines 200000 2000000] [--folder DIR] [--skip report watch]
    [--out FILE]

A short run on the digits writes a real record. Copies of its events make it as long as asked, with steps
before those of the run: the newest checkpoint stays the newest state. Then each command runs in a process of
its own: ``resume`` until a new step is recorded, SIGTERM until its process has ended, ``report`` and ``watch
--once``. The memory is the peak of the process. Rows with "first time" come before a fold of the record has
been saved, which the run that wrote the record would have done.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.support import benchmark_parser, header, markdown_table, publish
from orchestrator.types import MIB

NUM_STEPS = 400
LONGEST_S = 3600
COPIED = {"step", "phases", "load", "monitor", "evaluate", "epoch"}
COMMANDS = ("report", "watch")


@dataclass(frozen=True)
class Cost:
    """Seconds of a command, and the peak memory of its process."""

    name: str
    seconds: float
    peak_bytes: float


def main(argv: Sequence[str] | None = None) -> int:
    parser = benchmark_parser(__doc__)
    parser.add_argument(
        "--lines", type=int, nargs="+", default=[200_000, 2_000_000], help="lengths of records"
    )
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help="steps of the short run")
    parser.add_argument("--skip", nargs="*", choices=COMMANDS, default=[], help="commands to leave out")
    parser.add_argument("--rounds", type=int, default=2, help="times that everything is measured")
    parser.add_argument("--folder", type=Path, help="a folder for the records; a temporary one by default")
    options = parser.parse_args(argv)
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        short = Path(folder) / "short"
        _run(["train", "--task", "digits", "--max-steps", str(options.steps), "--run-dir", str(short)])
        for num_lines in options.lines:
            run_dir = Path(folder) / f"lines_{num_lines}"
            size = lengthen(short, run_dir, num_lines)
            for number in range(1, options.rounds + 1):
                for cost in measure(run_dir, number, options.skip):
                    peak = f"{cost.peak_bytes / MIB:.0f}"
                    rows.append(
                        [f"{num_lines:,}", f"{size / MIB:.0f}", cost.name, f"{cost.seconds:.1f}", peak]
                    )
                    print(*rows[-1], file=sys.stderr, flush=True)
            shutil.rmtree(run_dir)
    table = markdown_table(("lines", "record MiB", "command", "seconds", "peak memory MiB"), rows)
    publish(header("Long records", options) + table, options.out)
    return 0


def lengthen(short: Path, run_dir: Path, num_lines: int) -> int:
    """Copy a run folder with ``num_lines`` more events before its first step. Return its record's bytes."""
    shutil.copytree(short, run_dir)
    lines = (short / "events.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    events = [json.loads(line) for line in lines]
    copied = [event for event in events if event["event"] in COPIED]
    num_steps = max(event["step"] for event in copied)
    begin, last = events[0]["time"], events[-1]["time"]
    rounds = -(-num_lines // len(copied))
    first = sum(event["event"] != "step" for event in events[: events.index(copied[0])]) or 1
    with (run_dir / "events.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(lines[:first])
        written = 0
        for back in range(rounds, 0, -1):
            for event in copied[: num_lines - written]:
                moved = {
                    "step": event["step"] - back * num_steps,
                    "time": event["time"] - back * (last - begin),
                }
                file.write(json.dumps(event | moved) + "\n")
                written += 1
        file.writelines(lines[first:])
    return (run_dir / "events.jsonl").stat().st_size


def measure(run_dir: Path, number: int, skipped: Sequence[str]) -> list[Cost]:
    """Return the costs of each command on a run folder, in the order in which they run."""
    costs = _resume_and_stop(run_dir, number)
    if "report" not in skipped:
        costs.append(_timed(f"report, {_nth(number)}", ["report", str(run_dir)]))
    if "watch" not in skipped:
        costs.append(_timed(f"watch --once, {_nth(number)}", ["watch", str(run_dir), "--once"]))
    return costs


def _resume_and_stop(run_dir: Path, number: int) -> list[Cost]:
    path = run_dir / "events.jsonl"
    size = path.stat().st_size
    began_s = time.perf_counter()
    process = _start(["resume", str(run_dir), "--max-steps", "100000000"])
    while not _has_step(path, size):
        if process.poll() is not None:
            raise RuntimeError(f"the resumed run ended with {process.returncode}")
        time.sleep(0.02)
    resumed_s = time.perf_counter()
    process.send_signal(signal.SIGTERM)
    peak = _wait(process)
    ended_s = time.perf_counter()
    return [
        Cost(f"resume to first step, {_nth(number)}", resumed_s - began_s, peak),
        Cost(f"SIGTERM to exit, {_nth(number)}", ended_s - resumed_s, peak),
    ]


def _has_step(path: Path, begin: int) -> bool:
    """Return whether a step was recorded behind the byte ``begin``."""
    with path.open("rb") as file:
        file.seek(begin)
        return b'"event": "step"' in file.read()


def _timed(name: str, arguments: Sequence[str]) -> Cost:
    began_s = time.perf_counter()
    process = _start(arguments)
    peak = _wait(process)
    return Cost(name, time.perf_counter() - began_s, peak)


def _run(arguments: Sequence[str]) -> None:
    process = _start(arguments)
    _wait(process)
    if process.returncode:
        raise RuntimeError(f"orchestrator {arguments[0]} ended with {process.returncode}")


def _start(arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "orchestrator", *arguments]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def _wait(process: subprocess.Popen[bytes]) -> float:
    """Wait for the end of a process. Return the peak of its memory in bytes."""
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return usage.ru_maxrss * 1024


def _nth(number: int) -> str:
    return "first time" if number == 1 else "again"


if __name__ == "__main__":
    sys.exit(main())
