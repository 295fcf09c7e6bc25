"""Findings about the load of devices and hosts: memory, Python, imbalance, compute."""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.record.events.kinds import Compile, OutOfMemory
from orchestrator.report.run.figures import stats
from orchestrator.report.run.figures.host_load import UNEVEN, host_load
from orchestrator.report.run.figures.read import RunRecord, section
from orchestrator.report.run.findings.finding import MAX_ADVICE, Finding
from orchestrator.types import bytes_text, counted, flops_text, seconds_text

# A GPU with less than this utilization, in percent, and shorter steps than this waits for Python.
IDLE_UTILIZATION = 50.0
SHORT_STEP_S = 0.1
NEAR_LIMIT = 0.95


def out_of_memory_finding(record: RunRecord) -> Finding | None:
    ooms = record.of(OutOfMemory)
    if not ooms:
        return None
    micro_batch = ooms[-1].next_micro_batch or "?"
    steps = counted(len(ooms), "step")
    evidence = [f"{steps} ran out of memory; the micro-batch ended at {micro_batch}"]
    peak = stats.memory(record)
    if peak is not None and peak.limit:
        evidence.append(f"peak {bytes_text(peak.allocated)} of {bytes_text(peak.limit)} allowed")
    # The run has refuted the plan's estimate, so what the plan rejected may help.
    return Finding("memory", tuple(evidence), _memory_advice(record, may_recompute=True))


def near_limit_finding(record: RunRecord) -> Finding | None:
    peak = stats.memory(record)
    if peak is None or not peak.limit or peak.allocated < NEAR_LIMIT * peak.limit:
        return None
    share = peak.allocated / peak.limit
    evidence = f"peak {bytes_text(peak.allocated)} is {share:.0%} of the {bytes_text(peak.limit)} allowed"
    may_recompute = not record.rejects("activation_checkpointing", "on")
    return Finding("memory", (evidence,), _memory_advice(record, may_recompute))


def _memory_advice(record: RunRecord, may_recompute: bool) -> tuple[str, ...]:
    advice = ["a smaller --batch-size with as many more --accumulation-steps: the same result in less memory"]
    if may_recompute and record.setting("device", "activation_checkpointing") not in (True, "on"):
        advice.append(
            "--activation-checkpointing on: recomputes activations, about a third more compute for "
            "far less memory"
        )
    return (*advice, *_half_precision_advice(record))[:MAX_ADVICE]


def _half_precision_advice(record: RunRecord) -> tuple[str, ...]:
    """Advise bf16 on a GPU that does not use it yet; on a CPU the plan says whether there are
    units for it."""
    if not record.on_gpu or record.fact("precision") in ("bf16", "fp16", "fp8"):
        return ()
    return ("--precision bf16: half the bytes of activations, and faster matrix products",)


def python_finding(record: RunRecord) -> Finding | None:
    """Return a GPU that waits for Python to launch its work."""
    use = stats.gpu_utilization(record)
    measured = stats.speed(record)
    if not record.on_gpu or use is None or measured is None:
        return None
    if use >= IDLE_UTILIZATION or measured.median_step_s >= SHORT_STEP_S:
        return None
    launches = "--compile --compile-mode reduce-overhead: one launch for many kernels"
    advice = (
        *larger_batch_advice(record, "more work per launch; scale the learning rate with it"),
        *_compile_advice(record, launches),
        "--profile: traces a few steps, operation by operation",
    )
    evidence = (
        f"the GPU is busy {use:.0f}% of the time",
        f"a step takes {seconds_text(measured.median_step_s)}: Python and kernel launches dominate it",
    )
    return Finding("host", evidence, advice)


def larger_batch_advice(record: RunRecord, gain: str) -> tuple[str, ...]:
    """Advise a larger batch, unless the plan has found that memory does not allow it."""
    choice = section(section(record.plan, "choices"), "batch_size")
    return () if choice.get("rejected") else (f"a larger --batch-size: {gain}",)


def _compile_advice(record: RunRecord, text: str) -> tuple[str, ...]:
    """Advise compilation, unless the run was compiled, failed to compile, or its plan rejects it."""
    was_tried = stats.is_compiled(record) or bool(record.of(Compile))
    return () if was_tried or record.rejects("compile", "on") else (text,)


def imbalance_finding(record: RunRecord) -> Finding | None:
    """Return that hosts wait for the slowest of them.

    Uneven experts alone do not slow a run: a device computes the rows of all its experts, however they are
    divided (``skewed_load`` in ``benchmarks/``)."""
    load = host_load(record)
    if load is None or load.imbalance is None or load.imbalance <= UNEVEN:
        return None
    predicted = load.predicted_imbalance
    prediction = f" (predicted {predicted:.2f})" if predicted is not None else ""
    evidence = (
        f"the slowest host of a layer takes {load.imbalance:.2f} times the mean "
        f"of the {len(load.hosts)} hosts{prediction}"
    )
    advice = list(placement_advice(record))
    if not advice and predicted is not None and predicted > UNEVEN:
        smaller = ", or smaller experts and more of them" if record.takes("experts") else ""
        advice.append(f"fewer --workers{smaller}: no placement balances these")
    if not section(record.config, "moe").get("balance_bias") and record.takes("balance_bias"):
        advice.append(
            "--balance-bias 0.001: steers the gate towards experts with few rows, without a loss term"
        )
    return Finding("imbalance", (evidence,), tuple(advice) or (balance_advice(record),))


def placement_advice(record: RunRecord) -> tuple[str, ...]:
    """Advise placement by cost if hosts are unbalanced: the hosts that finish first wait in the
    exchange too."""
    load = host_load(record)
    if load is None or load.imbalance is None or load.imbalance <= UNEVEN:
        return ()
    gain = "places experts by their cost and by the measured speed of the hosts"
    requested = section(record.config, "parallel").get("placement")
    method = load.placement.method
    if requested != "auto" and (requested or method in ("round_robin", "file")):
        return (f"--placement auto: {gain}",)
    if method == "round_robin" and section(record.config, "run").get("auto") is False:
        return (f"leave out --no-auto: the plan then {gain}",)
    return ()


def balance_advice(record: RunRecord) -> str:
    """Return how the gate can be balanced, by a setting if the run has one."""
    moe = section(record.config, "moe")
    if not record.takes("balance_loss"):
        if record.takes("balance_bias"):
            rate = moe.get("balance_bias") or 0
            return f"--balance-bias {(rate or 0.0005) * 2:g} (was {rate}): steers the gate towards even use"
        return "no setting balances these experts: their model or the loss of the task would have to change"
    weight = moe.get("balance_loss")
    if not isinstance(weight, int | float):
        return "--balance-loss 0.02: pulls the gate towards even use"
    return f"--balance-loss {(weight or 0.005) * 2:g} (was {weight}): pulls the gate towards even use"


def _largest_part(parts: Mapping[str, float]) -> str:
    """Return the share of a step that its model, its optimizer or its CUDA graph takes."""
    computing = {
        "its CUDA graph": parts.get("graph", 0),
        "forward and backward": _model_share(parts),
        "the optimizer": parts.get("optimizer", 0),
    }
    name = max(computing, key=lambda name: computing[name])
    return f"{computing[name]:.0%} of a step is {name}"


def _model_share(parts: Mapping[str, float]) -> float:
    return parts.get("forward", 0) + parts.get("backward", 0)


def _fewer_updates_advice(record: RunRecord, parts: Mapping[str, float]) -> tuple[str, ...]:
    if parts.get("optimizer", 0) <= _model_share(parts):
        return ()
    advice = larger_batch_advice(
        record, "fewer updates for the same samples; scale the learning rate with it"
    )
    # Threads that wait for a busy core cost more than a small update.
    return advice if record.on_gpu else (*advice, "OMP_NUM_THREADS=1, if other processes use the cores too")


def compute_finding(record: RunRecord) -> Finding | None:
    """Return that most of the time goes into the model itself, if anything was measured."""
    parts = stats.shares(stats.phase_seconds(record))
    use = stats.gpu_utilization(record)
    if not parts and use is None:
        return None
    evidence = []
    if parts:
        evidence.append(_largest_part(parts))
    if record.on_gpu and use is not None:
        evidence.append(f"the GPU is busy {use:.0f}% of the time")
    rate = stats.flops_per_second(record)
    if rate is not None:
        evidence.append(f"{flops_text(rate)}/s by the plan's count of operations")
    fewer_updates = _fewer_updates_advice(record, parts)
    advice = (
        *fewer_updates,
        *_compile_advice(record, "--compile: fuses operations, after some tens of seconds at the start"),
        *_half_precision_advice(record),
    )
    if record.on_gpu:
        batch_advice = () if fewer_updates else larger_batch_advice(record, "while memory allows")
        advice += batch_advice or ("a faster GPU, or more of them",)
    else:
        advice += ("a machine with a GPU",)
    return Finding("compute", tuple(evidence), advice[:MAX_ADVICE])
