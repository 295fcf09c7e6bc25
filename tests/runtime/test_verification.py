"""``orchestrator verify`` on workers: the record of one process, computed again on two."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.hosts.cluster import RayCluster
from harness.runs.cli_runs import complete
from harness.runs.verified_runs import TRAIN_FLAGS

pytestmark = [pytest.mark.ray, pytest.mark.extended, pytest.mark.timeout(900)]


def test_the_record_of_one_process_is_equal_on_two_workers(
    shared_cluster: RayCluster, tmp_path: Path
) -> None:
    complete(None, tmp_path, ["train", *TRAIN_FLAGS, "--run-dir", "run"])
    run = tmp_path / "run"
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    for strategy in ("expert_parallel", "data_parallel"):
        flags = ["--workers", "2", "--parallel-strategy", strategy]
        output = complete(shared_cluster, tmp_path, ["verify", "run", *flags])
        assert "equal: 2 steps and the digests of 3 steps were compared" in output
        assert "on 2 workers" in output
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    assert not list(tmp_path.glob(".verify-*")), "the temporary folder is removed"
    lines = (run / "events.jsonl").read_text().splitlines()
    number = next(i for i, line in enumerate(lines) if '"event": "step"' in line and '"step": 4' in line)
    lines[number] = lines[number].replace('"loss": ', '"loss": 1')
    (run / "events.jsonl").write_text("\n".join(lines) + "\n")
    output = complete(shared_cluster, tmp_path, ["verify", "run", *flags], code=4)
    assert "differs at step 4" in output
    assert "step 4: loss 1" in output
