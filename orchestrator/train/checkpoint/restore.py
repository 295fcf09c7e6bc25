"""Restores the contents of a checkpoint into the live state of a run, by name.

The hashes of a checkpoint prove that its bytes are as written, not that a run of this model wrote
them. So every name, shape and type is checked, and a mismatch is the user's error with advice, not
a traceback.

E: experts of one size"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from experts.expert_state import join_experts, remote_expert_names, stacked_names
from experts.model import structure_of
from experts.structure import Expert, LayerStructure
from orchestrator.checkpoint.files import AVERAGE_SLOT, Contents
from orchestrator.checkpoint.progress import (
    OTHER_CHECKPOINT,
    Progress,
    read_progress,
)
from orchestrator.checkpoint.saved_experts import OtherExperts, read_experts
from orchestrator.errors import UserError
from orchestrator.train.checkpoint.state import (
    TrainState,
    frozen_base,
    is_plain,
    model_tensors,
    restore_random_state,
)
from orchestrator.train.optim.adamw import AdamW
from orchestrator.train.optim.shards import as_shard, copy_into, local_part, shard_like

_STATISTICS = ".statistics.sums"
"""The end of the names of routing statistics."""
_ADAM_SLOTS = frozenset({"step", "exp_avg", "exp_avg_sq"})
_KNOWN_SLOTS: Mapping[type, Sequence[Set[str]]] = {
    torch.optim.AdamW: (_ADAM_SLOTS,),
    AdamW: (_ADAM_SLOTS,),
    torch.optim.Adam: (_ADAM_SLOTS,),
    # Without momentum it has none, and a run may be resumed with another momentum.
    torch.optim.SGD: (frozenset({"momentum_buffer"}), frozenset()),
}
"""The slots of torch's usual optimizers: counters, and tensors like the parameter.

Others cannot be checked."""


def restore(contents: Contents, state: TrainState) -> Progress:
    """Restore a checkpoint.

    Return its progress. Raise ``UserError`` if no run of this model wrote it."""
    progress = read_progress(contents.state)
    check_experts(contents, state.model)
    restore_model(contents, state.model)
    try:
        _restore_optimizer(contents, state)
        state.precision.load_state_dict(contents.state["precision"])
        restore_random_state(contents.state["random"])
        if state.evolution is not None and contents.state["evolution"] is not None:
            state.evolution.restore(contents.state["evolution"])
    except (
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        IndexError,
        OverflowError,
    ) as error:
        raise UserError(
            "the checkpoint's state does not belong to a run of this model "
            f"({type(error).__name__}: {error}); {OTHER_CHECKPOINT}"
        ) from None
    return progress


def check_experts(contents: Contents, model: nn.Module) -> None:
    """Raise ``OtherExperts`` if experts were born, merged or pruned before the checkpoint was written."""
    saved = read_experts(contents.state)
    own = structure_of(model)
    have_same_names = [layer.name for layer in saved.layers] == [layer.name for layer in own]
    can_differ = saved.have_changed or any(not layer.is_initial for layer in own)
    if have_same_names and can_differ and _without_hosts(saved.layers) != _without_hosts(own):
        raise OtherExperts(saved)


def check_base(contents: Contents, model: nn.Module) -> None:
    """Raise ``UserError`` for adapters whose frozen weights are not those of the model."""
    saved = contents.state.get("frozen_base")
    own = frozen_base(model)
    if saved is None or saved == own:
        return
    if own is None:
        raise UserError(
            "the checkpoint holds adapters alone, without the weights of their model; give --model and "
            "--lora as in its run"
        )
    raise UserError(
        "the checkpoint holds adapters of another model than --model: the names, sizes or contents of its "
        "safetensors files differ; give the model that the run began with"
    )


def _without_hosts(layers: Sequence[LayerStructure]) -> list[list[Expert]]:
    """Return the experts without their places, which may differ."""
    return [[replace(expert, hosts=(), split=()) for expert in layer.experts] for layer in layers]


@torch.no_grad()
def restore_model(contents: Contents, model: nn.Module) -> None:
    """Restore the weights alone (``--init-from``).

    Every one must be there, and have the right shape."""
    if not contents.tensors["model"]:
        raise UserError("the checkpoint has no weights; give another one")
    check_base(contents, model)
    tensors = model_tensors(model)
    stacked = {name: experts for name, experts in stacked_names(model).items() if name in tensors}
    saved = _join_experts(contents.tensors["model"], stacked, "the checkpoint")
    shards = contents.shards.get("model", frozenset())
    for name, tensor in tensors.items():
        if name.endswith(_STATISTICS) and (name not in saved or saved[name].shape != tensor.shape):
            continue  # a run without evolution has none
        if name not in saved:
            raise UserError(
                f"the checkpoint has no {name}; the model needs it: is it of the same task and sizes?"
            )
        needed = local_part(tensor) if name in shards else tensor
        if saved[name].shape != needed.shape:
            saved_shape = tuple(saved[name].shape)
            model_shape = tuple(needed.shape)
            raise UserError(
                f"{name} is {saved_shape} in the checkpoint and {model_shape} in the model; "
                "give the sizes it was trained with"
            )
        copy_into(tensor, saved[name])


def _join_experts(
    tensors: Mapping[str, Tensor], stacked: Mapping[str, list[str]], source: str
) -> dict[str, Tensor]:
    try:
        return join_experts(tensors, stacked)
    except KeyError as error:
        raise UserError(
            f"{source} has no {error.args[0]}; the model has that expert: "
            "give the number of experts it was trained with"
        ) from None
    except RuntimeError as error:
        raise UserError(
            f"{source} has experts of other sizes than the model: "
            f"give the sizes it was trained with ({error})"
        ) from None


def _restore_optimizer(contents: Contents, state: TrainState) -> None:
    saved = contents.state["optimizer"]
    kind = type(state.optimizer).__name__
    if saved["kind"] != kind:
        raise UserError(
            f"the checkpoint's optimizer is {saved['kind']}, this run's {kind}; "
            "use --init-from for the weights alone"
        )
    parameters = dict(state.model.named_parameters())
    remote_names = remote_expert_names(state.model)
    saved_tensors = contents.tensors["optimizer"]
    shards = contents.shards.get("optimizer", frozenset())
    for slot, name, tensor in _slot_tensors(saved_tensors, state.model, remote_names):
        _set_slot(state.optimizer, parameters[name], slot, tensor, f"{slot}/{name}" in shards)
    for slot, name, value in _slot_values(saved["values"], state.model, remote_names):
        state.optimizer.state[parameters[name]][slot] = value
    _check_slots(state.optimizer, parameters)
    # Only the learning rates: other settings are those of this start, which may have changed them.
    groups = [group for group in state.optimizer.param_groups if "same_as" not in group]
    for group, settings in zip(groups, saved["groups"], strict=True):
        group |= _learning_rates(settings)
    for group in state.optimizer.param_groups:
        if "same_as" in group:
            group |= _learning_rates(groups[group["same_as"]])


def _learning_rates(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key in ("lr", "initial_lr")}


def _slot_tensors(
    saved: Mapping[str, Tensor], model: nn.Module, remote_names: Set[str]
) -> Iterator[tuple[str, str, Tensor]]:
    """Yield the slot, the parameter's name and the tensor of each saved tensor of this host."""
    slots: dict[str, dict[str, Tensor]] = {}
    for key, tensor in saved.items():
        slot, _, name = key.partition("/")
        slots.setdefault(slot, {})[name] = tensor
    for slot, tensors in slots.items():
        local_tensors = {name: tensor for name, tensor in tensors.items() if name not in remote_names}
        for name, tensor in _join_slot(local_tensors, model).items():
            yield slot, name, tensor


def _slot_values(
    saved: Mapping[str, Any], model: nn.Module, remote_names: Set[str]
) -> Iterator[tuple[str, str, Any]]:
    """Yield the slot, the parameter's name and the value of each plain value of this host."""
    stack_of_expert = {
        expert_name: name for name, experts in stacked_names(model).items() for expert_name in experts
    }
    for key, value in saved.items():
        slot, _, name = key.partition("/")
        if not is_plain(value):
            raise TypeError(f"{key} is a {type(value).__name__}")
        if name not in remote_names:
            yield slot, stack_of_expert.get(name) or name, value


def _join_slot(tensors: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Stack one slot's tensors as the model does.

    A slot that has any trained expert must have all of them."""
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    stacked = {name: experts for name, experts in stacked_names(model).items() if name in trained}
    # A slot may belong to dense parameters alone.
    if not any(expert in tensors for experts in stacked.values() for expert in experts):
        stacked = {}
    joined = _join_experts(tensors, stacked, "the checkpoint's optimizer")
    for name in stacked:
        if joined[name].ndim == 1:
            joined[name] = _common_counter(joined[name])
    return joined


def _common_counter(counters_E: Tensor) -> Tensor:
    """Return the step counter that the experts of a stacked parameter share."""
    if not bool((counters_E == counters_E[0]).all()):
        raise UserError(
            f"experts of one size have different step counters ({counters_E.tolist()}); "
            "this version keeps one per size"
        )
    return counters_E[0]


def _set_slot(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, slot: str, tensor: Tensor, of_shard: bool
) -> None:
    """Store a tensor where the optimizer expects it: moments on the parameter's device.

    A step counter is on the device only under a fused optimizer, else on the CPU."""
    fused = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    device = parameter.device if slot != "step" or fused else torch.device("cpu")
    stored = tensor.to(device, copy=True)
    if of_shard:
        stored = as_shard(stored, parameter)
    elif tensor.shape == parameter.shape or slot in getattr(optimizer, "row_slots", ()):
        stored = shard_like(stored, parameter)
    optimizer.state[parameter][slot] = stored


def _check_slots(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
    """Check the restored slots.

    Without the check, the first step would fail with an error that explains nothing."""
    known = _KNOWN_SLOTS.get(type(optimizer))
    if known is None:
        return
    for name, parameter in parameters.items():
        slots = optimizer.state.get(parameter)
        if not slots:
            continue
        if slots.keys() - {"max_exp_avg_sq", AVERAGE_SLOT} not in known:
            needed = ", ".join(sorted(known[0]))
            raise ValueError(f"the optimizer keeps {needed} of {name}, not {', '.join(sorted(slots))}")
        for slot, value in slots.items():
            # A counter is a scalar of any type; a moment is like its parameter.
            is_counter = slot == "step"
            shape = () if is_counter else tuple(parameter.shape)
            # The optimizer sees weights that --weight-precision stores in bf16 as copies in fp32.
            dtype = value.dtype if is_counter else parameter.grad_dtype or parameter.dtype
            if tuple(value.shape) != shape or value.dtype != dtype:
                raise ValueError(f"{slot} of {name} is {value.dtype} of shape {tuple(value.shape)}")
