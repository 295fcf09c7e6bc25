"""Each pair of values of the settings that meet in a step trains on hosts and equals one process, or is
refused before the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.hosts.ranks import run_ranks
from harness.lm.language_models import save_sums, save_tiny_model
from harness.runs.combinations import (
    Case,
    Combination,
    Outcome,
    Validated,
    covering,
    run_in_one_process,
    run_on_host,
)
from orchestrator.config.settings import Config
from orchestrator.errors import UserError
from orchestrator.trainer import Trainer

AXES: dict[str, Sequence[Any]] = {
    "model": ("moe", "lm", "lora", "nf4"),
    "hosts": (2, 3),
    "parallel_strategy": ("expert_parallel", "data_parallel"),
    "optimizer": ("adamw", "sgd", "muon", "adamw8bit"),
    "sharding": ("none", "zero2", "zero3"),
    "average": ("none", "kept", "evaluated"),
    "replicated": (False, True),
    "evolution": ("off", "bold"),
    "rebalance": ("off", "on"),
    "precision": ("fp32", "bf16", "fp16"),
    "weight_precision": ("fp32", "bf16"),
    "activation_checkpointing": ("off", "on"),
    "accumulation_steps": (1, 2),
}
"""``replicated``: each host has all experts."""

DENSE: dict[str, Any] = {
    "parallel_strategy": "data_parallel",
    "recovery": "live",
    "replicated": False,
    "evolution": "off",
    "rebalance": "off",
}
DENSE_AXES: dict[str, Sequence[Any]] = {
    "model": ("dense", "dense lora"),
    **{name: values for name, values in AXES.items() if name not in DENSE and name != "model"},
}
"""Those of models without experts, on hosts with live recovery."""

TASK = Validated(((8, 8, 12, 8, 8), (8, 12, 8)), top_k=2, samples=36, dtype=torch.float32)
BASE: dict[str, Any] = {
    "epochs": 10,
    "learning_rate": 1e-3,
    "schedule": "constant",
    "deterministic": True,
    "log_every": 1,
    "evaluate_every": 1,
    "checkpoint_every": 1,
    "trackers": (),
    "monitor_gpu": False,
    "gpu_mode": "cpu",
}
EVOLVING: dict[str, Any] = {
    "sleep_every": 1,
    "birth_entropy": 0.1,
    "birth_patience": 1,
    "newborn_warmup": 2,
    "change_tolerance": 1000.0,
}
ON_HOSTS_ALONE = ("parallel_strategy", "recovery", "sharding", "expert_replicas", "rebalance")
TOLERANCES = {"fp32": 2e-5, "bf16": 0.03, "fp16": 0.01}
ROUNDED = 1e-3
"""The tolerance for weights in bf16 that another sum of gradients may round to the other neighbour."""


def refusals(c: Combination) -> list[str]:
    """Return a part of each message with which settings of a combination refuse each other."""
    return [message for message, applies in rules(c).items() if applies]


def rules(c: Combination) -> dict[str, bool]:
    """Return all such parts, and whether they apply."""
    is_sharded = c["sharding"] != "none"
    evolves = c["evolution"] == "bold"
    moves = c["rebalance"] == "on"
    return {
        "works with expert_parallel": (c["replicated"] or moves)
        and c["parallel_strategy"] == "data_parallel",
        "divides their weights": evolves and is_sharded and c["parallel_strategy"] == "data_parallel",
        "know their number of experts": evolves and c["model"] in ("lm", "lora"),
        "changed experts would be packed anew": evolves and c["model"] == "nf4",
        "packed bytes are not divided": is_sharded and c["model"] == "nf4",
        "a newborn expert would be in one group alone": evolves and c["replicated"],
        "every group keeps one copy of each expert": moves and c["replicated"],
        "adapters are small": c["weight_precision"] == "bf16" and c["model"] in ("lora", "nf4"),
    }


def is_allowed(c: Combination) -> bool:
    return not refusals(c)


def is_allowed_dense(c: Combination) -> bool:
    return c["weight_precision"] == "fp32" or c["model"] == "dense"


def settings_of(c: Combination, files: Mapping[str, Path]) -> dict[str, Any]:
    settings = BASE | {
        "parallel_strategy": c["parallel_strategy"],
        "recovery": c.get("recovery", "auto"),
        "workers": c["hosts"],
        "optimizer": c["optimizer"],
        "sharding": c["sharding"],
        "evolution": c["evolution"],
        "rebalance": c["rebalance"],
        "precision": c["precision"],
        "weight_precision": c["weight_precision"],
        "activation_checkpointing": c["activation_checkpointing"],
        "accumulation_steps": c["accumulation_steps"],
        "global_batch_size": 6 * c["accumulation_steps"],
    }
    if c["average"] != "none":
        settings |= {"ema_decay": 0.9, "evaluate_ema": c["average"] == "evaluated"}
    if c["replicated"]:
        settings["expert_replicas"] = c["hosts"]
    if c["evolution"] == "bold":
        settings |= EVOLVING
    if c["model"] != "moe":
        data = {"data": [str(files["data"])], "validation_data": [str(files["data"])]}
        folder = files["dense" if "dense" in c["model"] else "model"]
        settings |= {"task": "lm", "model": str(folder), "sequence_length": 96} | data
    if "lora" in c["model"] or c["model"] == "nf4":
        settings |= {"lora": 3, "frozen_weights": "nf4" if c["model"] == "nf4" else "auto"}
    return settings


def name_of(c: Combination) -> str:
    return " ".join(f"{axis}={value}" for axis, value in c.items())


def case_of(c: Combination, files: Mapping[str, Path]) -> Case:
    return Case(name_of(c), TASK if c["model"] == "moe" else None, settings_of(c, files))


def in_one_process(case: Case, folder: Path) -> Outcome:
    settings = {name: value for name, value in case.settings.items() if name not in ON_HOSTS_ALONE}
    return run_in_one_process(Case(case.name, case.task, settings | {"workers": 1}), folder)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("lm")
    return {
        "model": save_tiny_model(folder / "model"),
        "dense": save_tiny_model(folder / "dense", num_experts=0),
        "data": save_sums(folder / "sums.jsonl", 24),
    }


@pytest.mark.extended
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("hosts", [2, 3])
def test_each_pair_of_settings_trains_on_hosts_as_in_one_process(
    hosts: int, files: dict[str, Path], tmp_path: Path
) -> None:
    chosen = [c for c in covering(AXES, is_allowed) if c["hosts"] == hosts]
    assert_equal(chosen, hosts, files, tmp_path)


@pytest.mark.extended
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("hosts", [2, 3])
def test_each_pair_of_settings_trains_a_dense_model_with_live_recovery(
    hosts: int, files: dict[str, Path], tmp_path: Path
) -> None:
    chosen = [c for c in covering(DENSE_AXES, is_allowed_dense) if c["hosts"] == hosts]
    assert_equal([DENSE | dict(c) for c in chosen], hosts, files, tmp_path)


def assert_equal(chosen: Sequence[Combination], hosts: int, files: dict[str, Path], tmp_path: Path) -> None:
    """Run combinations on hosts and in one process, and compare them."""
    cases = {name_of(c): (c, case_of(c, files)) for c in chosen}
    hosts_outcomes = run_ranks(
        run_on_host, hosts, [case for _, case in cases.values()], tmp_path, timeout=1200
    )
    problems: list[str] = []
    for number, (name, (c, case)) in enumerate(cases.items()):
        outcome = hosts_outcomes[0][name]
        failures = [host[name].failed for host in hosts_outcomes if host[name].failed]
        if outcome.refused or failures:
            problems.append(f"{name}: {outcome.refused or failures}")
            continue
        expected = in_one_process(case, tmp_path / f"one-{number}")
        if expected.refused or expected.failed:
            problems.append(f"{name}, one process: {expected.refused or expected.failed}")
            continue
        tolerance = max(TOLERANCES[c["precision"]], ROUNDED if c["weight_precision"] == "bf16" else 0.0)
        for kind in ("losses", "evaluated"):
            found, wanted = getattr(outcome, kind), getattr(expected, kind)
            if found != pytest.approx(wanted, rel=tolerance):
                problems.append(f"{name}: {kind} {found}, in one process {wanted}")
    assert not problems, "\n".join(problems)


def test_settings_that_refuse_each_other_do_so_before_the_run(files: dict[str, Path]) -> None:
    for message in rules(next(iter(covering(AXES, is_allowed)))):
        alone = covering(AXES, lambda c, message=message: refusals(c) == [message])
        assert alone, f"{message}: never alone"
        for c in alone[:6]:
            task = TASK if c["model"] == "moe" else None
            with pytest.raises(UserError, match=message):
                Trainer(task=task, config=Config.of(**settings_of(c, files)), quiet=True).prepare()
