"""Tests of the CSV files: every trial once, full precision, text that stays text."""

import csv
import io
import re

import pytest

from harness.fakes.fake_sweep import (
    EXPERTS,
    HOSTILE,
    MIXED,
    NOTHING,
    STRONG,
    SWEEPS,
    FakeSweep,
    write_record,
)
from orchestrator.record.files.ledger import SweepRecord, TrialRow
from orchestrator.report.sweep.frames import scaling_csv, sweep_csv


def parse(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


@pytest.mark.parametrize("name", SWEEPS)
def test_every_trial_is_one_line(tmp_path, name) -> None:
    record = write_record(tmp_path, SWEEPS[name])
    text = sweep_csv(record)
    assert len(text.splitlines()) == 1 + len(record.rows)
    assert [int(line["trial"]) for line in parse(text)] == [row.trial for row in record.rows]
    assert [line["status"] for line in parse(text)] == [row.status for row in record.rows]


def test_a_trial_has_its_settings_figures_and_reason(tmp_path) -> None:
    record = write_record(tmp_path, MIXED)
    lines = {int(line["trial"]): line for line in parse(sweep_csv(record))}
    row = record.rows[0]
    assert float(lines[1]["samples_per_second"]) == row.samples_per_second, "at full precision"
    assert lines[1]["strategy"] == "single"
    assert lines[1]["global_batch_size"] == "16", "integers stay integers, although some trials have none"
    assert lines[1]["compile"] == "false"
    assert float(lines[1]["forward_seconds"]) == row.phases["forward"]
    assert lines[2]["reason"] == MIXED.reason
    assert lines[2]["samples_per_second"] == ""
    assert lines[3]["workers"] == "4", "an infeasible trial has the requested workers"


def test_no_cell_is_a_formula(tmp_path) -> None:
    record = write_record(tmp_path, FakeSweep(failing=(1,), reason="=HYPERLINK(1)\n+1"))
    assert parse(sweep_csv(record))[0]["reason"] == "'=HYPERLINK(1) +1"
    hostile = parse(sweep_csv(write_record(tmp_path / "x", HOSTILE)))
    cells = [cell for line in hostile for cell in line.values()]
    assert not [cell for cell in cells if re.match(r"[=@+]", cell) or "\x1b" in cell or "\n" in cell]


def test_scaling_lines_are_by_kind_and_the_best_are_marked(tmp_path) -> None:
    lines = parse(scaling_csv(write_record(tmp_path, STRONG)))
    assert list(dict.fromkeys(line["scaling"] for line in lines)) == ["best", "strong", "weak"]
    best = [line for line in lines if line["scaling"] == "best"]
    assert [line["devices"] for line in best] == ["1", "2", "4"]
    trials = {line["trial"] for line in best}
    assert all((line["trial"] in trials) == (line["best_of_its_devices"] == "true") for line in lines)


def test_strong_lines_share_the_global_batch_and_weak_ones_the_batch(tmp_path) -> None:
    lines = parse(scaling_csv(write_record(tmp_path, EXPERTS)))
    for kind, shared in (("strong", "global_batch_size"), ("weak", "batch_size")):
        for series in {line["series"] for line in lines if line["scaling"] == kind}:
            assert len({line[shared] for line in lines if line["series"] == series}) == 1


def test_without_measurements_scaling_has_a_header_only(tmp_path) -> None:
    text = scaling_csv(write_record(tmp_path, NOTHING))
    assert text.startswith("scaling,series,devices,strategy,")
    assert parse(text) == []


def test_a_damaged_header_leaves_the_trials(tmp_path) -> None:
    header = {"event": "sweep", "space": 3, "settings": [1], "trials": "x", "devices": None}
    record = SweepRecord(tmp_path, header, (TrialRow(1, {}, "failed"),))
    assert len(sweep_csv(record).splitlines()) == 2
