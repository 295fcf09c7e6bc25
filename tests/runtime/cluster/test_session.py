"""What Ray would print of itself, and which ways to the store are used again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from experts.membership import GroupMembership
from orchestrator.runtime.cluster import session
from orchestrator.runtime.expert_parallel.host_worker import _kept_client


def test_a_death_is_not_told_by_ray_too(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    plain = lambda data, ignore_prefix: heard.extend(data["lines"])  # noqa: E731
    monkeypatch.setattr(session.ray_worker, "print_to_stdstream", plain)
    with session._in_a_line():
        for line in (
            f"{session._DEATHS} Lease ID: 0",
            "2 workers were killed because the node runs low on memory",
        ):
            session.ray_worker.print_to_stdstream({"lines": [line]}, ignore_prefix=False)
    assert heard == ["2 workers were killed because the node runs low on memory"]
    assert session.ray_worker.print_to_stdstream is plain


def broken(keys: list[str]) -> bool:
    raise RuntimeError("connection reset by peer")


@pytest.mark.parametrize(
    ("connecting", "check", "kept"),
    [(False, lambda keys: False, True), (True, lambda keys: False, False), (False, broken, False)],
)
def test_a_way_that_is_busy_or_broken_is_not_taken_again(connecting: bool, check: Any, kept: bool) -> None:
    store = SimpleNamespace(check=check)
    side: Any = SimpleNamespace(memory={"store": store}, life=GroupMembership())
    lines: Any = SimpleNamespace(connecting=connecting, store=store)
    with _kept_client(side, lines):
        pass
    assert ("store" in side.memory) == kept
