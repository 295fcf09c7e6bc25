"""A Ray Train job in the form of Ray's documentation. ``benchmarks.startup.ray_start`` compares with it.

Started as a script:

    python benchmarks/startup/plain_ray_train.py FOLDER STEPS [--checkpoint-every 10]

Writes ``steps.jsonl`` (step, time, pid) from rank 0 and ``worker_<rank>.pid`` into the folder.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

GLOBAL_BATCH = 64


def train_loop_per_worker(config: dict[str, Any]) -> None:
    folder = Path(config["folder"])
    rank = ray.train.get_context().get_world_rank()
    (folder / f"worker_{rank}.pid").write_text(str(os.getpid()))
    digits: Any = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    per_worker = GLOBAL_BATCH // ray.train.get_context().get_world_size()
    loader = ray.train.torch.prepare_data_loader(
        DataLoader(TensorDataset(images, labels), batch_size=per_worker, shuffle=True)
    )
    model: Any = ray.train.torch.prepare_model(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    step = _restore(model, optimizer)
    while step < config["steps"]:
        for image, label in loader:
            loss = nn.functional.cross_entropy(model(image), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if rank == 0:
                _record(folder, step)
            _report(loss.item(), step, model, optimizer, config["checkpoint_every"])
            if step == config["steps"]:
                break


def _record(folder: Path, step: int) -> None:
    line = json.dumps({"step": step, "time": time.time(), "pid": os.getpid()})
    with (folder / "steps.jsonl").open("a") as file:
        file.write(line + "\n")


def _restore(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest checkpoint, where there is one. Returns its step."""
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as folder:
        saved = torch.load(Path(folder) / "state.pt", weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return saved["step"]


def _report(
    loss: float, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, checkpoint_every: int
) -> None:
    """Report the loss, with a checkpoint from rank 0 every so many steps."""
    is_due = checkpoint_every and step % checkpoint_every == 0
    if not is_due or ray.train.get_context().get_world_rank() != 0:
        ray.train.report({"loss": loss})
        return
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    with tempfile.TemporaryDirectory() as folder:
        torch.save(state, Path(folder) / "state.pt")
        ray.train.report({"loss": loss}, checkpoint=ray.train.Checkpoint.from_directory(folder))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--checkpoint-every", type=int, default=0)
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    ray.init(address="local")  # never a cluster that happens to run on this machine
    # Each class is declared as that of either version of Ray Train, and those do not fit each other.
    train: Any = ray.train
    trainer = train.torch.TorchTrainer(
        train_loop_per_worker,
        train_loop_config={
            "folder": str(folder),
            "steps": arguments.steps,
            "checkpoint_every": arguments.checkpoint_every,
        },
        scaling_config=train.ScalingConfig(num_workers=2),
        run_config=train.RunConfig(
            name="plain",
            storage_path=str(folder / "storage"),
            failure_config=train.FailureConfig(max_failures=3),
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
