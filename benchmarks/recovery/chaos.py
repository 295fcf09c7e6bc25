"""Hosts that are killed again and again: does the run survive, and what does each kill cost?

    python -m benchmarks.recovery.chaos --kills 100 --seed 0            a soak: random SIGKILLs over one
    run, any host, any moment
    python -m benchmarks.recovery.chaos --minutes 10 --every 60         one kill a minute: the goodput
    python -m benchmarks.recovery.chaos --kills 20 --plain 5            and plain TorchTrainer with
    FailureConfig for comparison
    python -m benchmarks.recovery.chaos --kills 50 --gpu --backend nccl  on GPUs
    python -m benchmarks.recovery.chaos --kills 100 --evolution         experts change; a third of the kills
    hits a change
    python -m benchmarks.recovery.chaos --kills 25 --dense --plain 5    a dense model, with --recovery live

The soak is compared with the same run undisturbed: losses and weights to the last bit, each sample
once per epoch, the same changes of experts, and no process, memory or file left behind. The cost of
a kill is the time until the next step is done; that of plain Ray Train comes from its own log of
steps. Kills in the phases "anywhere" and "recovery" come from outside, by the clock; the others come
from inside the process, at that moment. In a disturbed run hosts sleep a little in each step
(``--pace``): steps that fill all cores would measure how long a busy machine takes to start a
process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import mean

import torch

from benchmarks.processes import ROOT, kill, started, wait_until
from benchmarks.recovery.chaos_table import (
    Cost,
    by_gap,
    by_phase,
    by_rank,
    costs,
    goodput,
    recovery_table,
    spread_table,
    time_kept,
)
from benchmarks.support import benchmark_parser, header, markdown_table, publish
from harness.faults.chaos_runs import (
    DENSE_SETTINGS,
    EVOLVING,
    SAMPLES,
    SETTINGS,
    FinishedRun,
    Job,
    run_with_faults,
)
from harness.faults.fault_schedule import (
    DENSE_WEIGHTS,
    EVOLUTION_PHASES,
    EVOLUTION_WEIGHTS,
    PHASE_WEIGHTS,
    FaultFolder,
    FaultSchedule,
    Phase,
    kills_every,
    random_kills,
)
from harness.faults.run_checks import (
    check_experts,
    check_sample_counts,
    check_samples,
    check_steps,
    check_survivors,
)
from harness.hosts.cluster import RayCluster, local_cluster
from harness.runs.cli_runs import read_summary
from harness.runs.records import decoded
from orchestrator.record.experts.expert_changes import change_counts, expert_changes
from orchestrator.record.files.reading import of_kind
from orchestrator.types import MIB

STEPS_BEFORE = 20  # before the first kill
STEPS_AFTER = 40  # after the last kill
LONGEST_S = 3600.0
CALM_STEPS = 400  # of the undisturbed run that measures the step time
PLAIN_STEPS = 25  # between two kills of plain Ray Train: past a checkpoint, and warm
PLAIN_LONGEST_S = 240.0
SHOWN_PROCESSES = 6


def soak(
    arguments: argparse.Namespace, folder: Path, cluster: RayCluster | None
) -> tuple[FinishedRun, FinishedRun, list[str]]:
    """Run undisturbed, then under random kills.

    Returns both runs, and the differences that must not be.
    """
    steps = STEPS_BEFORE + STEPS_AFTER + arguments.kills * arguments.steps_per_kill
    job = job_of(arguments, steps, cluster)
    calm = run_with_faults(replace(job, pace_s=0.0), folder / "calm", FaultSchedule(), timeout=LONGEST_S)
    step_ms = seconds_per_step(calm) * 1000
    say(f"undisturbed: {steps} steps, {step_ms:.1f} ms each; {calm.leftovers or 'nothing left behind'}")
    schedule = random_kills(
        arguments.seed,
        arguments.kills,
        hosts=arguments.hosts,
        first=STEPS_BEFORE,
        last=steps - STEPS_AFTER,
        phase_weights=phase_weights(arguments),
    )
    ended = run_with_faults(job, folder / "soak", schedule, timeout=LONGEST_S)
    restarted = check_survivors(FaultFolder.of_run(ended.run_dir), arguments.hosts)
    experts = check_experts(ended.events, calm.events)
    return calm, ended, [*calm.leftovers, *ended.problems(calm, steps), *restarted, *experts]


def phase_weights(arguments: argparse.Namespace) -> Mapping[Phase, float]:
    if arguments.dense:
        return DENSE_WEIGHTS
    return EVOLUTION_WEIGHTS if arguments.evolution else PHASE_WEIGHTS


def kill_by_clock(
    arguments: argparse.Namespace, folder: Path, cluster: RayCluster | None
) -> tuple[FinishedRun, FinishedRun, list[str]]:
    """Run for about so many minutes, with a kill every so many seconds."""
    calm = run_with_faults(
        job_of(arguments, CALM_STEPS, cluster), folder / "calm", FaultSchedule(), timeout=LONGEST_S
    )
    steps = round(60 * arguments.minutes / seconds_per_step(calm))
    schedule = kills_every(
        arguments.seed, arguments.every, hosts=arguments.hosts, until=60 * arguments.minutes
    )
    ended = run_with_faults(job_of(arguments, steps, cluster), folder / "clock", schedule, timeout=LONGEST_S)
    wrong = [
        *check_steps(ended.events, steps),
        *check_sample_counts(ended.events, SAMPLES),
        *check_samples(ended.events, FaultFolder.of_run(ended.run_dir), SAMPLES),
        *ended.leftovers,
        *ended.leaks(calm),
    ]
    if ended.exit_code:
        wrong.append(f"code {ended.exit_code}")
    return calm, ended, wrong


def job_of(arguments: argparse.Namespace, steps: int, cluster: RayCluster | None) -> Job:
    flags = ("--backend", arguments.backend)
    if cluster is not None:
        flags += ("--gpu-mode", "multi_gpu")
    if arguments.evolution:
        flags += tuple(EVOLVING)
    return Job(
        steps,
        arguments.hosts,
        arguments.spares,
        arguments.snapshot_every,
        arguments.checkpoint_every,
        extra=flags,
        settings=tuple(DENSE_SETTINGS if arguments.dense else SETTINGS),
        cluster=cluster,
        pace_s=arguments.pace,
    )


@contextmanager
def gpu_cluster(arguments: argparse.Namespace) -> Iterator[RayCluster | None]:
    """With ``--gpu``, a node with a GPU for each host and spare; they share one where there are fewer."""
    if not arguments.gpu:
        yield None
        return
    num_gpus = arguments.hosts + arguments.spares
    if torch.cuda.device_count() < num_gpus:
        os.environ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
    with local_cluster(cpus=2 * num_gpus, gpus=num_gpus) as cluster:
        yield cluster


def seconds_per_step(calm: FinishedRun) -> float:
    steps = of_kind(calm.events, "step")
    if calm.exit_code or len(steps) < 2:
        raise RuntimeError(f"the undisturbed run ended with code {calm.exit_code}:\n{calm.output[-3000:]}")
    return (steps[-1]["time"] - steps[0]["time"]) / (len(steps) - 1)


# --- plain Ray Train


def plain_steps(folder: Path) -> list[dict[str, float]]:
    path = folder / "steps.jsonl"
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def plain_kills(
    folder: Path, ranks: Sequence[int], arguments: argparse.Namespace
) -> list[tuple[float, float]]:
    """Return the seconds from each kill of a rank to the next step done, and to the first step
    that is new."""
    folder.mkdir(parents=True)
    script = str(ROOT / "benchmarks" / "recovery" / "plain_chaos.py")
    flags = ["--workers", str(arguments.hosts), "--pace", str(arguments.pace)]
    command = [sys.executable, script, str(folder), *flags, *(["--dense"] if arguments.dense else [])]
    times: list[tuple[float, float]] = []
    with started(command, folder) as process:
        for rank in ranks:
            wait_for_steps(process, folder)
            next_s, new_s = plain_kill(process, folder, rank)
            times.append((next_s, new_s))
            say(
                f"plain TorchTrainer, rank {rank} killed: next step after {next_s:.2f} s, "
                f"past it after {new_s:.2f} s"
            )
    return times


def wait_for_steps(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Wait until plain Ray Train has done so many more steps."""
    wanted = len(plain_steps(folder)) + PLAIN_STEPS
    wait_until(lambda: len(plain_steps(folder)) >= wanted, process, folder, timeout_s=PLAIN_LONGEST_S)


def plain_kill(process: subprocess.Popen[bytes], folder: Path, rank: int) -> tuple[float, float]:
    """Kill a rank of plain Ray Train, which restarts the whole group: the next step has another
    process id."""
    steps = plain_steps(folder)
    old_pids = {step["pid"] for step in steps}
    highest = max(step["step"] for step in steps)

    def new_steps() -> list[dict[str, float]]:
        return [step for step in plain_steps(folder) if step["pid"] not in old_pids]

    killed = kill(int((folder / f"worker_{rank}.pid").read_text(encoding="utf-8")), process)
    wait_until(
        lambda: any(step["step"] > highest for step in new_steps()),
        process,
        folder,
        timeout_s=PLAIN_LONGEST_S,
    )
    later = new_steps()
    first_new = next(step["time"] for step in later if step["step"] > highest)
    return later[0]["time"] - killed, first_new - killed


# --- the report


def report(
    arguments: argparse.Namespace,
    calm: FinishedRun,
    ended: FinishedRun,
    wrong: Sequence[str],
    plain: Sequence[tuple[float, float]],
) -> str:
    kills = costs(ended.fired, ended.events)
    parts = [
        header(f"{'Hosts of a dense model' if arguments.dense else 'Expert hosts'}, killed", arguments),
        verdict(ended, wrong),
        "## Seconds\n\n" + spread_table(kills, [next_s for next_s, _ in plain]),
        "## Goodput\n\n" + goodput_table(ended, kills, arguments.every, plain),
        "## By phase\n\n" + by_phase(kills),
        "## By victim\n\n" + by_rank(kills),
        "## By the time since the kill before\n\n" + by_gap(kills),
        "## What processes hold\n\n" + holdings(calm, ended),
        "## Every kill\n\n" + recovery_table(kills),
    ]
    return "\n".join(parts)


def verdict(ended: FinishedRun, wrong: Sequence[str]) -> str:
    summary = read_summary(ended.run_dir)
    names = ("status", "steps", "workers", "failures", "recoveries", "lost_steps", "goodput", "seconds")
    words = ", ".join(f"{name} {summary.get(name)}" for name in names)
    checks = "\n".join(f"- WRONG: {word}" for word in wrong) or "Nothing wrong, nothing left behind."
    in_changes = sum(fired.phase in EVOLUTION_PHASES for fired in ended.fired)
    counts = change_counts(expert_changes(decoded(ended.events)))
    changes = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    experts = f"Experts: {changes}; {in_changes} kills hit a change.\n\n" if counts else ""
    return f"{len(ended.fired)} kills; the run's own summary: {words}.\n\n{experts}{checks}\n"


def goodput_table(
    ended: FinishedRun, kills: Sequence[Cost], every: float, plain: Sequence[tuple[float, float]]
) -> str:
    """Return the goodput of this run, and for one kill in so many seconds by the mean cost of a kill."""
    rows: list[tuple[str, float | None]] = [
        ("the run's own (summary.json)", read_summary(ended.run_dir).get("goodput")),
        ("time in steps that count, of all time", goodput(ended.events)),
        ("time not lost between a kill and being past it", time_kept(kills, ended.events)),
    ]
    ours = [cost.back for cost in kills if cost.back is not None and cost.fired.phase != "recovery"]
    theirs = [new_s for _, new_s in plain]
    for name, seconds in (("orchestrator", ours), ("plain TorchTrainer", theirs)):
        if seconds:
            label = f"{name}, at a kill every {every:g} s: 1 − {mean(seconds):.2f} / {every:g}"
            rows.append((label, max(0.0, 1 - mean(seconds) / every)))
    cells = [[name, "–" if part is None else f"{part:.3f}"] for name, part in rows]
    return markdown_table(["goodput", "part"], cells)


def holdings(calm: FinishedRun, ended: FinishedRun) -> str:
    """Return the resources of the processes that lived through most kills.

    Each cell shows the most that such a process held in the undisturbed run, and what this one held
    at the end.
    """
    rows: list[list[object]] = []
    for process in ended.watch.holdings([fired.time for fired in ended.fired])[:SHOWN_PROCESSES]:
        is_driver = process.pid == ended.watch.root
        last = process.last
        files = calm.watch.peak("files", is_driver)
        threads = calm.watch.peak("threads", is_driver)
        resident = calm.watch.peak("resident", is_driver)
        rows.append(
            [
                "driver" if is_driver else f"host {process.pid}",
                f"{process.seconds:.0f}",
                process.faults,
                f"{files} → {last.files}",
                f"{threads} → {last.threads}",
                f"{resident / MIB:.0f} → {last.resident / MIB:.0f}",
            ]
        )
    return markdown_table(["who", "seconds", "kills lived through", "files", "threads", "MiB"], rows)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parse() -> argparse.Namespace:
    parser = benchmark_parser(__doc__)
    parser.add_argument(
        "--kills", type=int, default=100, help="random kills over one run, in place of --minutes"
    )
    parser.add_argument("--minutes", type=float, help="about so long, with a kill --every so many seconds")
    parser.add_argument("--every", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plain", type=int, default=0, help="kills of plain Ray Train")
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
    parser.add_argument(
        "--evolution", action="store_true", help="experts change, and a third of the kills hits a change"
    )
    parser.add_argument("--dense", action="store_true", help="a dense language model, with --recovery live")
    parser.add_argument("--gpu", action="store_true", help="hosts on GPUs; on one GPU they share it")
    parser.add_argument("--backend", default="gloo", choices=("gloo", "nccl"))
    parser.add_argument("--folder", type=Path, help="where the runs are kept; default: a temporary one")
    return parser.parse_args()


def measure(arguments: argparse.Namespace, folder: Path, cluster: RayCluster | None) -> tuple[str, list[str]]:
    """Return the report, and what went wrong."""
    run = kill_by_clock if arguments.minutes else soak
    calm, ended, wrong = run(arguments, folder, cluster)
    ranks = [fired.rank for fired in ended.fired if fired.rank is not None] or [1]
    plain_ranks = (ranks * arguments.plain)[: arguments.plain]
    plain: list[tuple[float, float]] = []
    if plain_ranks:
        plain = plain_kills(folder / "plain", plain_ranks, arguments)
    return report(arguments, calm, ended, wrong, plain), wrong


def main() -> None:
    arguments = parse()
    with tempfile.TemporaryDirectory(prefix="chaos-") as name, gpu_cluster(arguments) as cluster:
        text, wrong = measure(arguments, (arguments.folder or Path(name)).resolve(), cluster)
    publish(text, arguments.out)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
