"""Numbers and names for people."""

from __future__ import annotations

from orchestrator.types import counted


def test_a_counted_noun_is_singular_for_one_alone() -> None:
    assert [counted(count, "layer") for count in (0, 1, 2)] == ["0 layers", "1 layer", "2 layers"]
