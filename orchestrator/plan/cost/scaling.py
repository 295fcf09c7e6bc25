"""The scaling table of a cluster that need not be there: a row for each number of devices and
strategy. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from orchestrator.config.settings import did_you_mean
from orchestrator.errors import UserError
from orchestrator.plan.cost.devices import device_of, known_gpu, links_of
from orchestrator.plan.cost.model import DeviceCosts, LinkKind, Machine, Parallelism, StepPrediction, predict
from orchestrator.plan.cost.ops import MicroBatchOps
from orchestrator.types import StrategyName

MOST_DEVICES = 4096
IMBALANCE = 1.1  # assumed of experts that a balance loss keeps evenly used: the busiest device has a tenth more rows than the mean
CHUNKS_FROM = 4096  # tokens of a device from which they travel in two parts
_KEYS = {"nodes": "1", "gpus": "1", "gpu": "", "link": "", "net": "100gbit", "nics": "1"}
_NET = re.compile(r"(\d+(?:\.\d+)?)\s*(gbit|gbyte)(?:/s)?")
ScalingKind = Literal["weak", "strong"]


@dataclass(frozen=True)
class ClusterSpec:
    """What ``--cluster`` says. ``net_gbit`` is that of one network card, of which a node has
    ``nics``."""

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
        return f"{self.nodes} × {self.gpus} {self.gpu.upper()}, {self.link}, {cards}{self.net_gbit:g} Gbit/s between nodes"


def parse_cluster(text: str) -> ClusterSpec:
    """``nodes=16,gpus=8,gpu=h200,link=nvlink,net=400gbit``; ``gpu`` alone must be given."""
    given = _KEYS | given_keys(text)
    if not given["gpu"]:
        raise UserError("--cluster needs to know the GPU: gpu=h200, for one")
    known = known_gpu(given["gpu"])
    spec = ClusterSpec(
        _count("nodes", given["nodes"]),
        _count("gpus", given["gpus"]),
        given["gpu"].lower(),
        _link(given["link"] or ("nvlink" if known.nvlink_gb_s else "pcie"), given["gpu"], known.nvlink_gb_s),
        _net(given["net"]),
        _count("nics", given["nics"]),
    )
    if spec.devices > MOST_DEVICES:
        raise UserError(
            f"--cluster has {spec.nodes} × {spec.gpus} = {spec.devices:,} GPUs; the model is meant for up to {MOST_DEVICES:,}"
        )
    return spec


def given_keys(text: str) -> dict[str, str]:
    """What ``--cluster`` says, key by key."""
    given: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or key not in _KEYS:
            raise UserError(
                f"--cluster: {part!r} is not understood{did_you_mean(key, _KEYS)}; give KEY=VALUE of {', '.join(_KEYS)}"
            )
        if key in given:
            raise UserError(f"--cluster: {key} is given twice, as {given[key]} and as {value}; keep one")
        given[key] = value
    return given


def _count(name: str, value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise UserError(f"--cluster: {name}={value}; a whole number from 1 on was needed")
    return int(value)


def _link(value: str, gpu: str, nvlink: float) -> LinkKind:
    if value not in ("nvlink", "pcie"):
        raise UserError(f"--cluster: link={value}; it must be nvlink or pcie")
    if value == "nvlink" and not nvlink:
        raise UserError(f"--cluster: {gpu} has no NVLink; use link=pcie")
    return "nvlink" if value == "nvlink" else "pcie"


def _net(value: str) -> float:
    found = _NET.fullmatch(value.lower())
    if found is None or float(found[1]) <= 0:
        raise UserError(
            f"--cluster: net={value}; a rate such as 400gbit or 50gbyte was needed, that of one network card"
        )
    return float(found[1]) * (8 if found[2] == "gbyte" else 1)


def machine_of(spec: ClusterSpec, measured: DeviceCosts | None = None) -> Machine:
    """The cluster, with the figures of the data sheet or, where its GPU was calibrated, the
    measured ones."""
    inner, outer = links_of(spec.gpu, spec.link, spec.net_gbit, spec.nics, spec.gpus)
    return Machine(measured or device_of(spec.gpu), spec.nodes, spec.gpus, inner, outer)


@dataclass(frozen=True)
class ScalingJob:
    """What is trained: how its work is found for a number of samples and of hosts, and how much of
    it there is."""

    work: Callable[[int, int, int], MicroBatchOps]
    """Of a micro-batch of so many samples, with the experts on so many hosts, the tokens in so
    many parts."""
    micro_batch: int
    global_batch: int
    experts: int
    tokens_per_sample: int
    tf32: bool


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
        return (
            {name: getattr(self, name) for name in names}
            | self.predicted.to_json()
            | {"fits": self.predicted.memory.fits}
        )


def counts_up_to(most: int) -> list[int]:
    """1, 2, 4, … and the last."""
    return sorted({2**power for power in range(most.bit_length())} | {most})


def scaling_rows(job: ScalingJob, machine: Machine) -> list[ScalingRow]:
    """Weak scaling, each device with as many samples as one alone, and strong scaling of one
    global batch; data-parallel and, with experts, expert-parallel on at most as many devices as
    there are experts."""
    rows: list[ScalingRow] = []
    for kind in ("weak", "strong"):
        for strategy in ("data_parallel", "expert_parallel") if job.experts else ("data_parallel",):
            base = _predicted(job, machine, 1, "data_parallel", *_share(job, kind, 1))
            rows.extend(_rows(job, machine, kind, strategy, base.samples_per_second))
    return rows


def _rows(
    job: ScalingJob, machine: Machine, kind: ScalingKind, strategy: StrategyName, base: float
) -> Iterator[ScalingRow]:
    for devices in counts_up_to(machine.devices):
        if (strategy == "expert_parallel" and not 1 < devices <= job.experts) or (
            kind == "strong" and devices > job.global_batch
        ):
            continue
        batch, rounds = _share(job, kind, devices)
        found = _predicted(job, machine, devices, strategy, batch, rounds)
        yield ScalingRow(
            kind,
            strategy if devices > 1 else "single",
            devices,
            batch,
            rounds,
            found,
            found.samples_per_second / base,
        )


def _share(job: ScalingJob, kind: ScalingKind, devices: int) -> tuple[int, int]:
    """Samples of a micro-batch, and how many of them a device has in a step."""
    if kind == "weak":
        return job.micro_batch, 1
    each = max(1, job.global_batch // devices)
    batch = min(job.micro_batch, each)
    return batch, max(1, each // batch)


def _predicted(
    job: ScalingJob, machine: Machine, devices: int, strategy: StrategyName, batch: int, rounds: int
) -> StepPrediction:
    together = strategy == "expert_parallel" and devices > 1
    chunks = 2 if together and batch * job.tokens_per_sample >= CHUNKS_FROM else 1
    work = job.work(batch, devices if together else 1, chunks)
    imbalance = (
        IMBALANCE if together else 1.0
    )  # experts that do not divide evenly are in the work: it is that of a device with the most
    return predict(
        work,
        machine,
        Parallelism(devices, strategy if devices > 1 else "single", rounds, imbalance, chunks, job.tf32),
    )


def by_kind(rows: list[ScalingRow]) -> Mapping[tuple[ScalingKind, StrategyName], list[ScalingRow]]:
    """Tables: each begins with one device."""
    found: dict[tuple[ScalingKind, StrategyName], list[ScalingRow]] = {}
    single = {row.kind: row for row in rows if row.devices == 1}
    for row in rows:
        if row.devices > 1:
            found.setdefault((row.kind, row.strategy), [single[row.kind]]).append(row)
    return found or {(row.kind, row.strategy): [row] for row in rows}
