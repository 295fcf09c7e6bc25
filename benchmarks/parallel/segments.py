"""Time that expert hosts lose between segments, and while their driver is paused.

Two hosts of one core each train steps that take 20 ms and 3 s, asleep (``paced_task.py``). Each host
writes when its steps began and ended. *Lost between segments*: what the gap between two steps is
longer at the end of a segment than inside one, as a share of all time. *Lost in the pause*: what the
gaps between steps are longer than usual, while the driver is stopped (SIGSTOP) for five seconds and
for two seconds after that.

``--before DIR`` measures another checkout in alternation.

    python -m benchmarks.parallel.segments [--rounds 3] [--before DIR] [--out FILE]
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks.parallel.expert_parallel import ONE_THREAD
from benchmarks.processes import ROOT, end, tail
from benchmarks.support import benchmark_parser, header, markdown_table, publish

PAUSE_S = 5.0
_AFTER_PAUSE_S = 2.0
_SETTLING_S = 6.0
"""Time after the first step that is left out: segments are short until the driver knows a step."""
_LONGEST_S = 240.0


@dataclass(frozen=True)
class Case:
    """One kind of run."""

    name: str
    task: str
    steps: int
    pause: bool = False
    flags: tuple[str, ...] = ()


CASES = (
    Case("steps of 20 ms: lost between segments", "Steps20ms", 1000),
    Case("steps of 3 s: lost between segments", "Steps3s", 10),
    Case("steps of 20 ms, driver paused: lost in the pause", "Steps20ms", 900, pause=True),
    Case(
        "the same without snapshots",
        "Steps20ms",
        900,
        pause=True,
        flags=("--snapshot-every", "0"),
    ),
    Case("steps of 3 s, driver paused: lost in the pause", "Steps3s", 10, pause=True),
)


@dataclass(frozen=True)
class Gap:
    """The time between two steps of a host."""

    begun: float
    seconds: float
    ends_segment: bool


def measure(case: Case, tree: Path) -> float:
    """Return the lost share of the time, or the lost seconds of a pause."""
    with tempfile.TemporaryDirectory(prefix="segments-") as name:
        folder = Path(name)
        paused_at = run(case, tree, folder)
        hosts = [gaps(path) for path in sorted((folder / "run").glob("steps-*.jsonl"))]
    if case.pause:
        return max(lost_in_pause(each, paused_at) for each in hosts)
    return max(lost_between_segments(each) for each in hosts)


def run(case: Case, tree: Path, folder: Path) -> float:
    """Run a case to its end. Return when the driver was paused, or 0."""
    shutil.copy(Path(__file__).with_name("paced_task.py"), folder)
    environment = os.environ | {"PYTHONPATH": f"{tree}{os.pathsep}{folder}"}
    with (folder / "output.txt").open("wb") as output:
        process = subprocess.Popen(
            command(case, folder / "run"),
            cwd=tree,
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    paused_at = 0.0
    try:
        if case.pause:
            wait_for_steps(process, folder)
            time.sleep(_SETTLING_S)
            paused_at = pause(process)
        code = process.wait(_LONGEST_S)
    finally:
        end(process, [])
    if code != 0:
        raise RuntimeError(f"the run ended with code {code}:\n{tail(folder)}")
    return paused_at


def command(case: Case, run_dir: Path) -> list[str]:
    flags = {
        "--task": f"paced_task:{case.task}",
        "--run-dir": run_dir,
        "--max-steps": case.steps,
        "--epochs": 100_000,
        "--workers": 2,
        "--batch-size": 32,
        "--evaluate-every": 100_000,
        "--checkpoint-every": 100_000,
        "--log-every": 10,
        "--gpu-mode": "cpu",
        "--parallel-strategy": "expert_parallel",
    }
    words = [str(part) for flag in flags.items() for part in flag]
    trainer = [sys.executable, "-m", "orchestrator", "train"]
    return [*ONE_THREAD, *trainer, *words, "--trackers", "--no-monitor-gpu", *case.flags]


def wait_for_steps(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Wait until the hosts have finished a segment."""
    deadline = time.monotonic() + _LONGEST_S
    while not list((folder / "run").glob("steps-*.jsonl")):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the hosts did not begin to train:\n{tail(folder)}")
        time.sleep(0.05)


def pause(process: subprocess.Popen[bytes]) -> float:
    """Stop the driver for a while. Return when."""
    paused_at = time.time()
    process.send_signal(signal.SIGSTOP)
    time.sleep(PAUSE_S)
    process.send_signal(signal.SIGCONT)
    return paused_at


def gaps(path: Path) -> list[Gap]:
    """Return the gaps between the steps of a host, without those of the first seconds."""
    segments = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    steps = [
        (begun, ended, step is segment[-1])
        for segment in segments
        for step in segment
        for begun, ended in [step]
    ]
    settled = [step for step in steps if step[0] > steps[0][0] + _SETTLING_S]
    return [Gap(before[1], after[0] - before[1], before[2]) for before, after in pairwise(settled)]


def lost_between_segments(measured: list[Gap]) -> float:
    """Return the share of the time that the ends of segments cost."""
    usual = statistics.median(gap.seconds for gap in measured)
    lost = sum(max(0.0, gap.seconds - usual) for gap in measured if gap.ends_segment)
    return lost / (measured[-1].begun - measured[0].begun)


def lost_in_pause(measured: list[Gap], paused_at: float) -> float:
    """Return the seconds that the gaps were longer than usual, from the beginning of the pause on."""
    usual = statistics.median(gap.seconds for gap in measured)
    until = paused_at + PAUSE_S + _AFTER_PAUSE_S
    inside = [gap for gap in measured if paused_at < gap.begun + gap.seconds and gap.begun < until]
    return sum(max(0.0, gap.seconds - usual) for gap in inside)


def cell(case: Case, values: list[float]) -> str:
    """Return the median and the range, as a share or in seconds."""
    form, unit = (".2f", " s") if case.pause else (".2%", "")
    median = statistics.median(values)
    return f"{median:{form}} ({min(values):{form}}–{max(values):{form}}){unit}"


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--before", type=Path, help="another checkout to compare with")
    parser.add_argument("--cases", nargs="+", type=int, default=list(range(len(CASES))))
    arguments = parser.parse_args()
    trees = {"before": arguments.before, "now": ROOT} if arguments.before else {"now": ROOT}
    cases = [CASES[number] for number in arguments.cases]
    results = {(case, name): [] for case in cases for name in trees}
    for _ in range(arguments.rounds):
        for case in cases:
            for name, tree in trees.items():
                results[case, name].append(measure(case, tree))
                print(f"{case.name}, {name}: {results[case, name][-1]:.4f}", flush=True)
    rows = [[case.name, *(cell(case, results[case, name]) for name in trees)] for case in cases]
    text = header("Time lost between segments and in a pause of the driver", arguments)
    publish(text + markdown_table(["median (range)", *trees], rows), arguments.out)


if __name__ == "__main__":
    main()
