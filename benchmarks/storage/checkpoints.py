"""The cost of a checkpoint on several expert hosts: stall of the steps, host memory, bytes read on resume.

    python -m benchmarks.storage.checkpoints [--gigabytes 1] [--ranks 4] [--folder FOLDER] [--out FILE]

The ranks are processes on this machine, over gloo, on its GPU where there is one. 10 GB take under three
minutes on an H200: ``python -m benchmarks.storage.checkpoints --gigabytes 10``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import psutil
import torch
from torch import nn

from benchmarks.support import benchmark_parser, header, markdown_table, publish
from experts.expert_state import remote_expert_names
from experts.model import attach, place
from experts.moe.bank import ExpertBank, without_memory
from experts.moe.context import MoEContext
from experts.moe.layer import MoELayer
from experts.tokens.exchange import GroupExchange
from orchestrator.checkpoint.progress import Progress
from orchestrator.checkpoint.store import CheckpointStore
from orchestrator.record.files.log import SilentLog
from orchestrator.train.checkpoint.restore import restore
from orchestrator.train.checkpoint.state import TrainState
from orchestrator.train.checkpoint.writer import CheckpointWriter
from orchestrator.train.device.precision import Precision
from orchestrator.train.group.stores import file_store
from orchestrator.train.group.world import World, process_group_world
from orchestrator.train.worker.resume import StartPoint, _load_together, find_candidates

LAYERS = 4
EXPERTS = 16
WIDTH = 1024
DENSE_PART = 0.2
STATE_BYTES = 3 * 4  # a weight and two moments in fp32
SAVES = 3


@dataclass(frozen=True)
class RankResult:
    """What one rank has measured. The first save allocates buffers; the others show the usual cost."""

    stalls_s: list[float]
    durable_s: list[float]
    peak_bytes: int
    """Most memory of the process during the saves, beyond that before."""
    read_bytes: int
    resume_s: float


def build_state(world: World, gigabytes: float) -> TrainState:
    """Return so much state over all hosts, each with its own experts, after a step of AdamW."""
    parameters = gigabytes * 1e9 / STATE_BYTES / LAYERS
    hidden = max(1, round(parameters * (1 - DENSE_PART) / (3 * WIDTH * EXPERTS)))
    rows = max(1, round(parameters * DENSE_PART / WIDTH))
    with without_memory():
        layers = [
            nn.ModuleList([nn.Linear(WIDTH, rows, bias=False), MoELayer(WIDTH, [hidden] * EXPERTS, 1)])
            for _ in range(LAYERS)
        ]
    model = nn.ModuleList(layers)
    place(model, [[expert % world.size for expert in range(EXPERTS)]] * LAYERS, world.rank)
    for module in model.modules():
        if isinstance(module, ExpertBank):
            module.materialise()
    model.to(world.device)
    assert world.group is not None
    attach(model, MoEContext(GroupExchange(world.group)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=world.device.type == "cuda")
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.01)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return TrainState(model, optimizer, Precision("fp32", world.device))


def measure_rank(rank: int, size: int, folder: str, gigabytes: float, results: Any) -> None:
    torch.set_num_threads(1)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    store = file_store(f"{folder}/rendezvous", size)
    with process_group_world(store, rank, size, device, "gloo", 600) as world:
        state = build_state(world, gigabytes)
        world.barrier()
        results.put((rank, measure(state, world, Path(folder) / "checkpoints")))


def measure(state: TrainState, world: World, folder: Path) -> RankResult:
    """Save several times, then resume."""
    store = CheckpointStore(folder, keep=1, repair=world.is_main)
    writer = CheckpointWriter(store, state, world, SilentLog())
    before_bytes = psutil.Process().memory_info().rss
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    stalls_s: list[float] = []
    durable_s: list[float] = []
    for step in range(1, SAVES + 1):
        writer.poll()
        sleep(0.5)
        world.barrier()
        began_s = perf_counter()
        writer.save(Progress(step=step))
        stalls_s.append(perf_counter() - began_s)
        writer.finish()
        durable_s.append(perf_counter() - began_s)
    writer.close()
    peak_bytes = peak_memory() - before_bytes
    world.barrier()
    began_bytes = bytes_read()
    began_s = perf_counter()
    start = StartPoint(store, world, SilentLog())
    found = find_candidates("auto", store) if world.is_main else None
    checkpoint, _ = _load_together(found, start, remote_expert_names(state.model))
    assert checkpoint is not None
    restore(checkpoint.contents, state)
    world.barrier()
    return RankResult(stalls_s, durable_s, peak_bytes, bytes_read() - began_bytes, perf_counter() - began_s)


def peak_memory() -> int:
    """Return the peak of this process's memory since it was reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


def bytes_read() -> int:
    """Return the bytes that this process has read by system calls; memory maps do not count."""
    (line,) = [line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("rchar")]
    return int(line.split()[1])


def run(gigabytes: float, ranks: int, folder: Path | None) -> list[RankResult]:
    """Measure on all ranks. Return the results by rank."""
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    with tempfile.TemporaryDirectory(dir=folder) as place_for_files:
        arguments = [(rank, ranks, place_for_files, gigabytes, results) for rank in range(ranks)]
        processes = [context.Process(target=measure_rank, args=one) for one in arguments]
        for process in processes:
            process.start()
        by_rank = dict(results.get(timeout=600) for _ in processes)
        for process in processes:
            process.join()
    return [by_rank[rank] for rank in range(ranks)]


def rows_of(results: list[RankResult]) -> list[list[str]]:
    usual_stalls = [max(stalls) for stalls in zip(*(result.stalls_s for result in results), strict=True)]
    durable = [max(times) for times in zip(*(result.durable_s for result in results), strict=True)]
    read = [result.read_bytes / 1e9 for result in results]
    return [
        ["stall of the steps, first save, s", f"{usual_stalls[0]:.2f}"],
        ["stall of the steps, later saves (least), s", f"{min(usual_stalls[1:]):.2f}"],
        ["save until it is on disk (least), s", f"{min(durable):.2f}"],
        [
            "peak host memory of the busiest host beyond its own, GB",
            f"{max(r.peak_bytes for r in results) / 1e9:.2f}",
        ],
        ["bytes that each host reads on resume, GB", ", ".join(f"{value:.2f}" for value in read)],
        ["resume, s", f"{max(result.resume_s for result in results):.2f}"],
    ]


def main() -> None:
    parser: argparse.ArgumentParser = benchmark_parser(__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--folder", type=Path, help="where to write; a folder on the disk to measure")
    arguments = parser.parse_args()
    results = run(arguments.gigabytes, arguments.ranks, arguments.folder)
    table = markdown_table(["", ""], rows_of(results))
    publish(header("A checkpoint of expert hosts", arguments) + table, arguments.out)


if __name__ == "__main__":
    main()
