"""Which connections to the store are used again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from experts.membership import GroupMembership
from orchestrator.runtime.expert_parallel.host_worker import _kept_client


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
