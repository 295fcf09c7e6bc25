"""Numbers and names for people."""

from __future__ import annotations

from orchestrator.types import counted, flops_text


def test_a_counted_noun_is_singular_for_one_alone() -> None:
    assert [counted(count, "layer") for count in (0, 1, 2)] == ["0 layers", "1 layer", "2 layers"]


def test_operations_are_shown_with_a_prefix() -> None:
    counts = (12, 4.853e14, 4.9069e16, 2e19)
    assert [flops_text(count) for count in counts] == [
        "12 FLOP",
        "485.3 TFLOP",
        "49.1 PFLOP",
        "20,000.0 PFLOP",
    ]
