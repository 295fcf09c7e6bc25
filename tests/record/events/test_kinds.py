"""Tests of the types of events: what a line gives, whole and damaged, and the way back to JSON."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from typing import Any

import pytest

from harness.fakes.fake_events import FakeRun, run_events
from harness.fakes.fake_evolution import EVOLVING_HOSTS, evolving_events
from harness.runs.records import decoded, made
from orchestrator.record.events.decoding import MAX_INTEGER, to_json
from orchestrator.record.events.kinds import KINDS, decode_event
from orchestrator.record.files.event_log import encode_event

STEP = {"event": "step", "step": 3, "loss": 0.5, "seconds": 0.1, "samples": 8, "metrics": {"a": 1.0}}
LINES = [*run_events(FakeRun(workers=3, recover_at=70, gpu=True, ooms=1)), *evolving_events(EVOLVING_HOSTS)]


def test_every_field_of_a_line_is_known() -> None:
    for line in LINES:
        known = {field.name for field in fields(KINDS[line["event"]])}
        assert line.keys() <= known | {"event"}, line["event"]


def test_events_survive_the_way_to_json_and_back() -> None:
    events = decoded(LINES)
    assert len(events) == len(LINES)
    assert decoded(json.loads(json.dumps(events, default=to_json))) == events


def test_a_value_that_no_line_has_is_not_written() -> None:
    with pytest.raises(TypeError, match="object is no value of an event"):
        json.dumps({"metrics": {"a": object()}}, default=to_json)


@pytest.mark.parametrize("value", [None, "fast", True, -1, [1], {}, 2**1100, math.nan, 1e200])
def test_a_damaged_figure_leaves_the_others(value: Any) -> None:
    step = made(STEP | {"seconds": value})
    assert step.seconds is None
    assert (step.step, step.loss, step.samples, step.metrics) == (3, 0.5, 8, {"a": 1.0})


@pytest.mark.parametrize("step", [None, "3", 3.0, True, MAX_INTEGER])
def test_a_line_without_its_step_is_no_event(step: Any) -> None:
    assert decode_event(STEP | {"step": step}) is None


def test_numbers_that_json_lacks_are_read_from_text() -> None:
    step = made(STEP | {"loss": "nan", "metrics": {"a": "inf", "b": "7", "c": 1}})
    assert math.isnan(step.loss)
    assert step.metrics == {"a": math.inf, "c": 1}


def test_one_damaged_id_makes_a_list_of_ids_damaged_and_a_damaged_entry_is_left_out() -> None:
    line = {"event": "placement", "hosts": [{"rank": 1, "speed": "x"}, 7], "layers": [{"ids": [0, "1"]}]}
    placement = made(line)
    assert [(host.rank, host.speed) for host in placement.hosts] == [(1, None)]
    assert placement.layers[0].ids == ()


def test_an_unknown_kind_is_no_event() -> None:
    assert decode_event({"event": "comet", "step": 1}) is None


@pytest.mark.parametrize("host_of", [[0, 1, 1], [[0], [0, 1], [1]]])
def test_a_layer_is_written_as_it_is_read(host_of: list[Any]) -> None:
    """An expert without copies has the rank of its host alone."""
    event = made({"event": "placement", "layers": [{"host_of": host_of}]})
    assert json.loads(encode_event(event))["layers"][0]["host_of"] == host_of


def test_a_line_leaves_out_the_fields_that_have_their_default() -> None:
    line = {"event": "step", "time": 1.0, "step": 2, "loss": 0.0, "metrics": {}}
    assert json.loads(encode_event(made(line))) == line
