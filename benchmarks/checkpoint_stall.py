"""What a checkpoint costs the loop: steps per second with and without saving, and the stall that each save reports.

python -m benchmarks.checkpoint_stall [--every 20] [--steps 200] [--out FILE]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.support import header, markdown_table, write_result
from orchestrator.config.settings import Config
from orchestrator.record.events import by_step, of_kind, read_events
from orchestrator.trainer import Trainer


def run(steps: int, every: int, sizes: dict[str, Any]) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {
            "trackers": (),
            "monitor_gpu": False,
            "epochs": 10**6,
            "log_every": 1,
            "keep": 2,
        }
        config = Config.of(
            run_dir=Path(folder) / "run", max_steps=steps, checkpoint_every=every, **settings, **sizes
        )
        Trainer(config=config, quiet=True).fit()
        return read_events(Path(folder) / "run" / "events.jsonl")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    sizes = {
        "task": "synthetic",
        "experts": 0,
        "width": 512,
        "layers": 8,
        "context_length": 64,
        "vocabulary": 8192,
        "samples": 4096,
    }
    sizes |= {"batch_size": 16}
    calm = run(arguments.steps, 10**6, sizes)
    saving = run(arguments.steps, arguments.every, sizes)
    base = statistics.median(event["seconds"] for event in by_step(calm)[10:])
    saves = of_kind(saving, "checkpoint")[:-1]
    stall = statistics.median(event["stall"] for event in saves)
    # a step while the thread writes: those between a save and its promise
    writing = [
        step["seconds"]
        for save in saves
        for step in by_step(saving)
        if step["step"] > save["step"] and save["time"] - save["seconds"] < step["time"] <= save["time"]
    ]
    during = statistics.median(writing) if writing else base
    rows = [
        ["step without saving, ms", f"{base * 1e3:.1f}"],
        ["copy to host memory (the stall of a save), ms", f"{stall * 1e3:.1f}"],
        [
            "whole save until it is on disk, ms",
            f"{statistics.median(event['seconds'] for event in saves) * 1e3:.0f}",
        ],
        ["checkpoint, MiB", f"{saves[0]['bytes'] / 2**20:.0f}"],
        [f"step while it is written, ms ({len(writing)} steps)", f"{during * 1e3:.1f}"],
        ["… against one without, beyond the copy", f"{during / base - 1:+.1%}"],
    ]
    text = header("What a checkpoint costs the loop", arguments) + markdown_table(["", ""], rows)
    print(text)
    write_result(arguments.out, text)


if __name__ == "__main__":
    main()
