"""Copies of hosts' state in memory: put together they are a checkpoint, bit for bit, and any number of hosts can go on from them."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import orchestrator.train.checkpoint.snapshots as snapshots_module
from experts.actor_host import Outbox
from experts.expert_state import remote_expert_names
from experts.membership import GroupLeft, GroupMembership
from experts.model import place
from orchestrator.config.settings import Config
from orchestrator.train.checkpoint.pinned_buffers import PinnedBuffers
from orchestrator.train.checkpoint.snapshots import (
    Bytes,
    Header,
    HostSnapshots,
    Snapshots,
    SnapshotTarget,
    merge_snapshots,
    read_snapshot,
)
from orchestrator.train.checkpoint.state import Progress, capture, restore
from orchestrator.train.checkpoint.store import Contents
from orchestrator.train.parts.optim import build_adamw
from orchestrator.train.parts.precision import Precision
from orchestrator.train.parts.stores import file_store
from orchestrator.train.parts.world import World, process_group_world
from tests.support.ranks import run_ranks
from tests.support.steppers import make_stepper, mean_loss, run_steps
from tests.support.tiny_model import Tiny

CPU = torch.device("cpu")
SIZES = (3, 9, 3, 5, 9, 2, 4)
TASK = Tiny((SIZES, SIZES))
HOST_OF = ((0, 1, 1, 2, 1, 0, 1), (2, 2, 0, 1, 0, 0, 2))
WITHOUT = ((0, 1, 1, 0, 1, 0, 1), (1, 1, 0, 1, 0, 0, 1))  # none on the last of three hosts
PROGRESS = Progress(
    step=4,
    epoch=1,
    position=12,
    samples=52,
    best_value=0.5,
    best_step=3,
    epoch_loss=1.25,
    validation={"loss": 0.5, "step": 3},
)


class Shelf:
    """An outbox whose copies are fetched at once, by copying."""

    def __init__(self) -> None:
        self.held: list[tuple[Header, Bytes]] = []

    def wait_for_space(self, membership: GroupMembership) -> None:
        pass

    def put(self, header: Any, data: Any) -> None:
        self.held.append((header, data.copy()))


def trained(
    world: World, task: Tiny, host_of: Any, steps: int = 4
) -> tuple[nn.Module, torch.optim.Optimizer, Precision]:
    stepper, feed = make_stepper(
        task, 4, 12, learning_rate=1e-2, world=world, host_of=host_of if world.size > 1 else None
    )
    run_steps(stepper, feed, steps)
    return stepper.strategy.model, stepper.optimizer.inner, stepper.precision


def seeded(rank: int) -> None:
    random.seed(rank)
    np.random.seed(rank)
    random.gauss(0, 1)  # leaves half a draw behind
    np.random.randn(3)


def snapped(
    rank: int, size: int, store: str, task: Tiny, host_of: Any
) -> tuple[tuple[Header, Bytes], Contents | None]:
    """A host's copy after some steps, and the checkpoint of the same moment."""
    with process_group_world(file_store(store, size), rank, size, torch.device("cpu"), "gloo", 60) as world:
        model, optimizer, precision = trained(world, task, host_of)
        seeded(rank)
        shelf = Shelf()
        target = SnapshotTarget(shelf, PinnedBuffers(CPU), 5)
        Snapshots(2, target, model, optimizer, precision, world).take(PROGRESS)
        return shelf.held[0], capture(model, optimizer, precision, PROGRESS, world)


def taken(task: Tiny, host_of: Any, size: int = 3) -> tuple[HostSnapshots, Contents]:
    answers = run_ranks(snapped, size, task, host_of)
    (contents,) = [contents for _, contents in answers if contents is not None]
    return [copy for copy, _ in answers], contents


@pytest.fixture(scope="module")
def three() -> tuple[HostSnapshots, Contents]:
    return taken(TASK, HOST_OF)


def assert_same(ours: Contents, theirs: Contents) -> None:
    assert ours.tensors.keys() == theirs.tensors.keys()
    for kind, tensors in theirs.tensors.items():
        assert ours.tensors[kind].keys() == tensors.keys()
        for name, tensor in tensors.items():
            mine = ours.tensors[kind][name]
            assert (mine.dtype, mine.shape) == (tensor.dtype, tensor.shape), name
            assert torch.equal(bits(mine), bits(tensor)), name
    assert ours.state == theirs.state


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def test_together_they_are_a_checkpoint(three: tuple[HostSnapshots, Contents]) -> None:
    copies, contents = three
    assert_same(merge_snapshots(copies, 0, set()), contents)
    assert_same(merge_snapshots(list(reversed(copies)), 0, set()), contents)


def test_each_copy_says_whose_it_is(three: tuple[HostSnapshots, Contents]) -> None:
    copies, _ = three
    assert [(header.generation, header.step, header.rank, header.size) for header, _ in copies] == [
        (5, 4, rank, 3) for rank in range(3)
    ]
    named = [{(piece.kind, piece.name) for piece in read_snapshot(*copy)[0]} for copy in copies]
    assert not named[0] & named[1]
    assert not named[1] & named[2]
    assert all("bank" in name for kind, name in named[1] | named[2]), "the dense part is the main host's"
    assert all(
        piece.offset % 64 == 0
        for copy in copies
        for piece in read_snapshot(*copy)[0]
        if "bank" not in piece.name
    )


def test_what_lives_elsewhere_is_left_out(three: tuple[HostSnapshots, Contents]) -> None:
    copies, contents = three
    without = {name for name in contents.tensors["model"] if ".bank.3." in name}
    found = merge_snapshots(copies, 1, without)
    assert without
    assert contents.tensors["model"].keys() - found.tensors["model"].keys() == without
    gone = contents.tensors["optimizer"].keys() - found.tensors["optimizer"].keys()
    assert gone == {f"{slot}/{name}" for slot in ("step", "exp_avg", "exp_avg_sq") for name in without}


def test_the_random_state_is_each_ranks_own(three: tuple[HostSnapshots, Contents]) -> None:
    copies, _ = three
    states = [merge_snapshots(copies, rank, set()).state["random"] for rank in range(4)]
    assert [states[rank] == read_snapshot(*copies[rank])[1]["random"] for rank in range(3)] == [True] * 3
    assert states[0] != states[1] != states[2] != states[0]
    assert states[3] == states[0], "a host that was not there has the main one's"


def test_a_host_goes_on_with_the_random_numbers_of_its_rank(three: tuple[HostSnapshots, Contents]) -> None:
    before = random.getstate(), np.random.get_state(legacy=True)
    try:
        model, optimizer, precision = alone()
        restore(merge_snapshots(three[0], 2, set()), model, optimizer, precision)
        drawn = random.gauss(0, 1), random.random(), np.random.randn(2).tolist()
        seeded(2)
        assert drawn == (random.gauss(0, 1), random.random(), np.random.randn(2).tolist())
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


def alone(
    task: Tiny = TASK, host_of: Any = None, rank: int = 0
) -> tuple[nn.Module, torch.optim.Optimizer, Precision]:
    """Parts that have learned nothing; of one process, or as one of several hosts has them."""
    model = task.build_model()
    if host_of is not None:
        place(model, host_of, rank)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return (
        model,
        build_adamw(model.parameters(), Config().optim, fused=True),
        Precision("fp32", torch.device("cpu")),
    )


def test_one_process_goes_on_from_the_copies_of_three(three: tuple[HostSnapshots, Contents]) -> None:
    copies, contents = three
    model, optimizer, precision = alone()
    assert (
        restore(merge_snapshots(copies, 0, remote_expert_names(model)), model, optimizer, precision) == PROGRESS
    )
    again = capture(model, optimizer, precision, PROGRESS, World.single_process())
    assert again is not None
    assert_same(replace(again, state={**again.state, "random": contents.state["random"]}), contents)


def regrouped(
    rank: int, size: int, store: str, copies: HostSnapshots, host_of: Any
) -> tuple[Contents | None, Progress]:
    with process_group_world(file_store(store, size), rank, size, torch.device("cpu"), "gloo", 60) as world:
        stepper, _ = make_stepper(TASK, 4, 12, learning_rate=1e-2, world=world, host_of=host_of)
        model, optimizer = stepper.strategy.model, stepper.optimizer.inner
        progress = restore(
            merge_snapshots(copies, rank, remote_expert_names(model)), model, optimizer, stepper.precision
        )
        return capture(model, optimizer, stepper.precision, progress, world), progress


@pytest.mark.parametrize(
    "host_of",
    [
        pytest.param(((1, 0, 0, 1, 0, 1, 0), (0, 0, 1, 0, 1, 1, 0)), id="two hosts"),
        pytest.param(((2, 0, 0, 1, 2, 1, 0), (0, 1, 1, 2, 1, 2, 0)), id="three placed anew"),
        pytest.param(((3, 0, 0, 1, 0, 1, 2), (0, 3, 1, 0, 3, 1, 0)), id="four hosts"),
        pytest.param(((1,) * 7, (1,) * 7), id="all on the last"),
    ],
)
def test_other_hosts_go_on_from_the_copies_of_three(
    three: tuple[HostSnapshots, Contents], host_of: Any
) -> None:
    copies, contents = three
    size = 1 + max(max(layer) for layer in host_of)
    (main, progress), *others = run_ranks(regrouped, size, copies, host_of)
    assert main is not None
    assert_same(main, contents)
    assert progress == PROGRESS
    assert [found for found, _ in others] == [None] * (size - 1)


def test_a_host_without_experts() -> None:
    copies, contents = taken(TASK, WITHOUT)
    assert (read_snapshot(*copies[2])[0], copies[2][0].end) == ([], 0)
    assert_same(
        merge_snapshots(copies, 2, set()),
        replace(contents, state={**contents.state, "random": read_snapshot(*copies[2])[1]["random"]}),
    )


def low_precision(rank: int, size: int, store: str) -> tuple[tuple[Header, Bytes], Contents | None]:
    """Weights in bf16, moments in fp32 and counters of one number: as they lie beside each other on a GPU."""
    with process_group_world(file_store(store, size), rank, size, torch.device("cpu"), "gloo", 60) as world:
        stepper, _ = make_stepper(
            Tiny((SIZES,), dtype=torch.float32), 4, 12, world=world, host_of=HOST_OF[:1]
        )
        model = stepper.strategy.model
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(parameter.detach().bfloat16()))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape).bfloat16()
        for _ in range(3):
            optimizer.step()
        for state in optimizer.state.values():
            state["exp_avg"] = state["exp_avg"].float() + 1e-6
        shelf = Shelf()
        target = SnapshotTarget(shelf, PinnedBuffers(CPU), 0)
        Snapshots(2, target, model, optimizer, stepper.precision, world).take(PROGRESS)
        return shelf.held[0], capture(model, optimizer, stepper.precision, PROGRESS, world)


def test_bf16_and_counters_of_experts() -> None:
    answers = run_ranks(low_precision, 3)
    copies, contents = [copy for copy, _ in answers], answers[0][1]
    assert contents is not None
    found = merge_snapshots(copies, 0, set())
    assert_same(found, contents)
    assert {str(tensor.dtype) for tensor in found.tensors["model"].values()} >= {"torch.bfloat16"}
    counters = {
        name: tensor
        for name, tensor in found.tensors["optimizer"].items()
        if name.startswith("step/") and ".bank." in name
    }
    assert len(counters) == 2 * len(SIZES), "each expert has its own"
    assert {(tensor.shape, tensor.item()) for tensor in counters.values()} == {(torch.Size([]), 3.0)}


class Momentum(torch.optim.SGD):
    """Keeps a number beside its tensors."""

    def step(self, closure: Any = None) -> Any:
        done = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["seen"] = self.state[parameter].get("seen", 0) + 1
        return done


def with_values(rank: int, size: int, store: str) -> tuple[tuple[Header, Bytes], Contents | None]:
    with process_group_world(file_store(store, size), rank, size, torch.device("cpu"), "gloo", 60) as world:
        stepper, feed = make_stepper(TASK, 4, 12, world=world, host_of=HOST_OF)
        stepper.optimizer.inner = Momentum(stepper.strategy.model.parameters(), lr=1e-2, momentum=0.9)
        run_steps(stepper, feed, 2)
        shelf = Shelf()
        model, optimizer = stepper.strategy.model, stepper.optimizer.inner
        target = SnapshotTarget(shelf, PinnedBuffers(CPU), 0)
        Snapshots(2, target, model, optimizer, stepper.precision, world).take(PROGRESS)
        return shelf.held[0], capture(model, optimizer, stepper.precision, PROGRESS, world)


def test_plain_values_of_an_optimizer_come_along() -> None:
    answers = run_ranks(with_values, 3)
    found, contents = merge_snapshots([copy for copy, _ in answers], 0, set()), answers[0][1]
    assert contents is not None
    assert_same(replace(found, state={**found.state, "random": contents.state["random"]}), contents)
    assert set(found.state["optimizer"]["values"].values()) == {2}


# When copies are taken, and where they lie


class Watched(Outbox):
    """The outbox of a host, beside the lists of what was put and fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.put_at: list[int] = []

    def put(self, header: Any, data: Any) -> None:
        self.put_at.append(data.__array_interface__["data"][0])
        super().put(header, data)


@pytest.fixture
def parts() -> tuple[nn.Module, torch.optim.Optimizer, Precision]:
    model = nn.Linear(40, 40)
    return model, torch.optim.SGD(model.parameters(), lr=1.0), Precision("fp32", torch.device("cpu"))


def snapping(every: int, parts: Any, world: World, outbox: Any) -> Snapshots:
    model, optimizer, precision = parts
    target = SnapshotTarget(outbox, PinnedBuffers(CPU), 0)
    return Snapshots(every, target, model, optimizer, precision, world)


def step_to(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def weight_in(copy: tuple[Header, Bytes]) -> float:
    values = merge_snapshots([copy], 0, set()).tensors["model"]["weight"].unique().tolist()
    assert len(values) == 1, f"a copy of several moments: {values}"
    return values[0]


def test_when_a_copy_is_due(parts: Any) -> None:
    snapshots = snapping(4, parts, World.single_process(), Shelf())
    assert [step for step in range(1, 13) if snapshots.due(step)] == [4, 8, 12]
    assert not any(snapping(0, parts, World.single_process(), Shelf()).due(step) for step in range(13))


def test_a_step_is_copied_once(parts: Any) -> None:
    shelf = Shelf()
    snapshots = snapping(4, parts, World.single_process(), shelf)
    for step in (4, 4, 8):
        snapshots.take(Progress(step=step))
    assert [header.step for header, _ in shelf.held] == [4, 8]


def test_a_copy_is_of_its_moment(parts: Any) -> None:
    shelf = Shelf()
    snapshots = snapping(1, parts, World.single_process(), shelf)
    progress = Progress(step=1)
    step_to(parts[0], 1.0)
    snapshots.take(progress)
    step_to(parts[0], 2.0)
    progress.step, progress.samples = 2, 99
    assert weight_in(shelf.held[0]) == 1.0
    assert read_snapshot(*shelf.held[0])[1]["progress"]["samples"] == 0


def test_what_is_being_fetched_and_what_waits_are_not_written_over(parts: Any) -> None:
    """Two rooms: while the first copy is on its way the second is made, and the third waits until the second is on its way, when
    the first has arrived."""
    outbox, life = Watched(), GroupMembership()
    world = World.single_process()
    snapshots = snapping(1, parts, world, outbox)
    on_its_way: list[tuple[Header, Bytes]] = []
    for step in range(1, 8):
        step_to(parts[0], float(step))
        if step > 1:
            on_its_way = [*on_its_way[-1:], outbox.fetch()]  # the one before it has arrived
        snapshots.take(Progress(step=step))
        assert [weight_in(copy) for copy in on_its_way[-1:]] == [float(step - 1)] * (step > 1)
    assert not life.left
    assert len(set(outbox.put_at)) == 2, "two rooms are enough, and no more are made"


def test_a_copy_that_nobody_fetches_stops_the_next(parts: Any) -> None:
    """It is waited for, not written over; who is told to leave leaves."""
    outbox, life = Watched(), GroupMembership()
    snapshots = snapping(1, parts, _with_life(life), outbox)
    step_to(parts[0], 1.0)
    snapshots.take(Progress(step=1))
    step_to(parts[0], 2.0)
    life.leave()
    with pytest.raises(GroupLeft):
        snapshots.take(Progress(step=2))
    assert weight_in(outbox.fetch()) == 1.0


def _with_life(life: GroupMembership) -> World:
    from experts.group import GroupFactory
    from orchestrator.train.parts.stores import open_store

    return replace(
        World.single_process(), group_factory=GroupFactory(open_store("127.0.0.1")[0], "x", 0, 1, life)
    )


def test_growing_state_gets_larger_rooms(parts: Any) -> None:
    """An optimizer has nothing before its first step."""
    model, precision = parts[0], parts[2]
    optimizer, shelf = torch.optim.AdamW(model.parameters()), Shelf()
    snapshots = snapping(1, (model, optimizer, precision), World.single_process(), shelf)
    for step in range(3):
        snapshots.take(Progress(step=step))
        model.weight.grad = torch.ones_like(model.weight)
        model.bias.grad = torch.ones_like(model.bias)
        optimizer.step()
    sizes = [data.size for _, data in shelf.held]
    assert sizes[0] < sizes[1]
    ends = [header.end for header, _ in shelf.held]
    assert ends[0] < ends[1] == ends[2]
    found = merge_snapshots(shelf.held[2:], 0, set())
    assert torch.equal(found.tensors["optimizer"]["exp_avg/weight"], torch.full((40, 40), 0.19))


def test_where_tensors_lie_is_worked_out_once(parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each of the two rooms; and anew when there are other tensors of the same size."""
    worked_out: list[int] = []

    def watched(room: Tensor, offset: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        worked_out.append(offset)
        return place(room, offset, shape, dtype)

    place = snapshots_module._place
    monkeypatch.setattr(snapshots_module, "_place", watched)
    shelf, model = Shelf(), parts[0]
    snapshots = snapping(1, parts, World.single_process(), shelf)
    for step in range(1, 7):
        step_to(model, float(step))
        snapshots.take(Progress(step=step))
    assert len(worked_out) == 2 * 2, "weight and bias, in two rooms"
    assert [weight_in(copy) for copy in shelf.held] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    model.weight = nn.Parameter(torch.full((20, 80), 7.0))
    snapshots.take(Progress(step=7))
    assert merge_snapshots(shelf.held[6:], 0, set()).tensors["model"]["weight"].shape == (20, 80)
    assert weight_in(shelf.held[6]) == 7.0


def test_on_a_gpu_the_rooms_are_made_beside_the_steps(parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, str]] = []

    def make(self: PinnedBuffers, size: int) -> Tensor:
        made.append((size, threading.current_thread().name))
        return torch.empty(size, dtype=torch.uint8)

    monkeypatch.setattr(PinnedBuffers, "_made", make)
    rooms, size = PinnedBuffers(torch.device("cuda", 0)), 4 * 1600 + 3 * 64  # the bias has 160 bytes
    model, optimizer, precision = parts
    for _ in range(2):  # one membership after another
        target = SnapshotTarget(Shelf(), rooms, 0)
        snapshots = Snapshots(4, target, model, optimizer, precision, World.single_process())
        for _ in range(3):
            snapshots.prepare()
        assert len({rooms.next_buffer(size).data_ptr() for _ in range(4)}) == 2
    assert [thread for _, thread in made] == ["rooms"] * 2, "both in the thread, once"
    assert len({length for length, _ in made}) == 1
    assert made[0][0] > size
    other = PinnedBuffers(torch.device("cuda", 0))
    target = SnapshotTarget(Shelf(), other, 0)
    Snapshots(0, target, model, optimizer, precision, World.single_process()).prepare()
    assert other._making is None, "no copy is ever due"
    rooms = PinnedBuffers(CPU)
    rooms.prepare(100)
    assert (rooms._making, rooms.next_buffer(100).numel() >= 100, len(made)) == (None, True, 3)


def test_the_loss_goes_on_as_if_nothing_had_happened(three: tuple[HostSnapshots, Contents]) -> None:
    """One process that goes on from the copies, against one that never stopped: the next losses are the same."""
    stepper, feed = make_stepper(TASK, 4, 12, learning_rate=1e-2)
    expected = [mean_loss(totals) for totals in run_steps(stepper, feed, 8)][4:]
    again, _ = make_stepper(TASK, 4, 12, learning_rate=1e-2)
    restore(merge_snapshots(three[0], 0, set()), again.strategy.model, again.optimizer.inner, again.precision)
    portions = [portion for epoch in range(3) for portion in feed.steps(epoch)]
    assert [mean_loss(again.run(portions[step], step)) for step in range(4, 8)] == pytest.approx(
        expected, rel=1e-10
    )
