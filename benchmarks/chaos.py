"""Expert hosts that are killed again and again: does the run shrug, and what does each kill cost?

    python -m benchmarks.chaos --kills 100 --seed 0            a soak: random SIGKILLs over one run, any host, any moment
    python -m benchmarks.chaos --minutes 10 --every 60         one kill a minute: the goodput
    python -m benchmarks.chaos --kills 20 --plain 5            and plain TorchTrainer with FailureConfig beside it

The soak is compared with the same run left in peace: losses and weights to the last bit, each sample once per epoch, and nothing
left behind. A kill's cost is the time until the next step is done; the plain peer's is measured from its own log of steps.
Kills in the phase "anywhere" and "recovery" come from outside, by the clock; the others from inside the process, at that moment.
Hosts sleep a little in each step of a run under fire (``--pace``): steps that fill all cores would measure how long a crowded
machine takes to start a process.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean

import psutil

from benchmarks.chaos_table import (
    Cost,
    by_gap,
    by_phase,
    by_rank,
    costs,
    goodput,
    kept,
    recovery_table,
    spread_table,
)
from benchmarks.ray_start import started as plain_started
from benchmarks.ray_start import tail
from benchmarks.support import header, markdown_table, write_result
from orchestrator.record.events import of_kind
from orchestrator.types import MIB
from tests.support.chaos_runs import ROOT, SAMPLES, Ended, Job, disturbed
from tests.support.faults import Post, Schedule, kills_every, random_kills
from tests.support.run_checks import told, wrong_counts, wrong_samples, wrong_steps

FIRST, REST = 20, 40  # steps before the first kill, and after the last
LONGEST_S = 3600.0
PLAIN_STEPS = 25  # between two kills of the plain peer: past a checkpoint, and warm
PLAIN_LONGEST_S = 240.0
LIVES = 6


def soak(arguments: argparse.Namespace, folder: Path) -> tuple[Ended, Ended, list[str]]:
    """The run under random kills, and what is wrong with it against the same one left in peace."""
    steps = FIRST + REST + arguments.kills * arguments.steps_per_kill
    job = job_of(arguments, steps)
    calm = disturbed(replace(job, pace=0.0), folder / "calm", Schedule(), timeout=LONGEST_S)
    say(
        f"left in peace: {steps} steps, {seconds_per_step(calm) * 1000:.1f} ms each; {calm.left or 'nothing left behind'}"
    )
    schedule = random_kills(
        arguments.seed, arguments.kills, hosts=arguments.hosts, first=FIRST, last=steps - REST
    )
    ended = disturbed(job, folder / "soak", schedule, timeout=LONGEST_S)
    return calm, ended, [*calm.left, *ended.wrong(calm, steps)]


def by_the_clock(arguments: argparse.Namespace, folder: Path) -> tuple[Ended, Ended, list[str]]:
    """The run for about so many minutes, with a kill every so many seconds."""
    calm = disturbed(job_of(arguments, 400), folder / "calm", Schedule(), timeout=LONGEST_S)
    steps = round(60 * arguments.minutes / seconds_per_step(calm))
    schedule = kills_every(
        arguments.seed, arguments.every, hosts=arguments.hosts, until=60 * arguments.minutes
    )
    ended = disturbed(job_of(arguments, steps), folder / "clock", schedule, timeout=LONGEST_S)
    checks = [wrong_steps(ended.events, steps), wrong_counts(ended.events, SAMPLES)]
    checks.append(wrong_samples(ended.events, Post.beside(ended.run_dir), SAMPLES))
    words = [*(word for check in checks for word in check), *ended.left, *ended.leaking(calm)]
    return calm, ended, [*words, *([f"code {ended.code}"] if ended.code else [])]


def job_of(arguments: argparse.Namespace, steps: int) -> Job:
    return Job(
        steps,
        arguments.hosts,
        arguments.spares,
        arguments.snapshot_every,
        arguments.checkpoint_every,
        pace=arguments.pace,
    )


def seconds_per_step(calm: Ended) -> float:
    steps = of_kind(calm.events, "step")
    if calm.code or len(steps) < 2:
        raise RuntimeError(f"the run left in peace ended with code {calm.code}:\n{calm.output[-3000:]}")
    return (steps[-1]["time"] - steps[0]["time"]) / (len(steps) - 1)


# --- the plain peer


def plain_steps(folder: Path) -> list[dict[str, float]]:
    path = folder / "steps.jsonl"
    return (
        [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
        if path.exists()
        else []
    )


def plain_kills(folder: Path, ranks: Sequence[int], workers: int, pace: float) -> list[tuple[float, float]]:
    """Seconds from each kill of a rank to the next step done, and to the first step that is new."""
    folder.mkdir(parents=True)
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "plain_chaos.py"),
        str(folder),
        "--workers",
        str(workers),
        "--pace",
        str(pace),
    ]
    found: list[tuple[float, float]] = []
    with plain_started(command, folder) as process:
        for rank in ranks:
            done = len(plain_steps(folder))
            wait(process, folder, lambda done=done: len(plain_steps(folder)) >= done + PLAIN_STEPS)
            found.append(plain_kill(process, folder, rank))
            say(
                f"plain TorchTrainer, rank {rank} killed: next step after {found[-1][0]:.2f} s, past it after {found[-1][1]:.2f} s"
            )
    return found


def plain_kill(process: subprocess.Popen[bytes], folder: Path, rank: int) -> tuple[float, float]:
    """A killed worker ends the whole group: a step of another process is one of the next."""
    steps = plain_steps(folder)
    lives, highest = {step["pid"] for step in steps}, max(step["step"] for step in steps)
    pid = int((folder / f"worker_{rank}.pid").read_text(encoding="utf-8"))
    if os.getsid(pid) != process.pid and process.pid not in [
        parent.pid for parent in psutil.Process(pid).parents()
    ]:
        raise RuntimeError(f"{pid} is no process of the plain peer: not killed")
    killed = time.time()
    os.kill(pid, signal.SIGKILL)
    wait(
        process,
        folder,
        lambda: any(step["pid"] not in lives and step["step"] > highest for step in plain_steps(folder)),
    )
    later = [step for step in plain_steps(folder) if step["pid"] not in lives]
    return later[0]["time"] - killed, next(step["time"] for step in later if step["step"] > highest) - killed


def wait(process: subprocess.Popen[bytes], folder: Path, until: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PLAIN_LONGEST_S
    while not until():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the plain peer came to nothing:\n{tail(folder)}")
        time.sleep(0.01)


# --- what is printed


def report(
    arguments: argparse.Namespace,
    calm: Ended,
    ended: Ended,
    wrong: Sequence[str],
    plain: Sequence[tuple[float, float]],
) -> str:
    found = costs(ended.fired, ended.events)
    parts = [
        header("Expert hosts, killed", arguments),
        verdict(ended, wrong),
        "## Seconds\n\n" + spread_table(found, [first for first, _ in plain]),
        "## Goodput\n\n" + goodput_table(ended, found, arguments.every, plain),
        "## By phase\n\n" + by_phase(found),
        "## By victim\n\n" + by_rank(found),
        "## By the time since the kill before\n\n" + by_gap(found),
        "## What processes hold\n\n" + holdings(calm, ended),
        "## Every kill\n\n" + recovery_table(found),
    ]
    return "\n".join(parts)


def verdict(ended: Ended, wrong: Sequence[str]) -> str:
    summary = told(ended.run_dir)
    named = ("status", "steps", "workers", "failures", "recoveries", "lost_steps", "goodput", "seconds")
    words = ", ".join(f"{name} {summary.get(name)}" for name in named)
    checks = "\n".join(f"- WRONG: {word}" for word in wrong) or "Nothing wrong, nothing left behind."
    return f"{len(ended.fired)} kills; the run's own summary: {words}.\n\n{checks}\n"


def goodput_table(
    ended: Ended, found: Sequence[Cost], every: float, plain: Sequence[tuple[float, float]]
) -> str:
    """As it was, and for one kill in so many seconds by the mean of what a kill cost."""
    rows: list[list[object]] = [["the run's own (summary.json)", told(ended.run_dir).get("goodput")]]
    rows.append(["time in steps that count, of all time", goodput(ended.events)])
    rows.append(["time not lost between a kill and being past it", kept(found, ended.events)])
    backs = [cost.back for cost in found if cost.back is not None and cost.fired.phase != "recovery"]
    for name, seconds in (("orchestrator", backs), ("plain TorchTrainer", [past for _, past in plain])):
        if seconds:
            rows.append(
                [
                    f"{name}, at a kill every {every:g} s: 1 − {mean(seconds):.2f} / {every:g}",
                    max(0.0, 1 - mean(seconds) / every),
                ]
            )
    return markdown_table(
        ["goodput", "part"], [[name, "–" if part is None else f"{part:.3f}"] for name, part in rows]
    )


def holdings(calm: Ended, ended: Ended) -> str:
    """Those that lived through most kills, with the most that such a process held in the run left in peace, and what it held at the end."""
    rows: list[list[object]] = []
    for one in ended.watch.held([one.time for one in ended.fired])[:LIVES]:
        driver, last = one.pid == ended.watch.root, one.last
        files, threads, resident = (
            calm.watch.most(what, driver) for what in ("files", "threads", "resident")
        )
        held = [
            f"{files} → {last.files}",
            f"{threads} → {last.threads}",
            f"{resident / MIB:.0f} → {last.resident / MIB:.0f}",
        ]
        rows.append(["driver" if driver else f"host {one.pid}", f"{one.seconds:.0f}", one.faults, *held])
    return markdown_table(["who", "seconds", "kills lived through", "files", "threads", "MiB"], rows)


def say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--kills", type=int, default=100, help="random kills over one run, in place of --minutes"
    )
    parser.add_argument("--minutes", type=float, help="about so long, with a kill --every so many seconds")
    parser.add_argument("--every", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plain", type=int, default=0, help="kills of the plain peer")
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--spares", type=int, default=1)
    parser.add_argument("--steps-per-kill", type=int, default=60)
    parser.add_argument(
        "--pace",
        type=float,
        default=0.05,
        help="seconds that a host sleeps in each step, as if a GPU worked for it",
    )
    parser.add_argument("--snapshot-every", type=int, default=10)
    parser.add_argument("--checkpoint-every", type=int, default=50)
    parser.add_argument("--folder", type=Path, help="where the runs are kept; default: a temporary one")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def measured(arguments: argparse.Namespace, folder: Path) -> tuple[str, list[str]]:
    calm, ended, wrong = by_the_clock(arguments, folder) if arguments.minutes else soak(arguments, folder)
    ranks = [one.rank for one in ended.fired if one.rank is not None] or [1]
    killed = (ranks * arguments.plain)[: arguments.plain]
    plain = plain_kills(folder / "plain", killed, arguments.hosts, arguments.pace) if killed else []
    return report(arguments, calm, ended, wrong, plain), wrong


def main() -> None:
    arguments = parsed()
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        text, wrong = measured(arguments, (arguments.folder or Path(name)).resolve())
    print(text)
    write_result(arguments.out, text)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
