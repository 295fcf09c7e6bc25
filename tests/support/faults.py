"""Faults as data: what happens, to whom, and when. A schedule is drawn from a seed or written by hand, kept as JSON, and can be
carried out again: from outside by ``injector``, and at exact moments inside a step by ``faulty_task``.

    Schedule().kill(rank=1, step=30).stop(rank=0, step=50, wakes_after=2.0).kill(rank=2, step=70, phase="exchange")
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

What = Literal["sigkill", "sigstop", "exception", "oom", "disk", "raylet", "driver"]
Who = Literal["ranks", "idle", "newcomer", "buddy", "nobody"]
Phase = Literal["anywhere", "forward", "backward", "exchange", "snapshot", "checkpoint", "recovery"]
INSIDE: frozenset[Phase] = frozenset({"forward", "backward", "exchange", "snapshot", "checkpoint"})
"""Phases that only the process itself can tell."""
WEIGHTS: dict[Phase, float] = {
    "anywhere": 0.4, "forward": 0.1, "backward": 0.1, "exchange": 0.1, "snapshot": 0.08, "checkpoint": 0.07, "recovery": 0.15,
}  # fmt: skip
_LONGEST_WAIT = 1.0  # seconds into a recovery, or past a step


@dataclass(frozen=True)
class Whom:
    """``ranks``: those, all at once; ``idle``: a host without experts; ``newcomer``: the one that took a place last; ``buddy``: the
    next rank to the one hit last; ``nobody``: a fault of the machine."""

    who: Who = "ranks"
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if (
            self.who not in get_args(Who)
            or (self.who == "ranks") != bool(self.ranks)
            or any(rank < 0 for rank in self.ranks)
        ):
            raise ValueError(
                f"a victim is {self.who!r} with ranks {self.ranks}; ranks name some, and nobody else does"
            )


@dataclass(frozen=True)
class When:
    """In ``phase`` of ``step`` (from 1) or the first later one that has it; anywhere: so many ``seconds`` after that step was
    recorded (of step 0: after the first sign of life); recovery: so many seconds after the fault before it."""

    phase: Phase = "anywhere"
    step: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if (
            self.phase not in get_args(Phase)
            or self.step < 0
            or self.seconds < 0
            or (self.phase in INSIDE and self.seconds)
        ):
            raise ValueError(
                f"no moment: {self}; phases are {', '.join(get_args(Phase))}, and seconds are counted outside a step"
            )

    @property
    def inside(self) -> bool:
        return self.phase in INSIDE


@dataclass(frozen=True)
class Fault:
    """``wakes_after``: seconds until a stopped process goes on; None: never."""

    what: What
    whom: Whom
    when: When
    wakes_after: float | None = None

    def __post_init__(self) -> None:
        if self.what not in get_args(What):
            raise ValueError(f"no fault is called {self.what!r}; there are {', '.join(get_args(What))}")
        if (self.what in ("raylet", "driver")) != (self.whom.who == "nobody"):
            raise ValueError(
                f"{self.what} of {self.whom.who}: a raylet or the driver is nobody's rank, and the rest is somebody's"
            )
        if self.what in ("exception", "oom", "disk") and not self.when.inside:
            raise ValueError(
                f"{self.what} happens inside a step; phase {self.when.phase} is seen from outside"
            )
        if self.when.inside and self.whom.who != "ranks":
            raise ValueError(
                f"a process knows its rank, and not whether it is the {self.whom.who}: name ranks for phase {self.when.phase}"
            )


@dataclass(frozen=True)
class Schedule:
    """Faults, numbered by their place. Each happens once."""

    faults: tuple[Fault, ...] = ()
    seed: int | None = field(default=None, compare=False)

    def add(self, fault: Fault) -> Schedule:
        return replace(self, faults=(*self.faults, fault))

    def kill(
        self, rank: int | Sequence[int] | Who, step: int = 0, phase: Phase = "anywhere", seconds: float = 0.0
    ) -> Schedule:
        return self.add(Fault("sigkill", _whom(rank), When(phase, step, seconds)))

    def stop(
        self, rank: int, step: int = 0, phase: Phase = "anywhere", wakes_after: float | None = None
    ) -> Schedule:
        return self.add(Fault("sigstop", _whom(rank), When(phase, step), wakes_after))

    def fail(self, what: What, rank: int = 0, step: int = 0, phase: Phase = "forward") -> Schedule:
        """An exception, running out of memory, or a full disk."""
        return self.add(Fault(what, _whom(rank), When(phase, step)))

    def lose(self, what: What, step: int = 0) -> Schedule:
        """A raylet or the driver."""
        return self.add(Fault(what, Whom("nobody"), When("anywhere", step)))

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Schedule:
        data: dict[str, Any] = json.loads(text)
        return cls(tuple(_fault(entry) for entry in data["faults"]), data["seed"])


def _whom(named: int | Sequence[int] | Who) -> Whom:
    if isinstance(named, str):
        return Whom(named)  # pyright: ignore[reportArgumentType]
    return Whom("ranks", (named,) if isinstance(named, int) else tuple(named))


def _fault(entry: dict[str, Any]) -> Fault:
    whom = Whom(entry["whom"]["who"], tuple(entry["whom"]["ranks"]))
    return Fault(entry["what"], whom, When(**entry["when"]), entry["wakes_after"])


def random_kills(
    seed: int, kills: int, *, hosts: int, first: int, last: int, phases: Sequence[Phase] = ()
) -> Schedule:
    """So many SIGKILLs between two steps, any host, any moment: as many in the ``phases`` as their weights say. A kill in the recovery
    from another hits another host than that one did, or the one that has just taken its place."""
    if kills > last - first:
        raise ValueError(
            f"{kills} kills need as many steps to happen at; between steps {first} and {last} there are {last - first}"
        )
    draw, known = random.Random(f"kills/{seed}"), list(phases or WEIGHTS)
    steps, faults = sorted(draw.sample(range(first, last), kills)), list[Fault]()
    hit = 0
    for step in steps:
        phase = draw.choices(known, [WEIGHTS[phase] for phase in known])[0]
        if phase == "recovery" and faults:
            whom = (
                Whom("newcomer")
                if draw.random() < 0.5
                else Whom("ranks", ((hit + draw.randrange(1, hosts)) % hosts,))
            )
            faults.append(
                Fault("sigkill", whom, When("recovery", 0, round(draw.uniform(0, _LONGEST_WAIT), 3)))
            )
            continue
        hit = draw.randrange(hosts)
        phase = "anywhere" if phase == "recovery" else phase
        seconds = round(draw.uniform(0, 0.1), 4) if phase == "anywhere" else 0.0
        faults.append(Fault("sigkill", Whom("ranks", (hit,)), When(phase, step, seconds)))
    return Schedule(tuple(faults), seed)


def kills_every(seed: int, seconds: float, *, hosts: int, until: float) -> Schedule:
    """A SIGKILL of any host every so many seconds of training."""
    draw = random.Random(f"every/{seed}")
    at = [seconds * number for number in range(1, round(until / seconds) + 1) if seconds * number < until]
    return Schedule(
        tuple(
            Fault("sigkill", Whom("ranks", (draw.randrange(hosts),)), When("anywhere", 0, moment))
            for moment in at
        ),
        seed,
    )


# --- what has happened: a file for each victim of each fault, made before the fault, by whoever carries it out


@dataclass(frozen=True)
class Fired:
    """A fault that has happened to someone. ``time`` is in unix seconds, taken just before; ``step`` the newest that was known."""

    fault: int
    what: What
    phase: Phase
    rank: int | None
    pid: int
    step: int
    time: float


@dataclass(frozen=True)
class Post:
    """Where those who carry out a schedule meet: a folder beside that of the run."""

    folder: Path

    @classmethod
    def beside(cls, run_dir: Path) -> Post:
        return cls(run_dir.with_name(f"{run_dir.name}.chaos"))

    def lay_out(self, schedule: Schedule, pace: float = 0.0) -> None:
        """``pace``: seconds that each host sleeps in a step."""
        (self.folder / "fired").mkdir(parents=True, exist_ok=True)
        (self.folder / "pace").write_text(str(pace), encoding="utf-8")
        (self.folder / "seen").mkdir(exist_ok=True)
        (self.folder / "faults.json").write_text(schedule.to_json(), encoding="utf-8")

    def schedule(self) -> Schedule:
        path = self.folder / "faults.json"
        return Schedule.from_json(path.read_text(encoding="utf-8")) if path.exists() else Schedule()

    def pace(self) -> float:
        path = self.folder / "pace"
        return float(path.read_text(encoding="utf-8")) if path.exists() else 0.0

    def claim(self, number: int, fault: Fault, rank: int | None, pid: int, step: int) -> bool:
        """Say that a fault is about to happen to a rank; False where it has happened already."""
        told = Fired(number, fault.what, fault.when.phase, rank, pid, step, time.time())
        try:
            descriptor = os.open(self._path(number, rank), os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            return False
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(asdict(told), file)
        return True

    def happened(self, number: int, rank: int | None) -> bool:
        return self._path(number, rank).exists()

    def _path(self, number: int, rank: int | None) -> Path:
        return self.folder / "fired" / f"{number:04d}_{'x' if rank is None else rank}.json"

    def fired(self) -> list[Fired]:
        """In the order in which they happened. One whose file is being written is left for the next look."""
        found: list[Fired] = []
        for path in self.folder.glob("fired/*.json"):
            text = path.read_text(encoding="utf-8")
            if text.endswith("}"):
                found.append(Fired(**json.loads(text)))
        return sorted(found, key=lambda one: one.time)
