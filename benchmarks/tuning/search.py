"""Search strategies on listed spaces: how near to the best setting a few trials come, and what a
suggestion costs.

    python -m benchmarks.tuning.search [--seeds 24] [--surfaces NAME ...] [--out FILE]

Each surface gives every point of a listed space its true score; a trial sees it with noise. All
searches of a seed begin at the same random point and see the same noise. "Share of the best" is
the true score of the point that measured best, divided by the best true score; a search that
returns the best setting has 100 %.
"""

from __future__ import annotations

import math
import random
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import optuna
import torch

from benchmarks.support import benchmark_parser, header, markdown_table, publish
from orchestrator.cli.predict import make_tracer
from orchestrator.config.settings import Config
from orchestrator.config.sweep.space import Point, Space, Values, point_key
from orchestrator.config.sweep.space_parser import parse_space
from orchestrator.measure.tracing.model_facts import model_facts
from orchestrator.plan.cost.cluster_spec import machine_of, parse_cluster
from orchestrator.plan.cost.machine import Parallelism
from orchestrator.plan.cost.model import StepPrediction, predict
from orchestrator.runtime.sweep.optuna_search import OptunaSource
from orchestrator.tasks.load import load_task
from orchestrator.types import PrecisionName

CHECKPOINTS = (4, 8, 12)
PRECISIONS: tuple[PrecisionName, ...] = ("fp32", "bf16", "fp16")
NEAR = 0.98
"""A search has found the best if its point has this share of the best score."""


@dataclass(frozen=True)
class Surface:
    """The true score of every point of a space, the larger the better; None where a trial fails."""

    name: str
    space: Space
    scores: Mapping[str, float | None]
    noise: float

    @property
    def best(self) -> float:
        return max(score for score in self.scores.values() if score is not None)


# --- surfaces


H200_RATES = (
    616.7, 587.1, 576.4, 681.5, 927.6, 1001.2, 921.3, 1003.0,
    499.7, 573.8, 490.9, 639.6, 1794.8, 2227.8, 1894.5, 2427.7,
)  # fmt: skip
"""Samples per second of a transformer on an H200, measured on 2026-11-15, in the order of the grid."""


def h200_measured() -> Surface:
    space = parse_space(
        ["precision=fp32,bf16", "batch-size=8,32", "accumulation-steps=1,4", "compile=off,on"]
    )
    scores = {point_key(point): rate for point, rate in zip(space.grid(), H200_RATES, strict=True)}
    return Surface("H200, measured", space, scores, 0.04)


CPU_RATES: Mapping[int, Sequence[float]] = {
    1: (1656, 1865, 1908, 2878, 3153, 3249, 5060, 5501, 5606, 8603, 9443, 10116),
    2: (1968, 2541, 2929, 3639, 4595, 5256, 6621, 8093, 7193, 10800, 12900, 12400),
}
"""Samples per second of the digits on two cores, measured on 2026-11-15; the last three of two
workers are estimates."""


def cpu_measured() -> Surface:
    space = parse_space(["workers=1,2", "batch-size=16,32,64,128", "accumulation-steps=1,2,4"])
    rates = [*CPU_RATES[1], *CPU_RATES[2]]
    scores = {point_key(point): rate for point, rate in zip(space.grid(), rates, strict=True)}
    return Surface("CPU, measured", space, scores, 0.04)


def cost_model(gpu: str) -> Surface:
    """Return precision × batch × accumulation × workers by the cost model.

    The points that need most memory fail, about a sixth of them, as if the memory ended there.
    """
    space = parse_space(
        ["precision=fp32,bf16,fp16", "batch-size=4..128:x2", "accumulation-steps=1,2,4,8", "workers=1,2,4,8"]
    )
    task = load_task(Config.of(task="text", width=512, layers=4, experts=8, sequence_length=256))
    predictions: dict[str, StepPrediction] = {}
    for precision in PRECISIONS:
        facts = model_facts(task, "cuda:0", precision)
        grouped = precision == "bf16" and gpu == "h200"
        tracer = make_tracer(task, facts, True, precision, grouped, recompute=False)
        for point in space.grid():
            if point["precision"] != precision:
                continue
            workers = point["workers"]
            machine = machine_of(parse_cluster(f"gpus={workers},gpu={gpu}"))
            strategy = "data_parallel" if workers > 1 else "single"
            parallelism = Parallelism(workers, strategy, point["accumulation_steps"], tf32=True)
            ops = tracer(point["batch_size"], 1, 1, workers == 1)
            predictions[point_key(point)] = predict(ops, machine, parallelism)
    needed = sorted(prediction.memory.total for prediction in predictions.values())
    limit = needed[int(0.9 * len(needed))]
    scores = {
        key: prediction.samples_per_second if prediction.memory.total < limit else None
        for key, prediction in predictions.items()
    }
    return Surface(f"{gpu.upper()}, cost model", space, scores, 0.04)


def contended() -> Surface:
    """Return a throughput with a ridge: too many loaders or too large batches for the workers
    slow a step down."""
    space = parse_space(
        ["precision=fp32,bf16", "batch-size=8..256:x2", "loader-workers=0,1,2,4,8", "workers=1,2,3,4"]
    )

    def rate(point: Point) -> float:
        workers, loaders = point["workers"], point["loader_workers"]
        batch = point["batch_size"]
        compute_s = 0.004 + batch * (2.4e-4 if point["precision"] == "fp32" else 1.5e-4)
        cache_s = 0.01 * max(0.0, math.log2(batch / 64))
        load_s = batch * 6e-4 / max(0.5, loaders)
        crowding = max(1.0, (workers * (1 + 0.5 * loaders)) / 8)
        reduce_s = 0.002 * (workers - 1)
        return workers * batch / (max(compute_s + cache_s, load_s) * crowding + reduce_s)

    scores: dict[str, float | None] = {point_key(point): rate(point) for point in space.grid()}
    return Surface("shared CPU, synthetic", space, scores, 0.04)


def learning_curve() -> Surface:
    """Return the negative validation loss: a valley in the learning rate that moves with batch
    size and width."""
    space = parse_space(
        ["learning-rate=1e-4,3e-4,1e-3,3e-3,1e-2,3e-2", "batch-size=16,32,64,128", "width=64,128,256,512"]
    )

    def score(point: Point) -> float | None:
        optimum = (
            -2.6 + 0.5 * math.log2(point["batch_size"] / 32) * 0.30 - 0.35 * math.log2(point["width"] / 128)
        )
        distance = math.log10(point["learning_rate"]) - optimum
        if distance > 1.2:
            return None  # diverged
        floor = 1.2 + 0.9 / math.log2(point["width"]) + 0.02 * abs(math.log2(point["batch_size"] / 64))
        return -(floor + 0.35 * distance**2)

    return Surface(
        "validation loss, synthetic", space, {point_key(point): score(point) for point in space.grid()}, 0.01
    )


def interaction() -> Surface:
    """Return a score that no setting improves alone: two settings must match."""
    space = parse_space(["experts=1..6:1", "layers=1..6:1"])
    scores: dict[str, float | None] = {
        point_key(point): 100.0 + 50 * (point["experts"] + point["layers"] == 7) * point["experts"]
        for point in space.grid()
    }
    return Surface("interaction, synthetic", space, scores, 0.02)


SURFACES: Mapping[str, Callable[[], Surface]] = {
    "h200": h200_measured,
    "cpu": cpu_measured,
    "h200-model": lambda: cost_model("h200"),
    "l4-model": lambda: cost_model("l4"),
    "contended": contended,
    "loss": learning_curve,
    "interaction": interaction,
}


# --- searches


class Search(Protocol):
    """A search over the points of a listed space."""

    def ask(self) -> int:
        """Return the number of the point to try next."""
        ...

    def tell(self, number: int, score: float | None) -> None: ...


class RandomSearch:
    """Points in random order, none twice."""

    def __init__(self, space: Space, seed: int, first: int) -> None:
        rest = [number for number in range(space.size) if number != first]
        random.Random(seed).shuffle(rest)
        self._order = [first, *rest]

    def ask(self) -> int:
        return self._order.pop(0)

    def tell(self, number: int, score: float | None) -> None:
        pass


class SweepSearch:
    """``--search optuna`` as a sweep uses it."""

    def __init__(self, space: Space, seed: int, first: int) -> None:
        self._points = space.grid()
        self._number = {point_key(point): number for number, point in enumerate(self._points)}
        self._source = OptunaSource(space, seed, [self._points[first]])

    def ask(self) -> int:
        point = self._source.ask()
        assert point is not None
        return self._number[point_key(point)]

    def tell(self, number: int, score: float | None) -> None:
        self._source.tell(self._points[number], score)


class OptunaSearch:
    """A sampler of Optuna. Numbers of a list are an integer in their order, words are categories.

    Samplers suggest points again that were tried. Such a suggestion is answered with the known
    score, and after three of them a random new point is taken.
    """

    def __init__(self, space: Space, seed: int, first: int, sampler: optuna.samplers.BaseSampler) -> None:
        self._space = space
        self._study = optuna.create_study(direction="maximize", sampler=sampler)
        self._random = random.Random(seed)
        self._points = space.grid()
        self._number = {point_key(point): number for number, point in enumerate(self._points)}
        self._lists = {name: _ordered(domain) for name, domain in space.domains.items()}
        self._distributions = {name: _distribution(values) for name, values in self._lists.items()}
        self._scores: dict[int, float | None] = {}
        self._trials: dict[int, optuna.Trial] = {}
        self._study.enqueue_trial(self._encode(self._points[first]))

    def _encode(self, point: Point) -> dict[str, int]:
        return {name: values.index(point[name]) for name, values in self._lists.items()}

    def ask(self) -> int:
        for _ in range(3):
            trial = self._study.ask(self._distributions)
            point = {name: values[trial.params[name]] for name, values in self._lists.items()}
            number = self._number[point_key(point)]
            if number not in self._scores:
                self._trials[number] = trial
                return number
            self._finish(trial, self._scores[number])
        number = self._random.choice([n for n in range(len(self._points)) if n not in self._scores])
        self._study.enqueue_trial(self._encode(self._points[number]))
        self._trials[number] = self._study.ask(self._distributions)
        return number

    def tell(self, number: int, score: float | None) -> None:
        self._scores[number] = score
        self._finish(self._trials[number], score)

    def _finish(self, trial: optuna.Trial, score: float | None) -> None:
        """Tell a score, its logarithm if it is positive; a failed trial is as bad as the worst."""
        known = [value for value in self._scores.values() if value is not None]
        if score is None and not known:
            self._study.tell(trial, state=optuna.trial.TrialState.FAIL)
            return
        value = min(known) if score is None else score
        self._study.tell(trial, math.log(value) if value > 0 else value)


def _ordered(domain: Any) -> list[Any]:
    assert isinstance(domain, Values)
    return sorted(domain.values) if _is_numeric(domain.values) else list(domain.values)


def _is_numeric(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _distribution(values: Sequence[Any]) -> optuna.distributions.BaseDistribution:
    if _is_numeric(values):
        return optuna.distributions.IntDistribution(0, len(values) - 1)
    return optuna.distributions.CategoricalDistribution(list(range(len(values))))


def gp_search(startup: int) -> Callable[[Space, int, int], Search]:
    def make(space: Space, seed: int, first: int) -> Search:
        sampler = optuna.samplers.GPSampler(seed=seed, n_startup_trials=startup)
        return OptunaSearch(space, seed, first, sampler)

    return make


def tpe_search(space: Space, seed: int, first: int) -> Search:
    sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=4, multivariate=True, constant_liar=True)
    return OptunaSearch(space, seed, first, sampler)


SEARCHES: Mapping[str, Callable[[Space, int, int], Search]] = {
    "random": RandomSearch,
    "--search optuna": SweepSearch,
    "GPSampler, 1 startup trial": gp_search(1),
    "TPESampler, 4 startup trials": tpe_search,
}


# --- measurement


@dataclass(frozen=True)
class Outcome:
    """One search: the share of the best after each checkpoint, and the seconds of each
    suggestion after the first."""

    shares: tuple[float, ...]
    ask_seconds: tuple[float, ...]


def run_search(surface: Surface, make: Callable[[Space, int, int], Search], seed: int) -> Outcome:
    points = surface.space.grid()
    noise = random.Random(10_000 + seed)
    factors = [math.exp(noise.gauss(0, surface.noise)) for _ in points]
    first = random.Random(seed).randrange(len(points))
    search = make(surface.space, seed, first)
    measured: dict[int, float | None] = {}
    seconds: list[float] = []
    shares: list[float] = []
    for trial in range(1, CHECKPOINTS[-1] + 1):
        began = time.perf_counter()
        number = search.ask()
        if trial > 1:
            seconds.append(time.perf_counter() - began)
        assert number not in measured, "a point was tried twice"
        score = surface.scores[point_key(points[number])]
        measured[number] = None if score is None else score * factors[number]
        search.tell(number, measured[number])
        if trial in CHECKPOINTS:
            shares.append(_share(surface, points, measured))
    return Outcome(tuple(shares), tuple(seconds))


def _share(surface: Surface, points: Sequence[Point], measured: Mapping[int, float | None]) -> float:
    known = {number: score for number, score in measured.items() if score is not None}
    if not known:
        return 0.0
    chosen = surface.scores[point_key(points[max(known, key=lambda number: known[number])])]
    assert chosen is not None
    # Losses are negative scores: the best loss divided by the found one.
    return chosen / surface.best if surface.best > 0 else surface.best / chosen


def table(surface: Surface, seeds: int) -> tuple[str, dict[str, list[Outcome]]]:
    rows = []
    outcomes: dict[str, list[Outcome]] = {}
    for name, make in SEARCHES.items():
        outcomes[name] = [run_search(surface, make, seed) for seed in range(seeds)]
        rows.append([name, *_cells(outcomes[name])])
    failing = sum(score is None for score in surface.scores.values())
    note = f"{len(surface.scores)} points, {failing} of them fail, noise {surface.noise:.0%}."
    return f"## {surface.name}\n\n{note}\n\n{markdown_table(COLUMNS, rows)}\n", outcomes


COLUMNS = (
    "search",
    *(f"share of the best after {count}" for count in CHECKPOINTS),
    *(f"within {1 - NEAR:.0%} after {count}" for count in CHECKPOINTS),
    "ms per suggestion, median (max)",
)


def _cells(outcomes: Sequence[Outcome]) -> list[str]:
    cells = []
    for index in range(len(CHECKPOINTS)):
        shares = [outcome.shares[index] for outcome in outcomes]
        cell = f"{statistics.mean(shares):.1%}"
        if len(shares) > 1:  # one search has no spread
            cell += f" ± {statistics.stdev(shares) / math.sqrt(len(shares)):.1%}"
        cells.append(cell)
    for index in range(len(CHECKPOINTS)):
        near = [outcome for outcome in outcomes if outcome.shares[index] >= NEAR]
        cells.append(f"{len(near) / len(outcomes):.0%}")
    seconds = [value for outcome in outcomes for value in outcome.ask_seconds]
    return [*cells, f"{1e3 * statistics.median(seconds):.1f} ({1e3 * max(seconds):.0f})"]


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=24)
    parser.add_argument("--surfaces", nargs="*", choices=list(SURFACES), default=list(SURFACES))
    arguments = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    with suppress(RuntimeError):
        torch.set_num_threads(1)
    text = header("Search strategies on listed spaces", arguments)
    text += f"Optuna {optuna.__version__}; {arguments.seeds} seeds; mean ± standard error.\n\n"
    every: dict[str, list[Outcome]] = {name: [] for name in SEARCHES}
    for name in arguments.surfaces:
        part, outcomes = table(SURFACES[name](), arguments.seeds)
        text += part
        for search, results in outcomes.items():
            every[search] += results
        print(part, flush=True)
    summary = markdown_table(COLUMNS, [[name, *_cells(results)] for name, results in every.items()])
    publish(text + f"## All surfaces together\n\n{summary}", arguments.out)


if __name__ == "__main__":
    main()
