"""Tests of the import rules: package order, sub-package order, cycles, and the homes of Ray, torch
and the environment.

Imports inside functions and under ``TYPE_CHECKING`` count.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

LAYERS = (
    "storage",
    "config",
    "data",
    "tasks",
    "plan",
    "launch",
    "record",
    "report",
    "train",
    "measure",
    "runtime",
    "api",
    "cli",
)
"""Packages of ``orchestrator`` from the lowest to the highest. A module imports from its own layer
and from lower ones."""

LEAVES = {"orchestrator.types", "orchestrator.errors", "orchestrator.redaction"}
_API_MODULES = ("trainer", "preparation", "result", "sweeps", "evaluations")
API = {"orchestrator"} | {f"orchestrator.{name}" for name in _API_MODULES}
ENTRY_POINTS = {"orchestrator.__main__"}

EXPERTS_LEAVES = {
    "experts.types",
    "experts.structure",
    "experts.membership",
    "experts.device_waits",
    "experts.group",
    "experts.host_copy",
}
EXPERTS_LAYERS = (
    *("kernels", "tokens", "modules", "placement", "rebalance", "evolution", "surgery"),
    "transformers",
)
"""Sub-packages of ``experts`` from the lowest to the highest; ``modules`` stands for the modules of
``experts`` itself, which are the MoE layer and its parts."""

TORCH_FREE_EXPERTS = (
    "experts.types",
    "experts.structure",
    "experts.tokens.routes",
    "experts.placement",
    "experts.rebalance",
    "experts.evolution",
)
"""Values and decisions. They import no other module of ``experts``, which would bring torch along."""

TORCH_PACKAGES = (
    "experts",
    "orchestrator.train",
    "orchestrator.measure",
    "orchestrator.data",
    "orchestrator.tasks",
    "orchestrator.runtime",
)
TORCH_LATE = ("orchestrator.plan.inventory", "orchestrator.plan.checks")
"""Probes of the hardware: they import torch inside functions, so that ``--help`` answers without it."""

RAY_PACKAGES = ("experts.actor_host", "orchestrator.runtime")
RAY_FREE = {
    "orchestrator.runtime.recovery",
    "orchestrator.runtime.failures",
    "orchestrator.runtime.expert_parallel.states",
    "orchestrator.runtime.recovery_log",
    "orchestrator.runtime.expert_parallel.heartbeats",
    "orchestrator.runtime.expert_parallel.stuck",
}
PRIVATE_RAY = ("ray._private", "ray._raylet", "ray._common", "ray.core.generated", "ray.train.v2._internal")
PRIVATE_RAY_HOMES = {"orchestrator.runtime.ray_internals"}

DISTRIBUTED_PACKAGES = ("experts.group", "orchestrator.train.parts.world", "orchestrator.train.strategies")
ENVIRONMENT_PACKAGES = ("orchestrator.plan.inventory.hardware", "orchestrator.runtime.cluster")


@dataclass(frozen=True)
class Import:
    importer: str
    name: str
    late: bool = False
    typing_only: bool = False

    def __str__(self) -> str:
        return f"{self.importer} imports {self.name}"


def find_modules() -> dict[str, Path]:
    found = {}
    for package in ("orchestrator", "experts"):
        for path in (ROOT / package).rglob("*.py"):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


MODULES = find_modules()
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}


def imports_of(module: str, tree: ast.AST, late: bool = False, typing_only: bool = False) -> Iterator[Import]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (Import(module, alias.name, late, typing_only) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            for alias in node.names:
                full_name = f"{node.module}.{alias.name}"
                # `from ray import _private` names a private module as well as `from ray._private
                # import x` does.
                is_module = full_name in MODULES or full_name.startswith(PRIVATE_RAY)
                yield Import(module, full_name if is_module else str(node.module), late, typing_only)
        else:
            in_function = late or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            in_type_checking = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
            yield from imports_of(module, node, in_function, typing_only or in_type_checking)


IMPORTS = [entry for name, tree in TREES.items() for entry in imports_of(name, tree)]


def is_within(module: str, packages: Iterable[str]) -> bool:
    """Whether a module is one of these modules or packages, or lies below one."""
    return any(module == package or module.startswith(package + ".") for package in packages)


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
    return not is_within(entry.name, ["benchmarks", "tests"])


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
    wrong = [str(entry) for entry in IMPORTS if not rule(entry)]
    assert not wrong, wrong


@pytest.mark.parametrize(
    ("rule", "importer", "statement"),
    [
        (points_downwards, "orchestrator.record.x", "def f():\n    from orchestrator.train import loop"),
        (points_downwards, "orchestrator.train.x", "from orchestrator.measure import trial"),
        (points_downwards, "orchestrator.runtime.x", "from orchestrator.cli.main import main"),
        (points_downwards, "orchestrator.trainer", "from orchestrator.cli.main import main"),
        (points_downwards, "orchestrator.types", "from orchestrator.config.settings import Config"),
        (points_downwards_in_experts, "experts.layer", "from experts.placement import placement"),
        (points_downwards_in_experts, "experts.tokens.x", "from experts.layer import MoELayer"),
        (
            points_downwards_in_experts,
            "experts.rebalance.x",
            "from experts.evolution.rules import EvolutionRules",
        ),
        (keeps_decisions_free_of_torch, "experts.evolution.x", "from experts.layer import MoELayer"),
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
        (may_import_distributed, "orchestrator.train.loop", "import torch.distributed as dist"),
        (leaves_tests_alone, "orchestrator.train.loop", "from tests.support import oracle"),
    ],
)
def test_a_planted_violation_is_found(rule: Callable[[Import], bool], importer: str, statement: str) -> None:
    assert not all(rule(entry) for entry in imports_of(importer, ast.parse(statement)))


# Cycles, between modules and between sub-packages.


def package_of(module: str) -> str:
    """The package or sub-package of a module, which the rule about sub-packages compares."""
    return (
        module if module in MODULES and MODULES[module].name == "__init__.py" else module.rpartition(".")[0]
    )


def find_cycle(edges: dict[str, set[str]]) -> list[str]:
    """One cycle of a directed graph; empty when there is none."""
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name not in done:
            for following in sorted(edges.get(name, ())):
                if found := visit(following, (*path, name)):
                    return found
            done.add(name)
        return []

    for name in sorted(edges):
        if found := visit(name, ()):
            return found
    return []


def edges_between(imports: Iterable[Import], unit: Callable[[str], str]) -> dict[str, set[str]]:
    edges: dict[str, set[str]] = {}
    for entry in imports:
        if entry.name not in MODULES or entry.importer == "orchestrator":
            continue
        importer, imported = unit(entry.importer), unit(entry.name)
        if importer != imported:
            edges.setdefault(importer, set()).add(imported)
    return edges


def test_no_module_is_in_an_import_cycle() -> None:
    assert not find_cycle(edges_between(IMPORTS, lambda module: module))


@pytest.mark.parametrize("package", ["report", "plan", "train", "measure", "runtime"])
def test_no_sub_package_is_in_an_import_cycle(package: str) -> None:
    """Sub-packages of one package import each other in one direction. The package's own modules
    may stand between them."""
    prefix = f"orchestrator.{package}"

    def unit(module: str) -> str:
        parent = package_of(module)
        return parent if is_within(module, [prefix]) and parent != prefix else module

    inside = [e for e in IMPORTS if is_within(e.importer, [prefix]) and is_within(e.name, [prefix])]
    assert not find_cycle(edges_between(inside, unit))


def test_a_planted_cycle_is_found() -> None:
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == ["a", "b", "c", "a"]
    assert not find_cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()})


# The environment, package files, and code that loads code.


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
        for name, tree in TREES.items()
        if (lines := reads_environment(tree)) and not is_within(name, ENVIRONMENT_PACKAGES)
    }
    assert not wrong, wrong
    assert reads_environment(ast.parse("import os\nx = os.environ['A']\ny = os.getenv('B')")) == [2, 3]


PUBLIC = {"orchestrator", "experts.transformers"}
"""Packages with a lazy public API."""


def test_package_files_are_empty() -> None:
    full = [
        name
        for name, path in MODULES.items()
        if path.name == "__init__.py" and name not in PUBLIC and path.read_text(encoding="utf-8").strip()
    ]
    assert not full, full


PICKLES = {
    "pickle",
    "_pickle",
    "cloudpickle",
    "marshal",
    "shelve",
    "dill",
    "joblib",
    "jsonpickle",
    "copyreg",
    "code",
}
EXECUTES = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "os.system",
    "os.popen",
    "runpy.run_path",
    "runpy.run_module",
}
LOADS = {
    "torch.load",
    "np.load",
    "numpy.load",
    "joblib.load",
    "pd.read_pickle",
    "pandas.read_pickle",
    "torch.jit.load",
    "torch.package",
}
YAML_LOADS = {
    "yaml.load",
    "yaml.load_all",
    "yaml.full_load",
    "yaml.unsafe_load",
    "yaml.Loader",
    "yaml.FullLoader",
    "yaml.UnsafeLoader",
}
IMPORTERS = {
    "orchestrator": "re-exports a fixed list of names",
    "orchestrator.cli.main": "imports the module of a verb, from a fixed list",
    "orchestrator.runtime.cluster.import_hook": "imports a fixed list of modules",
    "orchestrator.train.parts.compiling": "imports one private module of torch by a fixed name",
    "orchestrator.tasks.load": "imports a built-in task, from a fixed list",
    "orchestrator.tasks.named_object": "the user names an object on the command line or in a config",
    "orchestrator.cli.completion": "imports the modules of the verbs, from a fixed list",
}


def unpickling_imports(tree: ast.AST) -> list[str]:
    """Imports of modules or functions that unpickle."""
    whole = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    parts = [
        (str(node.module), alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    wrong = [name for name in whole if PICKLES & set(name.split("."))]
    wrong += [f"{module}.{name}" for module, name in parts if PICKLES & {*module.split("."), name}]
    loads = LOADS | YAML_LOADS
    return wrong + [
        f"{module}.{name}"
        for module, name in parts
        if f"{module}.{name}" in loads or module == "torch.serialization"
    ]


def executing_calls(module: str, tree: ast.AST) -> Iterator[str]:
    """Calls that execute what they read, shells, and arguments that allow either."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        enabled = {
            k.arg for k in node.keywords if isinstance(k.value, ast.Constant) and k.value.value is True
        }
        dynamic = called.endswith((".import_module", ".exec_module")) and module not in IMPORTERS
        unsafe = enabled & {"allow_pickle", "shell", "trust_remote_code"}
        if called in EXECUTES | LOADS | YAML_LOADS or dynamic or unsafe:
            yield f"{module}:{node.lineno} {called}"


def test_nothing_is_unpickled() -> None:
    wrong = {name: found for name, tree in TREES.items() if (found := unpickling_imports(tree))}
    assert not wrong, wrong


def test_no_call_loads_code_from_data() -> None:
    """``torch.load``, ``yaml.load`` and their kind execute what they read."""
    wrong = [call for name, tree in TREES.items() for call in executing_calls(name, tree)]
    assert not wrong, wrong


@pytest.mark.parametrize(
    "planted",
    [
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "numpy.lib.npyio.load(path, allow_pickle=True)",
        "yaml.load(text, Loader=yaml.Loader)",
        "eval(text)",
        "subprocess.run(text, shell=True)",
        "importlib.import_module(name)",
        "exec(text)",
    ],
)
def test_planted_executions_are_found(planted: str) -> None:
    assert list(executing_calls("orchestrator.record.x", ast.parse(planted)))


@pytest.mark.parametrize(
    "planted",
    [
        "import pickle",
        "from ray import cloudpickle",
        "import ray.cloudpickle as p",
        "def f():\n    from torch import load",
    ],
)
def test_planted_pickles_are_found(planted: str) -> None:
    assert unpickling_imports(ast.parse(planted))
