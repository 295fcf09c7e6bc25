"""Tests of the verdict: each cause is finding, shown with numbers, and answered with advice."""

import dataclasses
import json
import re

import pytest

from harness.fakes.fake_events import PHASES_PARALLEL, FakeRun, run_events
from harness.fakes.fake_run import events_record, run_record, write_events, write_run
from orchestrator.report.run.figures.read import read_run_record
from orchestrator.report.run.findings.verdict import MIN_STEPS, verdict
from orchestrator.types import GIB

MOSTLY_COMMUNICATION = {
    "data": 0.03,
    "forward": 0.2,
    "backward": 0.25,
    "communication": 0.48,
    "optimizer": 0.04,
}
MOSTLY_DATA = {"data": 0.5, "forward": 0.2, "backward": 0.25, "optimizer": 0.03}


def verdict_of(tmp_path, **fields):
    return verdict(run_record(tmp_path, FakeRun(**fields)))


def advised_flags(finding, *flags):
    text = " ".join(finding.advice)
    return [flag for flag in flags if flag in text]


@pytest.mark.parametrize(
    ("fields", "bound_by", "flag"),
    [
        ({"phases": MOSTLY_DATA}, "data", "--loader-workers"),
        ({"ooms": 2}, "memory", "--activation-checkpointing on"),
        ({"gpu": True, "peak_bytes": 122 * GIB}, "memory", "--batch-size"),
        ({}, "compute", "--compile"),
        ({"gpu": True}, "compute", "--compile"),
        ({"gpu": True, "utilization": 20.0, "step_s": 0.01}, "host", "--compile"),
        ({"evaluate_s": 4.0}, "evaluation", "--evaluate-every"),
        ({"checkpoint_s": 2.0}, "checkpoint", "--checkpoint-every"),
        ({"workers": 2, "phases": MOSTLY_COMMUNICATION}, "communication", "--accumulation-steps"),
        (
            {"workers": 2, "experts": 4, "hosted": True, "exchange": 0.3, "sizes": (64,)},
            "communication",
            "larger --batch-size",
        ),
        (
            {"gpu": True, "workers": 2, "experts": 4, "hosted": True, "exchange": 0.3, "sizes": (64,)},
            "communication",
            "--exchange-chunks",
        ),
        (
            {"workers": 2, "experts": 4, "hosted": True, "exchange": 0.2, "sizes": (64,), "skew": 0.0},
            "compute",
            "--compile",
        ),
        ({"workers": 3, "experts": 5, "hosted": True, "skew": 0.0}, "imbalance", "fewer --workers"),
        (
            {"workers": 2, "experts": 8, "hosted": True, "skew": 1.0, "sizes": (64,)},
            "imbalance",
            "--balance-bias 0.001",
        ),
        (
            {"workers": 2, "experts": 5, "hosted": True, "skew": 0.0, "method": "round_robin"},
            "imbalance",
            "--placement auto",
        ),
        ({"workers": 2, "recover_at": 70}, "recovery", "--checkpoint-every 5"),
        (
            {"workers": 2, "recover_at": 70, "experts": 4, "hosted": True, "sizes": (64,), "skew": 0.0},
            "recovery",
            "--snapshot-every 5",
        ),
        (
            {"workers": 2, "recover_at": 70, "recovery_s": 0.2, "phases": PHASES_PARALLEL},
            "compute",
            "--compile",
        ),
        ({"steps": MIN_STEPS - 1, "epochs": 1}, "unknown", "--max-steps"),
        ({"steps": 0, "ends": "failed"}, "unknown", "--max-steps"),
    ],
)
def test_each_cause_is_found_with_advice(tmp_path, fields, bound_by, flag):
    finding = verdict_of(tmp_path, **fields)
    assert finding.kind == bound_by
    assert flag in " ".join(finding.advice)
    assert finding.evidence
    assert 1 <= len(finding.advice) <= 3


@pytest.mark.parametrize(
    ("taken", "advised"),
    [
        (("balance_loss",), ["--balance-loss"]),
        (("balance_bias",), ["--balance-bias"]),
        (("balance_loss", "balance_bias"), ["--balance-bias"]),
        ((), []),
    ],
)
def test_uneven_hosts_get_advice_that_the_run_can_take(tmp_path, taken, advised):
    fields = {"workers": 2, "experts": 8, "hosted": True, "skew": 1.0, "sizes": (64,)}
    finding = verdict_of(tmp_path, taken=taken, **fields)
    assert finding.kind == "imbalance"
    assert finding.advice
    assert advised_flags(finding, "--balance-bias", "--balance-loss", "--experts", "--top-k") == advised


def test_evidence_has_the_numbers(tmp_path):
    assert (
        verdict_of(tmp_path / "a", phases=MOSTLY_DATA)
        .evidence[0]
        .startswith("50% of a step waits for data (40 ms per step")
    )
    assert "20%" in verdict_of(tmp_path / "b", gpu=True, utilization=20.0, step_s=0.01).evidence[0]
    assert "ran out of memory" in verdict_of(tmp_path / "c", ooms=2).evidence[0]


def test_findings_about_several_workers_name_them(tmp_path):
    finding = verdict_of(tmp_path / "a", workers=4, phases=MOSTLY_COMMUNICATION, gpu=True)
    assert finding.evidence[0] == "48% of a step of 4 workers is communication (38.4 ms per step)"
    lost = verdict_of(tmp_path / "b", workers=2, recover_at=70)
    assert "of the run was spent on 1 recovery (12.3 s each) after losing a worker" in lost.evidence[0]
    assert "10 steps were done twice" in lost.advice[1]


@pytest.mark.parametrize(
    ("spares", "hosted", "is_advised"), [(0, True, True), (1, True, False), (0, False, False)]
)
def test_a_spare_is_advised_after_a_recovery_on_hosts_that_had_none(tmp_path, spares, hosted, is_advised):
    fields = {"workers": 2, "recover_at": 70, "experts": 4, "hosted": hosted, "sizes": (64,), "skew": 0.0}
    record = run_record(tmp_path, FakeRun(**fields, recovery_s=21.0))
    record.config["parallel"] = {"spares": spares}
    finding = verdict(record)
    assert finding.kind == "recovery"
    assert (advised_flags(finding, "--spares") == ["--spares"]) == is_advised


def test_waiting_hosts_are_shown_with_figures(tmp_path):
    waiting = verdict_of(
        tmp_path / "a", workers=2, experts=4, hosted=True, exchange=0.3, sizes=(64,), skew=0.0
    )
    assert waiting.evidence == (
        "28% of a step waits for the exchange of rows between 2 hosts (24 ms per step, 32.0 MiB)",
    )
    uneven = verdict_of(tmp_path / "b", workers=3, experts=5, hosted=True, skew=0.0)
    assert re.fullmatch(
        r"the slowest host of a layer takes 1\.[34]\d times the mean of the 3 hosts \(predicted 1\.41\)",
        uneven.evidence[0],
    )
    both = verdict_of(
        tmp_path / "c", workers=3, experts=5, hosted=True, exchange=0.3, phases=MOSTLY_COMMUNICATION
    )
    assert both.kind == "communication"
    assert [line.split()[0] for line in both.evidence] == ["28%", "48%", "also"]
    assert len(both.advice) == 3


def test_a_placement_that_is_set_already_is_not_advised(tmp_path):
    """A resumed run keeps its first placement, with the method ``file``."""
    folder = write_run(tmp_path, FakeRun(workers=2, experts=5, hosted=True, skew=0.0, method="round_robin"))
    for setting, is_advised in (("auto", False), ("round_robin", True), ("mine.json", True)):
        (folder / "config.yaml").write_text(f"parallel: {{placement: {setting}}}\n")
        assert ("--placement auto" in " ".join(verdict(read_run_record(folder)).advice)) is is_advised


def test_a_bias_that_is_set_already_is_not_advised(tmp_path):
    folder = write_run(tmp_path, FakeRun(workers=2, experts=8, hosted=True, skew=1.0, sizes=(64,)))
    assert "--balance-bias" in " ".join(verdict(read_run_record(folder)).advice)
    (folder / "config.yaml").write_text("moe: {balance_bias: 0.001}\n")
    finding = verdict(read_run_record(folder))
    assert finding.kind == "imbalance"
    assert advised_flags(finding, "--balance-bias", "--balance-loss") == ["--balance-loss"]


def test_a_checkpoint_in_the_background_is_no_bottleneck(tmp_path):
    assert verdict_of(tmp_path, workers=2, checkpoint_s=2.0).kind == "compute"


def test_other_findings_are_added_to_the_evidence(tmp_path):
    finding = verdict_of(tmp_path, phases=MOSTLY_DATA, workers=3, experts=5, hosted=True, skew=0.0)
    assert finding.kind == "data"
    assert any(line.startswith("also imbalance:") for line in finding.evidence)


def test_memory_shortage_counts_even_in_a_short_run(tmp_path):
    assert verdict_of(tmp_path, steps=2, epochs=1, ooms=1).kind == "memory"


def test_a_gpu_with_long_steps_does_not_wait_for_python(tmp_path):
    assert verdict_of(tmp_path, gpu=True, utilization=20.0, step_s=0.5).kind != "host"


def test_a_cpu_run_gets_no_evidence_about_a_gpu(tmp_path):
    finding = verdict_of(tmp_path, step_s=0.001, evaluate_s=0.0, checkpoint_s=0.0)
    assert finding.kind == "compute"
    assert not any("GPU is busy" in line for line in finding.evidence)


def test_a_step_that_is_mostly_the_optimizer_says_so(tmp_path):
    phases = {"data": 0.05, "forward": 0.05, "backward": 0.05, "optimizer": 0.85}
    on_cpu = verdict_of(tmp_path / "cpu", phases=phases)
    assert on_cpu.evidence[0] == "85% of a step is the optimizer"
    assert advised_flags(on_cpu, "larger --batch-size: fewer updates", "OMP_NUM_THREADS=1") == [
        "larger --batch-size: fewer updates",
        "OMP_NUM_THREADS=1",
    ]
    on_gpu = verdict_of(tmp_path / "gpu", phases=phases, gpu=True)
    assert "OMP_NUM_THREADS" not in " ".join(on_gpu.advice)
    assert " ".join(on_gpu.advice).count("--batch-size") == 1
    mostly_model = phases | {"forward": 0.5, "optimizer": 0.4}
    finding = verdict_of(tmp_path / "model", phases=mostly_model)
    assert finding.evidence[0] == "55% of a step is forward and backward"


def test_settings_that_are_on_already_are_not_advised(tmp_path):
    finding = verdict_of(tmp_path / "a", gpu=True, compiled="compiled")
    assert advised_flags(finding, "--compile", "--precision bf16", "--batch-size") == ["--batch-size"]
    failed = verdict_of(tmp_path / "b", gpu=True, compiled="failed")
    assert "--compile" not in " ".join(failed.advice), "it was tried"


@pytest.mark.parametrize(
    ("fields", "choice", "option", "flag"),
    [
        ({}, "compile", "on", "--compile"),
        ({"gpu": True, "utilization": 20.0, "step_s": 0.01}, "compile", "on", "--compile"),
        ({"gpu": True}, "batch_size", "512", "--batch-size"),
        ({"phases": MOSTLY_DATA}, "loader_workers", "loader processes", "--loader-workers"),
        (
            {"gpu": True, "peak_bytes": 122 * GIB},
            "activation_checkpointing",
            "on",
            "--activation-checkpointing",
        ),
    ],
)
def test_what_the_plan_rejects_is_not_advised(tmp_path, fields, choice, option, flag):
    folder = write_run(tmp_path, FakeRun(**fields))
    assert flag in " ".join(verdict(read_run_record(folder)).advice)
    plan = json.loads((folder / "plan.json").read_text())
    rejected = [{"option": option, "why": "measured"}]
    plan["choices"][choice] = plan["choices"].get(choice, {"value": False}) | {"rejected": rejected}
    (folder / "plan.json").write_text(json.dumps(plan))
    finding = verdict(read_run_record(folder))
    assert flag not in " ".join(finding.advice)
    assert finding.advice


def test_a_gpu_run_in_fp32_is_advised_bf16(tmp_path):
    folder = write_run(tmp_path, FakeRun(gpu=True))
    events = [
        event | {"precision": "fp32"} if event["event"] == "start" else event
        for event in run_events(FakeRun(gpu=True))
    ]
    write_events(folder, events)
    assert "--precision bf16" in " ".join(verdict(read_run_record(folder)).advice)


def test_without_phases_and_monitor_nothing_is_claimed(tmp_path):
    events = [event for event in run_events(FakeRun()) if event["event"] not in ("phases", "monitor")]
    finding = verdict(events_record(tmp_path, events))
    assert finding.kind == "unknown"
    assert "--profile" in " ".join(finding.advice)


def test_loader_workers_stay_within_the_cores(tmp_path):
    assert "--loader-workers 2:" in verdict_of(tmp_path, phases=MOSTLY_DATA).advice[0]


def test_uneven_experts_of_one_device_do_not_slow_a_run(tmp_path):
    """A device computes the rows of all its experts, however they are divided."""
    finding = verdict_of(tmp_path, experts=8, skew=2.0)
    assert finding.kind == "compute"
    assert not any("imbalance" in line for line in finding.evidence)


def test_a_finding_is_a_frozen_value(tmp_path):
    with pytest.raises(dataclasses.FrozenInstanceError):
        verdict_of(tmp_path).kind = "data"  # pyrefly: ignore[read-only]


def test_exchange_chunks_are_advised_if_compute_can_overlap_the_exchange(tmp_path):
    """A GPU computes while NCCL sends rows. On CPUs the same cores do both, and gloo blocks the GPU."""
    fields = {"workers": 2, "experts": 4, "hosted": True, "exchange": 0.3, "sizes": (64,)}
    assert "--exchange-chunks" not in " ".join(verdict_of(tmp_path / "cpu", **fields).advice)
    events = [
        event | ({"backend": "gloo"} if event["event"] == "start" else {})
        for event in run_events(FakeRun(gpu=True, **fields))
    ]
    gloo_advice = " ".join(verdict(events_record(tmp_path / "gloo", events)).advice)
    assert "--exchange-chunks" not in gloo_advice
    assert "--backend nccl" in gloo_advice


@pytest.mark.parametrize(
    ("settings", "advised"),
    [
        ("parallel: {placement: round_robin}", "--placement auto"),
        ("parallel: {placement: mine.json}", "--placement auto"),
        ("{parallel: {placement: auto}, run: {auto: false}}", "leave out --no-auto"),
        ("{parallel: {placement: auto}, run: {auto: true}}", ""),
    ],
)
def test_placement_by_cost_is_advised_if_hosts_wait_for_a_slow_one(tmp_path, settings, advised):
    fields = {
        "workers": 2,
        "experts": 5,
        "hosted": True,
        "skew": 0.0,
        "exchange": 0.4,
        "method": "round_robin",
    }
    folder = write_run(tmp_path, FakeRun(**fields))
    (folder / "config.yaml").write_text(settings + "\n")
    finding = verdict(read_run_record(folder))
    assert finding.kind == "communication"
    assert advised in finding.advice[0]
    assert ("places experts by their cost" in finding.advice[0]) is bool(advised)
