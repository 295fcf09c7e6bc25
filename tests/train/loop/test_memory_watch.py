"""The peak memory of a run and its parts: on a GPU and a CPU, of several workers, and in the record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.hosts.ranks import run_ranks
from harness.runs.loop_runs import SMALL, run_loop
from orchestrator.config.settings import Config
from orchestrator.record.events.kinds import Memory
from orchestrator.record.files.reading import of_kind, read_events
from orchestrator.report.run.figures.read import read_run_record
from orchestrator.report.run.figures.stats import memory_parts
from orchestrator.train.group.stores import file_store
from orchestrator.train.group.world import World, process_group_world
from orchestrator.train.loop import memory_watch
from orchestrator.train.loop.memory_watch import MemoryWatch
from orchestrator.trainer import Trainer

PARTS = {"parameters": 400, "gradients": 400, "optimizer": 800, "average": 0, "buffers": 8}


def watch_of(monkeypatch: pytest.MonkeyPatch, device: str, allocated: int) -> MemoryWatch:
    peak = {"allocated": allocated, "reserved": 2 * allocated}
    monkeypatch.setattr(memory_watch, "peak_memory", lambda device: peak)
    return MemoryWatch(World.single_process(torch.device(device)), lambda: PARTS)


def test_the_rest_of_a_gpus_peak_is_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    found = watch_of(monkeypatch, "cuda:0", 5000).epoch_peak()
    known = {name: size for name, size in PARTS.items() if size}
    assert found == Memory(5000, 10_000, known | {"activations": 5000 - sum(known.values())})
    assert sum(found.parts.values()) == found.allocated


def test_a_peak_before_the_first_step_has_no_negative_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    assert watch_of(monkeypatch, "cuda:0", 100).epoch_peak().parts["activations"] == 0


def test_a_process_on_a_cpu_has_parts_without_a_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "activations" not in watch_of(monkeypatch, "cpu", 5000).run_record().parts


def watch_on_rank(rank: int, size: int, store: str, peaks: list[int]) -> list[Memory]:
    with (
        pytest.MonkeyPatch.context() as patch,
        process_group_world(file_store(store, size), rank, size, torch.device("cpu"), "gloo", 30) as world,
    ):
        peak = {"allocated": peaks[rank], "reserved": 100 - rank}
        patch.setattr(memory_watch, "peak_memory", lambda device: peak)
        watch = MemoryWatch(world, lambda: {"parameters": 10 + rank})
        epoch = watch.epoch_peak()
        watch.end_run()
        return [epoch, watch.run_record()]


@pytest.mark.parametrize(("peaks", "worker"), [([50, 60], 1), ([60, 50], 0), ([60, 60], 0)])
def test_the_worker_with_the_largest_peak_counts(peaks: list[int], worker: int) -> None:
    expected = Memory(60, 100, {"parameters": 10 + worker}, worker)
    assert run_ranks(watch_on_rank, 2, peaks) == [[expected] * 2] * 2


def state_bytes(run_dir: Path) -> dict[str, float]:
    """Return the parts of a run of its summary, without those that depend on checkpoints."""
    parts = json.loads((run_dir / "summary.json").read_text())["memory_parts"]
    return {name: size for name, size in parts.items() if name != "buffers"}


def train(run_dir: Path, **settings: Any) -> None:
    config = Config.of(**SMALL | {"run_dir": run_dir, "ema_decay": 0.9} | settings)
    Trainer(config=config, quiet=True).fit()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("memory") / "run"
    train(run_dir, max_steps=3)
    return run_dir


def test_summary_text_and_page_show_the_same_parts(finished: Path) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    (end,) = of_kind(read_events(finished / "events.jsonl"), "end")
    parts = summary["memory_parts"]
    assert parts == end["memory"]["parts"]
    assert summary["peak_memory_bytes"] == end["memory"]["allocated"]
    assert set(parts) == {"parameters", "gradients", "optimizer", "average", "gate", "buffers"}
    assert parts["parameters"] == parts["gradients"] == parts["average"]
    record = read_run_record(finished)
    assert {part.name: part.measured for part in memory_parts(record) if part.measured} == parts
    text = (finished / "performance_summary.txt").read_text()
    page = (finished / "report.html").read_text()
    for shown in (text, page):
        assert "average" in shown
        assert "measured" in shown


def test_parts_are_as_the_plan_estimated_them(finished: Path) -> None:
    plan = json.loads((finished / "plan.json").read_text())["memory"]
    parts = state_bytes(finished)
    for name in ("parameters", "gradients", "average"):
        assert parts[name] == plan[name], name
    # AdamW counts the steps of each parameter.
    assert plan["optimizer"] <= parts["optimizer"] <= plan["optimizer"] + 400
    assert plan["gate"] <= parts["gate"] <= plan["gate"] + 40


@pytest.mark.extended
def test_a_resumed_run_measures_its_parts(finished: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    train(run_dir, max_steps=2)
    train(run_dir, max_steps=3, resume="auto")
    assert state_bytes(run_dir) == state_bytes(finished)


def test_a_run_that_only_evaluates_has_no_gradients(tmp_path: Path) -> None:
    """The state is measured at its end, from the weights and the optimizer state of the checkpoint."""
    run_dir = tmp_path / "run"
    train(run_dir, max_steps=2)
    trained = state_bytes(run_dir)
    train(run_dir, max_steps=2, resume="auto")
    last = of_kind(read_events(run_dir / "events.jsonl"), "end")[-1]["memory"]["parts"]
    assert "gradients" not in last
    assert {name: last[name] for name in ("parameters", "optimizer", "average")} == {
        name: trained[name] for name in ("parameters", "optimizer", "average")
    }


def test_the_buffer_of_a_checkpoint_counts_beside_a_model_on_a_cpu(tmp_path: Path) -> None:
    loop, _ = run_loop(tmp_path, max_steps=2)
    state = loop.stepper.state_memory.parts
    buffers = loop.memory.run_record().parts["buffers"]
    assert buffers > state["buffers"] + state["parameters"] + state["optimizer"]


def test_each_epoch_has_its_own_peak_and_the_run_the_highest(monkeypatch: pytest.MonkeyPatch) -> None:
    resets: list[torch.device] = []
    monkeypatch.setattr(memory_watch, "reset_peak", resets.append)
    watch = watch_of(monkeypatch, "cuda:0", 700)
    watch.start_epoch()
    assert len(resets) == 1
    monkeypatch.setattr(memory_watch, "peak_memory", lambda device: {"allocated": 500, "reserved": 600})
    assert watch.epoch_peak().allocated == 500
    assert watch.run_record().allocated == 700


@pytest.mark.parametrize(
    ("allocated", "warned"),
    [
        ([100, 102, 104, 107], [False, False, False, True]),
        ([100, 102, 102, 107], [False] * 4),
        ([100, 90, 92, 94, 96, 90], [False, False, False, False, True, False]),
    ],
)
def test_memory_that_rises_over_four_epochs_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, allocated: list[int], warned: list[bool]
) -> None:
    watch = MemoryWatch(World.single_process())
    readings = iter(allocated)
    monkeypatch.setattr(memory_watch, "allocated_now", lambda device: next(readings))
    warnings = [watch.leak_warning() for _ in allocated]
    assert [warning is not None for warning in warnings] == warned
    assert all("rose over four epochs" in warning for warning in warnings if warning)


def test_a_leak_is_a_warning_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter(range(1000, 10_000, 1000))
    monkeypatch.setattr(memory_watch, "allocated_now", lambda device: next(readings))
    run_loop(tmp_path / "run", epochs=5, batch_size=1000)
    warnings = of_kind(read_events(tmp_path / "run" / "events.jsonl"), "warning")
    assert [warning["kind"] for warning in warnings] == ["leak"] * 2
