"""What a sweep is asked to do: which trials, how long each, and what makes one better than another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_type_hints

from orchestrator.config.settings import Config, flat_names, setting_types
from orchestrator.config.space import MOST_POINTS, Space, Values, plain_point, points_space
from orchestrator.config.values import as_declared
from orchestrator.errors import UserError
from orchestrator.redaction import MASK

Search = Literal["grid", "random", "optuna"]
Objective = Literal["throughput", "validation_loss"]

_SECONDS = 10.0


@dataclass(frozen=True)
class Sweep:
    """A sweep over a space of settings."""

    space: Space
    search: Search = "grid"
    trials: int | None = None
    """Trials to be made in all; None: every point of the grid."""
    objective: Objective = "throughput"
    asha: bool = False
    trial_seconds: float = _SECONDS
    trial_steps: int | None = None
    concurrent: int | None = None

    def __post_init__(self) -> None:
        for name, value in (
            ("--trials", self.trials),
            ("--trial-steps", self.trial_steps),
            ("--concurrent", self.concurrent),
        ):
            if value is not None and value < 1:
                raise UserError(f"{name} is {value}; it must be at least 1")
        if self.search != "grid" and (self.trials or 0) > MOST_POINTS:
            raise UserError(f"--trials is {self.trials:,}; at most {MOST_POINTS:,} are made")
        if not 0 < self.trial_seconds < 1e6:
            raise UserError(f"--trial-seconds is {self.trial_seconds}; it must be positive and finite")
        if self.search != "grid" and self.trials is None:
            raise UserError(f"--search {self.search} needs to know when it is over: give --trials N")
        if self.objective == "throughput" and self.trial_steps is not None:
            raise UserError(
                "--trial-steps is for --objective validation_loss; how long a trial is measured is --trial-seconds"
            )
        if self.objective == "validation_loss" and self.trial_seconds != _SECONDS:
            raise UserError(
                "--trial-seconds is for --objective throughput; how long a trial trains is --trial-steps"
            )
        if self.search == "grid":
            self.space.grid()
        elif self.search == "optuna" and self.space.given:
            raise UserError(
                "--search optuna looks for points of its own, and the space is a list of points; leave --search out"
            )

    @property
    def points(self) -> int:
        """How many trials there are to be."""
        if self.search == "grid":
            return min(self.space.size, self.trials or self.space.size)
        assert self.trials is not None
        return min(self.trials, self.space.size)

    def header(self) -> dict[str, Any]:
        """What the ledger keeps of it."""
        names = ("search", "objective", "asha", "trial_seconds", "trial_steps")
        given = {"points": [plain_point(point) for point in self.space.given]} if self.space.given else {}
        return {
            "space": self.space.texts(),
            "domains": self.space.to_json(),
            **given,
            "trials": self.points,
            **{name: getattr(self, name) for name in names},
        }

    @classmethod
    def of_header(cls, header: Mapping[str, Any], concurrent: int | None) -> Sweep:
        """The sweep that a ledger was begun for."""
        hidden = [name for name, domain in as_mapping(header.get("domains")).items() if MASK in str(domain)]
        if hidden:
            raise UserError(
                f"the ledger keeps the values of {hidden[0]} without the secrets in them; begin the sweep anew"
            )
        try:
            space = (
                points_space(header["points"], "the ledger")
                if "points" in header
                else Space.of_json(header["domains"])
            )
            names = ("search", "trials", "objective", "asha", "trial_seconds", "trial_steps")
            hints = get_type_hints(cls)
            return cls(
                space,
                concurrent=concurrent,
                **{name: as_declared(name, hints[name], header[name]) for name in names},
            )
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
            raise UserError(
                f"the ledger does not say what was to be swept ({error!r}); begin the sweep anew"
            ) from None


def as_mapping(value: Any) -> Mapping[str, Any]:
    """Of a ledger: empty where it holds something else."""
    return value if isinstance(value, Mapping) else {}


def settings_of(config: Config) -> dict[str, Any]:
    """The settings that differ from their defaults, by flat name, as JSON has them."""
    plain = flat_values(Config())
    return {name: value for name, value in flat_values(config).items() if value != plain[name]}


def flat_values(config: Config) -> dict[str, Any]:
    """Every setting by its flat name, as JSON has it."""
    from orchestrator.config.reader import to_json

    tree = to_json(config)
    return {name: tree[section][name] if section else tree[name] for name, section in flat_names().items()}


def workers_asked(space: Space, config: Config) -> list[int]:
    """The numbers of workers that the trials of a sweep ask for; empty where that is left to the plan."""
    domain = space.domains.get("workers")
    if domain is None:
        return [config.parallel.workers] if isinstance(config.parallel.workers, int) else []
    values = domain.values if isinstance(domain, Values) else (int(domain.low), int(domain.high))
    return [value for value in values if isinstance(value, int)]


def restored(settings: Mapping[str, Any]) -> Config:
    """The config that a ledger keeps."""
    unknown = [name for name in settings if name not in setting_types()]
    if unknown:
        raise UserError(
            f"the ledger names a setting that this version does not know: {unknown[0]!r}; begin the sweep anew"
        )
    return Config.of(**settings)
