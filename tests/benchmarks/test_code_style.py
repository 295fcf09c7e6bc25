"""The style figures on small files whose counts are known by hand."""

from __future__ import annotations

from pathlib import Path

from benchmarks.code_style import figures, largest_folder, measure_file, modules_in_cycles, source_files

SAMPLE = '''"""A module docstring."""

# a comment of its own line
def add(left: int, right):
    """Add."""
    total = left + right  # at the end of a line
    a, b = 1, 2
    c, d = divmod(total, 2)
    return total


class Box:
    size: int = 3
    """A docstring under a field."""

    def get(self) -> int:
        return self.size
'''


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def test_a_file_is_counted() -> None:
    counts = measure_file(SAMPLE)
    assert counts.lines == 17
    assert counts.filled_lines == 13
    assert counts.code_lines == 9, "docstrings and comments are not code"
    assert counts.comment_lines == 2
    assert counts.assignments == 3
    assert counts.tuple_assignments == 1, "unpacking the pair of divmod is not counted"
    assert counts.function_lines == (6, 2)
    assert (counts.arguments, counts.typed_arguments, counts.typed_returns) == (2, 1, 1)


def test_tokens_leave_out_comments_and_docstrings() -> None:
    counts = measure_file('"""Docstring."""\n\nx = 1  # comment\nif x:\n    y = "a string"\n')
    assert counts.tokens == 3 + 3 + 3
    assert counts.code_lines == 3


def test_wide_lines_are_those_over_100_columns() -> None:
    exact = "x = '" + "a" * 94 + "'"
    assert len(exact) == 100
    assert measure_file(f"{exact}\n{exact} \n").wide_lines == 1


def test_import_cycles_are_found_inside_functions_too(tmp_path: Path) -> None:
    write(
        tmp_path / "package",
        {
            "__init__.py": "",
            "a.py": "from package import b\n",
            "b.py": "def later():\n    import package.c\n",
            "c.py": "from package.a import name\n",
            "d.py": "from package import a\nimport package\n",
        },
    )
    assert modules_in_cycles([tmp_path / "package"]) == ["package.a", "package.b", "package.c"]


def test_the_largest_folder_leaves_out_init_files(tmp_path: Path) -> None:
    write(tmp_path, {"p/__init__.py": "x = 1", "p/a.py": "x = 1", "p/q/b.py": "x = 1", "p/q/c.py": "x = 1"})
    assert largest_folder(source_files([tmp_path])) == (tmp_path / "p/q", 2)


def test_all_figures_of_a_folder(tmp_path: Path) -> None:
    write(tmp_path, {"p/__init__.py": "", "p/a.py": SAMPLE, "tests/test_a.py": "x = 1\n" * 17})
    table = figures([tmp_path / "p"], tmp_path / "tests")
    assert table["lines"] == "17"
    assert table["function lines: median / p90 / max"] == "4 / 6 / 6"
    assert table["arguments / returns typed"] == "50.0% / 50.0%"
    assert table["modules in import cycles"] == "0"
    assert table["test lines per source line"] == "1.00"
