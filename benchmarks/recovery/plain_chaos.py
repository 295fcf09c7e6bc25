"""The model of ``benchmarks.recovery.chaos`` under plain Ray Train, with Ray Train's own fault tolerance,
for comparison.

That is ``FailureConfig``, and checkpoints through ``ray.train.report``. Started as a script; it
trains until it is killed:

    python benchmarks/recovery/plain_chaos.py FOLDER [--workers 3] [--checkpoint-every 10] [--pace 0.05]
    [--dense]

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
from torch.utils.data import DataLoader, TensorDataset

from orchestrator.config.settings import Config
from orchestrator.tasks.digits import Digits
from orchestrator.tasks.task import Task
from orchestrator.tasks.text import Text

GLOBAL_BATCH = 96
MODEL: dict[str, Any] = {
    "width": 32,
    "layers": 2,
    "experts": 6,
    "expert_hidden_size": (32, 48, 32, 64, 32, 48),
}
DENSE_MODEL: dict[str, Any] = {"width": 64, "layers": 4, "experts": 0, "sequence_length": 16}
SAMPLES = 7190


def train_loop_per_worker(config: dict[str, Any]) -> None:
    folder = Path(config["folder"])
    rank = ray.train.get_context().get_world_rank()
    (folder / f"worker_{rank}.pid").write_text(str(os.getpid()))
    task, data = dense_text() if config["dense"] else digits()
    per_worker = GLOBAL_BATCH // ray.train.get_context().get_world_size()
    loader = ray.train.torch.prepare_data_loader(DataLoader(data, batch_size=per_worker, shuffle=True))
    model: Any = ray.train.torch.prepare_model(task.build_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = restore(model, optimizer)
    while True:
        for batch in loader:
            time.sleep(config["pace"])
            loss = task.loss(model, batch[0] if config["dense"] else batch)
            optimizer.zero_grad()
            (loss.sum / loss.count).backward()
            optimizer.step()
            step += 1
            if rank == 0:
                record(folder, step)
            if step % config["checkpoint_every"] == 0:
                report(step, model, optimizer, rank)


def digits() -> tuple[Task, TensorDataset]:
    task = Digits(Config.of(**MODEL))
    return task, TensorDataset(*task.train_data().tensors)


def dense_text() -> tuple[Task, TensorDataset]:
    task = Text(Config.of(**DENSE_MODEL))
    return task, TensorDataset(task.train_data().gather(torch.arange(SAMPLES)))


def record(folder: Path, step: int) -> None:
    line = json.dumps({"step": step, "time": time.time(), "pid": os.getpid()})
    with (folder / "steps.jsonl").open("a") as file:
        file.write(line + "\n")


def restore(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest checkpoint, where there is one. Returns its step."""
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as folder:
        saved = torch.load(Path(folder) / "state.pt", weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return saved["step"]


def report(step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    """Report the step to Ray Train, with a checkpoint from rank 0."""
    if rank != 0:
        ray.train.report({"step": step})
        return
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    with tempfile.TemporaryDirectory() as folder:
        torch.save(state, Path(folder) / "state.pt")
        ray.train.report({"step": step}, checkpoint=ray.train.Checkpoint.from_directory(folder))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--checkpoint-every", type=int, default=10)
    parser.add_argument("--pace", type=float, default=0.0, help="seconds to sleep in each step")
    parser.add_argument("--dense", action="store_true", help="the dense language model")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    # local: never a cluster that happens to run on this machine
    ray.init(address="local", num_cpus=arguments.workers + 1, include_dashboard=False)
    # Each class is declared as that of either version of Ray Train, and those do not fit each other.
    train: Any = ray.train
    trainer = train.torch.TorchTrainer(
        train_loop_per_worker,
        train_loop_config={
            "folder": str(folder),
            "checkpoint_every": arguments.checkpoint_every,
            "pace": arguments.pace,
            "dense": arguments.dense,
        },
        scaling_config=train.ScalingConfig(num_workers=arguments.workers),
        run_config=train.RunConfig(
            name="plain",
            storage_path=str(folder / "storage"),
            failure_config=train.FailureConfig(max_failures=-1),
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
