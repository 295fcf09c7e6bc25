"""Tests of the page of a sweep: complete, safe, and sortable."""

import base64
import hashlib
import re

import pytest

from harness.fakes.fake_sweep import (
    EXPERTS,
    HOSTILE,
    MIXED,
    NOTHING,
    SWEEPS,
    FakeSweep,
    random_points,
    write_record,
    write_sweep,
)
from orchestrator.cli.report import show_report
from orchestrator.errors import UserError
from orchestrator.report.draw.html import JS
from orchestrator.report.sweep.page import draw_sweep, sweep_page
from tests.report.run.test_page import checked


@pytest.mark.parametrize("name", SWEEPS)
def test_the_page_is_complete_and_needs_no_network(tmp_path, name) -> None:
    page = checked(sweep_page(write_record(tmp_path, SWEEPS[name])))
    assert page.tags.count("script") == 1
    links = [
        value
        for _, attribute, value in page.attributes
        if attribute in ("src", "href", "srcset", "action", "data")
    ]
    assert all(link.startswith("data:") for link in links)
    assert not [attribute for _, attribute, _ in page.attributes if attribute.startswith("on")]


def test_the_page_runs_its_own_script_only(tmp_path) -> None:
    text = sweep_page(write_record(tmp_path))
    digest = base64.b64encode(hashlib.sha256(JS.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in text
    assert f"<script>{JS}</script>" in text


def test_hostile_text_stays_text(tmp_path) -> None:
    text = sweep_page(write_record(tmp_path, HOSTILE))
    assert "<script>alert" not in text
    assert "\x1b" not in text
    assert checked(text).tags.count("img") == 0


def test_a_full_sweep_has_all_sections(tmp_path) -> None:
    text = sweep_page(write_record(tmp_path, EXPERTS))
    for name in ("Scaling", "What matters", "All trials"):
        assert f"<h2>{name}" in text, name
    for name in (
        "Strong scaling: throughput",
        "Weak scaling: efficiency",
        "Best setting of each number of devices",
        "speed-up",
    ):
        assert name in text, name
    plain = re.sub(r"</?span[^>]*>", "", text)
    flags = "--epochs 3 --parallel-strategy data_parallel --workers 8 --batch-size 32"
    assert f"orchestrator train --task text {flags}" in plain
    assert f"orchestrator train --tuned {tmp_path}" in plain


def test_what_matters_comes_before_scaling_and_one_row_is_no_scaling_table(tmp_path) -> None:
    text = sweep_page(write_record(tmp_path / "many", EXPERTS))
    assert text.index("<h2>What matters") < text.index("<h2>Scaling") < text.index("<h2>All trials")
    one = sweep_page(
        write_record(tmp_path / "one", FakeSweep(space={"batch_size": (16, 64), "workers": (1,)}))
    )
    assert "<h2>Scaling" not in one
    assert "<h2>All trials" in one


def test_a_setting_that_is_the_same_in_all_rows_is_no_column_of_the_scaling_table(tmp_path) -> None:
    space = {"precision": ("bf16",), "batch_size": (64,), "workers": (1, 2, 4)}
    text = sweep_page(write_record(tmp_path, FakeSweep(space=space)))
    table = text[text.index("Best setting of each number of devices") :]
    assert "against one device; precision bf16; batch 64" in table
    assert ">precision</th>" not in table[: table.index("</table>")]


def test_sections_without_data_are_left_out(tmp_path) -> None:
    text = sweep_page(write_record(tmp_path, NOTHING))
    assert "<h2>Scaling" not in text
    assert "<h2>What matters" not in text
    assert "No trial completed with a result" in text
    assert "needs 16 devices, the cluster has 4" in text


def test_an_unfinished_sweep_says_so(tmp_path) -> None:
    text = sweep_page(write_record(tmp_path, FakeSweep(left=20)))
    assert "16 of 36 trials so far" in text
    assert "running or interrupted" in text


def rows_of(text: str) -> list[list[tuple[str, str]]]:
    """Return (data-value, text) of each cell of the sortable table."""
    table = re.search(r'<table class="dense sortable">.*?</table>', text, flags=re.DOTALL)
    assert table is not None
    body = table[0].partition("<tbody>")[2]
    cells = [
        re.findall(r'<td[^>]* data-value="([^"]*)">(.*?)</td>', row)
        for row in re.findall(r"<tr.*?</tr>", body)
    ]
    return [[(value, re.sub("<[^>]*>", "", shown)) for value, shown in row] for row in cells]


def test_every_trial_is_in_the_table_and_the_best_is_first(tmp_path) -> None:
    record = write_record(tmp_path, MIXED)
    rows = rows_of(sweep_page(record))
    best = record.best()
    assert best is not None
    assert sorted(int(float(row[0][0])) for row in rows) == [row.trial for row in record.rows]
    assert rows[0][0][1] == str(best.trial)
    assert [row[1][1] for row in rows][18:20] == ["stopped", "failed"]
    failed = next(row for row in rows if row[0][1] == "2")
    assert len(failed) == len(rows[0]), "covered cells stay, or sorting would mix up columns"
    assert ("", MIXED.reason) in failed


def test_figures_are_sorted_by_value_and_missing_ones_are_blank(tmp_path) -> None:
    record = write_record(tmp_path, MIXED)
    text = sweep_page(record)
    names = re.findall(r"<th scope=\"col\"[^>]*data-first=\"(\w+)\">([^<]*)</th>", text)
    place = [name for _, name in names].index("samples/s")
    assert names[place][0] == "descending"
    rows = {int(float(row[0][0])): row for row in rows_of(text)}
    assert float(rows[1][place][0]) == record.rows[0].samples_per_second
    assert rows[2][place] == ("", MIXED.reason), "the reason replaces the missing figures"


def test_the_planned_value_of_auto_is_shown(tmp_path) -> None:
    record = write_record(tmp_path, FakeSweep(space={"precision": ("auto", "fp32")}))
    assert "auto → bf16" in sweep_page(record)


def test_without_its_script_the_table_is_plain(tmp_path) -> None:
    before = sweep_page(write_record(tmp_path)).partition("<script>")[0].partition("</style>")[2]
    assert "<button" not in before
    assert "aria-sort=" not in before


def test_the_report_is_drawn_from_the_folder_alone(tmp_path) -> None:
    write_sweep(tmp_path, EXPERTS)
    written = draw_sweep(tmp_path)
    names = [
        "sweep.csv",
        "scaling.csv",
        "scaling.md",
        "scaling.png",
        "heatmap.png",
        "parallel_coordinates.png",
        "report.html",
    ]
    assert [path.name for path in written] == names
    assert {path.name for path in tmp_path.iterdir()} == {"sweep.jsonl", *names}, "no partial file is left"


def test_a_damaged_ledger_is_drawn_as_far_as_possible(tmp_path) -> None:
    write_sweep(tmp_path, FakeSweep(space={"workers": (1, 2)}))
    odd = [
        '{"event": "trial", "trial": 3, "point": {"workers": [1], "x<y": {"a": 1}}, "status": '
        '"completed", "samples_per_second": NaN}',
        '{"event": "trial", "trial": 4, "point": {"workers": null}, "status": "completed", '
        '"samples_per_second": Infinity, "seconds": NaN}',
        '{"event": "trial", "trial": 5, "point": {}, "status": "completed", "samples_per_second": '
        '1e308, "interval": -1, "workers": 0}',
        '{"event": "trial", "trial": 6, "point": {"workers": 1e300}, "status": "failed", "phases": '
        '{"data": "x", "forward": -1}}',
        '{"event": "trial", "trial": 7, "point": 3, "status": "completed"}',
        '{"event": "trial", "trial": 8, "po',
    ]
    with (tmp_path / "sweep.jsonl").open("a") as ledger:
        ledger.write("\n".join(odd))
    assert len(draw_sweep(tmp_path)) == 7
    checked((tmp_path / "report.html").read_text())
    assert len((tmp_path / "sweep.csv").read_text().splitlines()) == 7


def test_the_same_folder_gives_the_same_page(tmp_path) -> None:
    folder = write_record(tmp_path, MIXED)
    assert sweep_page(folder) == sweep_page(folder)


def test_a_folder_without_a_sweep_is_a_user_error(tmp_path) -> None:
    with pytest.raises(UserError, match="holds no sweep"):
        draw_sweep(tmp_path)


def test_report_of_a_sweep_folder_draws_the_sweep(tmp_path, capsys) -> None:
    assert show_report(write_sweep(tmp_path, NOTHING)) == 0
    assert "scaling.md" in capsys.readouterr().out


@pytest.mark.extended
def test_a_long_sweep_stays_a_small_page(tmp_path) -> None:
    assert len(sweep_page(write_record(tmp_path, points=random_points(1000)))) < 1_500_000
