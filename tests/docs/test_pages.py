"""The pages of the site say what the code and the results say."""

from __future__ import annotations

import re
import runpy

import pytest

import orchestrator
from docs import generate_combinations
from harness.docs.documents import ROOT

_RESULT = re.compile(r"\]\(\.\./(benchmarks/results/[\w.-]+\.md)\)")
_FIGURE = re.compile(r"\d[\d,]*(?:\.\d+)?")


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def test_the_words_of_other_trainers_are_answered_as_the_code_does() -> None:
    generator = runpy.run_path(str(ROOT / "docs" / "generate_coming_from.py"))
    assert page("coming-from.md") == generator["generate"](), "run 'make docs-settings'"


@pytest.mark.extended
def test_combinations_are_answered_as_the_plan_does() -> None:
    assert page("combinations.md") == generate_combinations.generate(), "run 'make docs-settings'"


def test_the_start_page_is_the_one_list_of_all_pages() -> None:
    listed = re.findall(r"\]\(([\w-]+\.md)\)", page("index.md").partition("## Which page next")[2])
    assert sorted(listed) == sorted(
        path.name for path in (ROOT / "docs").glob("*.md") if path.stem != "index"
    )
    readme = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Where to read on")[2]
    assert set(re.findall(r"docs/[\w-]+\.md", readme.partition("\n## ")[0])) == {"docs/index.md"}


@pytest.mark.parametrize(
    "symptom",
    [
        "CUDA out of memory",
        "slow training",
        "slow loader",
        "several GPUs slower than one",
        "does not compile",
        "does not fit next to its optimizer",
        "NCCL",
        "workers hang",
        "no GPU readings",
        "on the same device",
        "different results on each run",
        "a checkpoint is damaged",
    ],
)
def test_a_symptom_has_a_place_to_look_and_a_fix(symptom: str) -> None:
    rows = [line.strip("|").split("|") for line in page("troubleshooting.md").splitlines() if line[:1] == "|"]
    answers = [cells for cells in rows if symptom in cells[0]]
    assert answers, "no row of troubleshooting.md has it"
    for cells in answers:
        assert [len(cell.strip()) > 5 for cell in cells] == [True] * 3


def test_measured_figures_are_those_of_their_files() -> None:
    """Each row of performance.md has its result in the second cell and its file in the last."""
    rows = [
        line.strip("|").split("|") for line in page("performance.md").splitlines() if _RESULT.search(line)
    ]
    tables = [cells for cells in rows if len(cells) == 4]
    assert len(tables) > 15
    for _, result, _, link in tables:
        (file,) = _RESULT.findall(link)
        text = (ROOT / file).read_text(encoding="utf-8")
        missing = [figure for figure in _FIGURE.findall(result) if not _has(text, figure)]
        assert missing == [], file


def _has(text: str, figure: str) -> bool:
    """Return whether a text has a figure, also as the rounded form of a longer one."""
    digits = len(figure.partition(".")[2])
    found = _FIGURE.findall(text)
    return figure in found or any(f"{float(other.replace(',', '')):.{digits}f}" == figure for other in found)


def test_the_reference_has_every_public_name() -> None:
    text = page("api.md")
    described = {line.rpartition(".")[2] for line in text.splitlines() if line.startswith("::: ")}
    assert set(orchestrator.__all__) <= described
