"""The silent errors of other MoE trainers, one test each, in the order of the table in ``facts.md``: a check that passes, and
that fails where the error is planted in our own code, on the hosts and in the one process they are held against alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from experts import bank as banks
from experts.bank import ExpertBank
from experts.exchange import Together
from experts.expert_state import split_experts, stacked_names
from experts.gate import Gate
from experts.group import Group
from experts.kernels import grouped
from experts.layer import MoELayer
from experts.load import moe_layers
from experts.model import initialise
from orchestrator.config.settings import Config
from orchestrator.errors import OutOfMemory, TaskFailed, UserError
from orchestrator.train import state
from orchestrator.train import step as stepping
from orchestrator.train.checkpoint import Contents
from orchestrator.train.data import Feed, Portion, cut_batch
from orchestrator.train.hosting import Hosted
from orchestrator.train.optim import norm_of
from orchestrator.train.replicate import Replica
from orchestrator.train.state import Progress, capture, restore
from orchestrator.train.step import Stepper
from orchestrator.train.totals import Totals
from orchestrator.train.world import World, file_store, joined
from tests.support.parts import assert_gradients_equal, make_stepper, mean_loss
from tests.support.ranks import PEER_GONE, RanksFailed, run_ranks
from tests.support.tiny import Tiny

HOSTS = 2
RATE = 1e-2
SIZES = (3, 5, 2, 4, 6, 7)  # each of its own: an expert is a parameter by itself
TASK, CHOOSY = Tiny((SIZES,)), Tiny((SIZES,), top_k=1)
Plant = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Case:
    """A run on two hosts, with every other expert on the second: ``micro`` samples of each at once."""

    task: Tiny = TASK
    micro: int = 8
    whole: int = 16
    clip: float = 0.0
    steps: int = 1
    recompute: bool = False

    def stepper(self, world: World) -> tuple[Stepper, Feed]:
        """One process takes the batch in one piece, and recomputes nothing."""
        alone = world.size == 1
        return make_stepper(
            self.task,
            self.whole if alone else self.micro,
            self.whole,
            learning_rate=RATE,
            clip_norm=self.clip,
            world=world,
            host_of=None if alone else [[expert % HOSTS for expert in range(len(sizes))] for sizes in self.task.sizes],
            recompute=self.recompute and not alone,
        )


@dataclass(frozen=True)
class Ran:
    losses: list[float]
    norms: list[float]
    loads: list[list[list[int]]]
    """By step and layer."""
    biases: list[list[Tensor]]
    gradients: dict[str, Tensor]
    """Of the first step, as the optimizer got them, by expert."""
    weights: dict[str, Tensor]


def ran(case: Case, world: World) -> Ran:
    stepper, feed = case.stepper(world)
    model, done, biases = stepper.replica.model, [], []
    first: dict[str, Tensor] = {}
    for step, portion in enumerate(portions(feed, case.steps)):
        done.append(stepper.run(portion, step))
        biases.append([layer.gate.bias_E.clone() for _, layer in moe_layers(model)])
        if not step:
            first = by_expert(model, {name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    loads = [[load.tolist() for load in totals.loads] for totals in done]
    weights = by_expert(model, dict(model.named_parameters()))
    return Ran([mean_loss(totals) for totals in done], [_norm(totals) for totals in done], loads, biases, first, weights)


def portions(feed: Feed, steps: int) -> Iterator[Portion]:
    whole = (portion for epoch in count() for portion in feed.steps(epoch))
    return (next(whole) for _ in range(steps))


def by_expert(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in split_experts(tensors, stacked_names(model)).items()}


def _norm(totals: Totals) -> float:
    assert totals.norm is not None
    return float(totals.norm)


@contextmanager
def planted(plant: Plant | None) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if plant is not None:
            plant(patch)
        yield


@contextmanager
def hosted(rank: int, size: int, store: str, plant: Plant | None) -> Iterator[World]:
    with planted(plant), joined(file_store(store, size), rank, size, torch.device("cpu"), "gloo", 20) as world:
        yield world


def on_host(rank: int, size: int, store: str, cases: Sequence[Case], plant: Plant | None) -> list[Ran]:
    with hosted(rank, size, store, plant) as world:
        return [ran(case, world) for case in cases]


def on_hosts(case: Case, plant: Plant | None) -> list[Ran]:
    return [found for (found,) in run_ranks(on_host, HOSTS, [case], plant)]


def alone(case: Case, plant: Plant | None = None) -> Ran:
    with planted(plant):
        return ran(case, World.alone())


def merged(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Each tensor once: experts from their hosts, the dense part from any."""
    return {name: tensor for part in parts for name, tensor in part.items()}


def norm(tensors: Mapping[str, Tensor]) -> float:
    return float(torch.stack([tensor.norm() for tensor in tensors.values()]).norm())


def shows(check: Callable[[Plant | None], None], plant: Plant, match: str) -> None:
    """The check passes; with the error planted its comparison fails, and no rank stumbles for another reason."""
    check(None)
    with pytest.raises(AssertionError, match=match) as caught:
        check(plant)
    assert not isinstance(caught.value, RanksFailed)


# Gradient norm averaged over ranks that own different experts.


def averages_norms(patch: pytest.MonkeyPatch) -> None:
    def averaged(self: Hosted, gradients: list[Tensor], squares: Tensor | None) -> Tensor:
        return self.world.sum_(norm_of(gradients)) / self.world.size

    patch.setattr(Hosted, "norm", averaged)


def norms_equal_one_process(plant: Plant | None) -> None:
    case = Case(steps=3, clip=0.5)
    expected = alone(case, plant).norms
    for host in on_hosts(case, plant):
        assert host.norms == pytest.approx(expected, rel=1e-12), "the gradient norm is another one on hosts"


def test_gradient_norm_averaged_over_ranks_that_own_different_experts() -> None:
    shows(norms_equal_one_process, averages_norms, "gradient norm is another one")


# Each expert group clips by its own norm.


def clips_by_own_norm(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Hosted, "norm", lambda self, gradients, squares: norm_of(gradients))


def dense_weights_stay_together(plant: Plant | None) -> None:
    case = Case(steps=6, clip=0.1)
    first, second = (host.weights for host in on_hosts(case, plant))
    expected = alone(case, plant).weights
    shared = sorted(first.keys() & second.keys())
    assert "stem.weight" in shared
    assert "blocks.0.ffn.gate.weight_ED" in shared
    for name in shared:
        assert torch.equal(first[name], second[name]), f"{name} drifted apart"
        torch.testing.assert_close(first[name], expected[name], rtol=1e-9, atol=1e-9)


def test_each_expert_group_clips_by_its_own_norm() -> None:
    shows(dense_weights_stay_together, clips_by_own_norm, "drifted apart")


# The norm leaves experts out, or counts replicas once per rank.


def leaves_experts_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Hosted, "norm", lambda self, gradients, squares: _dense_norm(self))


def counts_replicas_per_host(patch: pytest.MonkeyPatch) -> None:
    def counted(self: Hosted, gradients: list[Tensor], squares: Tensor) -> Tensor:
        return (_dense_norm(self).square() * self.world.size + squares.sum()).sqrt()

    patch.setattr(Hosted, "norm", counted)


def _dense_norm(replica: Hosted) -> Tensor:
    return norm_of([p.grad for p in replica._dense if p.grad is not None])


def clipped_to_the_bound(plant: Plant | None) -> None:
    """What the optimizer got, added up here over each parameter once."""
    case = Case(clip=0.05)
    hosts = on_hosts(case, plant)
    assert min(host.norms[0] for host in hosts) > case.clip
    clipped = norm(merged([host.gradients for host in hosts]))
    assert clipped == pytest.approx(case.clip, rel=1e-12), "clipped too little or too much"
    assert hosts[0].norms == pytest.approx(alone(case, plant).norms, rel=1e-12)


@pytest.mark.parametrize("plant", [leaves_experts_out, counts_replicas_per_host])
def test_norm_leaves_experts_out_or_counts_replicas_once_per_rank(plant: Plant) -> None:
    shows(clipped_to_the_bound, plant, "clipped too little or too much")


# Expert gradients exactly doubled: invisible under Adam, so gradients are held against differences of the loss.


@dataclass(frozen=True)
class Nudged(Tiny):
    """``part`` of the weights moved a little in one direction."""

    part: str = ""
    by: float = 0.0

    def build_model(self) -> nn.Module:
        model = super().build_model()
        for name, direction in directions(model, self.part).items():
            model.get_parameter(name).data.add_(self.by * direction)
        return model


def directions(model: nn.Module, part: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(4)
    drawn = {name: torch.randn(p.shape, generator=generator, dtype=p.dtype) for name, p in model.named_parameters()}
    return {name: direction for name, direction in drawn.items() if part in name}


def gradients_are_slopes(part: str, plant: Plant | None) -> None:
    """The gradient along a direction is what the loss does there, on hosts as in one process."""
    small = 1e-5
    cases = [Case(Nudged((SIZES,), part=part, by=by)) for by in (0.0, small, -small)]
    model = cases[0].task.build_model()
    direction = by_expert(model, directions(model, part))
    one, hosts = [alone(case, plant) for case in cases], run_ranks(on_host, HOSTS, cases, plant)
    for runs, gradients in ((one, one[0].gradients), (hosts[0], merged([host[0].gradients for host in hosts]))):
        along = sum(float((gradients[name] * direction[name]).sum()) for name in direction)
        slope = (runs[1].losses[0] - runs[2].losses[0]) / (2 * small)
        assert abs(slope) > 1e-3
        assert along == pytest.approx(slope, rel=1e-6), f"the gradient of the {part} is not the slope of the loss"


def doubles_expert_gradients(patch: pytest.MonkeyPatch) -> None:
    real = Hosted.add_up

    def doubled(self: Hosted) -> float:
        factor = real(self)
        for stack in (stack for bank in self._banks for _, _, stack in bank.stacks()):
            assert stack.grad is not None
            stack.grad.mul_(2)
        return factor

    patch.setattr(Hosted, "add_up", doubled)


def test_expert_gradients_exactly_doubled() -> None:
    shows(lambda plant: gradients_are_slopes("bank", plant), doubles_expert_gradients, "gradient of the bank is not the slope")
    case = Case(steps=6)
    hidden, right = on_hosts(case, doubles_expert_gradients)[0].losses, alone(case).losses
    assert hidden == pytest.approx(right, rel=1e-4), "the losses would have told"


# Gradients doubled at every micro-batch.


def doubles_at_every_micro_batch(patch: pytest.MonkeyPatch) -> None:
    real = Replica.loss

    def doubled(self: Replica, batch: Any, last: bool) -> Any:
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(2)
        return real(self, batch, last)

    patch.setattr(Replica, "loss", doubled)


def accumulated_gradients_equal_one_pass(plant: Plant | None) -> None:
    case = Case(micro=2)  # four micro-batches
    found = merged([host.gradients for host in on_hosts(case, plant)])
    assert_gradients_equal(found, alone(case, plant).gradients, 1e-10, 1e-12)


def test_gradients_doubled_at_every_micro_batch() -> None:
    shows(accumulated_gradients_equal_one_pass, doubles_at_every_micro_batch, "off by .* allowed")


# Router cut off by a non-differentiable gather.


def cuts_the_router_off(patch: pytest.MonkeyPatch) -> None:
    real = Gate.forward

    def cut(self: Gate, *arguments: Any) -> Any:
        routing = real(self, *arguments)
        return replace(routing, weights_TK=routing.weights_TK.detach())

    patch.setattr(Gate, "forward", cut)


def test_router_cut_off_by_a_non_differentiable_gather() -> None:
    shows(lambda plant: gradients_are_slopes("gate", plant), cuts_the_router_off, "gradient of the gate is not the slope")


# Experts without tokens get no gradient.


def skips_experts_without_tokens(patch: pytest.MonkeyPatch) -> None:
    real: Any = ExpertBank._compute

    def skipping(self: ExpertBank, group: Any, rows_RD: Tensor, *rest: Tensor) -> Tensor:
        return real(self, group, rows_RD, *rest) if len(rows_RD) else rows_RD

    patch.setattr(ExpertBank, "_compute", skipping)


def idle_experts_keep_momentum_and_decay(plant: Plant | None) -> None:
    """Experts that had tokens in the first step or never, against AdamW with gradients of zero from then on."""
    case = Case(CHOOSY, micro=1, whole=2, steps=3)
    model = case.task.build_model()
    begun = by_expert(model, dict(model.named_parameters()))
    hosts = on_hosts(case, plant)
    first, *later = [step[0] for step in hosts[0].loads]
    idle = [expert for expert, loads in enumerate(zip(*later, strict=True)) if not any(loads)]
    assert {first[expert] > 0 for expert in idle} == {True, False}, "the case has no such experts"
    gradients, weights = merged([host.gradients for host in hosts]), merged([host.weights for host in hosts])
    for name in (f"blocks.0.ffn.bank.{expert}.{role}" for expert in idle for role in ("up", "down")):
        expected = nn.Parameter(begun[name])
        optimizer = torch.optim.AdamW([expected], lr=RATE, weight_decay=Config.of().optim.weight_decay)
        for step in range(case.steps):
            expected.grad = torch.zeros_like(expected) if step else gradients.get(name, torch.zeros_like(expected))
            optimizer.step()
        torch.testing.assert_close(weights[name], expected.detach(), rtol=1e-12, atol=1e-12, msg=f"{name}: momentum or decay diverged")
    assert gradients.keys() == begun.keys()


def test_experts_without_tokens_get_no_gradient() -> None:
    shows(idle_experts_keep_momentum_and_decay, skips_experts_without_tokens, "momentum or decay diverged")


# Uninitialised tail rows: neither torch's grouped product nor gloo says a word where there are more rows than were written.


def takes_any_offsets(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(grouped, "check_offsets", lambda offsets_E, rows: None)


def grouped_layer() -> MoELayer:
    layer = MoELayer(8, (4, 4, 4), 2)
    initialise(layer, 3)
    layer.bank.kernel = "grouped"
    return layer


def short_offsets_are_refused(plant: Plant | None) -> None:
    """A count that is one short leaves the last row unwritten."""
    x_TD = torch.randn(7, 8, generator=torch.Generator().manual_seed(0))
    with planted(plant), pytest.MonkeyPatch.context() as fault:
        real = banks.experts_grouped

        def short(rows_RD: Tensor, up: Tensor, down: Tensor, counts_E: Tensor, *rest: Any) -> Tensor:
            counts_E = counts_E.clone()
            counts_E[-1] -= 1
            return real(rows_RD, up, down, counts_E, *rest)

        grouped_layer()(x_TD)  # the right counts pass
        fault.setattr(banks, "experts_grouped", short)
        said = refusal(lambda: grouped_layer()(x_TD))
    assert "do not cover 14 rows" in said, "took a row that nobody wrote"


def refusal(call: Callable[[], Any]) -> str:
    try:
        return f"no word, {call()}"
    except (RuntimeError, ValueError) as error:
        return str(error)


def takes_any_counts(patch: pytest.MonkeyPatch) -> None:
    def unchecked(self: Together, mine_NC: Tensor, agreed: Sequence[int]) -> list[list[int]]:
        received = torch.empty_like(mine_NC)
        self.group.all_to_all(received, mine_NC.contiguous(), [], []).wait()
        return received.tolist()

    patch.setattr(Together, "counts", unchecked)


def out_of_step(rank: int, size: int, store: str, ahead: int, plant: Plant | None) -> str:
    """Each sends the other a row; the second host is some exchanges ahead, and tells of the rows of the one it is at."""
    with hosted(rank, size, store, plant) as world:
        exchange = Together(Group(rank, size, world.process_group))
        exchange._number = ahead * rank
        told_NC = torch.tensor([[1 + 2 * ahead * rank], [1]])

        def exchanged() -> int:
            receives = [row[0] for row in exchange.counts(told_NC, (8,))]
            return len(exchange.rows(torch.ones(2, 3), [1, 1], receives).wait())

        return refusal(exchanged)


def wrong_counts_are_refused(plant: Plant | None) -> None:
    assert run_ranks(out_of_step, HOSTS, 0, plant) == ["no word, 2"] * HOSTS
    said = run_ranks(out_of_step, HOSTS, 1, plant)
    assert all("out of step; nothing was sent" in words for words in said), f"took rows that nobody sent: {said}"


def test_uninitialised_tail_rows() -> None:
    shows(short_offsets_are_refused, takes_any_offsets, "took a row that nobody wrote")
    shows(wrong_counts_are_refused, takes_any_counts, "took rows that nobody sent: .'no word, 4'")


# 0 × NaN from zero routing weights.


@dataclass(frozen=True)
class Poisoned(Tiny):
    """An expert of the first layer that makes NaN of everything."""

    expert: int = 0

    def build_model(self) -> nn.Module:
        model = super().build_model()
        for group, _, stack in moe_layers(model)[0][1].bank.stacks():
            if self.expert in group.ids:
                stack.data[group.ids.index(self.expert)] = torch.nan
        return model


def weighs_by_zero(patch: pytest.MonkeyPatch) -> None:
    """Every expert computes every row, and the weights of those that are not its own are zero."""
    real: Any = ExpertBank.forward

    def masked(self: ExpertBank, rows_RD: Tensor, counts_S: Tensor, weights_R: Tensor) -> Tensor:
        slot_R = torch.repeat_interleave(torch.arange(len(counts_S)), counts_S)
        all_SS = torch.eye(len(counts_S), dtype=counts_S.dtype) * len(rows_RD)
        made = [real(self, rows_RD, all_S, weights_R * (slot_R == slot)) for slot, all_S in enumerate(all_SS)]
        return torch.stack(made).sum(0)

    patch.setattr(ExpertBank, "forward", masked)


def an_expert_that_nobody_chose_changes_nothing(plant: Plant | None) -> None:
    case = Case(CHOOSY, micro=1, whole=2)
    healthy = alone(case, plant)
    expert = healthy.loads[0][0].index(0)
    ill = replace(case, task=Poisoned((SIZES,), top_k=1, expert=expert))
    hosts = on_hosts(ill, plant)
    for found in (alone(ill, plant), *hosts):
        assert found.losses == pytest.approx(healthy.losses, rel=1e-12), "an expert that nobody chose reached the loss"
        assert found.norms == pytest.approx(healthy.norms, rel=1e-12)
    assert_gradients_equal(merged([host.gradients for host in hosts]), healthy.gradients, 1e-10, 1e-12)


def test_zero_times_nan_from_zero_routing_weights() -> None:
    shows(an_expert_that_nobody_chose_changes_nothing, weighs_by_zero, "nobody chose reached the loss")


# The checkpoint keeps one rank's experts, and the run resumes silently.


def keeps_own_experts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(state, "_bring_together", lambda *_: None)


def keeps_own_moments(patch: pytest.MonkeyPatch) -> None:
    real = state._bring_together

    def in_part(both: dict[str, dict[str, Tensor]], *rest: Any) -> None:
        own = dict(both["optimizer"])
        real(both, *rest)
        both["optimizer"] = own

    patch.setattr(state, "_bring_together", in_part)


SAVED = Case(steps=4)
SAVED_AT = 2


def saved_on_host(rank: int, size: int, store: str, plant: Plant | None) -> tuple[Contents | None, dict[str, Tensor]]:
    """A checkpoint in the middle of a run, and the weights at its end."""
    with hosted(rank, size, store, plant) as world:
        stepper, feed = SAVED.stepper(world)
        model, contents = stepper.replica.model, None
        for step, portion in enumerate(portions(feed, SAVED.steps)):
            if step == SAVED_AT:
                contents = capture(model, stepper.learner.optimizer, stepper.precision, Progress(step), world)
            stepper.run(portion, step)
        return contents, by_expert(model, dict(model.named_parameters()))


def resumed_alone(contents: Contents) -> dict[str, Tensor]:
    stepper, feed = SAVED.stepper(World.alone())
    model = stepper.replica.model
    restore(contents, model, stepper.learner.optimizer, stepper.precision)
    for step, portion in enumerate(portions(feed, SAVED.steps)):
        if step >= SAVED_AT:
            stepper.run(portion, step)
    return by_expert(model, dict(model.named_parameters()))


def saved(plant: Plant | None) -> tuple[Contents, dict[str, Tensor]]:
    answers = run_ranks(saved_on_host, HOSTS, plant)
    (contents,) = [made for made, _ in answers if made is not None]
    return contents, merged([weights for _, weights in answers])


def a_checkpoint_has_all_experts(plant: Plant | None) -> None:
    contents, expected = saved(plant)
    lacking = expected.keys() - contents.tensors["model"].keys()
    assert not lacking, f"the checkpoint lacks {sorted(lacking)}"
    for name, weight in resumed_alone(contents).items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-9, atol=1e-9, msg=f"{name} is wrong after resuming")


def test_checkpoint_keeps_one_ranks_experts() -> None:
    shows(a_checkpoint_has_all_experts, keeps_own_experts, r"the checkpoint lacks .'blocks\.0\.ffn\.bank\.1\.down'")
    for plant in (keeps_own_experts, keeps_own_moments):  # nor would it be taken up silently
        with pytest.raises(UserError, match=r"has no blocks\.0\.ffn\.bank\.\d\.\w+; the model has that expert"):
            resumed_alone(saved(plant)[0])


# Balance loss wrong under accumulation.


def balances_each_micro_batch(patch: pytest.MonkeyPatch) -> None:
    real = Gate.forward

    def by_itself(self: Gate, x_TD: Tensor, previous_E: Tensor, *rest: Any) -> Any:
        return real(self, x_TD, real(self, x_TD, previous_E, *rest).counts_E, *rest)

    patch.setattr(Gate, "forward", by_itself)


def balance_does_not_depend_on_the_cut(plant: Plant | None) -> None:
    case = Case(micro=2, steps=3)
    expected, hosts = alone(case, plant), on_hosts(case, plant)
    assert hosts[0].losses == pytest.approx(expected.losses, rel=1e-12), "the loss depends on how the batch is cut"
    assert_gradients_equal(merged([host.gradients for host in hosts]), expected.gradients, 1e-10, 1e-12)


def test_balance_loss_wrong_under_accumulation() -> None:
    shows(balance_does_not_depend_on_the_cut, balances_each_micro_batch, "loss depends on how the batch is cut")


# Recomputation counts expert loads twice.


def counts_both_passes(patch: pytest.MonkeyPatch) -> None:
    real, counted = MoELayer._route, {}

    def route(self: MoELayer, x_TD: Tensor, samples: int) -> Any:
        routing = real(self, x_TD, samples)
        if self.hosts.repeating:
            counted[self].add_(routing.counts_E)
        else:
            counted[self] = routing.counts_E
        return routing

    patch.setattr(MoELayer, "_route", route)


def loads_are_those_of_one_pass(plant: Plant | None) -> None:
    case = Case(Tiny((SIZES, SIZES)), micro=4, steps=3, recompute=True)
    expected, hosts = alone(case, plant), on_hosts(case, plant)
    for host in hosts:
        assert host.loads == expected.loads, "recomputation changes the loads"
        assert {sum(load) for load in host.loads[0]} == {case.whole * case.task.top_k}
        assert host.losses == pytest.approx(expected.losses, rel=1e-12)


def test_recomputation_counts_expert_loads_twice() -> None:
    shows(loads_are_those_of_one_pass, counts_both_passes, "recomputation changes the loads")


# Asynchronous balancer dead without a word. Ours is a part of the step, on every host.


def never_settles(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(stepping, "settle", lambda model, loads: None)


def settles_once(patch: pytest.MonkeyPatch) -> None:
    real, calls = stepping.settle, count()
    patch.setattr(stepping, "settle", lambda model, loads: None if next(calls) else real(model, loads))


def biases_move_at_every_step(plant: Plant | None) -> None:
    rate = 0.01
    case = Case(Tiny((SIZES, SIZES), options={"bias_rate": rate}), steps=4)
    for host in (alone(case, plant), *on_hosts(case, plant)):
        expected = [torch.zeros(len(SIZES), dtype=torch.float64) for _ in case.task.sizes]
        for step, (loads, biases) in enumerate(zip(host.loads, host.biases, strict=True)):
            for layer, load in enumerate(loads):
                even = sum(load) / len(load)
                expected[layer] += rate * torch.sign(even - torch.tensor(load, dtype=torch.float64))
                assert torch.equal(biases[layer], expected[layer]), f"layer {layer} was not balanced after step {step}"
        assert float(torch.stack(host.biases[-1]).abs().max()) > rate


def test_asynchronous_balancer_dead_without_a_word() -> None:
    shows(biases_move_at_every_step, never_settles, "layer 0 was not balanced after step 0")
    with pytest.raises(AssertionError, match="layer 0 was not balanced after step 1"):
        biases_move_at_every_step(settles_once)


@dataclass(frozen=True)
class Untold(Tiny):
    """Trains MoE layers, and does not say how their experts were used."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return replace(super().loss(model, batch), loads=())


def test_a_task_that_tells_no_loads_is_refused() -> None:
    with pytest.raises(UserError, match="loads"):
        alone(Case(Untold((SIZES,))))


# One rank runs out of memory, the others keep their batch.


@dataclass(frozen=True)
class Hurt:
    losses: list[float]
    counts: list[int]
    error: str
    kind: str
    limit: int


HURT = Case(Tiny((SIZES,), samples=48), micro=4, steps=3)
HURT_AT = 3  # of the forward passes, two in a step
GONE = "the other host is gone"


def short_of_memory(forward: Callable[..., Any]) -> Callable[..., Any]:
    calls = count(1)

    def tight(batch: Any, samples: int, last: bool) -> Any:
        if next(calls) == HURT_AT:
            raise torch.OutOfMemoryError("injected")
        return forward(batch, samples, last)

    return tight


def hurt_on_host(rank: int, size: int, store: str, hosts: bool, plant: Plant | None) -> Hurt:
    """A run of which the second worker runs out of memory in the second step; what each came to."""
    losses, counts, error, kind, limit = [], [], "", "", 0
    try:
        with hosted(rank, size, store, plant) as world:
            stepper, feed = HURT.stepper(world) if hosts else make_stepper(HURT.task, HURT.micro, HURT.whole, RATE, HURT.clip, world=world)
            if rank == 1:
                stepper._forward = short_of_memory(stepper._forward)
            for step, portion in enumerate(portions(feed, HURT.steps)):
                totals = stepper.run(portion, step)
                losses.append(mean_loss(totals))
                counts.append(int(totals.count))
            limit = stepper.limit
    except Exception as caught:
        kind, error = type(caught).__name__, GONE if any(phrase in str(caught) for phrase in PEER_GONE) else str(caught)
    return Hurt(losses, counts, error, kind, limit)


def goes_on_with_half(patch: pytest.MonkeyPatch) -> None:
    """The worker that ran out takes half of its samples, and tells nobody."""
    real = Stepper._attempt

    def attempt(self: Stepper, portion: Portion, step: int) -> Totals | None:
        try:
            return real(self, portion, step)
        except torch.OutOfMemoryError:
            half = [replace(m, samples=m.samples // 2, fetch=lambda m=m: _half(m.fetch(), m.samples)) for m in portion.micros]
            return real(self, replace(portion, micros=half), step)

    patch.setattr(Stepper, "_attempt", attempt)


def _half(batch: Any, samples: int) -> Any:
    return cut_batch(batch, 0, samples // 2, samples)


def halves_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Stepper, "_vote", lambda self, problem: problem)


def hosts_end_together(plant: Plant | None) -> None:
    """Tokens have left already: nobody can be asked, and the run begins again with less."""
    first, second = run_ranks(hurt_on_host, HOSTS, True, plant)
    expected = alone(HURT, None).losses[:1]
    assert [len(host.losses) for host in (first, second)] == [1, 1], f"went on with batches of {second.counts} of {HURT.whole}"
    assert first.losses == second.losses == pytest.approx(expected, rel=1e-12)
    assert first.error == GONE
    assert second.kind == OutOfMemory.__name__
    assert second.error == "worker 1 ran out of memory at step 2 with a micro-batch of 4"


def workers_halve_together(plant: Plant | None) -> None:
    expected = alone(HURT, None).losses
    workers = run_ranks(hurt_on_host, HOSTS, False, plant)
    assert [worker.error for worker in workers] == ["", ""]
    for worker in workers:
        assert worker.counts == [HURT.whole] * HURT.steps, "went on with batches"
        assert worker.losses == pytest.approx(expected, rel=1e-12)
    assert [worker.limit for worker in workers] == [2, 2], "one worker halved alone"


def test_one_rank_runs_out_of_memory_and_the_others_keep_their_batch() -> None:
    shows(hosts_end_together, goes_on_with_half, r"went on with batches of \[16, 12, 16\] of 16")
    shows(workers_halve_together, goes_on_with_half, "went on with batches")
    with pytest.raises(AssertionError, match="one worker halved alone"):
        workers_halve_together(halves_alone)


def test_a_host_that_is_gone_is_no_mistake_of_the_users() -> None:
    """A mistake of theirs is never tried again, and would hide that the other ran out of memory."""
    first, _ = run_ranks(hurt_on_host, HOSTS, True, None)
    assert first.error == GONE
    assert first.kind != TaskFailed.__name__
