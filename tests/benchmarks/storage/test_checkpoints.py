"""A checkpoint of expert hosts: a tiny state on two hosts, as threads."""

from __future__ import annotations

from pathlib import Path

from benchmarks.storage.checkpoints import SAVES, RankResult, build_state, measure, rows_of
from harness.hosts.thread_hosts import run_gloo_threads
from orchestrator.train.group.world import World

GIGABYTES = 0.001


def test_saves_and_resume_are_measured(tmp_path: Path) -> None:
    def host(world: World) -> RankResult:
        return measure(build_state(world, GIGABYTES), world, tmp_path / "checkpoints")

    results = run_gloo_threads(2, host)
    for result in results:
        assert len(result.stalls_s) == len(result.durable_s) == SAVES
        assert min(result.stalls_s + result.durable_s) > 0
        assert result.read_bytes > 0
        assert result.resume_s > 0
    assert [len(row) for row in rows_of(results)] == [2] * 6
