"""Tests of the metrics of a run: their text by Prometheus' own parser, their values by the events."""

from __future__ import annotations

import math
import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from harness.fakes.fake_events import FakeRun, run_events
from harness.fakes.fake_placements import expert_event
from harness.runs.records import made
from orchestrator.live.metrics.metrics import METRICS, exposition
from orchestrator.record.events.kinds import JsonEvent as Event
from orchestrator.record.live.state import RunState

HOSTED = FakeRun(experts=7, layers=3, workers=3, hosted=True, gpu=True, recover_at=75)
UNITS = ("seconds", "bytes", "ratio", "watts", "celsius", "total", "info", "second")
COUNTS = (
    *("running", "step", "planned_steps", "epoch", "workers", "experts"),
    *("loss", "validation_loss", "gradient_norm", "learning_rate"),
)
"""Names of figures without a unit."""

Key = tuple[str, frozenset[tuple[str, str]]]


def state_after(events: list[Event]) -> RunState:
    state = RunState()
    for event in events:
        state(made(event))
    return state


def parsed(state: RunState, run_name: str = "run-1") -> dict[Key, float]:
    text = exposition(state, run_name).decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def key(metric: str, **labels: str) -> Key:
    return f"orchestrator_{metric}", frozenset({"run": "run-1", **labels}.items())


def test_values_are_those_of_the_last_events() -> None:
    events = run_events(HOSTED)
    newest = {event["event"]: event for event in events}
    state = state_after(events)
    speed = state.speed()
    assert speed is not None
    gpu = newest["monitor"]["devices"][0]
    labels = {"gpu": "0", "name": "NVIDIA H200"}
    expected = {
        key("step"): 120,
        key("planned_steps"): 120,
        key("epoch"): 4,
        key("workers"): 2,
        key("running"): 0,
        key("loss"): newest["step"]["loss"],
        key("validation_loss"): newest["evaluate"]["loss"],
        key("samples_per_second"): speed.samples,
        key("step_seconds"): speed.mean_step_s,
        key("phase_seconds", phase="backward"): newest["phases"]["backward"],
        key("exchange_seconds"): newest["exchange"]["seconds"],
        key("exchange_bytes"): newest["exchange"]["bytes"],
        key("imbalance_ratio"): state.experts.imbalance(),
        key("failures_total"): 1,
        key("recoveries_total"): 1,
        key("lost_steps_total"): 15,
        key("checkpoints_total"): 4,
        key("node_cpu_ratio"): newest["monitor"]["host"]["cpu_percent"] / 100,
        key("gpu_memory_used_bytes", **labels): gpu["memory_used"],
        key("gpu_power_watts", **labels): gpu["power"],
        key("gpu_utilization_ratio", **labels): gpu["utilization"] / 100,
        key("experts", layer="2"): 7,
    }
    found = parsed(state)
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_every_metric_has_a_sample_of_a_run_that_uses_everything() -> None:
    state = state_after(run_events(FakeRun(**vars(HOSTED) | {"ends": "killed"})))
    state(made(expert_event(120, "born", ids=[7], parents=[0])))
    names = {name for name, _ in parsed(state)}
    assert names == {metric.name for metric in METRICS}


def test_a_run_without_events_has_no_figures_that_nobody_measured() -> None:
    names = {name for name, _ in parsed(RunState())}
    counters = {metric.name for metric in METRICS if metric.kind == "counter" and not metric.labels}
    assert names == counters | {"orchestrator_running", "orchestrator_step"}


def test_labels_with_quotes_backslashes_and_line_breaks_survive() -> None:
    name = 'a"b\\c\nd{e}="f"\\n'
    found = parsed(state_after(run_events(FakeRun())), name)
    assert ("orchestrator_step", frozenset({("run", name)})) in found


@pytest.mark.parametrize(("loss", "text"), [("nan", "NaN"), ("inf", "+Inf"), ("-inf", "-Inf")])
def test_a_diverged_loss_is_a_number_of_the_format(loss: str, text: str) -> None:
    state = state_after(run_events(FakeRun(broken={120: loss})))
    assert f'orchestrator_loss{{run="r"}} {text}\n' in exposition(state, "r").decode()
    value = parsed(state)[key("loss")]
    assert math.isnan(value) if loss == "nan" else value == float(loss)


def test_each_family_is_described_once_and_before_its_samples() -> None:
    """A slow reading of the rules of the format, besides the parser, which forgives much."""
    described: list[str] = []
    typed: dict[str, str] = {}
    text = exposition(state_after(run_events(HOSTED)), "run-1").decode()
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# HELP "):
            described.append(line.split()[2])
        elif line.startswith("# TYPE "):
            typed[line.split()[2]] = line.split()[3]
        else:
            match = re.fullmatch(r'([a-z_]+)\{(?:[a-z_]+="[^"]*",?)+\} \S+', line)
            assert match is not None, line
            assert match[1] == described[-1]
            assert match[1] in typed
    assert len(described) == len(set(described)) == len(typed)
    assert set(typed.values()) == {"gauge", "counter"}
    assert all(name.endswith("_total") == (kind == "counter") for name, kind in typed.items())


def test_names_end_with_their_base_unit_and_no_two_are_equal() -> None:
    names = [metric.name.removeprefix("orchestrator_") for metric in METRICS]
    assert len(names) == len(set(names))
    assert [name for name in names if name not in COUNTS and not name.endswith(UNITS)] == []


def test_samples_have_the_labels_that_their_metric_declares() -> None:
    state = state_after(run_events(HOSTED))
    for metric in METRICS:
        for labels, _ in metric.read(state):
            assert tuple(name for name, _ in labels) == metric.labels
