"""With --reproducible, weights, optimizer state, losses and changes of experts have the same bits on any
number of hosts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from experts.tokens import bounds
from harness.faults.planted_order import ERRORS, planted
from harness.runs.bits import Leg, Run, changes_of, differing_tensors, first_difference, run_all, sha256_of
from harness.runs.exact_runs import DATA, DROPPED, EXACT, EXPERTS, ROUNDED, SKEWED, assert_equal
from orchestrator.record.files.reading import of_kind, read_events

# The comparison itself


def test_a_difference_is_named_with_step_tensor_and_expert() -> None:
    state = {
        "model/blocks.0.ffn.bank.3.up": b"float32 (2,) 12345678",
        "model/head.bias": b"float32 (1,) 1234",
    }
    other = state | {"model/blocks.0.ffn.bank.3.up": b"float32 (2,) 12345679"}
    assert list(differing_tensors(state, state)) == []
    assert list(differing_tensors(state, other)) == ["model/blocks.0.ffn.bank.3.up differs in 1 bytes"]
    del other["model/head.bias"]
    assert "model/head.bias of one run alone" in list(differing_tensors(state, other))
    assert sha256_of(state) != sha256_of(other)


@pytest.mark.timeout(600)
def test_each_planted_error_is_seen(tmp_path: Path) -> None:
    """Runs on hosts, data parallel, in shards and in one process are equal; with an error they are not."""
    one = Run(tmp_path / "one", DROPPED, EXACT, [Leg(1, 3)])
    runs = {
        "experts": Run(tmp_path / "experts", DROPPED, EXACT, [Leg(2, 3, EXPERTS)]),
        "data": Run(tmp_path / "data", DROPPED, EXACT, [Leg(2, 3, DATA)]),
        "shards": Run(tmp_path / "shards", DROPPED, EXACT, [Leg(3, 3, DATA | {"sharding": "zero2"})]),
    }
    for number, name in enumerate(ERRORS):
        plant = partial(planted, name=name)
        runs[name] = Run(tmp_path / f"planted-{number}", DROPPED, EXACT, [Leg(2, 3, EXPERTS)], plant)
    run_all([one, *runs.values()])
    found = {name: first_difference(run.folder, one.folder) for name, run in runs.items()}
    equal = {name for name, difference in found.items() if difference is None}
    assert equal == {"experts", "data", "shards"}, found


# Hosts and placements


@pytest.mark.timeout(600)
def test_hosts_interrupted_and_resumed_on_others_have_the_bits_of_one_process(tmp_path: Path) -> None:
    """With dropout, noise of the gate, a capacity, a shared expert and an average of the weights.

    Without the flag the same runs differ."""
    options = {"jitter": 0.2, "shared": 3, "bias_rate": 0.01, "scores": "sigmoid", "capacity": 0.8}
    task = replace(DROPPED, options=options)
    more = {"ema_decay": 0.9, "evaluate_ema": True}
    variants = {"hosts": [Leg(3, 4, EXPERTS), Leg(2, 6, EXPERTS)]}
    assert_equal(tmp_path, task, EXACT | more, variants, 6)

    one, on_hosts = (
        Run(tmp_path / f"rounded-{number}", task, ROUNDED | more, [Leg(number, 3, EXPERTS)])
        for number in (1, 3)
    )
    run_all([one, on_hosts])
    assert first_difference(on_hosts.folder, one.folder) is not None


@pytest.mark.extended
@pytest.mark.timeout(900)
@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
def test_copies_of_a_hot_expert_have_the_bits_of_one_process(optimizer: str, tmp_path: Path) -> None:
    """The expert is copied on 3 hosts, and the run is resumed on 2 with the copies dropped."""
    sizes = {"batch_size": 12, "global_batch_size": 90, "rebalance": "on", "optimizer": optimizer}
    variants = {"hosts": [Leg(3, 12, EXPERTS), Leg(2, 15, EXPERTS)], "more hosts": [Leg(4, 15, EXPERTS)]}
    folders = assert_equal(tmp_path, SKEWED, EXACT | sizes, variants, 15)
    assert all("copied" in changes_of(folders[name]) for name in variants)


# The exchange


@contextmanager
def tight_bounds(_rank: int) -> Iterator[None]:
    """Bound rows so tightly that some are cut in each step that has bounds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounds, "_ROUND", 1)
        patch.setattr(bounds, "_SLACK", 0.5)
        yield


@pytest.mark.extended
@pytest.mark.timeout(600)
def test_chunks_and_bounds_of_the_exchange_change_no_bit(tmp_path: Path) -> None:
    """A step whose rows were cut is repeated with counts, and its sums with it."""
    chunks = EXPERTS | {"exchange_chunks": 2}
    bounded = EXPERTS | {"exchange_rows": "bounded"}
    more = {"sharding": "zero3", "activation_checkpointing": "on"}
    settings = EXACT | {"max_steps": 6}
    runs = {
        "one": Run(tmp_path / "one", DROPPED, settings, [Leg(1, 6)]),
        "chunks": Run(tmp_path / "chunks", DROPPED, settings, [Leg(3, 4, chunks), Leg(2, 6, chunks)]),
        "bounded": Run(tmp_path / "bounded", DROPPED, settings, [Leg(3, 4, bounded), Leg(2, 6, bounded)]),
        "more": Run(tmp_path / "more", DROPPED, settings, [Leg(3, 6, bounded | more)]),
        "most": Run(
            tmp_path / "most", DROPPED, settings, [Leg(3, 6, chunks | more | {"exchange_chunks": 5})]
        ),
        "cut": Run(tmp_path / "cut", DROPPED, settings, [Leg(2, 6, bounded)], tight_bounds),
    }
    run_all(list(runs.values()))
    one = runs.pop("one").folder
    differences = {name: first_difference(run.folder, one) for name, run in runs.items()}
    assert not any(differences.values()), differences
    for name, run in runs.items():
        warnings = of_kind(read_events(run.folder / "events.jsonl"), "warning")
        cuts = [each for each in warnings if "more rows than their bound" in each["message"]]
        assert bool(cuts) == (name == "cut")
        assert all(each["kind"] == "exchange" for each in cuts)
