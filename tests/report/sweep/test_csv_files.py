"""The tables as files: every trial once, columns that line up, text that stays text."""

import csv
import io
import re
import shlex
from dataclasses import replace

import pytest

from orchestrator.config.flags import read_flags
from orchestrator.record.ledger import TrialRow, SweepRecord
from orchestrator.report.sweep.csv_files import groups, scaling_csv, sweep_csv
from orchestrator.report.sweep.facts import in_words, sentence, series_label, swept, train_command, value_text
from orchestrator.report.sweep.markdown import scaling_md
from orchestrator.report.sweep.page import sweep_page
from tests.support.fake_sweep import (
    EVIL,
    EXPERTS,
    HOSTILE,
    MIXED,
    NOTHING,
    SINGLE,
    STRONG,
    SWEEPS,
    FakeSweep,
    write_record,
)


def lines(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def tables(text: str) -> list[list[str]]:
    """Blocks of lines that begin with a bar."""
    found: list[list[str]] = [[]]
    for line in text.splitlines():
        if line.startswith("|"):
            found[-1].append(line)
        elif found[-1]:
            found.append([])
    return [block for block in found if block]


@pytest.mark.parametrize("name", SWEEPS)
def test_every_trial_is_one_line(tmp_path, name) -> None:
    record = write_record(tmp_path, SWEEPS[name])
    text = sweep_csv(record)
    assert len(text.splitlines()) == 1 + len(record.rows)
    assert [int(line["trial"]) for line in lines(text)] == [row.trial for row in record.rows]
    assert [line["status"] for line in lines(text)] == [row.status for row in record.rows]


def test_a_trial_has_its_settings_figures_and_reason(tmp_path) -> None:
    record = write_record(tmp_path, MIXED)
    found = {int(line["trial"]): line for line in lines(sweep_csv(record))}
    row = record.rows[0]
    assert float(found[1]["samples_per_second"]) == row.samples_per_second, "at full precision"
    assert (found[1]["strategy"], found[1]["global_batch_size"], found[1]["compile"]) == (
        "single",
        "16",
        "false",
    )
    assert float(found[1]["forward_seconds"]) == row.phases["forward"]
    assert found[2]["reason"] == MIXED.reason
    assert found[2]["samples_per_second"] == ""
    assert found[3]["workers"] == "4", "an infeasible trial has what it asked for"


def test_a_spreadsheet_meets_no_formula(tmp_path) -> None:
    record = write_record(tmp_path, FakeSweep(failing=(1,), reason="=HYPERLINK(1)\n+1"))
    assert lines(sweep_csv(record))[0]["reason"] == "'=HYPERLINK(1) +1"
    cells = [cell for line in lines(sweep_csv(write_record(tmp_path / "x", HOSTILE))) for cell in line.values()]
    assert not [cell for cell in cells if re.match(r"[=@+]", cell) or "\x1b" in cell or "\n" in cell]


def test_scaling_lines_are_by_kind_and_the_best_are_marked(tmp_path) -> None:
    found = lines(scaling_csv(write_record(tmp_path, STRONG)))
    assert list(dict.fromkeys(line["scaling"] for line in found)) == ["best", "strong", "weak"]
    best = [line for line in found if line["scaling"] == "best"]
    assert [line["devices"] for line in best] == ["1", "2", "4"]
    trials = {line["trial"] for line in best}
    assert all((line["trial"] in trials) == (line["best_of_its_devices"] == "true") for line in found)
    for line in found:
        expected = float(line["speedup"]) * int(line["against_devices"]) / int(line["devices"])
        assert float(line["efficiency"]) == pytest.approx(expected)


def test_strong_lines_share_the_global_batch_and_weak_ones_the_batch(tmp_path) -> None:
    found = lines(scaling_csv(write_record(tmp_path, EXPERTS)))
    for kind, same in (("strong", "global_batch_size"), ("weak", "batch_size")):
        for series in {line["series"] for line in found if line["scaling"] == kind}:
            assert len({line[same] for line in found if line["series"] == series}) == 1


@pytest.mark.parametrize("name", SWEEPS)
def test_markdown_tables_line_up(tmp_path, name) -> None:
    for table in tables(scaling_md(write_record(tmp_path, SWEEPS[name]))):
        bars = [
            [place for place, c in enumerate(line) if c == "|" and line[place - 1] != "\\"] for line in table
        ]
        assert all(places == bars[0] for places in bars), "\n".join(table)
        assert re.fullmatch(r"\|( -+:? \|)+", table[1])


def test_markdown_says_what_was_swept_and_how_it_went(tmp_path) -> None:
    text = scaling_md(write_record(tmp_path, MIXED))
    assert "2 GPUs (NVIDIA H200)" in text
    assert "precision (fp32,bf16) × batch (16,64,256) × accumulation (1,4) × devices (1,2,4)" in text
    assert "18 completed, 1 stopped, 1 failed, 4 out of memory, 12 infeasible" in text
    assert "95% confidence interval" in text
    assert "warm-up" in text
    assert "## Weak scaling" in text
    assert "## Trials that did not complete" in text
    assert "## Strong scaling" not in text, (
        "no two rows have the same global batch on another number of devices"
    )


def test_markdown_of_hostile_text_stays_text(tmp_path) -> None:
    text = scaling_md(write_record(tmp_path, HOSTILE))
    outside = re.sub(r"(`{3,})sh\n.*?\n\1", "", text, flags=re.DOTALL)
    assert not re.search(r"(?<!\\)[<`$\[]", outside)
    assert "\x1b" not in text
    for fence, command in re.findall(r"(`{3,})sh\n(.*?)\n\1", text, flags=re.DOTALL):
        assert fence not in command
        assert "\n" not in command


def test_nothing_measured_is_said(tmp_path) -> None:
    text = scaling_md(write_record(tmp_path, NOTHING))
    assert "nothing to compare" in text
    assert "needs 16 devices, the cluster has 4" in text
    assert lines(scaling_csv(write_record(tmp_path / "b", NOTHING))) == []


def test_a_base_of_several_devices_is_said(tmp_path) -> None:
    record = write_record(tmp_path, FakeSweep(space={"workers": (2, 4), "batch_size": (16,)}))
    assert "against 2 devices, the fewest there are" in scaling_md(record)


def test_the_command_trains_with_the_row(tmp_path) -> None:
    from orchestrator.cli.train import TrainOptions

    record = write_record(
        tmp_path,
        FakeSweep(
            space={"static_graph": (True, False), "batch_size": (16,)},
            settings={"epochs": 3, "data_dir": "a b;c"},
        ),
    )
    words = shlex.split(train_command(record, record.rows[0]))
    assert words[:2] == ["orchestrator", "train"]
    _, resolved = read_flags(TrainOptions, words[2:], "orchestrator train")
    config = resolved.config
    assert (config.task, config.run.epochs, str(config.data.data_dir)) == ("digits", 3, "a b;c")
    assert (config.parallel.static_graph, config.batch.batch_size, config.parallel.workers) == (True, 16, 1)
    assert "--no-static-graph" in train_command(record, record.rows[1])


def test_the_point_wins_over_what_was_given(tmp_path) -> None:
    given = {"batch_size": 8, "task": "other", "no_setting": 1}
    record = write_record(tmp_path, FakeSweep(space={"batch_size": (16,)}, settings=given))
    assert (
        train_command(record, record.rows[0])
        == "orchestrator train --task digits --batch-size 16 --workers 1"
    )


def test_hostile_settings_are_one_word_of_the_shell(tmp_path) -> None:
    record = write_record(tmp_path, HOSTILE)
    words = shlex.split(train_command(record, record.rows[0]))
    assert words.count(EVIL) == 2, "task and data_dir"


def test_damaged_headers_are_borne(tmp_path) -> None:
    record = SweepRecord(
        tmp_path,
        {"event": "sweep", "space": 3, "settings": [1], "trials": "x", "devices": None},
        (TrialRow(1, {}, "failed"),),
    )
    assert "1 trial: 1 failed" in sentence(record)
    assert train_command(record, record.rows[0]) == "orchestrator train --task digits"
    assert len(sweep_csv(record).splitlines()) == 2
    assert scaling_md(record)


def test_the_swept_settings_are_those_that_differ(tmp_path) -> None:
    assert swept(write_record(tmp_path / "a", SINGLE)) == ["batch_size"]
    assert swept(write_record(tmp_path / "b", FakeSweep(space={"batch_size": (16,), "compile": ("on", "off")}))) == [
        "compile"
    ]


def test_labels_name_what_sets_series_apart(tmp_path) -> None:
    labels = [group.label for group in groups(write_record(tmp_path, EXPERTS)) if group.kind == "weak"]
    assert labels[0] == "batch 32, data parallel"
    assert len(set(labels)) == len(labels) == 4
    assert series_label.__doc__


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "none"),
        (True, "on"),
        (0.00012345678, "0.0001235"),
        ([1, 2], "1,2"),
        ("data_parallel", "data parallel"),
    ],
)
def test_values_are_short(value, text) -> None:
    assert value_text(value) == text
    assert in_words("accumulation_steps") == "accumulation"


def test_a_list_of_points_is_no_product(tmp_path) -> None:
    record = write_record(tmp_path, MIXED)
    assert "swept precision (fp32,bf16) × batch (16,64,256)" in sentence(record)
    listed = replace(
        record, header=dict(record.header) | {"points": [dict(row.point) for row in record.rows]}
    )
    assert "swept 36 listed points of precision, batch, accumulation, devices by grid search" in sentence(
        listed
    )


def test_objects_of_a_program_are_trained_by_a_line_of_python(tmp_path) -> None:
    record = write_record(tmp_path, FakeSweep(task="python:Net"))
    best = record.best()
    assert best is not None
    settings = ", ".join(f"{name}={value!r}" for name, value in {"epochs": 3, **best.point}.items())
    assert train_command(record, best) == f"Trainer(…, config=Config.of({settings})).fit()"
    for text in (scaling_md(record), sweep_page(record)):
        assert "--tuned" not in text
        assert "Trainer(…, config=Config.of(" in text
