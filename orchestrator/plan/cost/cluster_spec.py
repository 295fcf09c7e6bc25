"""The cluster that ``--cluster`` describes: nodes, GPUs, and the network between the nodes. Pure.

It need not exist: the plan sees its nodes with assumed cores and memory."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from orchestrator.config.names.nearest import did_you_mean
from orchestrator.errors import UserError
from orchestrator.plan.cost.devices import KnownNode, catalogue, device_of, known_gpu, links_of
from orchestrator.plan.cost.machine import DeviceCosts, LinkKind, Machine
from orchestrator.plan.inventory.cluster import Cluster, Node
from orchestrator.plan.inventory.gpus import Gpu
from orchestrator.plan.inventory.hardware import Inventory

MAX_DEVICES = 4096
CORES_PER_GPU = 16
RAM_PER_GPU_MEMORY = 2
"""Assumed of a node: cores for each GPU, and RAM as a multiple of the memory of its GPUs."""
_MULTIPROCESSORS = 100
_USUAL_GPUS_PER_NODE = 8

_KEYS = ("nodes", "gpus", "gpu", "node", "link", "net", "nics")
_UNKNOWN_NET_GBIT = 100.0
"""Assumed of a node of GPUs that no known node has."""
_NET = re.compile(r"(\d+(?:\.\d+)?)\s*(gbit|gbyte)(?:/s)?")
_SHORT = re.compile(r"(?:(?P<nodes>\d+)x)?(?P<gpus>\d+)x(?P<gpu>[a-z]\w*)")
"""``8xH100``, or ``2x8xH100`` for two nodes."""
_COUNT_AND_GPU = re.compile(r"(?P<gpus>[1-9]\d*)?[\sx*×]*(?P<gpu>[a-z]\w*)")
"""``H100``, ``8h100`` or ``8 x H100``: what users write who mean ``8xH100``."""


@dataclass(frozen=True)
class ClusterSpec:
    """The cluster that ``--cluster`` describes."""

    nodes: int
    gpus: int
    gpu: str
    link: LinkKind
    net_gbit: float
    """Rate of one network card."""
    nics: int
    """Network cards of a node."""
    node: str | None = None
    """The known node whose network this is; None if the network was given, or no such node is known."""
    network_assumed: bool = False
    """``--cluster`` names neither a node nor a rate."""

    @property
    def devices(self) -> int:
        return self.nodes * self.gpus

    def text(self) -> str:
        cards = f"{self.nics} × " if self.nics > 1 else ""
        gpus = f"{self.nodes} × {self.gpus} {self.gpu.upper()}"
        return f"{gpus}, {self.link}, {cards}{self.net_gbit:g} Gbit/s between nodes"


def parse_cluster(text: str) -> ClusterSpec:
    """Parse ``nodes=16,gpus=8,gpu=h200,link=nvlink,net=400gbit``, ``16x8xH200,net=400gbit`` or
    ``nodes=16,node=p5.48xlarge``.

    Only the GPU is required, by itself or by the node that has it.
    """
    given = _given_keys(text)
    node = _given_node(given)
    gpu = given.get("gpu", node.gpu if node else "").lower()
    if not gpu:
        raise UserError("--cluster needs the GPU, for example 8xH200, gpu=h200 or node=p5.48xlarge")
    sheet = known_gpu(gpu)
    fastest_link = "nvlink" if sheet.nvlink_gb_s else "pcie"
    gpus = _parse_count("gpus", given.get("gpus", str(node.gpus) if node else "1"))
    name = given.get("node", "").lower() or next(iter(nodes_of(gpu)), None)
    net_gbit, nics = _network(given, catalogue().nodes[name] if name else None, gpus)
    spec = ClusterSpec(
        nodes=_parse_count("nodes", given.get("nodes", "1")),
        gpus=gpus,
        gpu=gpu,
        link=_parse_link(given.get("link", fastest_link), gpu, sheet.nvlink_gb_s),
        net_gbit=net_gbit,
        nics=nics,
        node=None if "net" in given else name,
        network_assumed=not {"net", "node"} & given.keys(),
    )
    if spec.devices > MAX_DEVICES:
        raise UserError(
            f"--cluster has {spec.nodes} × {spec.gpus} = {spec.devices:,} GPUs; "
            f"the model is meant for up to {MAX_DEVICES:,}"
        )
    return spec


def nodes_of(gpu: str) -> Mapping[str, KnownNode]:
    """Return the known nodes with this GPU, the one that is assumed first."""
    return {name: node for name, node in catalogue().nodes.items() if node.gpu == gpu}


def _given_node(given: Mapping[str, str]) -> KnownNode | None:
    """Return the node that ``node=`` names; None without it."""
    if "node" not in given:
        return None
    known = catalogue().nodes
    name = given["node"].lower()
    if name.isdecimal():
        raise UserError(f"--cluster: node={name} is a kind of node, not a number; did you mean nodes={name}?")
    if name not in known:
        suggestion = did_you_mean(name, known)
        raise UserError(
            f"--cluster: node={name} is not known{suggestion}; known are {', '.join(known)}. "
            "Describe another one by its GPUs and network: 8xH100,net=400gbit,nics=8"
        )
    gpu = given.get("gpu", "").lower()
    if gpu and gpu != known[name].gpu:
        raise UserError(
            f"--cluster: node={name} has {known[name].gpu.upper()}, but gpu={gpu} is given; keep one of them"
        )
    return known[name]


def _network(given: Mapping[str, str], node: KnownNode | None, gpus: int) -> tuple[float, int]:
    """Return the rate of a network card and the cards of a node with so many GPUs.

    Given values come first, then those of the node; of fewer GPUs than it has, their share.
    """
    if "net" in given:
        return _parse_net(given["net"]), _parse_count("nics", given.get("nics", "1"))
    if node is None:
        return _UNKNOWN_NET_GBIT, _parse_count("nics", given.get("nics", "1"))
    if "nics" in given:
        return node.net_gbit, _parse_count("nics", given["nics"])
    share = min(1.0, gpus / node.gpus)
    nics = max(1, round(node.nics * share))
    return node.net_gbit * node.nics * share / nics, nics


def _given_keys(text: str) -> dict[str, str]:
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
    if not equals or key not in _KEYS:
        short_form = None if equals else _nearest_short_form(part)
        suggestion = f" (did you mean {short_form}?)" if short_form else did_you_mean(key, _KEYS)
        raise UserError(
            f"--cluster: {part!r} is not understood{suggestion}; give 8xH100, 2x8xH100 for two nodes, "
            f"or KEY=VALUE of {', '.join(_KEYS)}"
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


def inventory_of(spec: ClusterSpec) -> Inventory:
    """Return a node of the cluster."""
    sheet = known_gpu(spec.gpu)
    memory = int(sheet.memory_gb * 1e9)
    gpus = tuple(
        Gpu(index, sheet.names[0], memory, memory, sheet.capability, _MULTIPROCESSORS)
        for index in range(spec.gpus)
    )
    ram = RAM_PER_GPU_MEMORY * memory * spec.gpus
    return Inventory(
        gpus=gpus,
        cores=CORES_PER_GPU * spec.gpus,
        ram_total=ram,
        ram_free=ram,
        cpu_name="assumed",
        architecture="assumed",
        cpu_bf16=False,
        driver=None,
        versions={},
        gpu_error=None,
        disk_free=ram,
    )


def cluster_of(spec: ClusterSpec) -> Cluster | None:
    """Return the nodes of the cluster; None for one GPU, on which one process trains."""
    if spec.devices == 1:
        return None
    cores = CORES_PER_GPU * spec.gpus
    nodes = [Node(f"node {number}", cores, spec.gpus, cores) for number in range(spec.nodes)]
    return Cluster(tuple(nodes), joined=True, described=True)


def larger_clusters(spec: ClusterSpec) -> Iterator[ClusterSpec]:
    """Yield clusters of the same GPUs with more of them: first on one node, then on more nodes."""
    per_node = max(_USUAL_GPUS_PER_NODE, spec.gpus)
    if spec.nodes == 1:
        for gpus in range(spec.gpus + 1, per_node + 1):
            yield replace(spec, gpus=gpus)
    nodes = spec.nodes + 1
    while nodes * per_node <= MAX_DEVICES:
        yield replace(spec, nodes=nodes, gpus=per_node)
        nodes += max(1, nodes // 8)  # coarser and coarser: a rough answer for large clusters
