"""Tests of a launch: what it refuses, and the numbers that it derives from its options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import UserError
from orchestrator.launch.launch import Launch, LaunchOptions


def launch(**options: Any) -> Launch:
    return Launch(LaunchOptions("kuberay", **options), ())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "My Run"}, "--name is 'My Run'; up to 40 lower-case"),
        ({"name": "a" * 41}, "--name"),
        ({"workers": 0}, "--workers is 0; it must be 1 or more"),
        ({"gpus_per_node": -1}, "--gpus-per-node is -1"),
        ({"cpus_per_node": 0}, "--cpus-per-node is 0"),
        ({"run_dir": Path("runs/mine")}, "--run-dir is runs/mine; an absolute path"),
        ({"run_dir": Path("/mine")}, "--run-dir is /mine; an absolute path in a folder"),
        ({"run_dir": Path("s3://me:secret@bucket/run")}, "must not hold keys"),
        ({"run_dir": Path("ftp://host/run")}, "ftp:// is not known"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        launch(**options)


@pytest.mark.parametrize(
    ("workers", "gpus_per_node", "nodes"),
    [(1, 1, 1), (2, 1, 2), (16, 8, 2), (9, 8, 2), (7, 8, 1), (3, 0, 3)],
)
def test_workers_are_divided_into_nodes(workers: int, gpus_per_node: int, nodes: int) -> None:
    assert launch(workers=workers, gpus_per_node=gpus_per_node).nodes == nodes


def test_cores_and_memory_grow_with_the_gpus_unless_they_are_given() -> None:
    large = launch(workers=8, gpus_per_node=8)
    given = launch(workers=8, gpus_per_node=8, cpus_per_node=6, memory_per_node=11)
    without_gpus = launch(gpus_per_node=0)
    assert (large.cpus_on_node, large.memory_on_node_gib) == (64, 256)
    assert (given.cpus_on_node, given.memory_on_node_gib) == (6, 11)
    assert (without_gpus.cpus_on_node, without_gpus.memory_on_node_gib) == (8, 32)


def test_a_run_with_an_address_works_in_the_shared_folder() -> None:
    remote = launch(run_dir=Path("s3://bucket/run1"))
    assert (remote.address, remote.run_dir, remote.shared_folder) == (
        "s3://bucket/run1",
        "s3://bucket/run1",
        "/runs",
    )
    assert launch(run_dir=Path("/data/mine/run1")).shared_folder == "/data/mine"
