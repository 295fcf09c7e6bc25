"""The documentation is true: commands and Python of README.md and docs/*.md run, flags and links
exist.

A block ```` ```bash ```` runs, line by line, in one folder per page. A block ```` ```bash no-run
```` needs a cluster, a GPU or minutes: it is counted, and its commands are parsed. Every ````
```python ```` block runs.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import runpy
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from harness.docs.documents import PAGES, ROOT, Block, blocks, broken_links, page_name, prose
from harness.hosts.cluster import RayCluster
from harness.hosts.ranks import run_ranks
from harness.runs.cli_runs import complete, enter_folder
from orchestrator.cli.launch import split
from orchestrator.cli.train import TrainOptions
from orchestrator.config.reading.flags import read_flags, read_options
from orchestrator.config.settings import flat_names, section_types


def find_readers() -> dict[str, list[str]]:
    """Return the packages that read each setting, by its flat name.

    A read is an attribute ``config.section.name``, or ``section.name`` where a function is given
    its section. Where no module reads a setting so, every attribute and every string of that name
    counts, and every call of a method of the section that reads it.
    """
    sections = {field.name: section for section, kind in section_types().items() for field in fields(kind)}
    methods = _methods_that_read()
    direct: dict[str, set[str]] = {name: set() for name in [*sections, "task"]}
    indirect: dict[str, set[str]] = {name: set() for name in direct}
    for path, tree in _modules():
        for node in ast.walk(tree):
            name = _name_read(node)
            if name in direct:
                of_section = isinstance(node, ast.Attribute) and _last_name(node.value) == sections.get(
                    name, "config"
                )
                (direct if of_section else indirect)[name].add(_package(path))
            for setting in methods.get(name or "", ()):
                indirect[setting].add(_package(path))
    return {name: sorted(packages or indirect[name]) for name, packages in direct.items()}


def _methods_that_read() -> dict[str, list[str]]:
    """Return the settings that the methods of their sections read, by the name of the method."""
    found: dict[str, list[str]] = {}
    for kind in section_types().values():
        names = {field.name for field in fields(kind)}
        tree = ast.parse(inspect.getsource(kind))
        for method in ast.walk(tree):
            if isinstance(method, ast.FunctionDef) and method.name != "__post_init__":
                read = {node.attr for node in ast.walk(method) if isinstance(node, ast.Attribute)}
                found[method.name] = sorted(read & names)
    return found


def _modules() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted((ROOT / "orchestrator").rglob("*.py")):
        relative = path.relative_to(ROOT / "orchestrator")
        if relative.parts[0] != "config":
            yield relative, ast.parse(path.read_text(encoding="utf-8"))


def _package(path: Path) -> str:
    """Return the folder of a module, or its own name at the top: ``trainer``."""
    return path.parent.as_posix() if len(path.parts) > 1 else path.stem


def _name_read(node: ast.AST) -> str | None:
    if isinstance(node, ast.Attribute):
        # Of torch: ``finfo(dtype).eps`` is no setting.
        of_call = isinstance(node.value, ast.Call) and _last_name(node.value.func) == "finfo"
        return None if of_call else node.attr
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _last_name(node: ast.expr) -> str | None:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None


BLOCKS = blocks()
NOT_RUN = {
    "README.md": 4,
    "docs/clusters.md": 10,
    "docs/coming-from.md": 5,
    "docs/cost-model.md": 1,
    "docs/development.md": 2,
    "docs/evaluation.md": 3,
    "docs/expert-parallelism.md": 1,
    "docs/index.md": 2,
    "docs/language-models.md": 8,
    "docs/live-view.md": 2,
    "docs/performance.md": 1,
    "docs/recovery.md": 1,
    "docs/reproducible.md": 1,
    "docs/reports.md": 1,
    "docs/security.md": 2,
    "docs/settings.md": 1,
    "docs/storage.md": 3,
    "docs/sweeps.md": 1,
    "docs/training.md": 2,
    "docs/transformers.md": 2,
}
TESTED_ELSEWHERE = ("orchestrator check",)  # tests/cli/test_check.py: it tries every precision and compiles
# Flags of every program, of ray, kubectl, Slurm, SkyPilot and tensorboard, and of the benchmarks and tools
FLAGS_OF_OTHERS = frozenset(
    {
        "--account",
        "--address",
        "--batch",
        "--block",
        "--build-arg",
        "--check",
        "--count",
        "--dashboard-port",
        "--every",
        "--exclusive",
        "--extras",
        "--find-links",
        "--fp8",
        "--from-env-file",
        "--from-file",
        "--generate",
        "--gres",
        "--head",
        "--help",
        "--hf-token",
        "--list",
        "--logdir",
        "--minutes",
        "--no-index",
        "--num-cpus",
        "--out",
        "--outcomes",
        "--partition",
        "--planted",
        "--tier",
        "--port",
        "--ray-client-server-port",
        "--requeue",
        "--rest",
        "--runtime-env-json",
        "--secret",
        "--seed",
        "--signal",
        "--temp-dir",
        "--time",
        "--tmux",
        "--working-dir",
    }
)


@cache
def load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_settings", ROOT / "docs" / "generate_settings.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def known_flags() -> set[str]:
    """Return the flags of all settings and of all verbs."""
    names = set(flat_names())
    for kind in load_generator().option_types().values():
        names |= set(kind.__dataclass_fields__)
    flags = {f"--{name.replace('_', '-')}" for name in names}
    return flags | {f"--no-{flag[2:]}" for flag in flags}


# --- the text


def test_the_readme_shows_a_command_within_twenty_lines() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert any(line.startswith("make train") for line in lines[:20])
    assert len(lines) < 190, "the details belong into docs/"


def test_the_settings_page_is_what_the_code_says() -> None:
    generated = load_generator().generate()
    committed = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert committed == generated, "run 'make docs-settings' and commit docs/settings.md"


def test_every_setting_is_read_somewhere() -> None:
    assert [name for name, packages in find_readers().items() if not packages] == []


def test_every_setting_has_a_row_with_its_meaning() -> None:
    text = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `--([a-z0-9-]+)` \| (.+) \| (.+) \| (.+) \|$", text, flags=re.MULTILINE)
    documented = {row[0].replace("-", "_") for row in rows}
    assert set(flat_names()) <= documented
    assert all(all(cell.strip() for cell in row) for row in rows)


@pytest.mark.parametrize("path", PAGES, ids=page_name)
def test_no_unknown_flag_is_mentioned(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    mentioned = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9](?![\w-])", text))
    assert mentioned <= known_flags() | FLAGS_OF_OTHERS


@pytest.mark.parametrize("path", PAGES, ids=page_name)
def test_links_lead_somewhere(path: Path) -> None:
    assert broken_links(path) == []


@pytest.mark.parametrize("path", PAGES, ids=page_name)
def test_nested_lists_are_indented_by_four_spaces(path: Path) -> None:
    """The site shows lists with fewer flat; GitHub nests both."""
    text = prose(path.read_text(encoding="utf-8"))
    assert re.findall(r"^ {1,3}(?:[-*]|\d+\.) .*$", text, flags=re.MULTILINE) == []


def test_code_on_the_start_page_fits_its_column() -> None:
    lines = [line for block in BLOCKS if block.page == "docs/index.md" for line in block.text.splitlines()]
    assert [line for line in lines if len(line) > 82] == []


def test_pictures_are_small() -> None:
    pictures = list((ROOT / "docs").rglob("*.png"))
    assert pictures
    assert [path.name for path in pictures if path.stat().st_size > 300_000] == []


@pytest.mark.parametrize("path", PAGES, ids=page_name)
def test_files_and_make_targets_that_are_named_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    files = re.findall(r"(?<![\w/])((?:orchestrator|experts|tests|benchmarks|docs)/[\w/*.-]+\.\w+)", text)
    missing = [name for name in files if "NAME" not in name and not list(ROOT.glob(name))]
    targets = set(
        re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    )
    mentioned = set(re.findall(r"(?:^|`)make ([a-z-]+)", text, flags=re.MULTILINE))
    assert missing == []
    assert mentioned <= targets


def test_the_map_of_packages_names_every_package_and_existing_files() -> None:
    """The table of docs/development.md lists the packages. Those inside the last one have rows of their own,
    ``… name/``, or are named in its row."""
    text = (ROOT / "docs" / "development.md").read_text(encoding="utf-8")
    table = text.split("## Packages")[1].split("## Import rules")[0]
    mapped = set()
    parent = ""
    for first, job, files in re.findall(r"^\| `([^`]+)`(.*) \| (.*) \|$", table, flags=re.MULTILINE):
        folder = first.removeprefix("… ").removesuffix("/")
        if first.startswith("… "):
            folder = f"{parent}/{folder}"
        elif first.endswith("/"):
            parent = folder
        mapped |= {folder, *(f"{folder}/{name}" for name in re.findall(r"`(\w+)/`", job))}
        for name in re.findall(r"`([\w/.]+)`", files):
            home = ROOT / folder if first.endswith("/") else ROOT / "orchestrator"
            assert (home / name).is_file(), f"{folder}: {name}"
    inits = [*ROOT.glob("orchestrator/*/**/__init__.py"), *ROOT.glob("experts/*/__init__.py")]
    packages = {path.parent.relative_to(ROOT).as_posix() for path in inits}
    assert packages - mapped == set()


def test_blocks_that_do_not_run_are_counted() -> None:
    counted = Counter(block.page for block in BLOCKS if block.language == "bash" and not block.runs)
    assert counted == NOT_RUN
    assert {block.language for block in BLOCKS} <= {"bash", "python", "json", "text"}


# --- commands

COMMANDS = [
    pytest.param(command, id=f"{block.name} {command}")
    for block in BLOCKS
    if block.language == "bash"
    for command in block.commands("orchestrator")
]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_parse(command: str) -> None:
    """Names and values of the flags are known to the verb, whether the command runs here or not."""
    _, verb, *arguments = shlex.split(command)
    if verb == "launch":
        arguments, flags = split(arguments)
        read_flags(TrainOptions, flags, "orchestrator train")
    kind = load_generator().option_types()[verb]
    if "settings" in kind.__dataclass_fields__:
        # the file may be one that an earlier command writes
        while "--config" in arguments:
            at = arguments.index("--config")
            del arguments[at : at + 2]
        read_flags(kind, arguments, f"orchestrator {verb}", positional=_positional(verb))
    else:
        read_options(kind, arguments, f"orchestrator {verb}", positional=_positional(verb))


def _positional(verb: str) -> Any:
    names = {
        "report": "folders",
        "watch": "folder",
        "resume": "folder",
        "init": "path",
        "evaluate": "checkpoint",
        "verify": "run",
        "launch": "kind",
    }
    return ("checkpoint", "folder") if verb == "export" else names.get(verb)


def needs_ray(command: str) -> bool:
    words = shlex.split(command)
    return words[1] == "sweep" or (words[1] == "train" and "--workers" in words)


PAGES_THAT_RUN = sorted({block.page for block in BLOCKS if block.runs and block.commands("orchestrator")})


@pytest.mark.extended(but_first=1)
@pytest.mark.ray
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", PAGES_THAT_RUN)
def test_commands_run(page: str, tmp_path: Path, shared_cluster: RayCluster) -> None:
    """In order, in one folder, as a reader would.

    Workers are started on the cluster of the tests.
    """
    for block in BLOCKS:
        if block.page == page and block.language == "bash" and block.runs:
            for command in block.commands("orchestrator"):
                if command not in TESTED_ELSEWHERE:
                    cluster = shared_cluster if needs_ray(command) else None
                    complete(cluster, tmp_path, shlex.split(command)[1:])


# --- Python

PYTHON = [pytest.param(block, id=block.name) for block in BLOCKS if block.language == "python"]


@pytest.mark.extended(but_first=4)
@pytest.mark.parametrize("block", PYTHON)
def test_python_runs(block: Block, tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(block.text, encoding="utf-8")
    if "tiny/model" in block.text:
        example = runpy.run_path(str(ROOT / "examples" / "fine_tune.py"))
        example["save_model"](tmp_path / "tiny" / "model")
        example["save_chats"](tmp_path / "tiny" / "chats.jsonl")
    if "class MyTask" in block.text:
        command = "orchestrator train --task example:MyTask --max-steps 5"
        complete(None, tmp_path, shlex.split(command)[1:])
        assert (tmp_path / "results").is_dir()
    else:
        run_ranks(run_script, 1, str(tmp_path))


def run_script(_rank: int, _size: int, _store: str, folder: str) -> None:
    enter_folder(folder, {})
    runpy.run_path("example.py", run_name="__main__")
