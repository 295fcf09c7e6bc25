"""What uploads cost the steps: the same run on the local disk, with a copy on another folder of the
disk (file://), and in S3, served by moto in a process of its own on this machine.

python -m benchmarks.storage.remote_runs [--steps 160] [--every 40] [--rounds 3] [--out FILE]
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, chdir, contextmanager
from dataclasses import dataclass
from time import perf_counter, time_ns
from typing import Any

from benchmarks.support import benchmark_parser, header, markdown_table, publish
from harness.runs.records import by_step
from harness.storage.object_server import object_server
from orchestrator.config.settings import Config
from orchestrator.record.events.kinds import JsonEvent as Event
from orchestrator.record.files.reading import of_kind, read_events
from orchestrator.trainer import Trainer
from orchestrator.types import MIB

SIZES: dict[str, Any] = {
    "task": "synthetic",
    "experts": 0,
    "width": 256,
    "layers": 4,
    "sequence_length": 16,
    "vocabulary": 8192,
    "samples": 2048,
    "batch_size": 4,
}
SMALL: dict[str, Any] = {"width": 32, "layers": 1, "sequence_length": 8, "vocabulary": 64}
PLACES = ("disk", "file://", "s3://")
WARM_UP = 10
NEVER = 10**6


@dataclass(frozen=True)
class Run:
    """The events of a run, and how long the whole call took."""

    events: list[Event]
    seconds: float

    @property
    def step_seconds(self) -> list[float]:
        return [event["seconds"] for event in by_step(self.events)[WARM_UP:]]

    @property
    def uploading_seconds(self) -> list[float]:
        """The steps during which an upload was under way."""
        uploads = of_kind(self.events, "upload")
        return [
            step["seconds"]
            for step in by_step(self.events)[WARM_UP:]
            if any(upload["time"] - upload["seconds"] < step["time"] <= upload["time"] for upload in uploads)
        ]

    @property
    def seconds_after_end(self) -> float:
        """The time from the end of the training to the last upload; 0 without uploads."""
        end = of_kind(self.events, "end")[-1]["time"]
        return max([0.0, *(upload["time"] - end for upload in of_kind(self.events, "upload"))])


def run(run_dir: str, steps: int, checkpoint_every: int, small: bool) -> Run:
    config = Config.of(
        run_dir=run_dir,
        max_steps=steps,
        checkpoint_every=checkpoint_every,
        trackers=(),
        monitor_gpu=False,
        evaluate_every=NEVER,
        epochs=NEVER,
        log_every=1,
        keep=2,
        **(SIZES | SMALL if small else SIZES),
    )
    began_s = perf_counter()
    result = Trainer(config=config, quiet=True).fit()
    return Run(read_events(result.run_dir / "events.jsonl"), perf_counter() - began_s)


@contextmanager
def places(with_s3: bool) -> Iterator[Callable[[str], str]]:
    """Yield a function that returns a new run folder at a place."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(chdir(folder))
        roots = {"disk": folder, "file://": f"file://{folder}/remote"}
        if with_s3:
            server = stack.enter_context(object_server())
            os.environ.update(server.environment)
            roots["s3://"] = server.url("benchmark")
        yield lambda place: f"{roots[place]}/run{time_ns()}"


def row_of(place: str, runs: list[Run]) -> list[str]:
    steps = [seconds for run in runs for seconds in run.step_seconds]
    uploading = [seconds for run in runs for seconds in run.uploading_seconds]
    saves = [event for run in runs for event in of_kind(run.events, "checkpoint")[:-1]]
    uploads = [event for run in runs for event in of_kind(run.events, "upload")]
    rates = [event["bytes"] / event["seconds"] / MIB for event in uploads]
    return [
        place,
        f"{statistics.median(steps) * 1e3:.0f}",
        f"{statistics.quantiles(steps, n=20)[-1] * 1e3:.0f}",
        f"{statistics.median(uploading) * 1e3:.0f} ({len(uploading)})" if uploading else "–",
        f"{statistics.median(event['stall'] for event in saves) * 1e3:.0f}",
        f"{saves[0]['bytes'] / MIB:.0f}",
        f"{statistics.median(rates):.0f}" if rates else "–",
        f"{statistics.median(run.seconds_after_end for run in runs):.1f}",
    ]


COLUMNS = (
    "run folder",
    "step, ms (median)",
    "95% of steps within, ms",
    "step during an upload, ms (steps)",
    "stall of a save, ms",
    "checkpoint, MiB",
    "upload, MiB/s",
    "last upload after the end, s",
)


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--every", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--places", nargs="+", choices=PLACES, default=list(PLACES))
    parser.add_argument("--small", action="store_true", help="a tiny model, to try the script")
    arguments = parser.parse_args()
    small = arguments.small
    runs: dict[str, list[Run]] = {place: [] for place in arguments.places}
    with places("s3://" in runs) as new_folder:
        run(new_folder("disk"), 2 * WARM_UP, NEVER, small)  # imports and caches
        for _ in range(arguments.rounds):
            for place, own in runs.items():  # in turn: the load of the machine changes
                own.append(run(new_folder(place), arguments.steps, arguments.every, small))
    table = markdown_table(COLUMNS, [row_of(place, own) for place, own in runs.items()])
    publish(header("What uploads cost the steps", arguments) + table, arguments.out)


if __name__ == "__main__":
    main()
