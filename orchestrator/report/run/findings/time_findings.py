"""Findings about time that does not go into training: data, recoveries, evaluation, checkpoints,
communication."""

from __future__ import annotations

from orchestrator.record.events.kinds import Failure
from orchestrator.report.run.figures.host_load import exchange_cost
from orchestrator.report.run.figures.read import RunRecord, section
from orchestrator.report.run.figures.stats import phase_seconds, shares, wall_seconds
from orchestrator.report.run.findings.finding import Finding, merge
from orchestrator.report.run.findings.load_findings import larger_batch_advice, placement_advice
from orchestrator.strategies import recorded_strategy
from orchestrator.types import bytes_text, counted, seconds_text

# Shares of a step (data, communication) or of the run (the others) from which a cause counts.
DATA_SHARE = 0.25
COMMUNICATION_SHARE = 0.25
EVALUATION_SHARE = 0.25
CHECKPOINT_SHARE = 0.15
RECOVERY_SHARE = 0.15

FEWER_WORKERS = "fewer --workers: a single device needs no exchange"
NCCL = "--backend nccl: gloo sends everything through the host's memory, and the GPU waits for it"
_CAUSES = {
    "worker": "losing a worker",
    "memory": "running out of memory",
    "communication": "losing the connection",
    "fault": "an error",
}


def data_finding(record: RunRecord) -> Finding | None:
    share = shares(phase_seconds(record)).get("data", 0.0)
    if share < DATA_SHARE:
        return None
    seconds = phase_seconds(record)["data"]
    workers = record.setting("data", "loader_workers")
    used = f" with {workers} loader workers" if isinstance(workers, int) and workers >= 0 else ""
    advice = ["move costly preparation out of the dataset: do it once, and store the result"]
    if not record.rejects("loader_workers", "loader processes"):
        more = f"--loader-workers {_more_loader_workers(record)}"
        advice.insert(0, f"{more}: batches are prepared while the model computes")
    evidence = f"{share:.0%} of a step waits for data ({seconds_text(seconds)} per step{used})"
    return Finding("data", (evidence,), tuple(advice))


def _more_loader_workers(record: RunRecord) -> int:
    """Return twice the loader workers, within the cores of the machine."""
    used = record.setting("data", "loader_workers")
    cores = section(record.plan, "hardware").get("cores")
    wanted = max(2, 2 * used) if isinstance(used, int) and used > 0 else 2
    return max(1, min(wanted, cores)) if isinstance(cores, int) else wanted


def recovery_finding(record: RunRecord) -> Finding | None:
    share = shares(wall_seconds(record)).get("recovery", 0.0)
    if share < RECOVERY_SHARE:
        return None
    num_recoveries = len(record.recoveries)
    seconds = wall_seconds(record)["recovery"] / num_recoveries
    kinds = dict.fromkeys(event.kind for event in record.of(Failure) if event.kind)
    causes = [_CAUSES.get(kind, kind) for kind in kinds]
    after = f" after {', '.join(causes[:3])}" if causes else ""
    evidence = (
        f"{share:.0%} of the run was spent on {counted(num_recoveries, 'recovery', 'recoveries')} "
        f"({seconds_text(seconds)} each){after}"
    )
    advice = ["see why workers were lost: What happened below, and logs/ in the run folder"]
    has_spares = bool(section(record.config, "parallel").get("spares"))
    strategy = recorded_strategy(record.fact("strategy"))
    if strategy is not None and strategy.replaces_workers and not has_spares:
        advice.append(
            "--spares 1, if a device is free: a host that stands by replaces a lost one in about a second"
        )
    if record.replayed_steps:
        from_memory = any(event.source == "memory" for event in record.recoveries)
        flag = "--snapshot-every" if from_memory else "--checkpoint-every"
        # A failure costs half an interval on average, so half the interval halves the loss.
        interval = max(1, record.replayed_steps // num_recoveries // 2)
        repeated = counted(record.replayed_steps, "step was", "steps were")
        advice.append(f"{flag} {interval}: {repeated} done twice")
    return Finding("recovery", (evidence,), tuple(advice))


def evaluation_finding(record: RunRecord) -> Finding | None:
    share = shares(wall_seconds(record)).get("evaluation", 0.0)
    if share < EVALUATION_SHARE:
        return None
    count = record.totals.num_evaluations
    seconds = seconds_text(wall_seconds(record)["evaluation"])
    return Finding(
        "evaluation",
        (f"{share:.0%} of the run is evaluation ({count} times, {seconds} in all)",),
        (
            f"--evaluate-every {_half_as_often(record, count)}: half as often",
            "a larger --eval-batch-size: no gradients are kept, so more fits",
        ),
    )


def checkpoint_finding(record: RunRecord) -> Finding | None:
    share = shares(wall_seconds(record)).get("checkpoints", 0.0)
    if share < CHECKPOINT_SHARE:
        return None
    count = record.totals.num_checkpoints
    seconds = seconds_text(wall_seconds(record)["checkpoints"] / count)
    return Finding(
        "checkpoint",
        (f"checkpoints block {share:.0%} of the run ({count} times, {seconds} each)",),
        (
            f"--checkpoint-every {_half_as_often(record, count)}: half as often",
            "a --run-dir on a local disk, if it is on a network drive",
        ),
    )


def _half_as_often(record: RunRecord, count: int) -> int:
    """Return the steps between events that shall happen half as often as they did."""
    return max(2, round(2 * record.totals.num_steps / max(1, count)))


def communication_finding(record: RunRecord) -> Finding | None:
    """Return the cost of the token exchange within a step and of the gradients' all-reduce between steps."""
    return merge(_exchange_finding(record), _reduction_finding(record))


def _exchange_finding(record: RunRecord) -> Finding | None:
    cost = exchange_cost(record)
    if cost is None or cost.share is None or cost.share < COMMUNICATION_SHARE:
        return None
    hosts = f" between {record.workers} hosts" if record.workers else ""
    figures = f"{seconds_text(cost.seconds or 0.0)} per step"
    if cost.bytes:
        figures += f", {bytes_text(cost.bytes)}"
    return Finding(
        "communication",
        (f"{cost.share:.0%} of a step waits for the exchange of rows{hosts} ({figures})",),
        (
            *placement_advice(record),
            *_overlap_advice(record),
            *larger_batch_advice(record, "fewer and larger messages for the same number of rows"),
            FEWER_WORKERS,
        ),
    )


def _overlap_advice(record: RunRecord) -> tuple[str, ...]:
    """Return how to compute during the exchange.

    It needs a GPU next to the cores that send the rows, and a backend that does not block the GPU.
    """
    if not record.on_gpu:
        return ()
    if record.start.backend == "gloo":
        return (NCCL,)
    return ("more --exchange-chunks: experts compute on one part while the next is sent",)


def _reduction_finding(record: RunRecord) -> Finding | None:
    parts = phase_seconds(record)
    share = shares(parts).get("communication", 0.0)
    if share < COMMUNICATION_SHARE:
        return None
    workers = f" of {record.workers} workers" if record.workers else ""
    seconds = seconds_text(parts["communication"])
    evidence = f"{share:.0%} of a step{workers} is communication ({seconds} per step)"
    advice = ["more --accumulation-steps, or a larger --batch-size: more work per all-reduce of gradients"]
    less_sharding = [form for form in ("zero2", "none") if not record.rejects("sharding", form)]
    if record.start.sharding == "zero3" and less_sharding:
        forms = " or ".join(less_sharding)
        advice.append(f"--sharding {forms}, if memory allows: then parameters are not gathered in every step")
    if record.on_gpu and record.start.backend == "gloo":
        advice.append(NCCL)
    return Finding("communication", (evidence,), (*advice, FEWER_WORKERS))
