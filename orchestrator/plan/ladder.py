"""The ladder: configurations of a run that need less and less memory, each planned as any other. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from orchestrator.config.settings import Config
from orchestrator.errors import OrchestratorError, ResourceError
from orchestrator.plan.cost.cluster_spec import cluster_of, inventory_of, larger_clusters, parse_cluster
from orchestrator.plan.cost.devices import short_name
from orchestrator.plan.device import USABLE_RAM
from orchestrator.plan.estimate import ModelFacts, largest_fitting
from orchestrator.plan.inventory.cluster import Cluster
from orchestrator.plan.inventory.hardware import Inventory
from orchestrator.plan.pass_memory import between
from orchestrator.plan.planning import Plan, plan
from orchestrator.types import bytes_text, counted, flag_of, memory_part_text

FactsOf = Callable[[Config], ModelFacts]
"""Returns the facts of the model that a config names: adapters and another length of sequences change it."""

_MOST_SAMPLES = 2**20
MOST_TOKENS = 2**16
"""Of a sequence, where the model has no limit of its own."""
_LORA_RANK = 16
_CERTAIN_ACTIVATIONS = 0.8
"""Share of the estimated activations that a run needs at least: the lowest of 60 small models needed 0.82."""


@dataclass(frozen=True)
class Site:
    """The devices that a run is planned for. ``flag`` is ``--cluster`` of more devices than were given."""

    inventory: Inventory
    cluster: Cluster | None = None
    in_cluster: bool = False
    flag: str = ""


@dataclass(frozen=True)
class PlanRequest:
    """What was asked for: settings, model and devices, with their plan."""

    config: Config
    facts: ModelFacts
    site: Site
    plan: Plan
    facts_of: FactsOf

    def changed(self, changes: Mapping[str, Any], site: Site | None = None) -> Plan | str:
        """Return the plan with changed settings, or why they are refused."""
        where = site or self.site
        try:
            config = self.config.but(**changes)
            facts = self.facts_of(config)
            return plan(config, where.inventory, facts, None, where.cluster, where.in_cluster)
        except OrchestratorError as error:
            return str(error)

    def fits(self, changes: Mapping[str, Any], site: Site | None = None) -> bool:
        planned = self.changed(changes, site)
        return isinstance(planned, Plan) and planned.memory.fits

    def micro_batches(self, samples: int) -> dict[str, Any]:
        """Return the settings that cut the samples of a step into micro-batches of this size."""
        sizes = {"batch_size": samples, "global_batch_size": self.plan.global_batch_size.value}
        return self._alone({**sizes, "accumulation_steps": None})

    def one_step(self, samples: int) -> dict[str, Any]:
        """Return the settings of a step of one micro-batch."""
        return self._alone({"batch_size": samples, "global_batch_size": None, "accumulation_steps": None})

    def _alone(self, sizes: dict[str, Any]) -> dict[str, Any]:
        # --debug has a batch of its own.
        return sizes | ({"debug": False} if self.config.run.debug else {})

    def flags(self, changes: Mapping[str, Any]) -> str:
        """Return the flags that change the settings."""
        changed = {name: value for name, value in changes.items() if value != self.config.value_of(name)}
        return " ".join(_flag(name, value) for name, value in changed.items())


def _flag(name: str, value: object) -> str:
    if isinstance(value, bool):
        return flag_of(name if value else f"no_{name}")
    return f"{flag_of(name)} {value}"


@dataclass(frozen=True)
class Rung:
    """A step of the ladder: changed settings, and the plan with them."""

    name: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    """All of them, those of earlier rungs too."""
    own_flags: str = ""
    """The flags that this rung adds."""
    plan: Plan | None = None
    """None if the settings are refused."""
    note: str = ""
    """Why the settings are refused, or why later rungs do without them."""
    only_if_asked: bool = False
    site: Site | None = None
    """The devices, if they are more than were given."""

    @property
    def fits(self) -> bool:
        return self.plan is not None and self.plan.memory.fits

    @property
    def largest_part(self) -> str:
        parts = self.plan.memory.parts if self.plan is not None else {}
        return memory_part_text(max(parts, key=lambda name: parts[name])) if parts else ""


@dataclass(frozen=True)
class _Step:
    name: str
    changes: Mapping[str, Any]
    only_if_asked: bool = False
    with_adapters: bool | None = None
    """Whether the step is for settings with --lora, or for those without; None for both."""
    without: tuple[str, ...] = ()
    """Changes of earlier rungs that the step takes the place of."""


_OFFLOAD = ("cpu_offload", "parallel_strategy")
_PACKED = {"frozen_weights": "nf4"}
_STEPS = (
    _Step("one sample at a time", {}),
    _Step("+ recomputed activations", {"activation_checkpointing": "on"}),
    _Step("+ 8-bit optimizer state", {"optimizer": "adamw8bit"}),
    _Step("+ weights in bf16", {"weight_precision": "bf16"}),
    _Step("+ optimizer state and gradients sharded", {"sharding": "zero2"}),
    _Step("+ parameters sharded", {"sharding": "zero3"}),
    _Step("+ offload to host memory", {"cpu_offload": True}),
    _Step("+ frozen weights in 4 bits", _PACKED, with_adapters=True, without=("sharding", *_OFFLOAD)),
    _Step(f"LoRA of rank {_LORA_RANK} instead", {"lora": _LORA_RANK}, only_if_asked=True),
    _Step(
        f"LoRA of rank {_LORA_RANK}, frozen weights in 4 bits",
        {"lora": _LORA_RANK, **_PACKED},
        only_if_asked=True,
        with_adapters=False,
    ),
)
_NEEDS_TASK = ("optimizer", "lora", "frozen_weights")
"""Settings that not every task takes."""


def ladder(request: PlanRequest) -> list[Rung]:
    """Return the rungs from the request itself to more devices.

    From the second one on they are planned with one sample in a micro-batch, for as many samples in a step.
    A rung keeps the changes of those before it that have reduced the memory."""
    rungs = [Rung("as configured", plan=request.plan)]
    kept: Rung | None = None
    for step in _STEPS:
        rung = _rung(request, step, kept)
        if rung is None:
            continue
        rungs.append(rung)
        if rung.plan is not None and not rung.note:
            kept = rung
    return [*rungs, _more_devices(request, rungs)]


def _rung(request: PlanRequest, step: _Step, kept: Rung | None) -> Rung | None:
    """Return the rung of a step above ``kept``; None if the settings have its changes already."""
    config = request.config
    changes = {name: value for name, value in step.changes.items() if value != config.value_of(name)}
    if (step.changes and not changes) or step.with_adapters not in (None, config.model.lora is not None):
        return None
    if "cpu_offload" in changes and request.plan.strategy_facts.in_process:
        changes["parallel_strategy"] = "data_parallel"
    one_sample = request.micro_batches(1)
    rung = Rung(step.name, changes, request.flags(changes or one_sample), only_if_asked=step.only_if_asked)
    why_not = _why_not(request, changes)
    if why_not:
        return replace(rung, note=why_not)
    earlier = dict(kept.changes) if kept is not None and not step.only_if_asked else one_sample
    earlier = {name: value for name, value in earlier.items() if name not in step.without}
    planned = request.changed(earlier | changes)
    if isinstance(planned, str):
        return replace(rung, note=planned)
    note = "only if asked: it trains adapters" if step.only_if_asked else _no_gain(planned, changes, kept)
    return replace(rung, changes=earlier | changes, plan=planned, note=note)


def _no_gain(planned: Plan, changes: Mapping[str, Any], kept: Rung | None) -> str:
    """Return why a rung is not better than the one before it; empty if it is."""
    if "sharding" in changes and planned.sharding.value != changes["sharding"]:
        return planned.sharding.reason
    if kept is None or kept.plan is None or planned.memory.total < kept.plan.memory.total:
        return ""
    if planned.memory == kept.plan.memory:
        return "the plan has it already, or the model has no use for it"
    return "it saves nothing"


def _why_not(request: PlanRequest, changes: Mapping[str, Any]) -> str:
    """Return why the task or its optimizer excludes changes; empty if nothing does."""
    lacking = [name for name in _NEEDS_TASK if name in changes and name not in request.facts.settings]
    if lacking:
        return f"the task does not take {flag_of(lacking[0])}"
    asked = request.config.optim.optimizer
    return f"--optimizer {asked} was asked for" if "optimizer" in changes and asked != "adamw" else ""


def _more_devices(request: PlanRequest, rungs: Sequence[Rung]) -> Rung:
    """Return the rung of the smallest number of devices of the same kind on which the model fits."""
    name = "more devices"
    last = next(rung for rung in reversed(rungs) if not rung.note)
    # Offload takes the place of devices: more of them are sought to do without it.
    reduced = {name: value for name, value in last.changes.items() if name not in _OFFLOAD}
    sites = list(wider_sites(request))
    for site in sites:
        for changes in ({}, reduced):
            for sizes in ({}, request.micro_batches(1)):
                planned = request.changed({**changes, **sizes}, site)
                if isinstance(planned, Plan) and planned.memory.fits:
                    rung = Rung(name, {**changes, **sizes}, plan=planned, site=site)
                    return replace(rung, own_flags=line_of(request, rung))
    note = "no number of them would do" if sites else "the plan knows GPUs of data sheets only (--cluster)"
    return Rung(name, note=note)


def wider_sites(request: PlanRequest) -> Iterator[Site]:
    """Yield clusters with more of the GPUs that a plan has, if it uses all of those here."""
    gpus = request.site.inventory.gpus
    gpu = short_name(gpus[0].name) if gpus and request.plan.device.value != "cpu" else None
    if gpu is None:
        return
    cluster = request.site.cluster
    nodes = len(cluster.training_nodes) if cluster is not None and cluster.joined else 1
    here = parse_cluster(f"{nodes}x{len(gpus)}x{gpu}")
    for spec in larger_clusters(here):
        flag = f"--cluster {spec.nodes}x{spec.gpus}x{spec.gpu.upper()}"
        yield Site(inventory_of(spec), cluster_of(spec), flag=flag)


# --- the columns


def largest_micro_batch(request: PlanRequest, rung: Rung) -> int:
    """Return the most samples of a micro-batch that fit with a rung's settings; 0 if one does not."""
    if rung.plan is None:
        return 0
    most = max(1, request.facts.at_most(_MOST_SAMPLES) // rung.plan.data_ranks)
    return largest_fitting(
        lambda size: request.fits({**rung.changes, **request.one_step(size)}, rung.site), most
    )


def longest_sequence(request: PlanRequest, rung: Rung, most: int = MOST_TOKENS) -> int | None:
    """Return the longest sequence of which one sample fits with a rung's settings.

    None if the task takes no length. The length is doubled first: facts of lengths far beyond are never
    asked for."""
    has_length = request.facts.units_per_sample > 1 and "sequence_length" in request.facts.settings
    if rung.plan is None or not has_length:
        return None
    changes = {**rung.changes, **request.micro_batches(1)}

    def fits(length: int) -> bool:
        return request.fits(changes | {"sequence_length": length}, rung.site)

    too_long = request.facts.units_per_sample
    while too_long < most and fits(too_long):
        too_long *= 2
    return largest_fitting(fits, min(too_long, most))


def facts_between(short: ModelFacts, long: ModelFacts, length: int) -> ModelFacts:
    """Return the facts for sequences of a length between two.

    Linear: that is exact, or at most an eighth too much where attention has a row for each pair of tokens."""
    begin, end = short.units_per_sample, long.units_per_sample
    share = (length - begin) / (end - begin)
    changed: dict[str, Any] = {"passes": between(short.passes, long.passes, share)}
    for name in (each.name for each in fields(ModelFacts)):
        less, more = getattr(short, name), getattr(long, name)
        if isinstance(less, int | float) and isinstance(more, int | float) and less != more:
            value = less + share * (more - less)
            changed[name] = value if isinstance(more, float) else round(value)
    return replace(long, **changed)


# --- the nearest configuration that fits


def fitting(request: PlanRequest, rung: Rung) -> Rung | None:
    """Return a rung with the largest micro-batches that fit, and as many samples in a step.

    None if one sample does not fit. Micro-batches that were asked for are kept if they fit."""
    sizes = request.micro_batches(1)
    changes = {name: value for name, value in rung.changes.items() if name not in sizes}
    configured = request.changed(changes, rung.site)
    if isinstance(configured, Plan) and configured.memory.fits:
        return replace(rung, changes=changes, plan=configured)

    def fits(size: int) -> bool:
        return request.fits(changes | request.micro_batches(size), rung.site)

    if rung.plan is None or not fits(1):
        return None
    share = -(-request.plan.global_batch_size.value // rung.plan.data_ranks)
    changes |= request.micro_batches(largest_fitting(fits, share))
    planned = request.changed(changes, rung.site)
    return replace(rung, changes=changes, plan=planned) if isinstance(planned, Plan) else None


def nearest(request: PlanRequest, rungs: Sequence[Rung]) -> Rung | None:
    """Return the first rung that fits, without changes that it does not need; None if none does."""
    for rung in rungs:
        if rung.fits and not rung.only_if_asked:
            return fitting(request, _without_needless(request, rung))
    return None


def _without_needless(request: PlanRequest, rung: Rung) -> Rung:
    needed = dict(rung.changes)
    for name in rung.changes:
        fewer = {other: value for other, value in needed.items() if other != name}
        if name not in request.micro_batches(1) and request.fits(fewer, rung.site):
            needed = fewer
    return replace(rung, changes=needed)


def line_of(request: PlanRequest, rung: Rung) -> str:
    """Return the flags of a rung, to copy."""
    flag = rung.site.flag if rung.site is not None else ""
    return " ".join(filter(None, (flag, request.flags(rung.changes))))


def shortage(request: PlanRequest) -> str | None:
    """Return what the devices lack for the plan, and the nearest configuration that fits; None if it fits."""
    if request.plan.memory.fits:
        return None
    found = nearest(request, ladder(request))
    lack = _lack(request.plan)
    if found is None:
        return (
            f"{lack}. No configuration fits: use devices with more memory, a shorter sequence, or --lora RANK"
        )
    return f"{lack}. The nearest configuration that fits: {line_of(request, found)}"


def _lack(chosen: Plan) -> str:
    """Return the memory that the micro-batch of a plan needs, and how much of it is missing."""
    memory = chosen.memory
    usable = memory.limit or 0
    samples = chosen.batch_size.value
    subject = "one sample" if samples == 1 else f"a micro-batch of {samples:,} samples"
    workers = chosen.workers.value
    where = f" on each of {counted(workers, 'worker')}" if workers > 1 else ""
    return (
        f"{subject} needs {bytes_text(memory.total)}{where}, {bytes_text(memory.total - usable)} more than "
        f"the usable {bytes_text(usable)} ({how(chosen)})"
    )


def how(chosen: Plan) -> str:
    """Return the strategy, the sharding and the recomputation of a plan in words."""
    strategy = chosen.strategy.value.replace("_", " ")
    sharding = f" with {chosen.sharding.value}" if chosen.sharding.value != "none" else ""
    recomputed = ", activations recomputed" if chosen.activation_checkpointing.value else ""
    return f"{strategy}{sharding}{recomputed}"


def check_fits(request: PlanRequest) -> None:
    """Raise ResourceError if not even one sample can fit: the run would fail after it has read its weights.

    On a CPU all free memory counts, of which the plan uses a part. A larger micro-batch is halved while the
    run goes on."""
    if request.plan.memory.fits:
        return
    hardware = request.site.inventory
    whole = replace(request.site, inventory=replace(hardware, ram_free=int(hardware.ram_free / USABLE_RAM)))
    one = request.changed(request.micro_batches(1), whole)
    memory = one.memory if isinstance(one, Plan) else request.plan.memory
    certain = memory.total - (1 - _CERTAIN_ACTIVATIONS) * memory.activations
    if certain > (memory.limit or certain):
        raise ResourceError(shortage(request))
