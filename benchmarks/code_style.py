"""Print the style figures of this repository, or of any other folder with Python packages.

    python -m benchmarks.code_style
    python -m benchmarks.code_style --sources path/to/package --tests path/to/tests

Definitions. Files that hold no statement (an empty ``__init__.py``) are left out.

lines                        All lines of the source files: code, docstrings, comments and blank lines.
file lines                   Lines per file: median and largest.
function lines               From ``def`` to the last line of the body, docstring included, nested
functions included.
tokens per code line         Tokens of Python's tokenizer, without comments, docstrings and layout
tokens, divided by the
                             lines on which they stand.
lines over 100 columns       Share of the lines that are not blank, docstrings and comments included.
tuple assignments            Assignments with a tuple on both sides (``a, b = 1, 2``), as a share
of all assignments.
                             ``a, b = pair`` unpacks one value and is not counted.
comments per 100 code lines  Lines that carry a ``#`` comment, per 100 code lines. A docstring is
not a comment.
arguments / returns typed    Annotated parameters (``self`` and ``cls`` left out) and annotated
returns, as a share of all.
largest folder               Modules directly in one folder, ``__init__.py`` left out.
modules in import cycles     Modules in strongly connected groups of the import graph. Imports
inside functions and under
                             ``TYPE_CHECKING`` count; the implicit import of a parent package does not.
test lines per source line   Lines of all files below the tests folder, divided by ``lines``.
"""

from __future__ import annotations

import argparse
import ast
import io
import statistics
import tokenize
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import networkx as nx

from benchmarks.support import markdown_table

_LAYOUT = frozenset(
    {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER, tokenize.ENCODING}
)
_WIDE = 100
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class FileFigures:
    """The counts of one file."""

    lines: int
    filled_lines: int
    wide_lines: int
    code_lines: int
    tokens: int
    comment_lines: int
    assignments: int
    tuple_assignments: int
    function_lines: tuple[int, ...]
    arguments: int
    typed_arguments: int
    typed_returns: int


def measure_file(text: str) -> FileFigures:
    """Count one file, given as text."""
    tree = ast.parse(text)
    lines = text.splitlines()
    code_lines, tokens, comment_lines = _count_tokens(text, _docstring_lines(tree))
    functions = [node for node in ast.walk(tree) if isinstance(node, _Function)]
    arguments = [argument for function in functions for argument in _arguments(function)]
    assignments = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    return FileFigures(
        lines=len(lines),
        filled_lines=sum(bool(line.strip()) for line in lines),
        wide_lines=sum(len(line) > _WIDE for line in lines),
        code_lines=code_lines,
        tokens=tokens,
        comment_lines=comment_lines,
        assignments=len(assignments),
        tuple_assignments=sum(_is_tuple_assignment(node) for node in assignments),
        function_lines=tuple(_length(function) for function in functions),
        arguments=len(arguments),
        typed_arguments=sum(argument.annotation is not None for argument in arguments),
        typed_returns=sum(function.returns is not None for function in functions),
    )


def _docstring_lines(tree: ast.Module) -> set[int]:
    """Return the lines of all docstrings, those under a dataclass field included."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | _Function):
            continue
        for statement in node.body:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                lines.update(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1))
    return lines


def _count_tokens(text: str, docstring_lines: set[int]) -> tuple[int, int, int]:
    """Return the number of code lines, of tokens on them, and of lines with a comment."""
    code_lines: set[int] = set()
    comment_lines: set[int] = set()
    tokens = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        line = token.start[0]
        if token.type == tokenize.COMMENT:
            comment_lines.add(line)
        elif token.type not in _LAYOUT and not (token.type == tokenize.STRING and line in docstring_lines):
            tokens += 1
            code_lines.update(range(line, token.end[0] + 1))
    return len(code_lines), tokens, len(comment_lines)


def _arguments(function: _Function) -> list[ast.arg]:
    given = function.args
    variadic = [argument for argument in (given.vararg, given.kwarg) if argument is not None]
    named = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    return [argument for argument in [*named, *variadic] if argument.arg not in ("self", "cls")]


def _is_tuple_assignment(node: ast.Assign) -> bool:
    return isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)


def _length(function: _Function) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


def source_files(folders: Iterable[Path]) -> list[Path]:
    """Return the Python files below these folders that hold at least one statement."""
    files = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    return [path for path in files if path.read_text(encoding="utf-8").strip()]


def modules_in_cycles(folders: Sequence[Path]) -> list[str]:
    """Return the modules that import each other in a circle, directly or through others."""
    paths = {module_name(path, folder.parent): path for folder in folders for path in folder.rglob("*.py")}
    graph = nx.DiGraph()
    for name, path in paths.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        graph.add_edges_from((name, imported) for imported in _imports(tree, paths))
    groups = nx.strongly_connected_components(graph)
    return sorted(name for group in groups if len(group) > 1 for name in group)


def module_name(path: Path, root: Path) -> str:
    """Return the dotted name by which a file below ``root`` is imported."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(tree: ast.Module, known: Collection[str]) -> Iterator[str]:
    """Yield the known modules that a module imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for alias in node.names:
                # "from a import b" imports module a.b where there is one, else a name of module a
                submodule = f"{node.module}.{alias.name}"
                imported = submodule if submodule in known else node.module
                if imported in known:
                    yield imported


def largest_folder(files: Iterable[Path]) -> tuple[Path, int]:
    """Return the folder that holds the most modules directly, and their number."""
    counts = Counter(path.parent for path in files if path.name != "__init__.py")
    return counts.most_common(1)[0]


def figures(sources: Sequence[Path], tests: Path) -> dict[str, str]:
    """Return all figures of the module's docstring, as text, by name."""
    paths = source_files(sources)
    files = [measure_file(path.read_text(encoding="utf-8")) for path in paths]
    test_lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in source_files([tests]))

    def total(name: str) -> int:
        return sum(getattr(file, name) for file in files)

    def percent(part: str, whole: str) -> str:
        return f"{100 * total(part) / max(1, total(whole)):.1f}%"

    file_lines = sorted(file.lines for file in files)
    function_lines = sorted(length for file in files for length in file.function_lines)
    p90 = function_lines[int(0.9 * len(function_lines))]
    returns = f"{100 * total('typed_returns') / len(function_lines):.1f}%"
    folder, num_modules = largest_folder(paths)
    return {
        "lines": f"{total('lines'):,}",
        "file lines: median / max": f"{statistics.median(file_lines):.0f} / {file_lines[-1]}",
        "function lines: median / p90 / max": (
            f"{statistics.median(function_lines):.0f} / {p90} / {function_lines[-1]}"
        ),
        "tokens per code line": f"{total('tokens') / total('code_lines'):.2f}",
        "lines over 100 columns": percent("wide_lines", "filled_lines"),
        "tuple assignments, of all assignments": percent("tuple_assignments", "assignments"),
        "comments per 100 code lines": f"{100 * total('comment_lines') / total('code_lines'):.1f}",
        "arguments / returns typed": f"{percent('typed_arguments', 'arguments')} / {returns}",
        "largest folder": f"{num_modules} modules ({folder})",
        "modules in import cycles": str(len(modules_in_cycles(sources))),
        "test lines per source line": f"{test_lines / total('lines'):.2f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sources", type=Path, nargs="+", default=[Path("orchestrator"), Path("experts")])
    parser.add_argument("--tests", type=Path, default=Path("tests"))
    arguments = parser.parse_args()
    rows = list(figures(arguments.sources, arguments.tests).items())
    print(markdown_table(("figure", ", ".join(str(path) for path in arguments.sources)), rows), end="")


if __name__ == "__main__":
    main()
