"""The cost of snapshots (copies of the state in memory) in the loop.

    python -m benchmarks.storage.snapshots [--rounds 5] [--steps 600] [--tasks digits text] [--out FILE]
    python -m benchmarks.storage.snapshots --gpu [--gigabytes 10] [--out FILE]

The first measures steps per second with and without snapshots, in turn. The second measures the
loop's stall for so much state on a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

from benchmarks.support import benchmark_parser, header, markdown_table, publish
from harness.runs.records import by_step
from orchestrator.config.settings import Config
from orchestrator.record.files.reading import read_events
from orchestrator.trainer import Trainer

EVERY = 10
WARM_UP = 20
NEVER = 10**6


def rate(snapshot_every: int, steps: int, task: str) -> float:
    """Return the steps per second of two expert hosts, by wall-clock time: a snapshot takes time
    between steps.

    It is the median over all stretches of as many steps as lie between two snapshots: other
    processes disturb some.
    """
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        config = Config.of(
            run_dir=run_dir,
            task=task,
            max_steps=steps,
            snapshot_every=snapshot_every,
            trackers=(),
            monitor_gpu=False,
            epochs=NEVER,
            log_every=1,
            checkpoint_every=NEVER,
            parallel_strategy="expert_parallel",
            workers=2,
            evaluate_every=NEVER,
            ray_address="local",
        )
        Trainer(config=config, quiet=True).fit()
        recorded = by_step(read_events(run_dir / "events.jsonl"))
    times = [event["time"] for event in recorded[WARM_UP::EVERY]]
    return EVERY / statistics.median(after - before for before, after in pairwise(times))


def on_cpu(arguments: argparse.Namespace) -> str:
    """Compare runs with and without snapshots."""
    rows = []
    for task in arguments.tasks:
        steps = arguments.steps if task == "digits" else arguments.steps // 10
        pairs = []
        for number in range(arguments.rounds):
            # the order alternates, so that neither is always first
            order = (0, EVERY) if number % 2 else (EVERY, 0)
            rates = {every: rate(every, steps, task) for every in order}
            pairs.append((rates[0], rates[EVERY]))
            print(task, f"without {rates[0]:.2f}, with {rates[EVERY]:.2f} steps/s", flush=True)
        without = statistics.median(pair[0] for pair in pairs)
        with_snapshots = statistics.median(pair[1] for pair in pairs)
        paired = statistics.median(after / before for before, after in pairs)
        change = f"{with_snapshots / without - 1:+.1%}"
        rows.append([task, f"{without:.2f}", f"{with_snapshots:.2f}", change, f"{paired - 1:+.1%}"])
    columns = ["task, 2 hosts", "steps/s without", f"every {EVERY} steps", "medians", "pairs"]
    return header("What snapshots cost", arguments) + markdown_table(columns, rows)


@contextmanager
def snapshot_worker(services: Any, gigabytes: float, rounds: int) -> Iterator[Any]:
    """Yield a worker that only takes snapshots of so much state, and computes in between."""
    import torch
    from torch import nn

    from orchestrator.checkpoint.progress import Progress
    from orchestrator.train.checkpoint.pinned_buffers import PinnedBuffers
    from orchestrator.train.checkpoint.snapshots import Snapshots, SnapshotTarget
    from orchestrator.train.checkpoint.state import TrainState
    from orchestrator.train.device.precision import Precision
    from orchestrator.train.group.world import World

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    on_gpu = device.type == "cuda"
    width = 4096 if on_gpu else 256
    num_matrices = max(1, round(gigabytes * 1e9 / (3 * 4 * width * width)))  # weight and two moments in fp32
    matrices = [torch.full((width, width), 0.5, device=device) for _ in range(num_matrices)]
    model = nn.ParameterList([nn.Parameter(matrix) for matrix in matrices])
    optimizer = torch.optim.AdamW(model.parameters(), fused=on_gpu)
    for parameter in model:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    state = TrainState(model, optimizer, Precision("fp32", device))
    target = SnapshotTarget(services.outbox, PinnedBuffers(device), 0)
    snapshots = Snapshots(state, World.single_process(device), target)
    snapshots.every = 1

    def compute() -> float:
        """Return the seconds of some work that stands for a step."""
        begun = perf_counter()
        values = torch.randn(2 * width, 2 * width, device=device)
        for _ in range(20):
            values = torch.nn.functional.normalize(values @ values)
        float(values.sum())
        return perf_counter() - begun

    class SnapshotWorker:
        def run_segment(self, _: Any) -> tuple[list[float], list[float], list[float]]:
            """Return the seconds of usual steps, of steps while buffers are prepared, and of each
            snapshot."""
            usual = [compute() for _ in range(10)]
            preparing = []
            begun = perf_counter()
            snapshots.prepare()
            while perf_counter() - begun < (12.0 if on_gpu else 0.5):
                preparing.append(compute())
            stalls = []
            for step in range(1, rounds + 1):
                compute()
                sleep(2.0 if on_gpu else 0.1)
                begun = perf_counter()
                snapshots.take(Progress(step=step))
                stalls.append(perf_counter() - begun)
            # the first two warm up the device
            return usual[2:], preparing, stalls

    yield SnapshotWorker()


def on_gpu(arguments: argparse.Namespace) -> str:
    """Measure the stall of the loop for a given amount of state."""
    import ray

    from experts.hosts.actor_host import ExpertHost

    # space for the snapshot that is written, the newest one, and the one before it
    store_bytes = round(3.5e9 * arguments.gigabytes) + 2**28
    ray.init(address="local", include_dashboard=False, object_store_memory=store_bytes, log_to_driver=False)
    # pyrefly: ignore[missing-attribute]
    host = ExpertHost.options(num_gpus=1 if ray.cluster_resources().get("GPU") else 0).remote()
    ray.get(host.join.remote(snapshot_worker, 0, arguments.gigabytes, arguments.rounds + 2))
    arrivals: list[float] = []
    is_over = threading.Event()

    def fetch() -> None:
        """Fetch snapshots as the driver does: one is dropped when the next has arrived."""
        newest = None
        while not is_over.is_set():
            description, *parts = host.next_snapshot.remote()
            if not ray.wait([description], timeout=60)[0]:
                return
            arrivals.append(perf_counter())
            newest = description, parts
        del newest

    threading.Thread(target=fetch, daemon=True).start()
    usual, preparing, stalls = ray.get(host.run_segment.remote(None))
    is_over.set()
    ray.kill(host)
    ray.shutdown()
    usual_s = statistics.median(usual)
    rows = [
        ["stall, median", f"{statistics.median(stalls):.3f} s"],
        ["each in turn", ", ".join(f"{seconds:.3f}" for seconds in stalls)],
        ["a step before", f"{usual_s:.3f} s"],
        ["the longest step while the memory for the copies is made", f"{max(preparing):.3f} s"],
        [
            "beyond the usual, all steps of that time",
            f"{sum(seconds - usual_s for seconds in preparing):.2f} s",
        ],
        ["copies that reached the driver", str(len(arrivals))],
    ]
    title = f"The loop's stall for {arguments.gigabytes:g} GB of state"
    return header(title, arguments) + markdown_table(["", ""], rows)


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--gigabytes", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--tasks", nargs="+", default=["digits", "text"])
    arguments = parser.parse_args()
    text = on_gpu(arguments) if arguments.gpu else on_cpu(arguments)
    publish(text, arguments.out)


if __name__ == "__main__":
    main()
