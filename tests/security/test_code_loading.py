"""Tests that nothing is unpickled, and that no data is executed as code."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from harness.docs.source_trees import trees

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
ASKING = (".from_pretrained", ".from_config")
"""Functions of ``transformers`` that load the code of a model's folder if they may."""
IMPORTERS = {
    "orchestrator": "re-exports a fixed list of names",
    "orchestrator.cli.main": "imports the module of a verb, from a fixed list",
    "orchestrator.runtime.cluster.import_hook": "imports a fixed list of modules",
    "orchestrator.train.device.compiling": "imports one private module of torch by a fixed name",
    "orchestrator.tasks.load": "imports a built-in task, from a fixed list",
    "orchestrator.tasks.named_object": "the user names an object on the command line or in a config",
    "orchestrator.cli.completion": "imports the modules of the verbs, from a fixed list",
}

OF_THE_DRIVER = "callbacks of the driver, in the assignment of its own run, which Ray pickles as a whole"
PICKLERS = {"orchestrator.runtime.driver": OF_THE_DRIVER, "orchestrator.runtime.bootstrap": OF_THE_DRIVER}


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
        constants = {k.arg: k.value.value for k in node.keywords if isinstance(k.value, ast.Constant)}
        enabled = {name for name, value in constants.items() if value is True}
        dynamic = called.endswith((".import_module", ".exec_module")) and module not in IMPORTERS
        unsafe = enabled & {"allow_pickle", "shell", "trust_remote_code"}
        # Unset, transformers asks on the terminal and runs the folder's code on "y".
        asks = called.endswith(ASKING) and constants.get("trust_remote_code") is not False
        if asks or called in EXECUTES | LOADS | YAML_LOADS or dynamic or unsafe:
            yield f"{module}:{node.lineno} {called}"


def test_nothing_is_unpickled() -> None:
    wrong = {name: found for name, tree in trees().items() if (found := unpickling_imports(tree))}
    assert all(wrong.pop(name, []) == ["ray.cloudpickle"] for name in PICKLERS)
    assert not wrong, wrong


def test_no_call_loads_code_from_data() -> None:
    """``torch.load``, ``yaml.load`` and their kind execute what they read."""
    wrong = [call for name, tree in trees().items() for call in executing_calls(name, tree)]
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
        "AutoConfig.from_pretrained(folder)",
        "AutoModel.from_config(config, trust_remote_code=trusted)",
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
