"""Faults as data: what happens, to which process, and when.

A schedule is drawn from a seed or written by hand, stored as JSON, and can be repeated.
``fault_injector`` carries it out from outside the run, ``faulty_task`` at exact moments inside a
step.

    FaultSchedule().kill(1, step=30).stop(0, step=50, wakes_after_s=2.0).kill(2, step=70, phase="exchange")
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

FaultKind = Literal[
    "sigkill", "sigstop", "exception", "oom", "disk", "raylet", "driver", "delay", "gil", "kernel", "compile"
]
VictimKind = Literal["ranks", "idle", "newcomer", "buddy", "nobody"]
Phase = Literal[
    "anywhere",
    "data",
    "forward",
    "counts",
    "exchange",
    "backward",
    "gradients",
    "evaluate",
    "snapshot",
    "checkpoint",
    "measure",
    "before move",
    "after move",
    "gate",
    "validate",
    "undo",
    "recovery",
]
EVOLUTION_PHASES: tuple[Phase, ...] = ("measure", "before move", "after move", "gate", "validate", "undo")
"""Phases of a change of experts: statistics, the exchange of experts, the time between the change of the
bank and that of the gate, the validation, and the way back."""
INSIDE_PHASES: frozenset[Phase] = frozenset(get_args(Phase)) - {"anywhere", "recovery"}
"""Phases that only the process itself can recognise."""
PHASE_WEIGHTS: dict[Phase, float] = {
    "anywhere": 0.3,
    "forward": 0.1,
    "counts": 0.05,
    "exchange": 0.1,
    "backward": 0.1,
    "gradients": 0.05,
    "snapshot": 0.08,
    "checkpoint": 0.07,
    "recovery": 0.15,
}
DENSE_WEIGHTS: dict[Phase, float] = {
    phase: weight for phase, weight in PHASE_WEIGHTS.items() if phase not in ("counts", "exchange")
}
"""The phases of a dense model, which exchanges no tokens."""
EVOLUTION_WEIGHTS: dict[Phase, float] = {
    **{phase: weight * 2 / 3 for phase, weight in PHASE_WEIGHTS.items()},
    "measure": 0.1,
    "before move": 0.06,
    "after move": 0.06,
    "gate": 0.04,
    "validate": 0.04,
    "undo": 0.03,
}
"""The weights for runs whose experts change: a third of the kills hits a change."""
_MAX_SECONDS_INTO_RECOVERY = 1.0
_MAX_SECONDS_AFTER_STEP = 0.1


@dataclass(frozen=True)
class Victim:
    """The processes that a fault hits.

    ``ranks``: these, all at once. ``idle``: a host without experts. ``newcomer``: the host that
    joined last. ``buddy``: the rank after the last victim's. ``nobody``: the fault hits the
    machine, not a rank."""

    kind: VictimKind = "ranks"
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        known = self.kind in get_args(VictimKind)
        if not known or (self.kind == "ranks") != bool(self.ranks) or any(rank < 0 for rank in self.ranks):
            raise ValueError(
                f"a victim is {self.kind!r} with ranks {self.ranks}; only the kind 'ranks' names ranks,"
                " and they are 0 or more"
            )


@dataclass(frozen=True)
class Moment:
    """The time of a fault.

    It happens in ``phase`` of ``step`` (from 1), or of the first later step that has this phase.
    Phase *anywhere* means ``seconds`` after that step was recorded (step 0: after the first step of
    the run); *recovery* means ``seconds`` after the fault before."""

    phase: Phase = "anywhere"
    step: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        known = self.phase in get_args(Phase)
        if not known or self.step < 0 or self.seconds < 0 or (self.inside and self.seconds):
            raise ValueError(
                f"{self} is not a moment; phases are {', '.join(get_args(Phase))}, and those inside a step"
                " have no seconds"
            )

    @property
    def inside(self) -> bool:
        """Whether the fault happens inside a step, so that the process itself must carry it out."""
        return self.phase in INSIDE_PHASES


@dataclass(frozen=True)
class Fault:
    """One fault. ``wakes_after_s``: when a stopped or delayed process continues; None means never.

    ``delay``: the process sleeps. ``gil``: a thread holds the interpreter lock. ``kernel``: the GPU
    runs a kernel that does not end. ``compile``: torch compiles."""

    kind: FaultKind
    victim: Victim
    moment: Moment
    wakes_after_s: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(FaultKind):
            raise ValueError(f"no fault is called {self.kind!r}; there are {', '.join(get_args(FaultKind))}")
        if (self.kind in ("raylet", "driver")) != (self.victim.kind == "nobody"):
            raise ValueError(
                f"{self.kind} of {self.victim.kind}: a raylet or the driver has no rank, and other "
                f"faults need one"
            )
        happens_outside = ("sigkill", "sigstop", "raylet", "driver")
        if self.kind not in happens_outside and not self.moment.inside:
            raise ValueError(
                f"{self.kind} happens inside a step; phase {self.moment.phase} is seen from outside"
            )
        if self.moment.inside and self.victim.kind != "ranks":
            raise ValueError(
                f"a process knows its rank, but not whether it is the {self.victim.kind}:"
                f" name ranks for phase {self.moment.phase}"
            )


@dataclass(frozen=True)
class FaultSchedule:
    """The faults of a run, numbered by their position. Each happens once."""

    faults: tuple[Fault, ...] = ()
    seed: int | None = field(default=None, compare=False)

    def add(self, fault: Fault) -> FaultSchedule:
        return replace(self, faults=(*self.faults, fault))

    def kill(
        self,
        victim: int | Sequence[int] | VictimKind,
        step: int = 0,
        phase: Phase = "anywhere",
        seconds: float = 0.0,
    ) -> FaultSchedule:
        return self.add(Fault("sigkill", _victim(victim), Moment(phase, step, seconds)))

    def stop(
        self, rank: int, step: int = 0, phase: Phase = "anywhere", wakes_after_s: float | None = None
    ) -> FaultSchedule:
        return self.add(Fault("sigstop", _victim(rank), Moment(phase, step), wakes_after_s))

    def delay(
        self,
        kind: FaultKind,
        rank: int,
        seconds: float | None = None,
        step: int = 0,
        phase: Phase = "forward",
    ) -> FaultSchedule:
        """Add a process that is slow or hangs; ``seconds`` None means for ever."""
        return self.add(Fault(kind, _victim(rank), Moment(phase, step), seconds))

    def fail(self, kind: FaultKind, rank: int = 0, step: int = 0, phase: Phase = "forward") -> FaultSchedule:
        """Add an exception, an out-of-memory error, or a full disk."""
        return self.add(Fault(kind, _victim(rank), Moment(phase, step)))

    def lose(self, kind: FaultKind, step: int = 0) -> FaultSchedule:
        """Add the loss of a raylet or of the driver."""
        return self.add(Fault(kind, Victim("nobody"), Moment("anywhere", step)))

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> FaultSchedule:
        data: dict[str, Any] = json.loads(text)
        return cls(tuple(_parse_fault(entry) for entry in data["faults"]), data["seed"])


def _victim(name: int | Sequence[int] | VictimKind) -> Victim:
    if isinstance(name, str):
        return Victim(name)
    return Victim("ranks", (name,) if isinstance(name, int) else tuple(name))


def _parse_fault(entry: dict[str, Any]) -> Fault:
    victim = Victim(entry["victim"]["kind"], tuple(entry["victim"]["ranks"]))
    return Fault(entry["kind"], victim, Moment(**entry["moment"]), entry["wakes_after_s"])


def random_kills(
    seed: int,
    kills: int,
    *,
    hosts: int,
    first: int,
    last: int,
    phase_weights: Mapping[Phase, float] = PHASE_WEIGHTS,
) -> FaultSchedule:
    """Draw a number of SIGKILLs between two steps, of any host, in phases drawn by their weights.

    A kill in the recovery from another one hits another host, or the one that has just replaced the
    victim."""
    if kills > last - first:
        raise ValueError(
            f"{kills} kills need as many steps to happen at; between steps {first} and {last}"
            f" there are {last - first}"
        )
    draw = random.Random(f"kills/{seed}")
    known_phases = list(phase_weights)
    weights = list(phase_weights.values())
    faults: list[Fault] = []
    last_rank = 0
    for step in sorted(draw.sample(range(first, last), kills)):
        phase = draw.choices(known_phases, weights)[0]
        if phase == "recovery" and faults:
            faults.append(_kill_in_recovery(draw, last_rank, hosts))
            continue
        last_rank = draw.randrange(hosts)
        if phase == "recovery":  # there is nothing to recover from yet
            phase = "anywhere"
        seconds = round(draw.uniform(0, _MAX_SECONDS_AFTER_STEP), 4) if phase == "anywhere" else 0.0
        faults.append(Fault("sigkill", Victim("ranks", (last_rank,)), Moment(phase, step, seconds)))
    return FaultSchedule(tuple(faults), seed)


def _kill_in_recovery(draw: random.Random, last_rank: int, hosts: int) -> Fault:
    victim = Victim("newcomer")
    if draw.random() >= 0.5:
        victim = Victim("ranks", ((last_rank + draw.randrange(1, hosts)) % hosts,))
    seconds = round(draw.uniform(0, _MAX_SECONDS_INTO_RECOVERY), 3)
    return Fault("sigkill", victim, Moment("recovery", 0, seconds))


def kills_every(seed: int, seconds: float, *, hosts: int, until: float) -> FaultSchedule:
    """Draw a SIGKILL of any host for every so many seconds of training."""
    draw = random.Random(f"every/{seed}")
    faults: list[Fault] = []
    for number in range(1, round(until / seconds) + 1):
        if seconds * number < until:
            victim = Victim("ranks", (draw.randrange(hosts),))
            faults.append(Fault("sigkill", victim, Moment("anywhere", 0, seconds * number)))
    return FaultSchedule(tuple(faults), seed)


# Faults that have happened: a file for each victim of each fault, written just before the fault.


@dataclass(frozen=True)
class FiredFault:
    """A fault that has happened to a process.

    ``time`` is in unix seconds, just before the fault; ``step`` is the last step that was known
    then."""

    fault: int
    kind: FaultKind
    phase: Phase
    rank: int | None
    pid: int
    step: int
    time: float


@dataclass(frozen=True)
class FaultFolder:
    """The folder next to a run's folder by which the injector and the processes of the run share a
    schedule."""

    folder: Path

    @classmethod
    def of_run(cls, run_dir: Path) -> FaultFolder:
        return cls(run_dir.with_name(f"{run_dir.name}.chaos"))

    def write(self, schedule: FaultSchedule, pace_s: float = 0.0) -> None:
        """Write a schedule. ``pace_s``: how long each host sleeps in a step."""
        (self.folder / "fired").mkdir(parents=True, exist_ok=True)
        (self.folder / "pace").write_text(str(pace_s), encoding="utf-8")
        (self.folder / "seen").mkdir(exist_ok=True)
        (self.folder / "faults.json").write_text(schedule.to_json(), encoding="utf-8")

    def schedule(self) -> FaultSchedule:
        path = self.folder / "faults.json"
        if not path.exists():
            return FaultSchedule()
        return FaultSchedule.from_json(path.read_text(encoding="utf-8"))

    def pace_s(self) -> float:
        path = self.folder / "pace"
        return float(path.read_text(encoding="utf-8")) if path.exists() else 0.0

    def claim(self, number: int, fault: Fault, rank: int | None, pid: int, step: int) -> bool:
        """Record that a fault is about to happen to a rank.

        Return False if it has happened already."""
        fired = FiredFault(number, fault.kind, fault.moment.phase, rank, pid, step, time.time())
        path = self.folder / "fired" / f"{number:04d}_{'x' if rank is None else rank}.json"
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            return False
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(asdict(fired), file)
        return True

    def fired(self) -> list[FiredFault]:
        """Return the faults that have happened, by time.

        A file that is still being written is left out."""
        found: list[FiredFault] = []
        for path in self.folder.glob("fired/*.json"):
            text = path.read_text(encoding="utf-8")
            if text.endswith("}"):
                found.append(FiredFault(**json.loads(text)))
        return sorted(found, key=lambda fault: fault.time)
