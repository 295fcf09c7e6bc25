"""Runs on nodes that share no disk, with the run folder on an object store.

Each node has an empty disk of its own where the driver has its run folder, and for temporary files."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import pytest

from harness.hosts.cluster import RayCluster, local_cluster, needs_private_disks
from harness.runs.cli_runs import (
    QUIET,
    SIZES,
    complete,
    finish_run,
    kill_worker,
    losses,
    single_process_losses,
)
from harness.runs.records import by_step
from harness.storage.object_server import ObjectServer
from orchestrator.record.events.kinds import JsonEvent as Event
from orchestrator.record.files.reading import of_kind, read_events
from orchestrator.storage.folder import RemoteFolder

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(900),
    needs_private_disks,
]
STEPS = 90
LENGTH = shlex.split(
    f"--max-steps {STEPS} --epochs 100 --checkpoint-every 10 --log-every 1 --evaluate-every 1000"
)
DATA_PARALLEL = shlex.split("--workers 2 --max-failures 5")
EXPERT_PARALLEL = shlex.split("--workers 3 --spares 1 --parallel-strategy expert_parallel --snapshot-every 5")
_WAIT_S = 200.0


@pytest.fixture(scope="module")
def cluster(_s3_server: ObjectServer) -> Iterator[RayCluster]:
    """A head without slots, where the drivers run, and four nodes with a slot and disks of their own."""
    with local_cluster(cpus=0) as started:
        private = [started.folder / "drivers", started.folder / "tmp"]
        for path in private:
            path.mkdir()
        started.environment |= {**_s3_server.environment, "TMPDIR": str(private[1])}
        for _ in range(4):
            started.add_node(cpus=1, private=private)
        yield started


@dataclass
class Driver:
    """A driver in a folder of its own, as on another machine."""

    folder: Path
    process: subprocess.Popen[str]

    @property
    def run_dir(self) -> Path:
        (found,) = self.folder.glob("results/*")
        return found

    @property
    def events(self) -> list[Event]:
        return [event for path in self.folder.glob("results/*/events.jsonl") for event in read_events(path)]

    def count(self, kind: str) -> int:
        return len(of_kind(self.events, kind))

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _WAIT_S
        while not condition():
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline, "the run does not come on"
            time.sleep(0.02)

    def kill(self) -> int:
        """Kill the driver and remove its disk. Return the newest step that was acknowledged."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()
        uploads = of_kind(self.events, "upload")
        shutil.rmtree(self.folder)
        return max(event["step"] for event in uploads)


def start(cluster: RayCluster, url: str, *extra: str) -> Driver:
    folder = cluster.folder / "drivers" / uuid4().hex[:8]
    folder.mkdir()
    command = [sys.executable, "-m", "orchestrator", "train", "--run-dir", url, "--resume", "auto"]
    process = subprocess.Popen(
        [*command, *SIZES, *QUIET, *LENGTH, *extra, "--ray-address", cluster.address],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env=cluster.environment,
        start_new_session=True,
    )
    return Driver(folder, process)


def check_resumed(driver: Driver, acknowledged: int, expected: list[float]) -> None:
    """The run goes on where it was acknowledged, and its losses are those of a run that was not disturbed."""
    output = finish_run(driver.process)
    assert "the nodes share no disk" in output
    events = driver.events
    assert of_kind(events, "start")[-1]["step"] >= acknowledged
    assert [event["step"] for event in by_step(events)] == list(range(1, STEPS + 1))
    assert losses(driver.run_dir)[:50] == pytest.approx(expected[:50], rel=1e-5)
    assert losses(driver.run_dir) == pytest.approx(expected, rel=2e-2)
    # The driver ends with a whole copy of the last checkpoint, and the model of it.
    assert (driver.run_dir / "checkpoints" / f"step_{STEPS:08d}" / "model_00001.safetensors").is_file()


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return single_process_losses(tmp_path_factory.mktemp("calm") / "run", *LENGTH)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("settings", "lost_rank"),
    [
        pytest.param([*DATA_PARALLEL, "--sharding", "none"], 1, id="data_parallel"),
        pytest.param([*DATA_PARALLEL, "--sharding", "zero3"], 1, id="zero3", marks=pytest.mark.slow),
        pytest.param(EXPERT_PARALLEL, 0, id="expert_parallel-main_host"),
    ],
)
def test_a_run_survives_a_lost_worker_and_a_lost_driver(
    cluster: RayCluster, s3: ObjectServer, calm: list[float], settings: list[str], lost_rank: int
) -> None:
    url = s3.url(f"lost-driver-{uuid4().hex}")
    driver = start(cluster, url, *settings)
    driver.wait_for(lambda: driver.count("upload") >= 2)
    kill_worker(driver.run_dir, lost_rank)
    driver.wait_for(lambda: driver.count("recovery") == 1)
    uploads = driver.count("upload")
    driver.wait_for(lambda: driver.count("upload") > uploads)
    acknowledged = driver.kill()
    check_resumed(start(cluster, url, *settings), acknowledged, calm)


@pytest.mark.extended
def test_each_node_downloads_the_checkpoint_that_is_evaluated(cluster: RayCluster, s3: ObjectServer) -> None:
    url = s3.url(f"evaluation-{uuid4().hex}")
    folder = cluster.folder / "drivers" / uuid4().hex[:8]
    folder.mkdir()
    complete(
        cluster, folder, ["train", "--workers", "1", "--run-dir", url, *SIZES, *QUIET, "--max-steps", "4"]
    )
    (run_dir,) = folder.glob("results/*")
    (expected,) = of_kind(read_events(run_dir / "events.jsonl"), "evaluate")
    output = complete(cluster, folder, ["evaluate", url, "--workers", "2"])
    assert "the nodes share no disk: each of them downloads the checkpoint" in output
    result = json.loads(RemoteFolder(url).read("checkpoints/step_00000004.validation.json", 2**20) or b"")
    assert (result["workers"], result["samples"]) == (2, expected["samples"])
    assert result["loss"] == pytest.approx(expected["loss"], rel=1e-6)


@pytest.mark.extended
def test_a_run_folder_on_a_disk_that_nodes_do_not_share_is_refused(cluster: RayCluster) -> None:
    driver = start(cluster, "results/run1", *DATA_PARALLEL)
    output = finish_run(driver.process, code=2)
    assert "does not see the run folder" in output
    assert "on an object store" in output
