"""Weights in bf16 with --reproducible, --ema-decay and --evolution: on any number of workers the bits of one
process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from harness.runs.bits import Leg, Run, changes_of, checkpoints_of, first_difference, run_all
from harness.runs.combinations import Validated
from harness.runs.exact_runs import DATA, DROPPED, EXACT, EXPERTS, SIZES, assert_equal, random_placement
from harness.runs.records import by_step
from orchestrator.checkpoint.files import load
from orchestrator.config.sections.evolution import EvolutionSettings
from orchestrator.config.settings import Config
from orchestrator.record.files.reading import of_kind, read_events
from orchestrator.trainer import Trainer

BF16: dict[str, Any] = {"weight_precision": "bf16"}


@dataclass(frozen=True)
class Rounded(Validated):
    """The tiny model with weights that are numbers of bf16."""

    def build_model(self) -> nn.Module:
        return super().build_model().bfloat16().float()


ROUNDED = Rounded(SIZES, top_k=2, samples=41, dtype=torch.float32, tokens=5)


def types_of(run_dir: Path) -> set[torch.dtype]:
    found = checkpoints_of(run_dir)
    return {tensor.dtype for tensor in load(found[max(found)]).tensors["model"].values()}


@pytest.mark.extended
@pytest.mark.timeout(600)
def test_exact_sums_of_short_weights_do_not_depend_on_hosts(tmp_path: Path) -> None:
    placement = tmp_path / "placement.json"
    placement.write_text(random_placement(random.Random(1), SIZES, 3))
    variants = {
        "placed": [Leg(3, 4, EXPERTS | {"placement": str(placement)})],
        "shards": [Leg(3, 2, DATA | {"sharding": "zero3"}), Leg(2, 4, DATA | {"sharding": "zero3"})],
    }
    folders = assert_equal(tmp_path, DROPPED, EXACT | BF16, variants, 4)
    assert torch.bfloat16 in types_of(folders["one process"])


@pytest.mark.extended
@pytest.mark.timeout(900)
@pytest.mark.parametrize("more", [{"precision": "bf16"}, {"optimizer": "muon"}, {"optimizer": "adamw8bit"}])
def test_further_exact_sums_of_short_weights(more: dict[str, Any], tmp_path: Path) -> None:
    variants = {
        "experts": [Leg(3, 3, EXPERTS), Leg(2, 6, EXPERTS)],
        "replicated": [Leg(4, 6, EXPERTS | {"expert_replicas": 2})],
        "data": [Leg(2, 6, DATA)],
        "zero2": [Leg(3, 6, DATA | {"sharding": "zero2"})],
        "sharded dense part": [Leg(2, 6, EXPERTS | {"sharding": "zero3"})],
    }
    assert_equal(tmp_path, DROPPED, EXACT | BF16 | more, variants, 6)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_exact_sums_are_those_of_a_model_in_fp32(precision: str, tmp_path: Path) -> None:
    settings = EXACT | {"precision": precision}
    runs = [
        Run(tmp_path / "short", ROUNDED, settings | BF16, [Leg(1, 1)]),
        Run(tmp_path / "full", ROUNDED, settings, [Leg(1, 1)]),
    ]
    run_all(runs)
    short, full = (by_step(read_events(run.folder / "events.jsonl"))[0] for run in runs)
    assert (short["loss"], short["grad_norm"]) == (full["loss"], full["grad_norm"])


AVERAGED = EXACT | BF16 | {"ema_decay": 0.9, "evaluate_ema": True, "evaluate_every": 1, "checkpoint_every": 1}


@pytest.mark.extended
def test_the_average_is_that_of_an_oracle_in_fp32(tmp_path: Path) -> None:
    settings = AVERAGED | {"workers": 1, "max_steps": 6, "keep_last": True, "keep": 9}
    result = Trainer(task=ROUNDED, config=Config.of(**settings, run_dir=tmp_path / "run"), quiet=True).fit()
    saved = [load(path).tensors for _, path in sorted(checkpoints_of(tmp_path / "run").items())]
    assert len(saved) == 6
    shapes: dict[str, torch.Tensor] = {}
    for tensors in saved:
        for name, weight in tensors["model"].items():
            if weight.dtype == torch.bfloat16:
                average = shapes.setdefault(name, weight.float())
                shapes[name] = average + (weight.float() - average) * (1 - 0.9)
    assert shapes
    for name, average in shapes.items():
        assert torch.equal(saved[-1]["optimizer"][f"ema/{name}"], average), name
    # What was evaluated is what the run ends with: nothing of the average was rounded.
    with torch.no_grad():
        loss = ROUNDED.loss(result.model.eval(), ROUNDED.validation_data().tensors)
    last = of_kind(read_events(tmp_path / "run" / "events.jsonl"), "evaluate")[-1]
    assert last["step"] == 6
    assert last["loss"] == pytest.approx(float(loss.sum) / loss.count, rel=1e-6)


@pytest.mark.extended
@pytest.mark.timeout(900)
def test_averages_of_short_weights_do_not_depend_on_hosts(tmp_path: Path) -> None:
    variants = {
        "experts": [Leg(3, 2, EXPERTS), Leg(2, 4, EXPERTS)],
        "data": [Leg(2, 4, DATA)],
        "zero2": [Leg(2, 2, DATA | {"sharding": "zero2"}), Leg(3, 4, DATA | {"sharding": "zero2"})],
        "zero3": [Leg(3, 4, DATA | {"sharding": "zero3"})],
        "sharded dense part": [Leg(3, 4, EXPERTS | {"sharding": "zero3"})],
    }
    assert_equal(tmp_path, DROPPED, AVERAGED, variants, 4)


EVOLVING: dict[str, Any] = {
    "evolution": "bold",
    "rebalance": "on",
    "sleep_every": 2,
    "birth_overload": 1.2,
    "birth_patience": 1,
    "newborn_warmup": 2,
    "merge_similarity": 0.0,
    "prune_below": 0.9,
    "prune_patience": 1,
    "change_tolerance": 1000.0,
    "evaluate_every": 10,
    "checkpoint_every": 10,
}


@contextmanager
def eager(_rank: int) -> Iterator[None]:
    """Let experts change at any age, and layers after each window."""
    rules = EvolutionSettings.rules

    def eager_rules(settings: EvolutionSettings, *arguments: Any) -> Any:
        found = rules(settings, *arguments)
        return found and replace(found, min_age_steps=0, cool_down_steps=0, min_tokens_per_expert=1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EvolutionSettings, "rules", eager_rules)
        yield


@pytest.mark.extended
@pytest.mark.timeout(900)
def test_experts_with_short_weights_change_alike_on_any_hosts(tmp_path: Path) -> None:
    settings = EXACT | BF16 | EVOLVING | {"ema_decay": 0.9}
    legs = {
        "one": [Leg(1, 14)],
        "experts": [Leg(3, 7, EXPERTS), Leg(2, 14, EXPERTS)],
        "data": [Leg(2, 14, DATA | {"rebalance": "off"})],
        "sharded dense part": [Leg(2, 14, EXPERTS | {"sharding": "zero3"})],
    }
    runs = {name: Run(tmp_path / name, DROPPED, settings, each, eager) for name, each in legs.items()}
    run_all(list(runs.values()))
    found = {name: first_difference(run.folder, runs["one"].folder) for name, run in runs.items()}
    assert not any(found.values()), found
    assert {"born", "warmed", "merged", "pruned"} <= set(changes_of(runs["experts"].folder))
    assert torch.bfloat16 in types_of(runs["experts"].folder)
