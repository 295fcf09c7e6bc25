"""The scaling table of a cluster that need not exist: a row for each number of devices and
strategy. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from orchestrator.config.nearest import did_you_mean
from orchestrator.errors import UserError
from orchestrator.plan.cost.devices import catalogue, device_of, known_gpu, links_of
from orchestrator.plan.cost.machine import DeviceCosts, LinkKind, Machine, Parallelism
from orchestrator.plan.cost.model import StepPrediction, predict
from orchestrator.plan.cost.ops import MicroBatchOps
from orchestrator.types import StrategyName

ScalingKind = Literal["weak", "strong"]

MAX_DEVICES = 4096
# Assumed of experts under a balance loss: the busiest device has a tenth more rows than the mean.
IMBALANCE = 1.1
CHUNKS_FROM_TOKENS = 4096  # of a device, from which on they are exchanged in two chunks

_DEFAULTS = {"nodes": "1", "gpus": "1", "gpu": "", "link": "", "net": "100gbit", "nics": "1"}
_NET = re.compile(r"(\d+(?:\.\d+)?)\s*(gbit|gbyte)(?:/s)?")
_SHORT = re.compile(r"(?:(?P<nodes>\d+)x)?(?P<gpus>\d+)x(?P<gpu>[a-z]\w*)")
"""``8xH100``, or ``2x8xH100`` for two nodes."""
_COUNT_AND_GPU = re.compile(r"(?P<gpus>[1-9]\d*)?[\sx*×]*(?P<gpu>[a-z]\w*)")
"""``H100``, ``8h100`` or ``8 x H100``: what users write who mean ``8xH100``."""


@dataclass(frozen=True)
class ClusterSpec:
    """The cluster that ``--cluster`` describes. ``net_gbit`` is the rate of one network card of a
    node's ``nics``."""

    nodes: int
    gpus: int
    gpu: str
    link: LinkKind
    net_gbit: float
    nics: int

    @property
    def devices(self) -> int:
        return self.nodes * self.gpus

    def text(self) -> str:
        cards = f"{self.nics} × " if self.nics > 1 else ""
        gpus = f"{self.nodes} × {self.gpus} {self.gpu.upper()}"
        return f"{gpus}, {self.link}, {cards}{self.net_gbit:g} Gbit/s between nodes"


def parse_cluster(text: str) -> ClusterSpec:
    """Parse ``nodes=16,gpus=8,gpu=h200,link=nvlink,net=400gbit`` or ``16x8xH200,net=400gbit``.

    Only the GPU is required.
    """
    values = _DEFAULTS | given_keys(text)
    if not values["gpu"]:
        raise UserError("--cluster needs the GPU, for example 8xH200 or gpu=h200")
    sheet = known_gpu(values["gpu"])
    fastest_link = "nvlink" if sheet.nvlink_gb_s else "pcie"
    spec = ClusterSpec(
        nodes=_parse_count("nodes", values["nodes"]),
        gpus=_parse_count("gpus", values["gpus"]),
        gpu=values["gpu"].lower(),
        link=_parse_link(values["link"] or fastest_link, values["gpu"], sheet.nvlink_gb_s),
        net_gbit=_parse_net(values["net"]),
        nics=_parse_count("nics", values["nics"]),
    )
    if spec.devices > MAX_DEVICES:
        raise UserError(
            f"--cluster has {spec.nodes} × {spec.gpus} = {spec.devices:,} GPUs; "
            f"the model is meant for up to {MAX_DEVICES:,}"
        )
    return spec


def given_keys(text: str) -> dict[str, str]:
    """Return the keys and values of ``--cluster``."""
    _check_one_kind(text)
    given: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        for key, value in _parse_part(part).items():
            if key in given:
                raise UserError(f"--cluster: {key} is given twice, as {given[key]} and as {value}; keep one")
            given[key] = value
    return given


def _check_one_kind(text: str) -> None:
    """Raise UserError for several groups of GPUs, such as ``4xH100,4xA100`` or ``8xH100+8xA100``."""
    groups = [part.strip() for part in re.split("[,+]", text)]
    matches = {group: match for group in groups if (match := _SHORT.fullmatch(group.lower()))}
    kinds = {match["gpu"] for match in matches.values()}
    if len(kinds) > 1:
        each = " and ".join(f"--cluster {group}" for group in matches)
        raise UserError(
            f"--cluster {text}: a cluster of different GPUs cannot be planned; "
            f"plan each kind by itself: {each}"
        )


def _parse_part(part: str) -> dict[str, str]:
    """Return the keys and values of ``8xH100``, or of KEY=VALUE."""
    short = _SHORT.fullmatch(part.lower())
    if short is not None:
        return {key: value for key, value in short.groupdict().items() if value is not None}
    key, equals, value = (piece.strip() for piece in part.partition("="))
    if not equals or key not in _DEFAULTS:
        short_form = None if equals else _nearest_short_form(part)
        suggestion = f" (did you mean {short_form}?)" if short_form else did_you_mean(key, _DEFAULTS)
        raise UserError(
            f"--cluster: {part!r} is not understood{suggestion}; give 8xH100, 2x8xH100 for two nodes, "
            f"or KEY=VALUE of {', '.join(_DEFAULTS)}"
        )
    return {key: value}


def _nearest_short_form(part: str) -> str | None:
    """Return ``8xH100`` for ``8h100``, and ``1xH100`` for ``H100``; None if it names no known GPU."""
    match = _COUNT_AND_GPU.fullmatch(part.lower())
    if match is None or match["gpu"] not in catalogue().devices:
        return None
    return f"{match['gpus'] or 1}x{match['gpu'].upper()}"


def _parse_count(name: str, value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise UserError(f"--cluster: {name}={value}; a whole number from 1 on is needed")
    return int(value)


def _parse_link(value: str, gpu: str, nvlink_gb_s: float) -> LinkKind:
    if value not in ("nvlink", "pcie"):
        raise UserError(f"--cluster: link={value}; it must be nvlink or pcie")
    if value == "nvlink" and not nvlink_gb_s:
        raise UserError(f"--cluster: {gpu} has no NVLink; use link=pcie")
    return "nvlink" if value == "nvlink" else "pcie"


def _parse_net(value: str) -> float:
    """Return the rate of one network card in Gbit/s."""
    match = _NET.fullmatch(value.lower())
    if match is None or float(match[1]) <= 0:
        raise UserError(
            f"--cluster: net={value}; a rate such as 400gbit or 50gbyte of one network card is needed"
        )
    return float(match[1]) * (8 if match[2] == "gbyte" else 1)


def machine_of(spec: ClusterSpec, measured: DeviceCosts | None = None) -> Machine:
    """Return the cluster with the costs of the data sheet, or with measured ones of a calibrated
    GPU."""
    inner, outer = links_of(spec.gpu, spec.link, spec.net_gbit, spec.nics, spec.gpus)
    return Machine(measured or device_of(spec.gpu), spec.nodes, spec.gpus, inner, outer)


@dataclass(frozen=True)
class ScalingJob:
    """The training job of a scaling table."""

    trace: Callable[[int, int, int, bool], MicroBatchOps]
    """Return the operations of a micro-batch, from its samples, the hosts of the experts, the chunks, and
    whether one device computes alone."""
    micro_batch: int
    global_batch: int
    experts: int
    tokens_per_sample: int
    tf32: bool
    samples: int | None = None
    """Training samples, at least as many as a micro-batch and the global batch have; None if only
    reading them all would tell."""


@dataclass(frozen=True)
class ScalingRow:
    """One line of the table."""

    kind: ScalingKind
    strategy: StrategyName
    devices: int
    micro_batch: int
    micro_batches: int
    predicted: StepPrediction
    speed_up: float

    @property
    def efficiency(self) -> float:
        return self.speed_up / self.devices

    def to_json(self) -> dict[str, Any]:
        names = ("kind", "strategy", "devices", "micro_batch", "micro_batches", "speed_up", "efficiency")
        values = {name: getattr(self, name) for name in names}
        return values | self.predicted.to_json() | {"fits": self.predicted.memory.fits}


def counts_up_to(most: int) -> list[int]:
    """Return the powers of two up to ``most``, and ``most`` itself."""
    return sorted({2**power for power in range(most.bit_length())} | {most})


def scaling_rows(job: ScalingJob, machine: Machine) -> list[ScalingRow]:
    """Return weak scaling, with a fixed batch per device, and strong scaling, with a fixed global
    batch.

    Both for data parallelism and, with experts, for expert parallelism on at most as many devices
    as experts. Steps with more samples than the data has are left out.
    """
    rows: list[ScalingRow] = []
    for kind in ("weak", "strong"):
        one_device = _predict_row(job, machine, 1, "data_parallel", *_share(job, kind, 1))
        for strategy in ("data_parallel", "expert_parallel") if job.experts else ("data_parallel",):
            rows.extend(_rows(job, machine, kind, strategy, one_device.samples_per_second))
    return rows


def _rows(
    job: ScalingJob, machine: Machine, kind: ScalingKind, strategy: StrategyName, base_speed: float
) -> Iterator[ScalingRow]:
    for devices in counts_up_to(machine.devices):
        if strategy == "expert_parallel" and not 1 < devices <= job.experts:
            continue
        if kind == "strong" and devices > job.global_batch:
            continue
        batch, micro_batches = _share(job, kind, devices)
        if job.samples is not None and devices * batch * micro_batches > job.samples:
            continue
        predicted = _predict_row(job, machine, devices, strategy, batch, micro_batches)
        yield ScalingRow(
            kind=kind,
            strategy=strategy if devices > 1 else "single",
            devices=devices,
            micro_batch=batch,
            micro_batches=micro_batches,
            predicted=predicted,
            speed_up=predicted.samples_per_second / base_speed,
        )


def _share(job: ScalingJob, kind: ScalingKind, devices: int) -> tuple[int, int]:
    """Return the samples of a micro-batch, and the micro-batches of a device in a step."""
    if kind == "weak":
        return job.micro_batch, 1
    per_device = max(1, job.global_batch // devices)
    micro_batches = -(-per_device // job.micro_batch)
    return per_device // micro_batches, micro_batches


def _predict_row(
    job: ScalingJob, machine: Machine, devices: int, strategy: StrategyName, batch: int, micro_batches: int
) -> StepPrediction:
    divided = strategy == "expert_parallel" and devices > 1
    chunks = 2 if divided and batch * job.tokens_per_sample >= CHUNKS_FROM_TOKENS else 1
    # Experts that do not divide evenly are already in the operations, which are those of the
    # device with the most.
    imbalance = IMBALANCE if divided else 1.0
    ops = job.trace(batch, devices if divided else 1, chunks, devices == 1)
    parallelism = Parallelism(
        devices=devices,
        strategy=strategy if devices > 1 else "single",
        micro_batches=micro_batches,
        imbalance=imbalance,
        chunks=chunks,
        tf32=job.tf32,
    )
    return predict(ops, machine, parallelism)


def by_kind(rows: list[ScalingRow]) -> Mapping[tuple[ScalingKind, StrategyName], list[ScalingRow]]:
    """Return the rows as tables, each of which begins with one device."""
    tables: dict[tuple[ScalingKind, StrategyName], list[ScalingRow]] = {}
    for one_device in (row for row in rows if row.devices == 1):
        kind = one_device.kind
        of_more = [row for row in rows if row.kind == kind and row.devices > 1]
        for row in of_more:
            tables.setdefault((kind, row.strategy), [one_device]).append(row)
        if not of_more:
            tables[kind, one_device.strategy] = [one_device]
    return tables
