"""The cost of a checkpoint in the loop: step times with and without saving, and the stall that each
save reports.

python -m benchmarks.storage.checkpoint_stall [--every 20] [--steps 200] [--out FILE]
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.support import benchmark_parser, header, markdown_table, publish
from harness.runs.records import by_step
from orchestrator.config.settings import Config
from orchestrator.record.events.kinds import JsonEvent as Event
from orchestrator.record.files.reading import of_kind, read_events
from orchestrator.trainer import Trainer
from orchestrator.types import MIB

SIZES: dict[str, Any] = {
    "task": "synthetic",
    "experts": 0,
    "width": 512,
    "layers": 8,
    "sequence_length": 64,
    "vocabulary": 8192,
    "samples": 4096,
    "batch_size": 16,
}
SMALL: dict[str, Any] = {"width": 32, "layers": 1, "sequence_length": 8, "vocabulary": 64, "samples": 256}
WARM_UP = 10
NEVER = 10**6


def run(steps: int, checkpoint_every: int, small: bool) -> list[Event]:
    """Train, and return the events of the run."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        config = Config.of(
            run_dir=run_dir,
            max_steps=steps,
            checkpoint_every=checkpoint_every,
            trackers=(),
            monitor_gpu=False,
            epochs=NEVER,
            log_every=1,
            keep=2,
            **(SIZES | SMALL if small else SIZES),
        )
        Trainer(config=config, quiet=True).fit()
        return read_events(run_dir / "events.jsonl")


def rows_of(undisturbed: Sequence[Event], saving: Sequence[Event]) -> list[list[str]]:
    """Return the rows of the table, from a run without checkpoints and one with them."""
    base_s = statistics.median(event["seconds"] for event in by_step(undisturbed)[WARM_UP:])
    saves = of_kind(saving, "checkpoint")[:-1]  # no step follows the last one, at the end of the run
    stall_s = statistics.median(event["stall"] for event in saves)
    whole_s = statistics.median(event["seconds"] for event in saves)
    writing = [step["seconds"] for save in saves for step in by_step(saving) if is_during(step, save)]
    during_s = statistics.median(writing) if writing else base_s
    return [
        ["step without saving, ms", f"{base_s * 1e3:.1f}"],
        ["copy to host memory (the stall of a save), ms", f"{stall_s * 1e3:.1f}"],
        ["whole save until it is on disk, ms", f"{whole_s * 1e3:.0f}"],
        ["checkpoint, MiB", f"{saves[0]['bytes'] / MIB:.0f}"],
        [f"step while it is written, ms ({len(writing)} steps)", f"{during_s * 1e3:.1f}"],
        ["… against one without, beyond the copy", f"{during_s / base_s - 1:+.1%}"],
    ]


def is_during(step: Event, save: Event) -> bool:
    """Report whether a step ended while the writer's thread was writing this checkpoint."""
    return step["step"] > save["step"] and save["time"] - save["seconds"] < step["time"] <= save["time"]


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--small", action="store_true", help="a tiny model, to try the script")
    arguments = parser.parse_args()
    undisturbed = run(arguments.steps, NEVER, arguments.small)
    saving = run(arguments.steps, arguments.every, arguments.small)
    table = markdown_table(["", ""], rows_of(undisturbed, saving))
    publish(header("What a checkpoint costs the loop", arguments) + table, arguments.out)


if __name__ == "__main__":
    main()
