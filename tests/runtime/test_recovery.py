"""What is done after a failure: one test per arrow."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.runtime.recovery import Again, Failure, GiveUp, decide

LOST = Failure("worker", "worker 1 was lost", 1)
NOW: dict[str, Any] = {"failures": 1, "max_failures": 3, "workers": 4, "slots": 4, "halvings": 1}


def test_a_lost_worker_is_replaced() -> None:
    assert decide(LOST, **NOW) == Again(4, 1, "worker 1 was lost")
    assert isinstance(decide(Failure("communication", "lost touch"), **NOW), Again)
    assert isinstance(decide(Failure("resources", "start timed out"), **NOW), Again)


def test_a_lost_node_leaves_fewer_workers() -> None:
    made = decide(LOST, **NOW | {"slots": 3})
    assert isinstance(made, Again)
    assert (made.workers, made.halvings) == (3, 1)
    assert "3 of 4 workers" in made.reason
    assert isinstance(decide(LOST, **NOW | {"slots": 0}), GiveUp)


def test_out_of_memory_halves_the_micro_batch() -> None:
    made = decide(Failure("memory", "worker 0 ran out", 0, 16), **NOW)
    assert isinstance(made, Again)
    assert (made.workers, made.halvings) == (4, 2)
    assert isinstance(decide(Failure("memory", "worker 0 ran out", 0, 1), **NOW), GiveUp)


def test_the_runs_own_error_is_never_retried() -> None:
    assert decide(Failure("error", "KeyError: 'a'"), **NOW) == GiveUp("KeyError: 'a'")


@pytest.mark.parametrize(("failures", "most"), [(4, 3), (1, 0)])
def test_patience_ends(failures: int, most: int) -> None:
    made = decide(LOST, **NOW | {"failures": failures, "max_failures": most})
    assert isinstance(made, GiveUp)
    assert "--max-failures" in made.reason
