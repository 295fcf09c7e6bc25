"""Tests of ``orchestrator plan``, as tables and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

from harness.runs.small_flags import CPU, SMALL
from orchestrator.config.settings import flat_names
from tests.cli.helpers import Call


def test_the_json_plan_has_a_reason_for_every_choice_and_an_origin_for_every_setting(
    call: Call, tmp_path: Path
):
    (tmp_path / "cfg.yaml").write_text("run:\n  epochs: 3\n")
    answer = call("plan", *SMALL, "--json", "--config", "cfg.yaml", "--seed", "7")
    assert (answer.code, answer.err) == (0, "")
    found = json.loads(answer.out)
    assert found["choices"].keys() >= {
        "device",
        "precision",
        "batch_size",
        "accumulation_steps",
        "starting_batch",
        "loader_workers",
    }
    assert [name for name, choice in found["choices"].items() if not choice["reason"]] == []
    assert found["memory"].keys() >= {
        "parameters",
        "gradients",
        "optimizer",
        "activations",
        "gate",
        "total",
        "limit",
    }
    origins = {entry["name"]: (entry["value"], entry["origin"]) for entry in found["settings"]}
    assert len(origins) == len(flat_names())
    assert origins["run.epochs"] == (3, "file cfg.yaml:2")
    assert origins["run.seed"] == (7, "flag --seed")
    assert origins["optim.learning_rate"] == (None, "default")
    assert list(tmp_path.iterdir()) == [tmp_path / "cfg.yaml"], "a plan writes nothing"


def test_plan_names_the_host_of_each_expert(call: Call):
    hosted = (
        *SMALL,
        "--experts",
        "5",
        "--parallel-strategy",
        "expert_parallel",
        "--workers",
        "2",
        "--placement",
        "round_robin",
        *CPU,
    )
    answer = call("plan", *hosted)
    assert answer.code == 0
    table = answer.out[answer.out.index("experts on hosts") :]
    rows = [
        [cell.strip() for cell in line.split("│")[1:3]] for line in table.splitlines() if line.startswith("│")
    ]
    assert rows == [["0", "0, 2, 4"], ["1", "1, 3"]]
    assert "placed in turn" in table
    found = json.loads(call("plan", *hosted, "--json").out)
    assert found["experts_on_hosts"] == {"assumes": "in turn", "host_of": [[0, 1, 0, 1, 0]]}


def test_the_plan_on_the_screen_shows_every_choice(call: Call):
    answer = call("plan", *SMALL)
    assert answer.code == 0
    assert [
        name
        for name in ("device", "precision", "batch_size", "starting_batch", "total", "may be used")
        if name not in answer.out
    ] == []


def test_choices_without_effect_are_named_and_shown_in_full_on_request(call: Call):
    usual = call("plan", *SMALL, *CPU)
    everything = call("plan", *SMALL, *CPU, "--all")
    assert (usual.code, everything.code) == (0, 0)
    assert "snapshots" in usual.out.partition("not used here: ")[2]
    assert not any(line.startswith("│ snapshots") for line in usual.lines)
    assert any(line.startswith("│ snapshots") for line in everything.lines)
    assert "not used here" not in everything.out


def test_a_given_setting_without_effect_is_shown(call: Call):
    answer = call("plan", *SMALL, *CPU, "--gate", "primary")
    assert any(line.startswith("│ gate") for line in answer.lines)
