"""The request for a sweep: which trials, how long each, and which objective compares them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_type_hints

from orchestrator.config.metric import split_metric
from orchestrator.config.settings import Config, setting_types
from orchestrator.config.sweep.objective import THROUGHPUT, check_effect
from orchestrator.config.sweep.space import MAX_POINTS, Space, Values, plain_point
from orchestrator.config.sweep.space_parser import points_space, space_from_json
from orchestrator.config.values import as_declared
from orchestrator.errors import UserError
from orchestrator.redaction import MASK
from orchestrator.types import flag_of

Search = Literal["grid", "random", "optuna"]

_TRIAL_SECONDS = 10.0
_LEDGER_FIELDS = ("search", "objective", "asha", "trial_seconds", "trial_steps")


@dataclass(frozen=True)
class Sweep:
    """A sweep over a space of settings."""

    space: Space
    search: Search = "grid"
    trials: int | None = None
    """Number of trials; None: every point of the grid."""
    objective: str = THROUGHPUT
    """throughput, validation_loss, or a validation metric: accuracy, churn:min."""
    asha: bool = False
    trial_seconds: float = _TRIAL_SECONDS
    trial_steps: int | None = None
    concurrent: int | None = None

    def __post_init__(self) -> None:
        self._check_numbers()
        if self.search != "grid" and self.trials is None:
            raise UserError(f"--search {self.search} needs to know when it is over: give --trials N")
        self._check_objective()
        if self.objective == THROUGHPUT and self.trial_steps is not None:
            raise UserError(
                "--trial-steps is for --objective validation_loss or a metric; "
                "how long a trial is measured is --trial-seconds"
            )
        if self.objective != THROUGHPUT and self.trial_seconds != _TRIAL_SECONDS:
            raise UserError(
                "--trial-seconds is for --objective throughput; how long a trial trains is --trial-steps"
            )
        if self.search == "grid":
            self.space.grid()  # raises for ranges, and for too many points
        elif self.search == "optuna" and self.space.given:
            raise UserError(
                "--search optuna looks for points of its own, and the space is a list of points; "
                "leave --search out"
            )

    def _check_objective(self) -> None:
        try:
            # A name without a direction may have one in the task.
            split_metric(self.objective)
        except ValueError as error:
            raise UserError(f"--objective {error}") from None
        check_effect(self.objective, self.space.varied())

    def _check_numbers(self) -> None:
        for name in ("trials", "trial_steps", "concurrent"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{flag_of(name)} is {value}; it must be at least 1")
        if self.search != "grid" and (self.trials or 0) > MAX_POINTS:
            raise UserError(f"--trials is {self.trials:,}; at most {MAX_POINTS:,} are made")
        if not 0 < self.trial_seconds < 1e6:
            raise UserError(f"--trial-seconds is {self.trial_seconds}; it must be positive and finite")

    @property
    def num_trials(self) -> int:
        """The number of trials of the whole sweep."""
        if self.search == "grid":
            return min(self.space.size, self.trials or self.space.size)
        assert self.trials is not None
        return min(self.trials, self.space.size)

    def header(self) -> dict[str, Any]:
        """Return the fields of the ledger from which ``of_header`` makes the sweep again."""
        points = {"points": [plain_point(point) for point in self.space.given]} if self.space.given else {}
        return {
            "space": self.space.texts(),
            "domains": self.space.to_json(),
            **points,
            "trials": self.num_trials,
            **{name: getattr(self, name) for name in _LEDGER_FIELDS},
        }

    @classmethod
    def of_header(cls, header: Mapping[str, Any], concurrent: int | None) -> Sweep:
        """Return the sweep of a ledger."""
        domains = as_mapping(header.get("domains"))
        masked = [name for name, domain in domains.items() if MASK in str(domain)]
        if masked:
            raise UserError(
                f"the ledger keeps the values of {masked[0]} without the secrets in them; "
                "begin the sweep anew"
            )
        try:
            if "points" in header:
                space = points_space(header["points"], "the ledger")
            else:
                space = space_from_json(header["domains"])
            hints = get_type_hints(cls)
            names = ("trials", *_LEDGER_FIELDS)
            values = {name: as_declared(name, hints[name], header[name]) for name in names}
            return cls(space, concurrent=concurrent, **values)
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
            raise UserError(
                f"the ledger does not say what was to be swept ({error!r}); begin the sweep anew"
            ) from None


def as_mapping(value: Any) -> Mapping[str, Any]:
    """Return a value of a ledger that should be a mapping; an empty one if it is something else."""
    return value if isinstance(value, Mapping) else {}


def requested_workers(space: Space, config: Config) -> list[int]:
    """Return the numbers of workers that the trials of a sweep ask for; empty if the plan decides."""
    domain = space.domains.get("workers")
    if domain is None:
        return [config.parallel.workers] if isinstance(config.parallel.workers, int) else []
    values = domain.values if isinstance(domain, Values) else (int(domain.low), int(domain.high))
    return [value for value in values if isinstance(value, int)]


def config_from_ledger(settings: Mapping[str, Any]) -> Config:
    """Return the config of a ledger."""
    unknown = [name for name in settings if name not in setting_types()]
    if unknown:
        raise UserError(
            f"the ledger names a setting that this version does not know: {unknown[0]!r}; "
            "begin the sweep anew"
        )
    return Config.of(**settings)
