"""Tests of the decisions about clusters that need none: which to join, which GPUs to show, how
long to wait."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest
import ray

from orchestrator.config.settings import Config
from orchestrator.errors import ResourceError, UserError
from orchestrator.runtime.cluster import session


@pytest.fixture
def listening() -> Iterator[str]:
    """The address of a port that answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1", "127.0.0.1:x", ":"])
def test_an_address_without_a_listener_does_not_answer(address: str) -> None:
    assert not session.answers(address)


def test_a_listener_answers(listening: str) -> None:
    assert session.answers(listening)


def test_a_killed_cluster_leaves_an_address_that_is_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(session, "find_local_cluster", lambda temp_dir: "127.0.0.1:1")
    assert not session.joins_cluster(Config())


def test_a_running_cluster_is_joined_unless_local_is_requested(
    listening: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", listening)
    assert session.joins_cluster(Config())
    assert session.joins_cluster(Config.of(ray_address=listening))
    assert not session.joins_cluster(Config.of(ray_address="local"))
    monkeypatch.setenv("RAY_ADDRESS", "local")
    assert not session.joins_cluster(Config())


def test_a_named_cluster_that_does_not_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(
        ResourceError, match=r"RAY_ADDRESS is 127\.0\.0\.1:1, but no Ray cluster answers there"
    ):
        session.joins_cluster(Config())
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:8265")
    with pytest.raises(UserError, match="the address of a service"):
        session.joins_cluster(Config())


@pytest.mark.parametrize(("visible", "expected"), [(None, "0,2"), ("4,5,7", "4,7"), ("", "0,2")])
def test_chosen_gpus_count_among_the_visible_ones(
    visible: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    session._restrict_gpus((0, 2))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == expected


def test_workers_notice_a_silent_peer_before_ray_train_does() -> None:
    assert session._timeouts(120)["RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S"] == "240"


def test_the_wait_for_an_autoscaler_ends_with_the_devices_or_the_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    present = iter([1.0, 1.0, 2.0])
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": next(present)})
    monkeypatch.setattr(session, "sleep", lambda seconds: None)
    notes: list[str] = []
    session.wait_for_slots(2, on_gpu=True, timeout_s=60, note=notes.append)
    assert notes == ["waiting up to 60 s for the autoscaler: 1 of 2 GPUs are there"]
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 3.0})
    with pytest.raises(ResourceError, match="4 workers need 4 CPUs; after 0 s the cluster has 3"):
        session.wait_for_slots(4, on_gpu=False, timeout_s=0, note=notes.append)
