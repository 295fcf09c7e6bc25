"""What copies of the state in memory cost the loop.

python -m benchmarks.snapshots [--rounds 5] [--steps 600] [--tasks digits text] [--out FILE]   steps per second with and without, in turn
python -m benchmarks.snapshots --gpu [--gigabytes 10] [--out FILE]         the loop's stall for so much state on a GPU
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

from benchmarks.support import header, markdown_table, write_result
from orchestrator.config.settings import Config
from orchestrator.record.events import by_step, read_events
from orchestrator.trainer import Trainer

EVERY = 10
_SKIPPED = 20  # steps at the beginning


def rate(every: int, steps: int, task: str) -> float:
    """Steps per second of two expert hosts, by the clock on the wall: what a copy takes lies between steps. Of all stretches of as many
    steps as lie between two copies the median: other things happen on a machine."""
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {
            "trackers": (),
            "monitor_gpu": False,
            "epochs": 10**6,
            "log_every": 1,
            "checkpoint_every": 10**6,
        }
        settings |= {
            "parallel_strategy": "expert_parallel",
            "workers": 2,
            "evaluate_every": 10**6,
            "ray_address": "local",
        }
        config = Config.of(
            run_dir=Path(folder) / "run", task=task, max_steps=steps, snapshot_every=every, **settings
        )
        Trainer(config=config, quiet=True).fit()
        told = by_step(read_events(Path(folder) / "run" / "events.jsonl"))
    times = [event["time"] for event in told[_SKIPPED::EVERY]]
    return EVERY / statistics.median(after - before for before, after in pairwise(times))


def on_cpu(arguments: argparse.Namespace) -> str:
    rows = []
    for task in arguments.tasks:
        steps = arguments.steps if task == "digits" else arguments.steps // 10
        pairs = []
        for number in range(arguments.rounds):
            order = (0, EVERY) if number % 2 else (EVERY, 0)
            found = {every: rate(every, steps, task) for every in order}
            pairs.append((found[0], found[EVERY]))
            print(task, f"without {found[0]:.2f}, with {found[EVERY]:.2f} steps/s", flush=True)
        without, with_copies = (statistics.median(values) for values in zip(*pairs, strict=True))
        paired = statistics.median(b / a for a, b in pairs)
        rows.append(
            [
                task,
                f"{without:.2f}",
                f"{with_copies:.2f}",
                f"{with_copies / without - 1:+.1%}",
                f"{paired - 1:+.1%}",
            ]
        )
    columns = ["task, 2 hosts", "steps/s without", f"every {EVERY} steps", "medians", "pairs"]
    return header("What copies in memory cost", arguments) + markdown_table(columns, rows)


@contextmanager
def _large(side: Any, gigabytes: float, rounds: int) -> Iterator[Any]:
    """Work that only takes copies of so much state, with something to compute in between."""
    import torch
    from torch import nn

    from orchestrator.train.checkpoint.pinned_buffers import PinnedBuffers
    from orchestrator.train.checkpoint.snapshots import Snapshots, SnapshotTarget
    from orchestrator.train.checkpoint.state import Progress
    from orchestrator.train.parts.precision import Precision
    from orchestrator.train.parts.world import World

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    width = 4096 if device.type == "cuda" else 256
    count = max(1, round(gigabytes * 1e9 / (3 * 4 * width * width)))  # weight and two moments in fp32
    model = nn.ParameterList(
        [nn.Parameter(torch.full((width, width), 0.5, device=device)) for _ in range(count)]
    )
    optimizer = torch.optim.AdamW(model.parameters(), fused=device.type == "cuda")
    for parameter in model:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    snapshots = Snapshots(
        1,
        SnapshotTarget(side.outbox, PinnedBuffers(device), 0),
        model,
        optimizer,
        Precision("fp32", device),
        World.single_process(device),
    )

    def busy() -> float:
        """Seconds of a piece of work, as a step is."""
        begun = perf_counter()
        values = torch.randn(2 * width, 2 * width, device=device)
        for _ in range(20):
            values = torch.nn.functional.normalize(values @ values)
        float(values.sum())
        return perf_counter() - begun

    class Taking:
        def advance(self, _: Any) -> tuple[list[float], list[float], list[float]]:
            usual = [busy() for _ in range(10)]
            begun, beside = perf_counter(), []
            snapshots.prepare()
            while perf_counter() - begun < (12.0 if device.type == "cuda" else 0.5):
                beside.append(busy())
            stalls = []
            for step in range(1, rounds + 1):
                busy()
                sleep(2.0 if device.type == "cuda" else 0.1)
                begun = perf_counter()
                snapshots.take(Progress(step=step))
                stalls.append(perf_counter() - begun)
            return usual[2:], beside, stalls

    yield Taking()


def on_gpu(arguments: argparse.Namespace) -> str:
    import ray

    from experts.actor_host import ExpertHost

    store = round(3.5e9 * arguments.gigabytes) + 2**28
    ray.init(address="local", include_dashboard=False, object_store_memory=store, log_to_driver=False)
    host = ExpertHost.options(num_gpus=1 if ray.cluster_resources().get("GPU") else 0).remote()  # pyright: ignore
    ray.get(host.join.remote(_large, 0, arguments.gigabytes, arguments.rounds + 2))
    whole, over = [], threading.Event()

    def fetch() -> None:
        """As the driver does: the one before is let go of when the next is there."""
        kept = None
        while not over.is_set():
            told, data = host.next_snapshot.remote()
            if not ray.wait([told], timeout=60)[0]:
                return
            whole.append(perf_counter())
            kept = told, data
        del kept

    threading.Thread(target=fetch, daemon=True).start()
    usual, beside, stalls = ray.get(host.advance.remote(None))
    over.set()
    ray.kill(host)
    ray.shutdown()
    rows = [
        ["stall, median", f"{statistics.median(stalls):.3f} s"],
        ["each in turn", ", ".join(f"{value:.3f}" for value in stalls)],
    ]
    rows += [["a step before", f"{statistics.median(usual):.3f} s"]]
    rows += [["the longest step while the memory for the copies is made", f"{max(beside):.3f} s"]]
    rows += [
        [
            "beyond the usual, all steps of that time",
            f"{sum(value - statistics.median(usual) for value in beside):.2f} s",
        ]
    ]
    rows += [["copies that reached the driver", str(len(whole))]]
    title = f"The loop's stall for {arguments.gigabytes:g} GB of state"
    return header(title, arguments) + markdown_table(["", ""], rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--gigabytes", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--tasks", nargs="+", default=["digits", "text"])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    text = on_gpu(arguments) if arguments.gpu else on_cpu(arguments)
    print(text)
    write_result(arguments.out, text)


if __name__ == "__main__":
    main()
