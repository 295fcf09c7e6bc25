"""The same run on 1, 2, 3 or 4 workers: real processes over gloo, against one process. Sizes that divide nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from orchestrator.config.settings import Config
from orchestrator.errors import OutOfMemory, UserError
from orchestrator.tasks.digits import Digits
from orchestrator.tasks.task import Loss, Task, TensorData
from orchestrator.tasks.text import Text
from orchestrator.train.parts.stores import file_store
from orchestrator.train.parts.world import World, process_group_world
from orchestrator.train.strategies import ddp as replicate
from orchestrator.train.strategies.buckets import gradient_buckets
from orchestrator.train.strategies.buffers import convert_sync_batchnorm, running_statistics
from orchestrator.train.strategies.ddp import DDPOptions
from tests.support.ranks import RanksFailed, run_ranks
from tests.support.steppers import (
    DoubleDigits,
    DoubleText,
    Events,
    assert_gradients_equal,
    gradients,
    make_stepper,
    mean_loss,
    run_steps,
    weights,
)

PLAIN = DDPOptions()
CONFIG = Config.of(
    expert_hidden_size=(8, 16, 8, 24, 16),
    experts=5,
    width=16,
    balance_loss=0.05,
    z_loss=0.001,
    context_length=24,
    layers=2,
)


@dataclass(frozen=True)
class Case:
    """A run: ``micro`` is per worker, ``samples`` the length of the data (None for all of it)."""

    task: type
    workers: int
    micro: int
    whole: int
    samples: int | None = None
    shares: tuple[float, ...] = ()
    sharding: str = "none"
    steps: int = 10
    config: Config = CONFIG
    survive: int = 4
    options: DDPOptions = PLAIN

    def make(self) -> Any:
        return _Few(self.task(self.config), self.samples) if self.samples else self.task(self.config)


class _Few:
    """The first samples of a task's data."""

    def __init__(self, task: Any, samples: int) -> None:
        self.task, self.samples = task, samples
        self.units_per_sample = task.units_per_sample

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["task"], name)

    def train_data(self) -> Any:
        return TensorData(*(tensor[: self.samples] for tensor in self.task.train_data().tensors))


@dataclass(frozen=True)
class Ran:
    losses: list[float]
    norms: list[float]
    samples: list[int]
    loads: list[list[int]]
    first_gradients: dict[str, Tensor]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    heard: list[tuple[str, dict[str, Any]]]


def ran(case: Case, world: World | None = None) -> Ran:
    """The steps of a case, on one worker or as one of several."""
    replicate.STEPS_BEFORE_OVERLAP = case.survive
    events = Events()
    micro = case.micro if world else case.whole
    sharding = case.sharding if world else "none"
    stepper, feed = make_stepper(
        case.make(), micro, case.whole, emit=events, world=world, sharding=sharding, options=case.options
    )
    first: dict[str, Tensor] = {}
    totals = []
    for step, done in enumerate(_each(stepper, feed, case.steps)):
        totals.append(done)
        if step == 0:
            first = gradients(stepper.strategy.model)
    return Ran(
        losses=[mean_loss(t) for t in totals],
        norms=[float(t.norm) for t in totals],
        samples=[t.samples for t in totals],
        loads=[[int(x) for layer in t.loads for x in layer] for t in totals],
        first_gradients=first,
        gradients=gradients(stepper.strategy.model),
        weights=weights(stepper.strategy.model),
        heard=events.events,
    )


def _each(stepper: Any, feed: Any, steps: int) -> Any:
    step = epoch = 0
    while True:
        for portion in feed.steps(epoch):
            if step >= steps:
                return
            yield stepper.run(portion, step)
            step += 1
        epoch += 1


def ran_rank(rank: int, size: int, store: str, case: Case) -> Ran:
    with process_group_world(file_store(store, size), rank, size, torch.device("cpu"), "gloo", 30) as world:
        return ran(case, world.with_shares(case.shares) if case.shares else world)


FP64 = [
    Case(DoubleDigits, 2, 32, 64),
    Case(DoubleDigits, 3, 22, 64),
    Case(DoubleDigits, 4, 5, 50, samples=110),  # accumulation; a last batch of 10
    Case(DoubleDigits, 3, 7, 50, samples=101),  # a last batch of one sample: two workers have none
    Case(DoubleDigits, 2, 16, 48, shares=(3.0, 1.0)),
    Case(DoubleDigits, 3, 4, 30, samples=94, shares=(1.0, 0.35, 0.01)),
    Case(DoubleText, 3, 3, 16, steps=6),
    Case(DoubleDigits, 2, 16, 64, sharding="zero2"),
    Case(DoubleDigits, 3, 7, 50, samples=101, sharding="zero3"),
    Case(DoubleText, 2, 4, 16, sharding="zero3", steps=6),
    Case(DoubleDigits, 4, 2, 8, samples=15, sharding="zero3"),  # a rest of 7 among four
    Case(DoubleDigits, 2, 32, 64, survive=100),  # summed after the backward pass only
    Case(
        DoubleDigits,
        3,
        8,
        48,
        survive=0,
        options=DDPOptions(bucket_cap_mb=1, static_graph=True, gradient_as_bucket_view=False),
    ),
]


@pytest.mark.parametrize(
    "case",
    FP64,
    ids=lambda c: f"{c.task.__name__}-{c.workers}x{c.micro}-of-{c.whole}-{c.sharding}-{c.survive}",
)
def test_workers_are_exact_in_fp64(case: Case) -> None:
    one = ran(case)
    for rank, many in enumerate(run_ranks(ran_rank, case.workers, case)):
        assert many.losses == pytest.approx(one.losses, rel=1e-12), f"rank {rank}"
        assert many.norms == pytest.approx(one.norms, rel=1e-12)
        assert many.samples == one.samples
        assert many.loads == one.loads
        assert_gradients_equal(many.first_gradients, one.first_gradients, 1e-10, 1e-12)
        assert_gradients_equal(many.gradients, one.gradients, 1e-10, 1e-12)
        for name, weight in one.weights.items():
            torch.testing.assert_close(many.weights[name], weight, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "case",
    [
        Case(Digits, 2, 32, 64),
        Case(Digits, 3, 8, 64),
        Case(Text, 4, 4, 16),
        Case(Digits, 2, 8, 64, sharding="zero3"),
    ],
    ids=str,
)
def test_workers_are_exact_in_fp32(case: Case) -> None:
    """One step from equal weights, then 50 free-running at lr 1e-3."""
    free = Case(
        case.task,
        case.workers,
        case.micro,
        case.whole,
        sharding=case.sharding,
        steps=50,
        config=CONFIG.but(balance_loss=0.01),
    )
    one = ran(free)
    many = run_ranks(ran_rank, case.workers, free)[0]
    assert many.losses[0] == pytest.approx(one.losses[0], rel=1e-6)
    assert many.norms[0] == pytest.approx(one.norms[0], rel=1e-6)
    assert_gradients_equal(many.first_gradients, one.first_gradients, 2e-6, 1e-7)
    assert many.losses == pytest.approx(one.losses, rel=1e-5)


def test_two_workers_are_the_same_to_the_bit_each_time() -> None:
    case = Case(Digits, 2, 16, 64, steps=12)
    first, again = run_ranks(ran_rank, 2, case)[0], run_ranks(ran_rank, 2, case)[0]
    assert first.losses == again.losses
    assert first.norms == again.norms


def test_a_mean_of_shares_would_be_seen() -> None:
    """The trap: averaging the workers' means is not the mean of the batch where shares differ."""
    case = Case(DoubleDigits, 2, 16, 48, shares=(3.0, 1.0), steps=1)
    parts = run_ranks(_own_mean, 2, case)
    assert sum(parts) / 2 != pytest.approx(ran(case).losses[0], rel=1e-4)


def _own_mean(rank: int, size: int, store: str, case: Case) -> float:
    world = World(rank, size, torch.device("cpu"), shares=case.shares)
    stepper, feed = make_stepper(case.make(), case.micro, case.whole)
    feed.world = world
    return mean_loss(run_steps(stepper, feed, 1)[0])


class Patchy(Task):
    """A model of which a part is used by the samples of some workers only, and a part by nobody."""

    def build_model(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.ModuleDict({name: nn.Linear(4, 1).double() for name in ("always", "sometimes", "never")})

    def train_data(self) -> TensorData:
        generator = torch.Generator().manual_seed(0)
        return TensorData(torch.randn(30, 4, dtype=torch.float64, generator=generator), torch.arange(30))

    def loss(self, model: Any, batch: Any) -> Loss:
        x, number = batch
        total = model["always"](x).square().sum()
        if bool((number == 7).any()):
            total = total + model["sometimes"](x[number == 7]).square().sum()
        return Loss(total, len(x))


class _PatchyTask(Patchy):
    def __init__(self, config: Config) -> None:
        del config


@pytest.mark.parametrize("find_unused", [False, True])
def test_parameters_without_a_gradient_on_some_workers(find_unused: bool) -> None:
    """Zero where others have one, none where nobody has: as in one process."""
    case = Case(_PatchyTask, 3, 2, 12, survive=2, options=DDPOptions(find_unused_parameters=find_unused))
    one = ran(case)
    for many in run_ranks(ran_rank, 3, case):
        assert many.losses == pytest.approx(one.losses, rel=1e-12)
        assert_gradients_equal(many.gradients, one.gradients, 1e-10, 1e-12)
        assert not any(name.startswith("never") for name in many.gradients)
        for name, weight in one.weights.items():
            torch.testing.assert_close(many.weights[name], weight, rtol=1e-9, atol=1e-9)
        warned = [fields["message"] for event, fields in many.heard if event == "warning"]
        assert bool(warned) is not find_unused


class LatelyPatchy(_PatchyTask):
    """All parts are used at first; later one is not, where sample 7 is not."""

    CALLS = 0

    def build_model(self) -> nn.Module:
        made = super().build_model()
        del made["never"]  # pyright: ignore[reportIndexIssue, reportArgumentType]
        return made

    def loss(self, model: Any, batch: Any) -> Loss:
        type(self).CALLS += 1
        x, number = batch
        total = model["always"](x).square().sum()
        if type(self).CALLS <= 4 or bool((number == 7).any()):
            total = total + model["sometimes"](x).square().sum()
        return Loss(total, len(x))


def test_a_parameter_that_is_unused_only_later_is_told_before_anything_is_updated() -> None:
    """DDP would leave its neighbours unsummed for a step, and then raise something else."""
    with pytest.raises(
        RanksFailed,
        match=r"TrainingFailed: a parameter got no gradient in this step.*--find-unused-parameters",
    ):
        run_ranks(ran_rank, 3, Case(LatelyPatchy, 3, 4, 12, survive=2), timeout=60)
    LatelyPatchy.CALLS = 0
    found = Case(LatelyPatchy, 3, 4, 12, survive=2, options=DDPOptions(find_unused_parameters=True))
    assert len(run_ranks(ran_rank, 3, found)) == 3


class Tight(DoubleDigits):
    """Runs out of memory on one worker, at given calls of its loss, when more than ``ROOM`` samples meet."""

    CALLS: tuple[int, ...] = ()
    RANK, ROOM = 1, 9

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.count = 0

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.count += 1
        import torch.distributed as dist

        here = dist.is_initialized() and dist.get_rank() == self.RANK
        if here and len(batch[0]) > self.ROOM and self.count in self.CALLS:
            raise torch.OutOfMemoryError("injected")
        return super().loss(model, batch)


class TightEarly(Tight):
    CALLS = (5, 6, 7)


class TightLate(Tight):
    CALLS = (16,)


def test_out_of_memory_on_one_worker_is_survived_by_all() -> None:
    """While a micro-batch has yet to prove itself the workers vote, and all take the smaller one."""
    case = Case(TightEarly, 2, 16, 64, survive=20)
    one = ran(Case(DoubleDigits, 2, 16, 64))
    for many in run_ranks(ran_rank, 2, case):
        assert many.losses == pytest.approx(one.losses, rel=1e-12)
        assert [(f["micro_batch"], f["next_micro_batch"]) for event, f in many.heard if event == "oom"] == [
            (16, 8)
        ]


def test_out_of_memory_later_is_told_as_such() -> None:
    """Once gradients are summed during the backward pass nobody can be asked: the run begins again with half."""
    with pytest.raises(
        RanksFailed, match=r"OutOfMemory.*worker 1 ran out of memory at step 8 with a micro-batch of 16"
    ):
        run_ranks(ran_rank, 2, Case(TightLate, 2, 16, 64, survive=3))
    error = OutOfMemory("worker 1 ran out", 16)
    assert (str(error), error.micro_batch, error.exit_code) == ("worker 1 ran out", 16, 3)


class Normed(DoubleDigits):
    """With batch norm, whose statistics are each worker's own."""

    def build_model(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10)).double()

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return Loss(nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1]))


def _statistics(rank: int, size: int, store: str, broadcast: bool) -> list[float]:
    with process_group_world(file_store(store, size), rank, size, torch.device("cpu"), "gloo", 30) as world:
        stepper, feed = make_stepper(Normed(CONFIG), 8, 16, world=world)
        replica: Any = stepper.strategy
        if broadcast:
            replica.options = DDPOptions(buffers=tuple(running_statistics(replica.model)))
        run_steps(stepper, feed, 3)
        stepper.strategy.begin_step(all_have_samples=True)
        norm: Any = stepper.strategy.model[2]  # pyright: ignore[reportIndexIssue]
        return norm.running_mean.tolist()


def test_running_statistics_are_the_main_workers_where_asked_for() -> None:
    mine, theirs = run_ranks(_statistics, 2, True)
    assert mine == theirs
    mine, theirs = run_ranks(_statistics, 2, False)
    assert mine != theirs


def _votes(rank: int, size: int, store: str) -> dict[str, Any]:
    with process_group_world(file_store(store, size), rank, size, torch.device("cpu"), "gloo", 30) as world:
        return {
            "most": world.all_reduce_max([rank, -rank]),
            "gather": world.gather([float(rank), 5.0]),
            "agree": world.broadcast_value("a", None if rank == 0 else {"from": rank}),
            "nobody": world.broadcast_value("b", None),
            "sum": world.all_reduce(torch.tensor([1.0, float(rank)])).tolist(),
        }


def test_what_workers_say_to_each_other() -> None:
    for heard in run_ranks(_votes, 3):
        assert heard["most"] == [2.0, 0.0]
        assert heard["gather"] == [[0.0, 5.0], [1.0, 5.0], [2.0, 5.0]]
        assert heard["agree"] == {"from": 1}
        assert heard["nobody"] is None
        assert heard["sum"] == [3.0, 3.0]


def _expanded(rank: int, size: int, store: str) -> list[float]:
    with process_group_world(file_store(store, size), rank, size, torch.device("cpu"), "gloo", 30) as world:
        memory = torch.tensor([5.0, float(rank), float(rank), float(rank)])
        table = torch.full((2, 3), float(rank)).T
        world.broadcast([memory[:1].expand(3), memory[3:], table])
        return [*memory.tolist(), float(table.sum())]


def test_broadcasting_an_expanded_tensor_touches_nothing_else() -> None:
    assert run_ranks(_expanded, 2) == [[5.0, 0.0, 0.0, 0.0, 0.0], [5.0, 1.0, 1.0, 0.0, 0.0]]


def _slow_main(rank: int, size: int, store: str) -> float:
    """The main worker is longer away than a collective would wait."""
    import time

    with process_group_world(file_store(store, size), rank, size, torch.device("cpu"), "gloo", 3) as world:
        begun = time.monotonic()
        if rank == 0:
            time.sleep(5)
        world.wait_for_main("late")
        return time.monotonic() - begun


def test_the_others_wait_for_the_main_worker_as_long_as_it_takes() -> None:
    assert min(run_ranks(_slow_main, 2)) > 4.5


def test_a_users_error_is_theirs_whatever_it_says() -> None:
    from orchestrator.train.parts.comm_errors import is_communication_error

    def feature_store() -> None:
        raise RuntimeError("gloo/transport: connection reset by peer")

    with pytest.raises(RuntimeError) as raised:
        feature_store()
    assert not is_communication_error(raised.value)
    assert is_communication_error(RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer"))
    assert not is_communication_error(RuntimeError("could not open a socket to the feature store"))


def test_buckets_are_fixed_by_the_list() -> None:
    sizes = [100, 300_000, 10, 200_000, 5]
    made = list(gradient_buckets([torch.zeros(n) for n in sizes], 1))
    assert [[len(g) for g in bucket] for bucket in made] == [[100], [300_000], [10, 200_000, 5]]
    mixed = list(gradient_buckets([torch.zeros(2), torch.zeros(2, dtype=torch.float64), torch.zeros(2)], 25))
    assert [len(bucket) for bucket in mixed] == [1, 1, 1]


def test_sync_batchnorm_needs_batch_norm() -> None:
    with pytest.raises(UserError, match="no batch norm"):
        convert_sync_batchnorm(nn.Linear(2, 2))
