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
    "model": ("moe", "lm", "lora"),
    "hosts": (2, 3),
    "parallel_strategy": ("expert_parallel", "data_parallel"),
    "optimizer": ("adamw", "sgd", "muon", "adamw8bit"),
    "sharding": ("none", "zero2", "zero3"),
    "average": ("none", "kept", "evaluated"),
    "replicated": (False, True),
    "evolution": ("off", "bold"),
    "rebalance": ("off", "on"),
    "precision": ("fp32", "bf16", "fp16"),
    "activation_checkpointing": ("off", "on"),
    "accumulation_steps": (1, 2),
}
"""``replicated``: each host has all experts."""

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
ON_HOSTS_ALONE = ("parallel_strategy", "sharding", "expert_replicas", "rebalance")
TOLERANCES = {"fp32": 2e-5, "bf16": 0.03, "fp16": 0.01}


def refusals(c: Combination) -> list[str]:
    """Return a part of each message with which settings of a combination refuse each other."""
    is_sharded = c["sharding"] != "none"
    evolves = c["evolution"] == "bold"
    moves = c["rebalance"] == "on"
    rules = {
        "works with expert_parallel": (c["replicated"] or moves)
        and c["parallel_strategy"] == "data_parallel",
        "needs whole weights": is_sharded and c["optimizer"] in ("muon", "adamw8bit"),
        "cannot follow experts that change": c["optimizer"] == "adamw8bit" and (moves or evolves),
        "divides their weights": evolves and is_sharded,
        "know their number of experts": evolves and c["model"] != "moe",
        "a newborn expert would be in one group alone": evolves and c["replicated"],
        "every group keeps one copy of each expert": moves and c["replicated"],
    }
    return [message for message, applies in rules.items() if applies]


def is_allowed(c: Combination) -> bool:
    return not refusals(c)


def settings_of(c: Combination, files: Mapping[str, Path]) -> dict[str, Any]:
    settings = BASE | {
        "parallel_strategy": c["parallel_strategy"],
        "workers": c["hosts"],
        "optimizer": c["optimizer"],
        "sharding": c["sharding"],
        "evolution": c["evolution"],
        "rebalance": c["rebalance"],
        "precision": c["precision"],
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
        settings |= {"task": "lm", "model": str(files["model"]), "sequence_length": 96} | data
    if c["model"] == "lora":
        settings["lora"] = 3
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
    return {"model": save_tiny_model(folder / "model"), "data": save_sums(folder / "sums.jsonl", 24)}


@pytest.mark.extended
@pytest.mark.timeout(900)
@pytest.mark.parametrize("hosts", [2, 3])
def test_each_pair_of_settings_trains_on_hosts_as_in_one_process(
    hosts: int, files: dict[str, Path], tmp_path: Path
) -> None:
    chosen = [c for c in covering(AXES, is_allowed) if c["hosts"] == hosts]
    cases = {name_of(c): (c, case_of(c, files)) for c in chosen}
    hosts_outcomes = run_ranks(
        run_on_host, hosts, [case for _, case in cases.values()], tmp_path, timeout=600
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
        for kind in ("losses", "evaluated"):
            found, wanted = getattr(outcome, kind), getattr(expected, kind)
            if found != pytest.approx(wanted, rel=TOLERANCES[c["precision"]]):
                problems.append(f"{name}: {kind} {found}, in one process {wanted}")
    assert not problems, "\n".join(problems)


def test_settings_that_refuse_each_other_do_so_before_the_run(files: dict[str, Path]) -> None:
    said: set[str] = set()
    for c in covering(AXES, lambda c: len(refusals(c)) == 1):
        (message,) = refusals(c)
        task = TASK if c["model"] == "moe" else None
        with pytest.raises(UserError, match=message):
            Trainer(task=task, config=Config.of(**settings_of(c, files)), quiet=True).prepare()
        said.add(message)
    assert len(said) == 7, "each rule alone"
