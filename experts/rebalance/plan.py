"""A plan to move and copy the experts of one layer: what it wins, what it costs, and its changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from experts.structure import Change, ChangeKind, Expert, LayerStructure


@dataclass(frozen=True)
class Plan:
    """The hosts and shares of a layer's experts before and after."""

    before: LayerStructure
    after: LayerStructure
    transfer: Transfer
    change_seconds: float
    """The time to carry it out, beside its transfer."""
    won_in_windows: tuple[float, ...]
    """Seconds per step, in each of the recent windows."""
    seconds_won: float
    """Per step, in their mean."""
    imbalance_before: float
    imbalance_after: float
    steps: float
    """The steps for which such loads usually last."""

    def net_seconds(self, margin: float) -> float:
        """Return the seconds won in all these steps, less a multiple of the costs."""
        return self.seconds_won * self.steps - margin * self.seconds

    @property
    def seconds(self) -> float:
        """What the plan costs, once."""
        return self.transfer.seconds + self.change_seconds

    def changes(self, layer: int) -> list[Change]:
        """Return a change for the moves and one for the copies and their shares."""
        moved: list[tuple[Expert, Expert]] = []
        copied: list[tuple[Expert, Expert]] = []
        for old, new in zip(self.before.experts, self.after.experts, strict=True):
            if old != new:
                is_move = len(old.hosts) == len(new.hosts) == 1
                (moved if is_move else copied).append((old, new))
        made = [self._change("moved", layer, moved), self._change("copied", layer, copied)]
        return [change for change in made if change is not None]

    def _change(self, kind: ChangeKind, layer: int, pairs: Sequence[tuple[Expert, Expert]]) -> Change | None:
        if not pairs:
            return None
        return Change(
            kind,
            layer,
            tuple(new.id for _, new in pairs),
            self._reason(kind, pairs),
            hosts=tuple(new.hosts for _, new in pairs),
            splits=tuple(new.split for _, new in pairs),
        )

    def _reason(self, kind: ChangeKind, pairs: Sequence[tuple[Expert, Expert]]) -> str:
        what = _count(len(pairs), "expert moves", "experts move") if kind == "moved" else _copies_text(pairs)
        balance = f"slowest host {self.imbalance_before:.2f} of the mean, then {self.imbalance_after:.2f}"
        costs = f"{_size(self.transfer.bytes)} in {_duration(self.seconds)}"
        steps = _count(round(self.steps), "step", "steps")
        won = f"{_duration(self.seconds_won)} won per step for about {steps}"
        return f"{what}: {balance}; {costs}, {won}"


@dataclass(frozen=True)
class Transfer:
    """The bytes that a plan sends, and the seconds in which the busiest host sends or receives."""

    bytes: float
    seconds: float

    @classmethod
    def between(
        cls,
        before: LayerStructure,
        after: LayerStructure,
        bytes_of: Sequence[float],
        num_hosts: int,
        bandwidth: float,
    ) -> Transfer:
        busy = [0.0] * num_hosts
        total = 0.0
        for old, new, size in zip(before.experts, after.experts, bytes_of, strict=True):
            added = set(new.hosts) - set(old.hosts)
            total += size * len(added)
            for host in added:
                busy[host] += size
            for host in old.hosts:
                busy[host] += size * len(added) / len(old.hosts)
        return cls(total, max(busy) / bandwidth)


def _copies_text(pairs: Sequence[tuple[Expert, Expert]]) -> str:
    more = sum(max(0, len(new.hosts) - len(old.hosts)) for old, new in pairs)
    fewer = sum(max(0, len(old.hosts) - len(new.hosts)) for old, new in pairs)
    parts = [_count(more, "copy is added", "copies are added")] if more else []
    parts += [_count(fewer, "copy is removed", "copies are removed")] if fewer else []
    experts = _count(len(pairs), "expert", "experts")
    return f"{' and '.join(parts) or 'the copies get other shares'} ({experts})"


def _count(count: int, singular: str, plural: str) -> str:
    return f"{count} {singular if count == 1 else plural}"


def _size(num_bytes: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if abs(seconds) >= 1 else f"{seconds * 1000:.3g} ms"
