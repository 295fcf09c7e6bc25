"""The collectives and store operations of a host between its rendezvous and the first step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.hosts.thread_hosts import HostCounts, run_thread_hosts
from orchestrator.config.settings import Config
from orchestrator.plan import workers
from orchestrator.record.files.log import SilentLog
from orchestrator.train.group.world import World
from orchestrator.train.strategies import shares
from orchestrator.train.worker.run import Supervision, WorkerRun
from orchestrator.trainer import Trainer

SMALL: dict[str, Any] = {
    "task": "digits",
    "layers": 1,
    "width": 8,
    "experts": 7,
    "expert_hidden_size": (4,),
    "evolution": "off",
    "global_batch_size": 512,
    "trackers": (),
    "monitor_gpu": False,
}


def join_counts(size: int, run_dir: Path, **settings: Any) -> list[HostCounts]:
    """Join a run on so many hosts, each with the worker's real code. Return the counts of each host."""
    config = Config.of(**SMALL | settings, run_dir=run_dir, parallel_strategy="expert_parallel", workers=size)
    with pytest.MonkeyPatch.context() as patch:
        # The hosts are threads: they need no process each.
        patch.setattr(workers, "_check_ram", lambda *_: None)
        prepared = Trainer(config=config, quiet=True).prepare()
    run_dir.mkdir(exist_ok=True)

    def join(world: World) -> None:
        with WorkerRun(prepared, world, run_dir, SilentLog(), Supervision()):
            pass

    with pytest.MonkeyPatch.context() as patch:
        # All hosts share two cores here: the measured speed would mean nothing, and takes time.
        patch.setattr(shares, "measure_speed", lambda *_: 1e9)
        return run_thread_hosts(size, join)[1]
