"""Tests of ``plan --what-fits``, and of a training that cannot fit."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from harness.fakes.inventories import machine
from orchestrator import trainer
from orchestrator.tasks.load import load_task
from tests.cli.helpers import Call

SIZES = (
    "--task", "synthetic", "--width", "64", "--layers", "3", "--sequence-length", "0",
    "--experts", "3", "--samples", "70", "--evolution", "off",
)  # fmt: skip


def test_the_table_has_a_row_for_each_configuration(call: Call) -> None:
    answer = call("plan", *SIZES, "--what-fits")
    assert answer.code == 0
    shown = " ".join(answer.out.split())
    for part in ("as configured", "--activation-checkpointing on", "--lora 16", "micro-batch up to", "yes"):
        assert part in shown
    assert "the plan takes batch_size 64: all 64 samples fit at once" in shown
    assert shown.endswith("the configuration fits")
    assert "sequence up to" not in shown, "the samples are vectors"


@pytest.mark.extended
def test_the_json_has_the_columns_of_a_cluster_with_speeds(call: Call) -> None:
    answer = call("plan", *SIZES, "--cluster", "2xL4", "--what-fits", "--json")
    assert answer.code == 0
    found = json.loads(answer.out)["what_fits"]
    assert found["nearest"] == ""
    rungs = {rung["name"]: rung for rung in found["rungs"]}
    configured = rungs["as configured"]
    assert configured["fits"]
    assert configured["per_second"] > 0
    assert configured["largest_micro_batch"] == 35, "half of the data on each GPU"
    offloaded = rungs["+ offload to host memory"]
    assert offloaded["memory"]["total"] < rungs["+ parameters sharded"]["memory"]["total"]
    assert offloaded["per_second"] is None, "the cost model has no figure"
    assert offloaded["flags"].endswith("--cpu-offload")
    assert rungs["LoRA of rank 16 instead"]["memory"] is None


@pytest.mark.extended
def test_the_longest_sequence_fits_by_its_own_trace(call: Call) -> None:
    sizes = "--task text --width 256 --layers 4 --experts 3 --evolution off --activation-checkpointing off"
    small = [*sizes.split(), "--gpu-memory-fraction", "0.05", "--cluster", "1xL4", "--global-batch-size", "8"]
    found = json.loads(call("plan", *small, "--what-fits", "--json").out)["what_fits"]
    longest = found["rungs"][0]["longest_sequence"]
    assert 2**10 < longest < 2**16
    one = ["--batch-size", "1", "--sequence-length", str(longest), "--json"]
    memory = json.loads(call("plan", *small, *one).out)["memory"]
    # Between two traced lengths memory is taken as linear.
    assert 0.97 * memory["limit"] < memory["total"] <= 1.001 * memory["limit"]


def test_a_training_that_cannot_fit_ends_before_its_weights_with_flags_that_fit(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So many layers that the update of one of them by 8-bit Adam needs less than its states save.
    sizes = [*SIZES]
    sizes[sizes.index("--layers") + 1] = "12"
    whole = json.loads(call("plan", *sizes, "--batch-size", "1", "--json").out)["memory"]["total"]
    small = machine(ram_free=0.9 * whole)
    monkeypatch.setattr(trainer, "inventory", lambda _: small)

    def initialise(*_: Any) -> None:
        raise AssertionError("the weights were drawn")

    monkeypatch.setattr("orchestrator.train.worker.run.run_worker", initialise)
    answer = call("train", *sizes)
    assert answer.code == 3
    message, _, flags = answer.err.strip().partition("The nearest configuration that fits: ")
    assert "one sample needs" in message
    assert not (tmp_path / "results").exists()
    memory = json.loads(call("plan", *sizes, *shlex.split(flags), "--json").out)["memory"]
    assert memory["total"] <= memory["limit"]
    assert "adamw8bit" in flags


def test_weights_of_a_hub_are_not_downloaded_for_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from harness.lm.language_models import lm_config

    config = lm_config(tmp_path)
    asked: list[list[str]] = []

    def snapshot_download(_: str, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        return str(config.model.model)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    load_task(config.but(model="org/name"))
    assert asked
    assert not any("safetensors" in pattern and "index" not in pattern for each in asked for pattern in each)
