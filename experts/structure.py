"""The experts of each layer during training: their ids, sizes, hosts and descent.

The structure changes between two steps, by one ``Change`` at a time, which all hosts carry out in the same
order. It is part of a checkpoint and of a snapshot. All values are frozen and need no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

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
    warm_step: int = 0
    """The step at which its warm-up ends."""
    twin_of: int | None = None
    """The parent whose tokens it shares until it is warm. The gate does not choose it by itself."""
    split: tuple[int, ...] = ()
    """The shares of its tokens that the copies get, in the order of ``hosts``, as whole numbers of any
    sum. Empty: equal shares."""

    def prior_at(self, step: int) -> float:
        """Return the prior in a step: an expert made afresh gains its share during the warm-up."""
        if self.twin_of is not None:
            return -math.inf
        if self.parents or step >= self.warm_step:
            return self.prior
        done = (step - self.born_step) / (self.warm_step - self.born_step)
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
        return self.next_id == len(self.experts) and all(not expert.prior for expert in self.experts)

    def index(self, expert_id: int) -> int:
        """Return the row of an expert in the gate."""
        return self.ids.index(expert_id)

    def expert(self, expert_id: int) -> Expert:
        return self.experts[self.index(expert_id)]

    def held(self, host: int) -> tuple[int, ...]:
        """Return the rows of the experts that a host has a copy of."""
        return tuple(index for index, expert in enumerate(self.experts) if host in expert.hosts)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> LayerStructure:
        experts = [Expert(**{**entry, **_tuples(entry)}) for entry in fields["experts"]]
        return cls(fields["name"], tuple(experts), fields["next_id"])


def _tuples(entry: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(entry[name]) for name in ("hosts", "parents", "split")}


@dataclass(frozen=True)
class Change:
    """One change of a layer's experts, and the reason for it.

    - born: ``ids`` is the new expert, ``parents`` the expert that is split, or empty for an expert made
      afresh; ``size`` and ``hosts`` are those of the new expert.
    - warmed: ``ids`` is an expert whose warm-up as a twin ends.
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
        flat = {name: tuple(fields[name]) for name in ("ids", "parents", "weights")}
        nested = {name: tuple(tuple(entry) for entry in fields[name]) for name in ("hosts", "splits")}
        return cls(**{**fields, **flat, **nested})


def changed(layer: LayerStructure, change: Change, step: int, top_k: int) -> LayerStructure:
    """Return the layer after a change that is carried out after ``step`` steps."""
    match change.kind:
        case "born":
            return _with_born(layer, change, step, top_k)
        case "warmed":
            return _with_warmed(layer, change.ids[0])
        case "merged":
            return _with_merged(layer, change)
        case "pruned":
            experts = tuple(expert for expert in layer.experts if expert.id != change.ids[0])
            return replace(layer, experts=experts)
        case "moved" | "copied":
            return _with_hosts(layer, change)


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


def _with_born(layer: LayerStructure, change: Change, step: int, top_k: int) -> LayerStructure:
    (new_id,) = change.ids
    if new_id != layer.next_id:
        raise ValueError(
            f"the next expert of {layer.name} is {layer.next_id}; expert {new_id} was to be born"
        )
    parent = layer.expert(change.parents[0]) if change.parents else None
    assert parent is not None or change.size is not None, "an expert made afresh needs a size"
    size = parent.size if parent is not None else change.size
    assert size is not None
    hosts = change.hosts[0] if change.hosts else (parent.hosts[:1] if parent else (0,))
    newborn = Expert(new_id, size, hosts, 0.0, change.parents, step, step + change.warmup_steps)
    experts = layer.experts
    if parent is not None and top_k == len(layer.experts):
        # Every token goes to every expert: both halves get half of the parent's share at once.
        newborn = replace(newborn, prior=parent.prior - math.log(2), warm_step=step)
        halved = replace(parent, prior=parent.prior - math.log(2))
        experts = tuple(halved if expert.id == parent.id else expert for expert in experts)
    elif parent is not None:
        newborn = replace(newborn, prior=parent.prior, twin_of=parent.id)
    return replace(layer, experts=(*experts, newborn), next_id=new_id + 1)


def _with_warmed(layer: LayerStructure, expert_id: int) -> LayerStructure:
    """Give twin and parent half of the parent's share each."""
    parent_id = layer.expert(expert_id).twin_of
    parent_prior = layer.expert(parent_id).prior if parent_id is not None else 0.0
    halved = parent_prior - math.log(2)
    experts = [
        replace(expert, prior=halved, twin_of=None) if expert.id in (expert_id, parent_id) else expert
        for expert in layer.experts
    ]
    return replace(layer, experts=tuple(experts))


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
