"""Tests of the import rules: package order, sub-package order, and the homes of Ray, torch and the
environment.

Imports inside functions and under ``TYPE_CHECKING`` count.
"""

from __future__ import annotations

import ast
from collections.abc import Callable

import pytest

from harness.docs.source_trees import (
    MODULES,
    PRIVATE_RAY,
    ROOT,
    Import,
    all_imports,
    imports_of,
    is_within,
    trees,
)
from orchestrator.strategies import STRATEGIES

LAYERS = (
    "storage",
    "config",
    "data",
    "tasks",
    "plan",
    "launch",
    "checkpoint",
    "record",
    "report",
    "live",
    "run",
    "train",
    "measure",
    "runtime",
    "api",
    "cli",
)
"""Packages of ``orchestrator`` from the lowest to the highest. A module imports from its own layer
and from lower ones."""

LEAVES = {f"orchestrator.{name}" for name in ("types", "errors", "interrupts", "redaction", "strategies")}
_API_MODULES = (
    "trainer",
    "training_run",
    "preparation",
    "result",
    "weights",
    "sweeps",
    "evaluations",
    "verification",
)
API = {"orchestrator"} | {f"orchestrator.{name}" for name in _API_MODULES}
ENTRY_POINTS = {"orchestrator.__main__"}

EXPERTS_LEAVES = {
    "experts.types",
    "experts.structure",
    "experts.copy_costs",
    "experts.host_copy",
}
EXPERTS_LAYERS = (
    *("hosts", "kernels", "tokens", "moe", "modules", "placement", "rebalance", "evolution", "surgery"),
    "transformers",
)
"""Sub-packages of ``experts`` from the lowest to the highest; ``modules`` stands for the modules of
``experts`` itself, which see all MoE layers of a model."""

TORCH_FREE_EXPERTS = (
    "experts.types",
    "experts.structure",
    "experts.copy_costs",
    "experts.tokens.routes",
    "experts.placement",
    "experts.rebalance",
    "experts.evolution",
)
"""Values and decisions. They import no other module of ``experts``, which would bring torch along."""

TORCH_PACKAGES = (
    "experts",
    "orchestrator.checkpoint",
    "orchestrator.train",
    "orchestrator.measure",
    "orchestrator.data",
    "orchestrator.tasks",
    "orchestrator.runtime",
)
TORCH_LATE = ("orchestrator.plan.inventory", "orchestrator.plan.checks")
"""Probes of the hardware: they import torch inside functions, so that ``--help`` answers without it."""

RAY_PACKAGES = ("experts.hosts.actor_host", "orchestrator.runtime")
RAY_FREE = {
    "orchestrator.runtime.recovery",
    "orchestrator.runtime.failures",
    "orchestrator.runtime.expert_parallel.states",
    "orchestrator.runtime.recovery_log",
    "orchestrator.runtime.expert_parallel.heartbeats",
    "orchestrator.runtime.expert_parallel.stuck",
}
PRIVATE_RAY_HOMES = {"orchestrator.runtime.ray_internals"}

DISTRIBUTED_PACKAGES = (
    "experts.hosts.group",
    "orchestrator.train.group.world",
    "orchestrator.train.optim.shards",
    "orchestrator.train.strategies",
)
ENVIRONMENT_PACKAGES = ("orchestrator.plan.inventory.hardware", "orchestrator.runtime.cluster")


# The rules. Each takes one import and says whether it is allowed.


def layer_of(module: str) -> int:
    """The height of a module: 0 for leaf modules and ``experts``, then one per entry of ``LAYERS``."""
    if module in LEAVES or is_within(module, ["experts"]):
        return 0
    if module in API:
        return LAYERS.index("api") + 1
    if module in ENTRY_POINTS:
        return len(LAYERS) + 1
    return LAYERS.index(module.split(".")[1]) + 1


def points_downwards(entry: Import) -> bool:
    if entry.importer == "orchestrator" or not is_within(entry.name, ["orchestrator"]):
        return True  # the package file re-exports the public API, lazily
    return layer_of(entry.name) <= layer_of(entry.importer)


def experts_layer_of(module: str) -> int:
    """The height of a module of ``experts``: 0 for leaf modules, then one per entry of ``EXPERTS_LAYERS``."""
    if module in EXPERTS_LEAVES:
        return 0
    name = module.split(".")[1]
    name = name if name in EXPERTS_LAYERS else "modules"
    return EXPERTS_LAYERS.index(name) + 1


def points_downwards_in_experts(entry: Import) -> bool:
    if not (is_within(entry.importer, ["experts"]) and is_within(entry.name, ["experts"])):
        return True
    return experts_layer_of(entry.name) <= experts_layer_of(entry.importer)


def keeps_decisions_free_of_torch(entry: Import) -> bool:
    if not (is_within(entry.importer, TORCH_FREE_EXPERTS) and is_within(entry.name, ["experts"])):
        return True
    return is_within(entry.name, TORCH_FREE_EXPERTS)


def leaves_experts_alone(entry: Import) -> bool:
    return not (is_within(entry.importer, ["experts"]) and is_within(entry.name, ["orchestrator"]))


def may_import_ray(entry: Import) -> bool:
    if not is_within(entry.name, ["ray"]):
        return True
    return is_within(entry.importer, RAY_PACKAGES) and entry.importer not in RAY_FREE


def may_import_private_ray(entry: Import) -> bool:
    return not is_within(entry.name, PRIVATE_RAY) or entry.importer in PRIVATE_RAY_HOMES


def may_import_torch(entry: Import) -> bool:
    if not is_within(entry.name, ["torch"]) or entry.typing_only:
        return True
    if is_within(entry.importer, TORCH_LATE):
        return entry.late
    return is_within(entry.importer, TORCH_PACKAGES) and not is_within(entry.importer, TORCH_FREE_EXPERTS)


def may_import_distributed(entry: Import) -> bool:
    return not is_within(entry.name, ["torch.distributed"]) or is_within(entry.importer, DISTRIBUTED_PACKAGES)


def leaves_tests_alone(entry: Import) -> bool:
    return not is_within(entry.name, ["benchmarks", "harness", "tests"])


RULES: tuple[Callable[[Import], bool], ...] = (
    points_downwards,
    points_downwards_in_experts,
    keeps_decisions_free_of_torch,
    leaves_experts_alone,
    may_import_ray,
    may_import_private_ray,
    may_import_torch,
    may_import_distributed,
    leaves_tests_alone,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_import_follows_the_rule(rule: Callable[[Import], bool]) -> None:
    wrong = [str(entry) for entry in all_imports() if not rule(entry)]
    assert not wrong, wrong


@pytest.mark.parametrize(
    ("rule", "importer", "statement"),
    [
        (points_downwards, "orchestrator.record.x", "def f():\n    from orchestrator.train import loop"),
        (points_downwards, "orchestrator.train.x", "from orchestrator.measure import trial"),
        (points_downwards, "orchestrator.runtime.x", "from orchestrator.cli.main import main"),
        (points_downwards, "orchestrator.trainer", "from orchestrator.cli.main import main"),
        (points_downwards, "orchestrator.types", "from orchestrator.config.settings import Config"),
        (points_downwards_in_experts, "experts.moe.layer", "from experts.placement import placement"),
        (points_downwards_in_experts, "experts.tokens.x", "from experts.moe.layer import MoELayer"),
        (
            points_downwards_in_experts,
            "experts.rebalance.x",
            "from experts.evolution.rules import EvolutionRules",
        ),
        (keeps_decisions_free_of_torch, "experts.evolution.x", "from experts.moe.layer import MoELayer"),
        (leaves_experts_alone, "experts.x", "if TYPE_CHECKING:\n    from orchestrator.types import Choice"),
        (may_import_ray, "orchestrator.train.x", "import ray"),
        (may_import_ray, "orchestrator.runtime.recovery", "from ray.exceptions import RayError"),
        (may_import_ray, "orchestrator.runtime.failures", "import ray"),
        (may_import_ray, "orchestrator.runtime.expert_parallel.states", "def f():\n    import ray"),
        (
            may_import_private_ray,
            "orchestrator.runtime.driver",
            "from ray._private.worker import global_worker",
        ),
        (may_import_private_ray, "orchestrator.runtime.driver", "from ray import _raylet"),
        (may_import_torch, "orchestrator.plan.planning", "def f():\n    import torch"),
        (may_import_torch, "orchestrator.plan.inventory.cpu", "import torch"),
        (may_import_torch, "experts.placement.x", "from torch import Tensor"),
        (may_import_torch, "orchestrator.cli.main", "import torch"),
        (may_import_distributed, "orchestrator.train.loop.loop", "import torch.distributed as dist"),
        (leaves_tests_alone, "orchestrator.train.loop.loop", "from harness.moe import oracle"),
    ],
)
def test_a_planted_violation_is_found(rule: Callable[[Import], bool], importer: str, statement: str) -> None:
    assert not all(rule(entry) for entry in imports_of(importer, ast.parse(statement)))


def test_only_tests_import_tests() -> None:
    """Benchmarks and the pictures of the docs need nothing below ``tests``; both share ``harness``."""
    programs = [
        path for name in ("benchmarks", "docs", "harness", "release") for path in (ROOT / name).rglob("*.py")
    ]
    entries = [
        entry
        for path in programs
        for entry in imports_of(str(path.relative_to(ROOT)), ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert len(entries) > 1000, "the rule would hold for nothing"
    assert [str(entry) for entry in entries if is_within(entry.name, ["tests"])] == []


# The environment, and package files.


def reads_environment(tree: ast.AST) -> list[int]:
    """Lines that name ``os.environ`` or ``os.getenv``."""
    names = ("environ", "getenv")
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in names and isinstance(node.value, ast.Name)
    ]


def test_the_environment_is_read_in_two_places_only() -> None:
    wrong = {
        name: lines
        for name, tree in trees().items()
        if (lines := reads_environment(tree)) and not is_within(name, ENVIRONMENT_PACKAGES)
    }
    assert not wrong, wrong
    assert reads_environment(ast.parse("import os\nx = os.environ['A']\ny = os.getenv('B')")) == [2, 3]


def compared_strategies(tree: ast.AST) -> list[int]:
    """Lines that compare something with the name of a strategy."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare)
        and any(isinstance(part, ast.Constant) and part.value in STRATEGIES for part in ast.walk(node))
    ]


def test_strategies_are_asked_for_their_facts_and_not_compared_by_name() -> None:
    wrong = {name: lines for name, tree in trees().items() if (lines := compared_strategies(tree))}
    assert not wrong, wrong
    assert compared_strategies(ast.parse("x = plan.strategy.value == 'single'\ny = 'a' == 'b'")) == [1]
    assert compared_strategies(ast.parse("x = name not in (None, 'expert_parallel')")) == [1]


PUBLIC = {"orchestrator", "experts.transformers"}
"""Packages with a lazy public API."""


def test_package_files_are_empty() -> None:
    full = [
        name
        for name, path in MODULES.items()
        if path.name == "__init__.py" and name not in PUBLIC and path.read_text(encoding="utf-8").strip()
    ]
    assert not full, full
