"""The house as a test: floors, import rules, and no circles. Imports inside functions and under TYPE_CHECKING count."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
WINGS = ("config", "tasks", "plan", "record", "report", "train", "runtime")  # from the ground up; the face is above them
GROUND = {"orchestrator.types", "orchestrator.errors", "orchestrator.masking"}
TORCH_FREE_EXPERTS = {"experts.types", "experts.placement", "experts.placement_search", "experts.evolution"}
TORCH_LATE = {"orchestrator.plan.hardware", "orchestrator.plan.probes", "orchestrator.plan.arithmetic", "orchestrator.plan.host"}
RAY_HOMES = ("experts.actor_host", "orchestrator.runtime.")
RAY_FREE = {"orchestrator.runtime.controller", "orchestrator.runtime.recovery"}
DISTRIBUTED_HOMES = {"experts.group", "orchestrator.train.world", "orchestrator.train.replicate"}
ENVIRONMENT_HOMES = {"orchestrator.plan.hardware", "orchestrator.runtime.session", "orchestrator.runtime.variables"}


@dataclass(frozen=True)
class Import:
    importer: str
    name: str
    late: bool
    typing_only: bool


def modules() -> dict[str, Path]:
    found = {}
    for package in ("orchestrator", "experts"):
        for path in (ROOT / package).rglob("*.py"):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


MODULES = modules()


def imports_of(module: str, tree: ast.AST, late: bool = False, typing_only: bool = False) -> Iterator[Import]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (Import(module, alias.name, late, typing_only) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield Import(module, whole if whole in MODULES else str(node.module), late, typing_only)
        else:
            inside = late or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            typed = typing_only or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
            yield from imports_of(module, node, inside, typed)


IMPORTS = [entry for name, path in MODULES.items() for entry in imports_of(name, ast.parse(path.read_text(encoding="utf-8")))]


def floor(module: str) -> int:
    """0 for the ground, then one per wing, the face on top."""
    if module in GROUND or module.startswith("experts"):
        return 0
    wing = module.split(".")[1] if "." in module else ""
    return WINGS.index(wing) + 1 if wing in WINGS else len(WINGS) + 1


def test_a_wing_imports_only_from_below_and_itself() -> None:
    wrong = [
        f"{e.importer} imports {e.name}"
        for e in IMPORTS
        if e.name.startswith("orchestrator.") and floor(e.name) > floor(e.importer) and e.importer != "orchestrator"
    ]
    assert not wrong, wrong


def test_experts_never_imports_orchestrator() -> None:
    wrong = [f"{e.importer} imports {e.name}" for e in IMPORTS if e.importer.startswith("experts") and e.name.startswith("orchestrator")]
    assert not wrong, wrong


def test_no_circles() -> None:
    edges: dict[str, set[str]] = {name: set() for name in MODULES}
    for entry in IMPORTS:
        if entry.name in MODULES and entry.importer != "orchestrator":  # the package file hands names on, lazily
            edges[entry.importer].add(entry.name)
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"circle: {' -> '.join([*path[path.index(name) :], name])}"
        if name not in done:
            for following in sorted(edges[name]):
                visit(following, (*path, name))
            done.add(name)

    for name in edges:
        visit(name, ())


def test_ray_only_in_its_rooms() -> None:
    wrong = [
        f"{e.importer} imports {e.name}"
        for e in IMPORTS
        if e.name.split(".")[0] == "ray" and (not e.importer.startswith(RAY_HOMES) or e.importer in RAY_FREE)
    ]
    assert not wrong, wrong


def may_use_torch(entry: Import) -> bool:
    if entry.typing_only:
        return True
    if entry.importer in TORCH_LATE:
        return entry.late
    at_home = entry.importer.startswith(("experts", "orchestrator.train.", "orchestrator.tasks.", "orchestrator.runtime."))
    return at_home and entry.importer not in TORCH_FREE_EXPERTS


def test_torch_only_in_its_rooms() -> None:
    wrong = [f"{e.importer} imports {e.name}" for e in IMPORTS if e.name.split(".")[0] == "torch" and not may_use_torch(e)]
    assert not wrong, wrong


def test_torch_distributed_only_in_its_rooms() -> None:
    wrong = [
        f"{e.importer} imports {e.name}" for e in IMPORTS if e.name.startswith("torch.distributed") and e.importer not in DISTRIBUTED_HOMES
    ]
    assert not wrong, wrong


def test_environment_read_only_in_its_rooms() -> None:
    wrong = [
        f"{name}:{node.lineno}"
        for name, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv") and isinstance(node.value, ast.Name)
        if name not in ENVIRONMENT_HOMES
    ]
    assert not wrong, wrong


def test_package_files_are_empty() -> None:
    full = [
        name
        for name, path in MODULES.items()
        if path.name == "__init__.py" and name != "orchestrator" and path.read_text(encoding="utf-8").strip()
    ]
    assert not full, full


def test_nothing_imports_benchmarks_or_tests() -> None:
    assert not [e for e in IMPORTS if e.name.split(".")[0] in ("benchmarks", "tests")]


PICKLES = {"pickle", "_pickle", "cloudpickle", "marshal", "shelve", "dill", "joblib", "jsonpickle", "copyreg", "code"}


def pickling(tree: ast.AST) -> list[str]:
    """Imports of what unpickles, by whatever way."""
    whole = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    parts = [(str(n.module), alias.name) for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for alias in n.names]
    wrong = [name for name in whole if PICKLES & set(name.split("."))]
    wrong += [f"{module}.{name}" for module, name in parts if PICKLES & {*module.split("."), name}]
    return wrong + [f"{module}.{name}" for module, name in parts if f"{module}.{name}" in LOADS | YAMLS or module == "torch.serialization"]


def test_nothing_is_unpickled() -> None:
    wrong = {name: found for name, path in MODULES.items() if (found := pickling(ast.parse(path.read_text(encoding="utf-8"))))}
    assert not wrong, wrong


EXECUTES = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "runpy.run_path", "runpy.run_module"}
LOADS = {"torch.load", "np.load", "numpy.load", "joblib.load", "pd.read_pickle", "pandas.read_pickle", "torch.jit.load", "torch.package"}
YAMLS = {"yaml.load", "yaml.load_all", "yaml.full_load", "yaml.unsafe_load", "yaml.Loader", "yaml.FullLoader", "yaml.UnsafeLoader"}
IMPORTERS = {
    "orchestrator": "hands on names of a fixed list",
    "orchestrator.runtime.successors": "modules whose names stand there",
    "orchestrator.train.compiling": "a module of torch whose name stands there",
    "orchestrator.tasks.load": "a task of one's own is named by the user, on the command line or in a config",
}


def executing(module: str, tree: ast.AST) -> Iterator[str]:
    """Calls that run what they read, shells, and arguments that allow it."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        allowing = {k.arg for k in node.keywords if isinstance(k.value, ast.Constant) and k.value.value is True}
        dynamic = called.endswith((".import_module", ".exec_module")) and module not in IMPORTERS
        if called in EXECUTES | LOADS | YAMLS or dynamic or allowing & {"allow_pickle", "shell", "trust_remote_code"}:
            yield f"{module}:{node.lineno} {called}"


def test_no_call_loads_code_from_data() -> None:
    """``torch.load``, ``yaml.load`` and friends execute what they read."""
    wrong = [call for name, path in MODULES.items() for call in executing(name, ast.parse(path.read_text(encoding="utf-8")))]
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
def test_planted_executions_are_seen(planted: str) -> None:
    assert list(executing("orchestrator.record.x", ast.parse(planted)))


@pytest.mark.parametrize(
    "planted", ["import pickle", "from ray import cloudpickle", "import ray.cloudpickle as p", "def f():\n    from torch import load"]
)
def test_planted_pickles_are_seen(planted: str) -> None:
    assert pickling(ast.parse(planted))


def test_the_rules_can_fail() -> None:
    """Planted errors are seen."""
    planted = list(imports_of("orchestrator.record.x", ast.parse("def f():\n    from orchestrator.train import loop\n    import torch")))
    assert [floor(e.name) > floor(e.importer) for e in planted[:1]] == [True]
    assert not may_use_torch(planted[1])
