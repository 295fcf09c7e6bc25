"""The experts of each layer during training: their ids, sizes, hosts and descent.

The structure changes between two steps, by one ``Change`` at a time, which all hosts carry out in the same
order. It is part of a checkpoint and of a snapshot. All values are frozen and need no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import Any, Literal

SETTLED = 2**62
"""A step after every ramp, for a model whose experts change no more."""
ChangeKind = Literal["born", "warmed", "merged", "pruned", "moved", "copied"]


@dataclass(frozen=True)
class Expert:
    """One expert of a layer."""

    id: int
    """Never used again in its layer."""
    size: int
    """Hidden size."""
    hosts: tuple[int, ...] = (0,)
    """The hosts of its copies, in ascending order. The first one writes it to checkpoints."""
    prior: float = 0.0
    """Added to its logit in the gate: the logarithm of the share that a split left it."""
    parents: tuple[int, ...] = ()
    born_step: int = 0
    ramp_step: int = 0
    """The step from which the gate chooses it, at first for few tokens."""
    warm_step: int = 0
    """The step at which its warm-up ends: its time as a twin, then its ramp."""
    twin_of: int | None = None
    """The parent whose tokens it shares until it is warm. The gate does not choose it by itself."""
    split: tuple[int, ...] = ()
    """The shares of its tokens that the copies get, in the order of ``hosts``, as whole numbers of any
    sum. Empty: equal shares."""

    def prior_at(self, step: int) -> float:
        """Return the prior in a step. An expert that the gate does not know yet gains its share slowly."""
        if self.twin_of is not None:
            return -math.inf
        if step >= self.warm_step:
            return self.prior
        done = (step - self.ramp_step) / (self.warm_step - self.ramp_step)
        return self.prior + math.log(done) if done > 0 else -math.inf


@dataclass(frozen=True)
class LayerStructure:
    """The experts of one layer, in the order of the gate's rows."""

    name: str
    experts: tuple[Expert, ...]
    next_id: int

    @classmethod
    def initial(cls, name: str, sizes: Sequence[int], hosts: Sequence[int] | None = None) -> LayerStructure:
        """Return a layer as the task has built it, with expert ``i`` on host ``hosts[i]``."""
        placed = hosts if hosts is not None else [0] * len(sizes)
        experts = [Expert(i, size, (host,)) for i, (size, host) in enumerate(zip(sizes, placed, strict=True))]
        return cls(name, tuple(experts), len(experts))

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(expert.id for expert in self.experts)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(expert.size for expert in self.experts)

    @property
    def is_initial(self) -> bool:
        """Whether no expert was born, merged or pruned."""
        was_built = [not expert.parents and expert.born_step == 0 for expert in self.experts]
        return self.next_id == len(self.experts) and all(was_built)

    def shifted(self, steps: int) -> LayerStructure:
        """Return the layer for a run that begins anew after ``steps`` steps of an earlier one."""
        experts = tuple(
            replace(
                expert,
                # Experts that the task has built keep their birth at step 0.
                born_step=min(-1, expert.born_step - steps) if expert.born_step else 0,
                ramp_step=expert.ramp_step - steps,
                warm_step=max(0, expert.warm_step - steps),
            )
            for expert in self.experts
        )
        return replace(self, experts=experts)

    def index(self, expert_id: int) -> int:
        """Return the row of an expert in the gate."""
        return self.ids.index(expert_id)

    def expert(self, expert_id: int) -> Expert:
        return self.experts[self.index(expert_id)]

    def held(self, host: int) -> tuple[int, ...]:
        """Return the rows of the experts that a host has a copy of."""
        return tuple(index for index, expert in enumerate(self.experts) if host in expert.hosts)

    def on_hosts(self, hosts: Sequence[int]) -> LayerStructure:
        """Return the layer with one copy of each expert, on these hosts."""
        experts = [
            replace(expert, hosts=(host,), split=()) for expert, host in zip(self.experts, hosts, strict=True)
        ]
        return replace(self, experts=tuple(experts))

    def to_json(self) -> dict[str, Any]:
        """Return a list for each property of the experts, unless all have its default: there may be many."""
        columns = {
            field.name: [getattr(expert, field.name) for expert in self.experts]
            for field in fields(Expert)
            if field.default is MISSING
            or any(getattr(expert, field.name) != field.default for expert in self.experts)
        }
        return {"name": self.name, "experts": columns, "next_id": self.next_id}

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> LayerStructure:
        """Raise ValueError, KeyError or TypeError for what ``to_json`` cannot have returned."""
        columns = saved["experts"]
        names = list(columns)
        rows = zip(*(columns[name] for name in names), strict=True)
        experts = [
            Expert(**{name: _frozen(value) for name, value in zip(names, row, strict=True)}) for row in rows
        ]
        return cls(saved["name"], tuple(experts), saved["next_id"])


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@dataclass(frozen=True)
class Change:
    """One change of a layer's experts, and the reason for it.

    - born: ``ids`` is the new expert, ``parents`` the expert that is split, or empty for an expert made
      afresh; ``size`` and ``hosts`` are those of the new expert.
    - warmed: ``ids`` is an expert whose time as a twin ends.
    - merged: ``ids`` is the new expert, ``parents`` are the two that become one, ``weights`` their shares in
      it. It takes the first one's row in the gate.
    - pruned: ``ids`` is the expert that is removed.
    - moved, copied: ``ids`` are the experts, ``hosts`` the hosts of the copies of each from now on,
      ``splits`` the shares of the copies (see ``Expert.split``)."""

    kind: ChangeKind
    layer: int
    ids: tuple[int, ...]
    reason: str
    parents: tuple[int, ...] = ()
    hosts: tuple[tuple[int, ...], ...] = ()
    size: int | None = None
    weights: tuple[float, ...] = ()
    warmup_steps: int = 0
    splits: tuple[tuple[int, ...], ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Change:
        flat: dict[str, Any] = {name: tuple(fields[name]) for name in ("ids", "parents", "weights")}
        nested: dict[str, Any] = {
            name: tuple(tuple(entry) for entry in fields[name]) for name in ("hosts", "splits")
        }
        return cls(**fields | flat | nested)


def changed(layer: LayerStructure, change: Change, step: int, chooses_all: bool = False) -> LayerStructure:
    """Return the layer after a change that is carried out after ``step`` steps.

    ``chooses_all``: every token goes to every expert."""
    if change.kind in ("born", "merged", "pruned"):
        _check_no_twins(layer, change)
    match change.kind:
        case "born":
            return _with_born(layer, change, step, chooses_all)
        case "warmed":
            return _with_warmed(layer, change.ids[0], step)
        case "merged":
            return _with_merged(layer, change)
        case "pruned":
            experts = tuple(expert for expert in layer.experts if expert.id != change.ids[0])
            return replace(layer, experts=experts)
        case "moved" | "copied":
            return _with_hosts(layer, change)


def _check_no_twins(layer: LayerStructure, change: Change) -> None:
    """Refuse to change the parent of a twin: the twin shares its tokens until the end of the warm-up."""
    concerned = change.ids if change.kind == "pruned" else change.parents
    for expert in layer.experts:
        if expert.twin_of in concerned:
            raise ValueError(f"{layer.name}: expert {expert.twin_of} has a twin in its warm-up, {expert.id}")


def _with_hosts(layer: LayerStructure, change: Change) -> LayerStructure:
    hosts_of = dict(zip(change.ids, change.hosts, strict=True))
    split_of = dict(zip(change.ids, change.splits, strict=True)) if change.splits else {}
    placed = [
        _on_hosts(expert, hosts_of[expert.id], split_of.get(expert.id, ()))
        if expert.id in hosts_of
        else expert
        for expert in layer.experts
    ]
    return replace(layer, experts=tuple(placed))


def _on_hosts(expert: Expert, hosts: tuple[int, ...], split: tuple[int, ...]) -> Expert:
    """Put an expert's copies on hosts, in ascending order, each with its share."""
    if split and len(split) != len(hosts):
        raise ValueError(f"expert {expert.id} has {len(hosts)} hosts and shares for {len(split)} copies")
    if not split:
        return replace(expert, hosts=tuple(sorted(hosts)), split=())
    pairs = sorted(zip(hosts, split, strict=True))
    return replace(expert, hosts=tuple(host for host, _ in pairs), split=tuple(share for _, share in pairs))


def _with_born(layer: LayerStructure, change: Change, step: int, chooses_all: bool) -> LayerStructure:
    (new_id,) = change.ids
    _check_new_id(layer, new_id)
    parent = layer.expert(change.parents[0]) if change.parents else None
    assert parent is not None or change.size is not None, "an expert made afresh needs a size"
    size = parent.size if parent is not None else change.size
    assert size is not None
    hosts = change.hosts[0] if change.hosts else (parent.hosts[:1] if parent else (0,))
    warm_step = step + change.warmup_steps
    newborn = Expert(new_id, size, hosts, 0.0, change.parents, step, step, warm_step)
    experts = layer.experts
    if parent is not None and chooses_all:
        # Both halves get half of the parent's share at once.
        newborn = replace(newborn, prior=parent.prior - math.log(2), warm_step=step)
        halved = replace(parent, prior=parent.prior - math.log(2))
        experts = tuple(halved if expert.id == parent.id else expert for expert in experts)
    elif parent is not None:
        newborn = replace(newborn, prior=parent.prior, twin_of=parent.id)
    return replace(layer, experts=(*experts, newborn), next_id=new_id + 1)


def _with_warmed(layer: LayerStructure, expert_id: int, step: int) -> LayerStructure:
    """Let the gate choose a twin, at first for few tokens: its share grows for as long as it was a twin.

    A gate that chose it at once would drop other experts of the same tokens."""
    twin = layer.expert(expert_id)
    assert twin.twin_of is not None
    warm_step = step + (step - twin.born_step)
    warmed = replace(
        twin, prior=layer.expert(twin.twin_of).prior, twin_of=None, ramp_step=step, warm_step=warm_step
    )
    return replace(layer, experts=tuple(warmed if e.id == expert_id else e for e in layer.experts))


def _with_merged(layer: LayerStructure, change: Change) -> LayerStructure:
    first, second = (layer.expert(expert_id) for expert_id in change.parents)
    (new_id,) = change.ids
    _check_new_id(layer, new_id)
    # The one expert gets the tokens of both.
    prior = math.log(math.exp(first.prior) + math.exp(second.prior))
    hosts = change.hosts[0] if change.hosts else first.hosts
    merged = replace(_on_hosts(first, hosts, ()), id=new_id, prior=prior, parents=change.parents)
    experts = [merged if e.id == first.id else e for e in layer.experts if e.id != second.id]
    return replace(layer, experts=tuple(experts), next_id=new_id + 1)


def _check_new_id(layer: LayerStructure, new_id: int) -> None:
    if new_id != layer.next_id:
        raise ValueError(f"the next expert of {layer.name} is {layer.next_id}; {new_id} was given")
