"""Trials by plain Ray Tune, each a Ray Train job in the form of Ray's documentation.
``benchmarks.tuning.sweep`` compares with it.

Started as a script:

    python benchmarks/tuning/plain_tune.py FOLDER WORKERS:BATCH:ACCUMULATION:STEPS,...

Prints the seconds that all trials take together.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
from ray import tune
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train_loop_per_worker(config: dict[str, Any]) -> None:
    digits: Any = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    loader = ray.train.torch.prepare_data_loader(
        DataLoader(TensorDataset(images, labels), batch_size=config["batch"], shuffle=True)
    )
    model: Any = ray.train.torch.prepare_model(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    micro = 0
    samples = 0
    last = config["steps"] * config["accumulation"]
    begun = time.perf_counter()
    while micro < last:
        for image, label in loader:
            nn.functional.cross_entropy(model(image), label).backward()
            micro += 1
            samples += len(image)
            if micro % config["accumulation"] == 0:
                optimizer.step()
                optimizer.zero_grad()
            if micro == last:
                break
    ray.train.report({"samples_per_second": samples / (time.perf_counter() - begun)})


def trial(config: dict[str, Any]) -> None:
    """Run one Ray Train job inside a trial of Ray Tune."""
    entry = config["trial"]
    # Each class is declared as that of either version of Ray Train, and those do not fit each other.
    train: Any = ray.train
    train.torch.TorchTrainer(
        train_loop_per_worker,
        train_loop_config=entry,
        scaling_config=train.ScalingConfig(num_workers=entry["workers"]),
        run_config=train.RunConfig(name=f"trial-{time.time_ns()}", storage_path=entry["folder"]),
    ).fit()
    tune.report({"done": True})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("trials", help="WORKERS:BATCH:ACCUMULATION:STEPS of each, separated by commas")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    names = ("workers", "batch", "accumulation", "steps")
    entries = [map(int, entry.split(":")) for entry in arguments.trials.split(",")]
    trials = [dict(zip(names, entry, strict=True)) | {"folder": str(folder)} for entry in entries]
    # Each trial's own process needs a slot too: with four, two trials of one worker run at a time,
    # as in our sweep
    ray.init(address="local", num_cpus=4)
    begun = time.perf_counter()
    results = tune.Tuner(
        tune.with_resources(trial, {"CPU": 1}),
        param_space={"trial": tune.grid_search(trials)},
        tune_config=tune.TuneConfig(max_concurrent_trials=2),
        run_config=tune.RunConfig(name="plain", storage_path=str(folder), verbose=0),
    ).fit()
    seconds = time.perf_counter() - begun
    if results.errors:
        raise results.errors[0]
    sys.stdout.write(f"{len(trials)} trials in {seconds:.2f} s\n")


if __name__ == "__main__":
    main()
