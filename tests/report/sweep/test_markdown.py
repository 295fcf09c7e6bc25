"""Tests of ``scaling.md``: aligned tables, and text that stays text."""

import re

import pandas as pd
import pytest

from harness.fakes.fake_sweep import HOSTILE, MIXED, NOTHING, SWEEPS, FakeSweep, write_record
from orchestrator.record.files.ledger import SweepRecord, TrialRow
from orchestrator.report.sweep.markdown import markdown_table, scaling_md


def tables(text: str) -> list[list[str]]:
    """Return the blocks of lines that begin with a bar."""
    blocks: list[list[str]] = [[]]
    for line in text.splitlines():
        if line.startswith("|"):
            blocks[-1].append(line)
        elif blocks[-1]:
            blocks.append([])
    return [block for block in blocks if block]


def bar_places(line: str) -> list[int]:
    return [place for place, sign in enumerate(line) if sign == "|" and line[place - 1] != "\\"]


@pytest.mark.parametrize("name", SWEEPS)
def test_columns_are_aligned(tmp_path, name) -> None:
    for table in tables(scaling_md(write_record(tmp_path, SWEEPS[name]))):
        places = [bar_places(line) for line in table]
        assert all(each == places[0] for each in places), "\n".join(table)
        assert re.fullmatch(r"\|( -+:? \|)+", table[1])


def test_figures_are_right_aligned_and_wide_characters_take_two_columns() -> None:
    frame = pd.DataFrame({"name": ["a|b", "日本"], "n": ["1", "–"]})
    assert markdown_table(frame).splitlines() == [
        "| name |   n |",
        "| ---- | --: |",
        "| a\\|b |   1 |",
        "| 日本 |   – |",
    ]


def test_the_sweep_and_its_outcome_are_described(tmp_path) -> None:
    text = scaling_md(write_record(tmp_path, MIXED))
    assert "2 GPUs (NVIDIA H200)" in text
    assert "precision (fp32,bf16) × batch (16,64,256) × accumulation (1,4) × devices (1,2,4)" in text
    assert "18 completed, 1 stopped, 1 failed, 4 out of memory, 12 infeasible" in text
    assert "95% confidence interval" in text
    assert "warm-up" in text
    assert "## Weak scaling" in text
    assert "## Trials that did not complete" in text
    assert "## Strong scaling" not in text, "no global batch was measured on two numbers of devices"


def test_hostile_text_stays_text(tmp_path) -> None:
    text = scaling_md(write_record(tmp_path, HOSTILE))
    outside = re.sub(r"(`{3,})sh\n.*?\n\1", "", text, flags=re.DOTALL)
    assert not re.search(r"(?<!\\)[<`$\[]", outside)
    assert "\x1b" not in text
    for fence, command in re.findall(r"(`{3,})sh\n(.*?)\n\1", text, flags=re.DOTALL):
        assert fence not in command
        assert "\n" not in command


def test_a_sweep_without_measurements_says_so(tmp_path) -> None:
    text = scaling_md(write_record(tmp_path, NOTHING))
    assert "nothing to compare" in text
    assert "needs 16 devices, the cluster has 4" in text


def test_a_base_of_several_devices_is_named(tmp_path) -> None:
    record = write_record(tmp_path, FakeSweep(space={"workers": (2, 4), "batch_size": (16,)}))
    assert "against 2 devices, the fewest there are" in scaling_md(record)


def test_a_damaged_header_still_gives_a_page(tmp_path) -> None:
    header = {"event": "sweep", "space": 3, "settings": [1], "trials": "x", "devices": None}
    assert scaling_md(SweepRecord(tmp_path, header, (TrialRow(1, {}, "failed"),)))
