"""Batch sizes and numbers of workers compared on Ray, with a scaling table.

python examples/sweep.py [SETTING=VALUE,VALUE ...]
"""

import sys
from pathlib import Path

from orchestrator import Config, Sweep, Trainer, parse_space, read_sweep


def main(space: list[str]) -> None:
    folder = Path("results") / "example-sweep"
    config = Config.of(task="digits", width=16, layers=1, evolution="off", run_dir=folder)
    sweep = Sweep(parse_space(space), trial_seconds=1.0)
    Trainer(config=config).sweep(sweep)
    trials = read_sweep(folder)
    print(trials.to_string(max_cols=8))
    print((folder / "scaling.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main(sys.argv[1:] or ["batch-size=16,64", "workers=1,2"])
