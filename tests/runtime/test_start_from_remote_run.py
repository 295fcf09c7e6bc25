"""Runs on a cluster that begin with a checkpoint of another run on an object store.

Each node has an empty disk of its own for drivers and temporary files. All share one other folder."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import pytest

from harness.hosts.cluster import RayCluster, local_cluster, needs_private_disks
from harness.runs.cli_runs import QUIET, SIZES, complete, losses
from harness.storage.object_server import ObjectServer
from orchestrator.config.reading.reader import read_file
from orchestrator.record.files.reading import of_kind, read_events
from orchestrator.storage.address import as_url
from orchestrator.storage.folder import RemoteFolder

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(600),
    needs_private_disks,
]
FIRST_STEPS = 6
STEPS = 12
LENGTH = shlex.split("--epochs 100 --log-every 1 --evaluate-every 1000 --checkpoint-every 100")
WORKERS = {
    "data_parallel": shlex.split("--workers 2"),
    "expert_parallel": shlex.split("--workers 2 --parallel-strategy expert_parallel"),
}


@pytest.fixture(scope="module")
def cluster(_s3_server: ObjectServer) -> Iterator[RayCluster]:
    """A head without slots, where the drivers run, and two nodes with a slot and disks of their own."""
    with local_cluster(cpus=0) as started:
        private = [started.folder / "drivers", started.folder / "tmp"]
        for path in (*private, started.folder / "shared"):
            path.mkdir()
        started.environment |= {**_s3_server.environment, "TMPDIR": str(private[1])}
        for _ in range(2):
            started.add_node(cpus=1, private=private)
        yield started


@dataclass(frozen=True)
class EarlierRun:
    """A run in one process: its first steps on the object store, and the losses of all its steps."""

    url: str
    losses: list[float]

    @property
    def checkpoint(self) -> str:
        return f"{self.url}/checkpoints/step_{FIRST_STEPS:08d}"


@pytest.fixture(scope="module")
def earlier(_s3_server: ObjectServer, tmp_path_factory: pytest.TempPathFactory) -> EarlierRun:
    folder = tmp_path_factory.mktemp("earlier")
    url = _s3_server.url(f"earlier-{uuid4().hex}")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in _s3_server.environment.items():
            patch.setenv(name, value)
        for run_dir, steps in ((url, FIRST_STEPS), (folder / "whole", STEPS)):
            length = [*LENGTH, "--max-steps", str(steps)]
            complete(None, folder, ["train", "--run-dir", str(run_dir), *SIZES, *QUIET, *length])
    return EarlierRun(url, losses(folder / "whole"))


def drive(cluster: RayCluster, folder: Path, *extra: str) -> str:
    """Train to the end in a new folder on the driver's disk, or on one that all nodes share."""
    folder.mkdir()
    arguments = ["train", *SIZES, *QUIET, *LENGTH, "--max-steps", str(STEPS), *extra]
    return complete(cluster, folder, arguments)


@pytest.mark.extended
@pytest.mark.parametrize(
    "strategy", [pytest.param("data_parallel", marks=pytest.mark.slow), "expert_parallel"]
)
def test_nodes_without_a_shared_disk_resume_another_run(
    cluster: RayCluster, s3: ObjectServer, earlier: EarlierRun, strategy: str
) -> None:
    folder = cluster.folder / "drivers" / f"resumed-{strategy}"
    url = s3.url(f"resumed-{uuid4().hex}")
    output = drive(cluster, folder, "--run-dir", url, "--resume", earlier.url, *WORKERS[strategy])
    assert "the nodes share no disk" in output
    assert f"nodes download the checkpoint step_{FIRST_STEPS:08d} of {earlier.url}" in " ".join(
        output.split()
    )
    (run_dir,) = folder.glob("results/*")
    events = read_events(run_dir / "events.jsonl")
    assert [event["step"] for event in of_kind(events, "start")] == [FIRST_STEPS]
    assert losses(run_dir) == pytest.approx(earlier.losses[FIRST_STEPS:], rel=1e-5)
    settings = read_file(run_dir / "config.yaml").config.checkpoint
    assert settings.resume == earlier.url
    assert f"checkpoints/step_{STEPS:08d}" in " ".join(RemoteFolder(url).files())


@pytest.mark.extended
@pytest.mark.parametrize("place", ["drivers", pytest.param("shared", marks=pytest.mark.slow)])
def test_a_run_on_a_drive_that_all_nodes_share_begins_with_remote_weights(
    cluster: RayCluster, s3: ObjectServer, earlier: EarlierRun, place: str
) -> None:
    """The driver's copy is below the folder that it was started in: the nodes see it, or they do not."""
    del s3
    run_dir = cluster.folder / "shared" / f"run-{place}"
    folder = cluster.folder / place / "begun"
    output = drive(
        cluster,
        folder,
        "--run-dir",
        str(run_dir),
        "--init-from",
        earlier.checkpoint,
        *WORKERS["data_parallel"],
    )
    assert ("nodes download the checkpoint" in " ".join(output.split())) == (place == "drivers")
    (resumed,) = of_kind(read_events(run_dir / "events.jsonl"), "resume")
    assert (resumed["weights_only"], resumed["path"]) == (True, earlier.checkpoint)
    assert as_url(read_file(run_dir / "config.yaml").config.checkpoint.init_from) == earlier.checkpoint
    # The weights of the earlier run, with data from its beginning.
    assert losses(run_dir)[0] < earlier.losses[0]


@pytest.mark.extended
def test_nodes_that_cannot_read_the_other_run_end_the_run_before_it_starts(
    cluster: RayCluster, s3: ObjectServer, earlier: EarlierRun
) -> None:
    """A copy on a drive of the driver's machine alone: file:// is another folder on each node."""
    del s3
    folder = cluster.folder / "drivers" / "unreadable"
    folder.mkdir()
    source = RemoteFolder(earlier.url)
    private = RemoteFolder(f"file://{folder}/remote")
    for name in source.files():
        private.write(name, source.read(name, 2**24) or b"")
    arguments = ["train", *SIZES, *QUIET, *LENGTH, "--max-steps", str(STEPS), *WORKERS["data_parallel"]]
    run_dir = cluster.folder / "shared" / "unreadable"
    output = complete(
        cluster,
        folder,
        [*arguments, "--run-dir", str(run_dir), "--resume", private.url],
        code=2,
    )
    message = f"cannot read {private.url}/checkpoints/step_{FIRST_STEPS:08d} (it is not there)"
    assert message in " ".join(output.split())
