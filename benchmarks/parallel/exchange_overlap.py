"""Steps of expert hosts over NCCL: their time, and how much of the exchange is hidden behind products.

Rows of the exchange counted or bounded, in one chunk or two. The decoder of ``whole_step`` with two layers,
its experts spread over the hosts. Ranks may share a GPU, if NCCL allows it (``NCCL_MULTI_RANK_GPU_ENABLE=1``
from version 2.30 on): then times say nothing of several GPUs, and the trace still shows what runs at once.

    python -m benchmarks.parallel.exchange_overlap [--ranks 2] [--steps 20] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch

from benchmarks.parallel.kernel_overlap import Overlap, kernels_of
from benchmarks.steps.whole_step import SMALL, Sizes
from benchmarks.support import benchmark_parser, header, markdown_table, publish
from experts.balance import moe_layers
from experts.hosts.group import GroupFactory
from experts.hosts.membership import GroupMembership
from experts.model import place
from experts.tokens.bounds import ExchangeBounds
from orchestrator.config.settings import Config
from orchestrator.measure.timed_steps import step_seconds
from orchestrator.record.files.log import ignore_event
from orchestrator.tasks.load import load_task
from orchestrator.train.data.loading import LoaderOptions
from orchestrator.train.data.opening import open_feed
from orchestrator.train.device.clock import PhaseClock
from orchestrator.train.device.precision import Precision
from orchestrator.train.group.stores import file_store
from orchestrator.train.group.world import World, recoverable_world
from orchestrator.train.optim.named_optimizers import build_named_optimizer
from orchestrator.train.optim.optimizer import ScheduledOptimizer, warmup_schedule
from orchestrator.train.stepper import Stepper
from orchestrator.train.strategies.expert_parallel import ExpertParallelStrategy

PROFILED_STEPS = 3
VARIANTS = [(rows, chunks) for rows in ("counted", "bounded") for chunks in (1, 2)]


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20, help="timed steps, after a warm-up")
    parser.add_argument("--small", action="store_true", help="a tiny model over gloo, to try it on a CPU")
    arguments = parser.parse_args()
    rows = []
    for variant in VARIANTS:
        rows.append(_row(variant, _run(arguments, *variant)))
        print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    text = header("Steps of expert hosts over NCCL", arguments)
    columns = (
        *("rows", "chunks", "ms a step", "range", "exchange, ms", "other kernels, ms", "both at once, ms"),
        *("exchange overlapped", "other kernels overlapped", "last loss"),
    )
    publish(text + markdown_table(columns, rows), arguments.out)


def _row(variant: tuple[str, int], found: dict[str, Any]) -> tuple[str, ...]:
    seconds = found["seconds"]
    times = ["–"] * 5  # a CPU has no kernels to trace
    if found["overlap"] is not None:
        overlap = Overlap(**found["overlap"])
        parts = (overlap.exchange, overlap.compute, overlap.both)
        times = [f"{time / PROFILED_STEPS / 1e6:.2f}" for time in parts]
        times += [f"{overlap.hidden_share:.0%}", f"{overlap.busy_share:.0%}"]
    return (
        *(variant[0], str(variant[1]), f"{statistics.median(seconds) * 1e3:.1f}"),
        f"{min(seconds) * 1e3:.1f}–{max(seconds) * 1e3:.1f}",
        *times,
        f"{found['loss']:.4f}",
    )


def _run(arguments: argparse.Namespace, rows: str, chunks: int) -> dict[str, Any]:
    """Run the hosts of one variant; return what the first of them has measured."""
    with tempfile.TemporaryDirectory() as folder:
        passed = (arguments.ranks, folder, rows, chunks, arguments.steps, arguments.small)
        context = multiprocessing.get_context("spawn")
        hosts = [context.Process(target=_host, args=(rank, *passed)) for rank in range(arguments.ranks)]
        for host in hosts:
            host.start()
        for host in hosts:
            host.join()
        if any(host.exitcode for host in hosts):
            raise RuntimeError(f"the hosts ended with {[host.exitcode for host in hosts]}")
        return json.loads((Path(folder) / "result.json").read_text(encoding="utf-8"))


def _host(rank: int, size: int, folder: str, rows: str, chunks: int, steps: int, small: bool) -> None:
    """Train as one host; the first one writes its figures."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    gpu = rank if torch.cuda.device_count() >= size else 0
    device = torch.device("cuda", gpu) if torch.cuda.is_available() else torch.device("cpu")
    backend = "nccl" if device.type == "cuda" else "gloo"
    factory = GroupFactory(file_store(f"{folder}/store", size), "generation0", rank, size, GroupMembership())
    with recoverable_world(factory, device, backend) as world:
        found = _measure(world, rows, chunks, steps, small)
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(found), encoding="utf-8")
    os._exit(0)  # threads of the groups may still run, and an ordinary end would abort at them


def _measure(world: World, rows: str, chunks: int, steps: int, small: bool) -> dict[str, Any]:
    sizes = SMALL if small else replace(Sizes(), layers=2)
    stepper, batches = _stepper(world, sizes, chunks)
    strategy = stepper.strategy
    assert isinstance(strategy, ExpertParallelStrategy)
    if rows == "bounded":
        strategy.context.bounds = ExchangeBounds(world.device)
    numbers = count()
    losses: list[Any] = []

    def step(_: int = 0) -> None:
        totals = stepper.run(next(batches), next(numbers))
        losses.append(totals.loss / totals.count)

    seconds = step_seconds(step, steps, device=world.device)
    overlap = asdict(_profiled(step)) if world.device.type == "cuda" else None
    return {"seconds": seconds, "overlap": overlap, "loss": float(losses[-1])}


def _profiled(step: Any) -> Overlap:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(PROFILED_STEPS):
            step()
        torch.cuda.synchronize()
    return Overlap.of(kernels_of(profile))


def _stepper(world: World, sizes: Sizes, chunks: int) -> tuple[Stepper, Any]:
    """Build a host's stepper, and its batches without an end."""
    config = Config.of(**sizes.settings)
    task = load_task(config)
    model = task.build_model()
    model.train().to(world.device)
    host_of = [[expert % world.size for expert in range(sizes.experts)] for _ in moe_layers(model)]
    place(model, host_of, world.rank)
    optimizer = build_named_optimizer(model, config.optim, fused=True)
    feed = open_feed(
        task.train_data(),
        world,
        global_batch=sizes.batch,
        micro_batch=sizes.batch // world.size,
        seed=0,
        loader=LoaderOptions(),
    )
    stepper = Stepper(
        world=world,
        strategy=ExpertParallelStrategy(model, task, world, chunks),
        optimizer=ScheduledOptimizer(optimizer, warmup_schedule("constant", 0, None)),
        precision=Precision("bf16" if world.device.type == "cuda" else "fp32", world.device),
        micro_batch=feed.largest_micro_batch,
        seed=0,
        clip_norm=1.0,
        clock=PhaseClock(),
        emit=ignore_event,
    )
    return stepper, (batch for epoch in count() for batch in feed.steps(epoch))


if __name__ == "__main__":
    main()
