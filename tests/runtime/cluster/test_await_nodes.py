"""Tests of the wait for the nodes of a cluster. ``tests/launch/test_slurm_run.py`` waits for real ones."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.errors import ResourceError
from orchestrator.runtime.cluster import await_nodes as module
from orchestrator.runtime.cluster.await_nodes import await_nodes, main

HEAD = "10.0.0.1:6379"


class FakeRay:
    """A cluster whose nodes join one after the other, at each look at them."""

    def __init__(self, joining: list[int]) -> None:
        self.joining = joining
        self.calls: list[str] = []

    def init(self, address: str, **_: Any) -> None:
        self.calls.append(f"init {address}")

    def nodes(self) -> list[dict[str, bool]]:
        num_alive = self.joining.pop(0) if len(self.joining) > 1 else self.joining[0]
        return [{"Alive": True}] * num_alive + [{"Alive": False}] * 3

    def shutdown(self) -> None:
        self.calls.append("shutdown")


@pytest.fixture(autouse=True)
def head_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "answers", lambda address: address == HEAD)
    monkeypatch.setattr(module, "_POLL_S", 0.0)


def test_it_returns_when_all_nodes_are_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = FakeRay([1, 2, 2, 3])
    monkeypatch.setattr(module, "ray", cluster)
    await_nodes(HEAD, 3, timeout_s=60)
    assert cluster.joining == [3], "dead nodes do not count"
    assert cluster.calls == [f"init {HEAD}", "shutdown"]


def test_a_missing_node_is_reported_and_the_session_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = FakeRay([1])
    monkeypatch.setattr(module, "ray", cluster)
    with pytest.raises(ResourceError, match="has fewer than 2 nodes; look at the logs"):
        await_nodes(HEAD, 2, timeout_s=0)
    assert cluster.calls[-1] == "shutdown"


def test_a_missing_head_is_reported() -> None:
    with pytest.raises(ResourceError, match=r"no Ray cluster answers at 10\.0\.0\.9:6379"):
        await_nodes("10.0.0.9:6379", 2, timeout_s=0)


@pytest.mark.parametrize("arguments", [[], [HEAD], [HEAD, "two"], [HEAD, "2", "3"]])
def test_wrong_arguments_are_answered(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert "HOST:PORT and the number of nodes were needed" in capsys.readouterr().err
