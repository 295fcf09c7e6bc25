"""Tests of whole runs on expert hosts: equal to one process, and resumed on other hosts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from experts.tokens import bounds
from harness.hosts.ranks import run_ranks
from harness.runs.records import by_step
from orchestrator.checkpoint.files import load
from orchestrator.record.events.kinds import JsonEvent as Event
from orchestrator.record.files.reading import of_kind, read_events
from tests.train.worker.test_run import config_of, losses, run_rank, train

PLAIN: dict[str, Any] = {
    "experts": 5,
    "expert_hidden_size": (4, 8, 4, 12, 8),
    "schedule": "constant",
    # With seed 0, rounding moves a token to another expert within these steps.
    "seed": 1,
}
EXPERT_PARALLEL: dict[str, Any] = PLAIN | {"parallel_strategy": "expert_parallel"}
ZERO2: dict[str, Any] = EXPERT_PARALLEL | {"sharding": "zero2"}
ZERO3: dict[str, Any] = EXPERT_PARALLEL | {"sharding": "zero3"}
WHOLE: dict[str, Any] = EXPERT_PARALLEL | {"sharding": "none"}
ONE_PROCESS: dict[str, Any] = PLAIN | {"sharding": "none"}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Event]]:
    """The run in one process that the others are compared with: its folder and events."""
    run_dir = tmp_path_factory.mktemp("reference") / "run"
    return run_dir, train(run_dir, 1, max_steps=24, checkpoint_every=8, **PLAIN)


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "two hosts": (2, {}),
    "three hosts, accumulated": (3, {"batch_size": 6}),
    "the gate on the first host": (3, {"gate": "primary"}),
    "round robin, in chunks": (2, {"placement": "round_robin", "exchange_chunks": 2}),
    "recomputed": (2, {"activation_checkpointing": "on"}),
    "bounded rows": (2, {"exchange_rows": "bounded"}),
    "bounded rows, accumulated, in chunks": (
        3,
        {"exchange_rows": "bounded", "batch_size": 6, "exchange_chunks": 2},
    ),
    "bounded rows, recomputed": (2, {"exchange_rows": "bounded", "activation_checkpointing": "on"}),
    "bounded rows of a sharded dense part": (3, {"exchange_rows": "bounded", "sharding": "zero3"}),
    "bounded rows, the gate on the first host": (3, {"exchange_rows": "bounded", "gate": "primary"}),
    "a sharded dense part": (3, {"sharding": "zero3", "batch_size": 6}),
}


@pytest.mark.extended(but_first=1)
@pytest.mark.parametrize("name", CASES)
def test_a_run_on_hosts_equals_one_process(
    tmp_path: Path, reference: tuple[Path, list[Event]], name: str
) -> None:
    hosts, settings = CASES[name]
    expected = reference[1]
    events = train(tmp_path / "run", hosts, max_steps=24, **EXPERT_PARALLEL | settings)
    assert losses(events) == pytest.approx(losses(expected), rel=1e-5)
    evaluation = of_kind(events, "evaluate")[-1]
    expected_evaluation = of_kind(expected, "evaluate")[-1]
    assert (evaluation["samples"], expected_evaluation["samples"]) == (359, 359)
    assert evaluation["loss"] == pytest.approx(expected_evaluation["loss"], rel=1e-4)
    (start,) = of_kind(events, "start")
    (placement,) = of_kind(events, "placement")
    assert (start["strategy"], start["workers"], start["global_batch_size"]) == ("expert_parallel", hosts, 50)
    assert [event["samples"] for event in by_step(events)] == [50] * 24
    assert len(placement["hosts"]) == hosts
    assert all(len(layer["host_of"]) == 5 for layer in placement["layers"])
    exchange = of_kind(events, "exchange")
    assert sum(event["steps"] for event in exchange) == 24
    assert all(event["bytes"] > event["rows"] > 0 for event in exchange)


def assert_checkpoints_equal(run_dir: Path, reference_dir: Path) -> None:
    """The names, tensors and parameter groups of two checkpoints at step 8."""
    saved, expected = (load(folder / "checkpoints" / "step_00000008") for folder in (run_dir, reference_dir))
    for file in ("model", "optimizer"):
        assert saved.tensors[file].keys() == expected.tensors[file].keys()
        for name, tensor in expected.tensors[file].items():
            torch.testing.assert_close(saved.tensors[file][name], tensor, rtol=1e-3, atol=1e-5)
    assert saved.state["optimizer"]["groups"] == expected.state["optimizer"]["groups"]


@pytest.mark.extended
def test_a_checkpoint_of_a_sharded_dense_part_resumes_with_any_sharding(
    tmp_path: Path, reference: tuple[Path, list[Event]]
) -> None:
    """Three hosts with shards, two with other shards, two without, one process: the losses continue.

    The checkpoint has the names, tensors and parameter groups of one process.
    """
    reference_dir, expected = reference
    run_dir = tmp_path / "run"
    train(run_dir, 3, max_steps=8, **ZERO3)
    assert_checkpoints_equal(run_dir, reference_dir)
    train(run_dir, 2, max_steps=12, resume="auto", **ZERO2)
    train(run_dir, 2, max_steps=16, resume="auto", **WHOLE)
    train(run_dir, 3, max_steps=20, resume="auto", **ZERO3)
    events = train(run_dir, 1, max_steps=24, resume="auto", **ONE_PROCESS)
    assert losses(events) == pytest.approx(losses(expected), rel=1e-5)
    assert [event["step"] for event in of_kind(events, "resume")] == [8, 12, 16, 20]


def test_a_checkpoint_of_hosts_resumes_on_other_hosts_placements_and_strategies(
    tmp_path: Path, reference: tuple[Path, list[Event]]
) -> None:
    """Four hosts, two with another placement, three of data parallel, one process: the losses continue.

    A checkpoint of hosts has the names and tensors of one process.
    """
    reference_dir, expected = reference
    run_dir = tmp_path / "run"
    train(run_dir, 4, max_steps=8, **EXPERT_PARALLEL)
    assert_checkpoints_equal(run_dir, reference_dir)
    placement_file = tmp_path / "placement.json"
    placement_file.write_text(json.dumps({"layers": [[1, 1, 0, 1, 1], [0, 0, 0, 0, 0]]}))
    placed: dict[str, Any] = EXPERT_PARALLEL | {"placement": str(placement_file)}
    train(run_dir, 2, max_steps=13, resume="auto", **placed)
    plain: dict[str, Any] = PLAIN | {"placement": "auto"}
    train(run_dir, 3, max_steps=19, resume="auto", **plain)
    events = train(run_dir, 1, max_steps=24, resume="auto", **plain)
    assert losses(events) == pytest.approx(losses(expected), rel=1e-5)
    assert [event["step"] for event in of_kind(events, "resume")] == [8, 13, 19]
    assert of_kind(events, "placement")[-1]["layers"][0]["host_of"] == [1, 1, 0, 1, 1]


@pytest.mark.extended
def test_a_deterministic_run_resumes_to_the_bit_with_its_placement(tmp_path: Path) -> None:
    settings: dict[str, Any] = EXPERT_PARALLEL | {"deterministic": True}
    uninterrupted = train(tmp_path / "uninterrupted", 2, max_steps=12, **settings)
    train(tmp_path / "run", 2, max_steps=5, **settings)
    events = train(tmp_path / "run", 2, max_steps=12, resume="auto", **settings)
    first, second = of_kind(events, "placement")
    assert [layer["host_of"] for layer in first["layers"]] == [layer["host_of"] for layer in second["layers"]]
    assert second["method"] == "as before"
    assert losses(events) == losses(uninterrupted)
    norms = [event["grad_norm"] for event in by_step(events)]
    assert norms == [event["grad_norm"] for event in by_step(uninterrupted)]


@pytest.mark.extended
def test_more_hosts_get_a_new_placement(tmp_path: Path) -> None:
    train(tmp_path / "run", 2, max_steps=4, **EXPERT_PARALLEL)
    events = train(tmp_path / "run", 4, max_steps=8, resume="auto", **EXPERT_PARALLEL)
    last = of_kind(events, "placement")[-1]
    assert last["method"] != "as before"
    assert {host for layer in last["layers"] for host in layer["host_of"]} == {0, 1, 2, 3}


def run_rank_with_tight_bounds(rank: int, size: int, store: str, *arguments: Any) -> Any:
    """Run a rank whose bounds have no slack: most steps have more rows than the one before."""
    bounds._SLACK = 1.0
    bounds._ROUND = 1
    return run_rank(rank, size, store, *arguments)


@pytest.mark.extended
def test_a_step_with_more_rows_than_their_bound_is_repeated(
    tmp_path: Path, reference: tuple[Path, list[Event]]
) -> None:
    settings = EXPERT_PARALLEL | {"exchange_rows": "bounded", "max_steps": 24}
    config = config_of(tmp_path / "run", 2, **settings)
    run_ranks(run_rank_with_tight_bounds, 2, config, None, None)
    events = read_events(tmp_path / "run" / "events.jsonl")
    messages = [event["message"] for event in of_kind(events, "warning")]
    repeated = [message for message in messages if "more rows than their bound" in message]
    assert len(repeated) > 3
    assert losses(events) == pytest.approx(losses(reference[1]), rel=1e-5)
