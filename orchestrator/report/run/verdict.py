"""What a run was bound by, and what to try: from its record alone, with the numbers that say so.

Each cause is a small function that returns its finding or None. They are asked in the order of how sure their evidence
is and how cheap the cure; the first that answers is the verdict, and what else answered is told beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from orchestrator.report.run.expert_load import busiest, idlest, layer_loads
from orchestrator.report.run.host_load import UNEVEN, exchange_cost, host_load
from orchestrator.report.run.read import RunRecord, remembered, section
from orchestrator.report.run.stats import (
    compiled,
    flops_per_second,
    flops_text,
    gpu_utilization,
    memory,
    phase_seconds,
    plural,
    shares,
    throughput,
    wall_seconds,
)
from orchestrator.types import bytes_text, seconds_text

BoundBy = Literal[
    "data",
    "memory",
    "communication",
    "compute",
    "host",
    "imbalance",
    "evaluation",
    "checkpoint",
    "recovery",
    "unknown",
]

MIN_STEPS = 10
"""Fewer steps than this are mostly first-time costs: no verdict."""
DATA_SHARE = 0.25
COMMUNICATION_SHARE = 0.25
EVALUATION_SHARE = 0.25
CHECKPOINT_SHARE = 0.15
RECOVERY_SHARE = 0.15
"""Shares of a step (data, communication) or of the run (the others) from which a cause counts as the one that holds the run up."""
IDLE_UTILIZATION = 50.0
SHORT_STEP_S = 0.1
"""A GPU below this utilization, in percent, with steps shorter than this waits for Python to launch its work."""
IMBALANCE = 2.0
"""Busiest expert against the mean of its layer, once the gate has settled."""
IDLE_SHARE = 0.25
"""Part of a layer's experts that are idle."""
NEAR_LIMIT = 0.95
FEWER_WORKERS = "fewer --workers: what one device does alone needs no exchange"
NCCL = "--backend nccl: gloo moves all there is to send through the host's memory, and the GPU waits for it"
MAX_ADVICE = 3


@dataclass(frozen=True)
class Verdict:
    """What held the run up, the numbers that show it, and one to three things to try."""

    bound_by: BoundBy
    evidence: tuple[str, ...]
    advice: tuple[str, ...]


@remembered
def verdict(record: RunRecord) -> Verdict:
    # Running out of memory says what it says after one step as well as after a thousand.
    if (found := _out_of_memory(record)) is not None:
        return found
    if len(record.steps) < MIN_STEPS:
        return _too_short(record)
    causes: tuple[Callable[[RunRecord], Verdict | None], ...] = (
        _data,
        _recovery,
        _evaluation,
        _checkpoint,
        _communication,
        _host,
        _imbalance,
        _near_limit,
        _compute,
    )
    findings = [finding for cause in causes if (finding := cause(record)) is not None]
    if not findings:
        return _unmeasured(record)
    first, *rest = findings
    also = tuple(
        f"also {finding.bound_by}: {finding.evidence[0]}" for finding in rest if finding.bound_by != "compute"
    )
    return Verdict(first.bound_by, first.evidence + also, first.advice[:MAX_ADVICE])


def _too_short(record: RunRecord) -> Verdict:
    evidence = f"{plural(len(record.steps), 'step', 'steps')} recorded; a verdict needs {MIN_STEPS}, because the first ones pay for start-up"
    return Verdict(
        "unknown", (evidence,), (f"run at least {MIN_STEPS} steps: raise --max-steps or --epochs",)
    )


def _unmeasured(record: RunRecord) -> Verdict:
    return Verdict(
        "unknown",
        (f"{len(record.steps)} steps recorded, but neither their phases nor the use of the device",),
        (
            "keep --monitor-gpu on and --gpu-log-interval below the number of steps",
            "--profile traces a few steps, operation by operation",
        ),
    )


def _out_of_memory(record: RunRecord) -> Verdict | None:
    ooms = record.of("oom")
    if not ooms:
        return None
    last = ooms[-1]
    evidence = [
        f"{plural(len(ooms), 'step', 'steps')} ran out of memory; the micro-batch ended at {last.get('next_micro_batch', '?')}"
    ]
    if (peak := memory(record)) is not None and peak.limit:
        evidence.append(f"peak {bytes_text(peak.allocated)} of {bytes_text(peak.limit)} allowed")
    return Verdict("memory", tuple(evidence), _memory_advice(record))


def _near_limit(record: RunRecord) -> Verdict | None:
    peak = memory(record)
    if peak is None or not peak.limit or peak.allocated < NEAR_LIMIT * peak.limit:
        return None
    evidence = f"peak {bytes_text(peak.allocated)} is {peak.allocated / peak.limit:.0%} of the {bytes_text(peak.limit)} allowed"
    return Verdict("memory", (evidence,), _memory_advice(record))


def _memory_advice(record: RunRecord) -> tuple[str, ...]:
    advice = ["a smaller --batch-size with as many more --accumulation-steps: the same result in less memory"]
    if record.setting("device", "activation_checkpointing") not in (True, "on"):
        advice.append(
            "--activation-checkpointing on: recomputes activations, about a third more compute for far less memory"
        )
    return (*advice, *_half_precision(record))[:MAX_ADVICE]


def _data(record: RunRecord) -> Verdict | None:
    share = shares(phase_seconds(record)).get("data", 0.0)
    if share < DATA_SHARE:
        return None
    waited = phase_seconds(record)["data"]
    workers = record.setting("data", "loader_workers")
    used = f" with {workers} loader workers" if isinstance(workers, int) and workers >= 0 else ""
    return Verdict(
        "data",
        (f"{share:.0%} of a step waits for data ({seconds_text(waited)} per step{used})",),
        (
            f"--loader-workers {_more_workers(record)}: batches are prepared while the model computes",
            "move costly preparation out of the dataset: do it once, and keep the result in --data-dir",
        ),
    )


def _more_workers(record: RunRecord) -> int:
    """One step up from what was used, within the cores of the machine."""
    used, cores = record.setting("data", "loader_workers"), section(record.plan, "hardware").get("cores")
    wanted = max(2, 2 * used) if isinstance(used, int) and used > 0 else 2
    return max(1, min(wanted, cores)) if isinstance(cores, int) else wanted


def _communication(record: RunRecord) -> Verdict | None:
    """The sum of gradients between steps, or the rows that travel to their experts and back within one."""
    return _together(_exchanging(record), _summing(record))


def _together(*parts: Verdict | None) -> Verdict | None:
    """Findings of one kind as one; advice that both give is given once."""
    found = [part for part in parts if part is not None]
    if not found:
        return None
    advice = dict.fromkeys(line for part in found for line in part.advice)
    return Verdict(found[0].bound_by, tuple(line for part in found for line in part.evidence), tuple(advice))


def _exchanging(record: RunRecord) -> Verdict | None:
    sent = exchange_cost(record)
    if sent is None or sent.share is None or sent.share < COMMUNICATION_SHARE:
        return None
    hosts = f" between {record.workers} hosts" if record.workers else ""
    figures = ", ".join(
        [f"{seconds_text(sent.seconds or 0.0)} per step"] + ([bytes_text(sent.bytes)] if sent.bytes else [])
    )
    advice = [
        *_placed_better(record),
        *_overlapping(record),
        "a larger --batch-size: fewer and larger messages for as many rows",
        FEWER_WORKERS,
    ]
    return Verdict(
        "communication",
        (f"{sent.share:.0%} of a step waits for the exchange of rows{hosts} ({figures})",),
        tuple(advice),
    )


def _overlapping(record: RunRecord) -> tuple[str, ...]:
    """How to compute while rows travel. That takes a device beside the cores that move them, and a backend that does not hold it up."""
    if not record.on_gpu:
        return ()
    if record.start.get("backend") == "gloo":
        return (NCCL,)
    return ("more --exchange-chunks: experts compute on one part while the next travels",)


def _summing(record: RunRecord) -> Verdict | None:
    parts = phase_seconds(record)
    share = shares(parts).get("communication", 0.0)
    if share < COMMUNICATION_SHARE:
        return None
    workers = f" of {record.workers} workers" if record.workers else ""
    advice = ["more --accumulation-steps, or a larger --batch-size: more work per exchange of gradients"]
    if record.start.get("sharding") == "zero3":
        advice.append(
            "--sharding zero2 or none, where memory allows: parameters are then not gathered in every step"
        )
    if record.on_gpu and record.start.get("backend") == "gloo":
        advice.append(NCCL)
    advice.append(FEWER_WORKERS)
    evidence = (
        f"{share:.0%} of a step{workers} is communication ({seconds_text(parts['communication'])} per step)"
    )
    return Verdict("communication", (evidence,), tuple(advice))


_CAUSES = {
    "worker": "losing a worker",
    "memory": "running out of memory",
    "communication": "losing touch",
    "fault": "an error",
}


def _recovery(record: RunRecord) -> Verdict | None:
    share = shares(wall_seconds(record)).get("recovery", 0.0)
    if share < RECOVERY_SHARE:
        return None
    spent, times = wall_seconds(record)["recovery"], len(record.recoveries)
    kinds = dict.fromkeys(str(event["kind"]) for event in record.of("failure") if event.get("kind"))
    reasons = [_CAUSES.get(kind, kind) for kind in kinds]
    cause = f" after {', '.join(reasons[:3])}" if reasons else ""
    advice = ["see why workers were lost: What happened below, and logs/ in the run folder"]
    if record.replayed_steps:
        rare = record.replayed_steps // times
        flag = (
            "--snapshot-every"
            if any(event.get("source") == "memory" for event in record.recoveries)
            else "--checkpoint-every"
        )
        advice.append(
            f"{flag} {max(1, rare // 2)}: {plural(record.replayed_steps, 'step was', 'steps were')} done twice"
        )
    return Verdict(
        "recovery",
        (
            f"{share:.0%} of the run was spent on {plural(times, 'recovery', 'recoveries')} ({seconds_text(spent / times)} each){cause}",
        ),
        tuple(advice),
    )


def _evaluation(record: RunRecord) -> Verdict | None:
    share = shares(wall_seconds(record)).get("evaluation", 0.0)
    if share < EVALUATION_SHARE:
        return None
    spent, times = wall_seconds(record)["evaluation"], len(record.of("evaluate"))
    rare = _rarer(record, times)
    return Verdict(
        "evaluation",
        (f"{share:.0%} of the run is evaluation ({times} times, {seconds_text(spent)} in all)",),
        (
            f"--evaluate-every {rare}: half as often",
            "a larger --eval-batch-size: no gradients are kept, so more fits",
        ),
    )


def _checkpoint(record: RunRecord) -> Verdict | None:
    share = shares(wall_seconds(record)).get("checkpoints", 0.0)
    if share < CHECKPOINT_SHARE:
        return None
    spent, times = wall_seconds(record)["checkpoints"], len(record.of("checkpoint"))
    return Verdict(
        "checkpoint",
        (
            f"{share:.0%} of the run is held up by checkpoints ({times} times, {seconds_text(spent / times)} each)",
        ),
        (
            f"--checkpoint-every {_rarer(record, times)}: half as often",
            "a --run-dir on a local disk, where it lies on a network drive",
        ),
    )


def _rarer(record: RunRecord, times: int) -> int:
    """Steps between events that shall happen half as often as they did."""
    return max(2, round(2 * len(record.steps) / max(1, times)))


def _host(record: RunRecord) -> Verdict | None:
    use, rate = gpu_utilization(record), throughput(record)
    if (
        not record.on_gpu
        or use is None
        or rate is None
        or use >= IDLE_UTILIZATION
        or rate.step_s >= SHORT_STEP_S
    ):
        return None
    advice = ["a larger --batch-size: more work per launch; scale --learning-rate with it"]
    if not compiled(record):
        advice.append("--compile --compile-mode reduce-overhead: one launch for many kernels")
    evidence = (
        f"the GPU is busy {use:.0f}% of the time",
        f"a step takes {seconds_text(rate.step_s)}: Python and kernel launches weigh on it",
    )
    return Verdict("host", evidence, tuple(advice))


def _imbalance(record: RunRecord) -> Verdict | None:
    """Hosts that wait for one of them, or experts with far more than their share."""
    return _together(_uneven_hosts(record), _uneven_experts(record))


def _uneven_hosts(record: RunRecord) -> Verdict | None:
    found = host_load(record)
    if found is None or found.imbalance is None or found.imbalance <= UNEVEN:
        return None
    predicted = found.predicted_imbalance
    told = f" (predicted {predicted:.2f})" if predicted is not None else ""
    evidence = f"the slowest host of a layer takes {found.imbalance:.2f} times the mean of the {len(found.hosts)} hosts{told}"
    advice = [*_placed_better(record)]
    if not advice and predicted is not None and predicted > UNEVEN:
        advice.append(
            "fewer --workers, or smaller experts and more of them: no placement divides these evenly"
        )
    if not section(record.config, "moe").get("balance_bias"):
        advice.append(
            "--balance-bias 0.001: steers the gate towards experts with few rows, without a loss term"
        )
    return Verdict("imbalance", (evidence,), tuple(advice) or (_balance_loss(record),))


def _placed_better(record: RunRecord) -> tuple[str, ...]:
    """What to change where hosts are uneven and experts were not placed by cost: those that are done first wait in the exchange too."""
    found = host_load(record)
    if found is None or found.imbalance is None or found.imbalance <= UNEVEN:
        return ()
    asked, gain = (
        section(record.config, "parallel").get("placement"),
        "places experts by their cost and by the measured speed of the hosts",
    )
    if asked != "auto" and (asked or found.placement.method in ("round_robin", "file")):
        return (f"--placement auto: {gain}",)
    if found.placement.method == "round_robin" and section(record.config, "run").get("auto") is False:
        return (f"leave out --no-auto: the plan then {gain}",)
    return ()


def _uneven_experts(record: RunRecord) -> Verdict | None:
    """An expert with far more than its share, or many with none: with few experts or a large top-k only the second shows."""
    most, none = busiest(layer_loads(record)), idlest(layer_loads(record))
    evidence = []
    if most is not None and most[1] >= IMBALANCE:
        evidence.append(f"the busiest expert of layer {most[0]} receives {most[1]:.1f} times its even share")
    if none is not None and none[1] >= IDLE_SHARE * none[2]:
        evidence.append(f"{none[1]} of {none[2]} experts of layer {none[0]} receive almost no tokens")
    if not evidence:
        return None
    return Verdict(
        "imbalance",
        tuple(evidence),
        (_balance_loss(record), "fewer --experts, or a larger --top-k, when some stay idle to the end"),
    )


def _balance_loss(record: RunRecord) -> str:
    weight = section(record.config, "moe").get("balance_loss", 0.01)
    higher = f"{(weight or 0.005) * 2:g}" if isinstance(weight, int | float) else "0.02"
    return f"--balance-loss {higher} (was {weight}): pulls the gate towards even use"


def _compute(record: RunRecord) -> Verdict | None:
    """What is left: most of the time goes into the model itself."""
    part, use, rate = shares(phase_seconds(record)), gpu_utilization(record), flops_per_second(record)
    if not part and use is None:
        return None
    evidence = []
    if part:
        evidence.append(
            f"{part.get('forward', 0) + part.get('backward', 0):.0%} of a step is forward and backward"
        )
    if record.on_gpu and use is not None:
        evidence.append(f"the GPU is busy {use:.0f}% of the time")
    if rate is not None:
        evidence.append(f"{flops_text(rate)} by the plan's count of operations")
    advice = (
        [] if compiled(record) else ["--compile: fuses operations, after some tens of seconds at the start"]
    )
    advice += [
        *_half_precision(record),
        "a larger --batch-size, while memory allows" if record.on_gpu else "a machine with a GPU",
    ]
    return Verdict("compute", tuple(evidence), tuple(advice[:MAX_ADVICE]))


def _half_precision(record: RunRecord) -> tuple[str, ...]:
    """bf16, where it is not used yet and the device has units for it: a CPU's plan says so where it lacks them."""
    if not record.on_gpu or record.fact("precision") in ("bf16", "fp16"):
        return ()
    return ("--precision bf16: half the bytes of activations, and faster matrix products",)
