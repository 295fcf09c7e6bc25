"""From the living parts of a run to the contents of a checkpoint and back: everything by name, nothing pickled."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Set
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from experts.expert_state import join_experts, is_expert_parallel, remote_expert_names, split_experts, stacked_names
from orchestrator.errors import UserError
from orchestrator.plan.inventory.hardware import secret_values
from orchestrator.redaction import mask_tree
from orchestrator.train.checkpoint.store import Contents
from orchestrator.train.parts.precision import Precision


@dataclass(frozen=True)
class TrainState:
    """The parts of a run that hold state.

    step: int = 0
    epoch: int = 0
    position: int = 0
    samples: int = 0
    best_step: int | None = None
    best_value: float | None = None
    bad_evaluations: int = 0
    epoch_loss: float = 0.0  # sums since the epoch began, for its mean
    epoch_count: float = 0.0
    epoch_seconds: float = 0.0
    validation: dict[str, float] = field(default_factory=dict)


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers that belong to the model's state, shared ones once. The model is the task's own, never a
    wrapper of it, so its names are too."""
    kept = set(model.state_dict())
    return {
        name: tensor for name, tensor in [*model.named_parameters(), *model.named_buffers()] if name in kept
    }


def capture(
    model: nn.Module, optimizer: torch.optim.Optimizer, precision: Precision, progress: Progress, world: World
) -> Contents | None:
    """A copy in the main worker's host memory of all that a run needs to go on; None on the others. Where the model is
    sharded, or its experts live on several hosts, every worker must call it."""
    lodged = is_expert_parallel(model)
    if not world.is_main and not is_sharded(model) and not lodged:
        return None
    reshard_all(model)
    stacked = stacked_names(model)
    tensors, values, groups = optimizer_state(model, optimizer, stacked)
    keep = world.is_main or lodged

    def wanted(named: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The main host has the dense part itself: of the others their experts are wanted."""
        return (
            {name: tensor for name, tensor in named.items() if name in stacked}
            if lodged and not world.is_main
            else named
        )

    both = {"model": _host(wanted(model_tensors(model)), stacked, keep)}
    both["optimizer"] = {}
    for slot, of_slot in tensors.items():
        held = _host(wanted(of_slot), stacked, keep)
        both["optimizer"] |= {f"{slot}/{name}": tensor for name, tensor in held.items()}
    if lodged:
        _bring_together(
            both, values, {piece for pieces in stacked.values() for piece in pieces}, world, progress.step
        )
    if not world.is_main:
        return None
    # of all that it holds, metrics alone have names of anyone's making; the others are read again by the names they have
    metrics = mask_tree(progress.validation, secret_values())
    state = {
        "progress": asdict(progress) | {"validation": metrics},
        "precision": precision.state_dict(),
        "optimizer": {"kind": type(optimizer).__name__, "groups": groups, "values": values},
        "random": random_state(),
    }
    return Contents(both, state)


def _bring_together(
    both: dict[str, dict[str, Tensor]], values: dict[str, Any], experts: set[str], world: World, step: int
) -> None:
    """The experts of all hosts, to the main one. The dense part it has itself."""
    mine = {f"model/{name}": tensor for name, tensor in both["model"].items() if name in experts}
    mine |= {
        f"optimizer/{key}": tensor
        for key, tensor in both["optimizer"].items()
        if key.partition("/")[2] in experts
    }
    theirs = {key: value for key, value in values.items() if key.partition("/")[2] in experts}
    for tensors, plain in world.gather_to_main(mine, theirs, f"experts/{step}"):
        for key, tensor in tensors.items():
            kind, _, name = key.partition("/")
            both[kind][name] = tensor
        values |= plain


def _host(tensors: Mapping[str, Tensor], stacked: Mapping[str, list[str]], keep: bool) -> dict[str, Tensor]:
    """Whole tensors by expert, copied to host memory one after the other, so that a sharded model is never whole on a device."""
    held: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        gathered = full_tensor(tensor.detach())
        if keep:
            pieces = _split_one(name, gathered, stacked)
            held |= {piece: value.to("cpu", copy=True).contiguous() for piece, value in pieces.items()}
    return held


def _split_one(name: str, tensor: Tensor, stacked: Mapping[str, list[str]]) -> dict[str, Tensor]:
    """A tensor by expert. A scalar of a stacked parameter (Adam's step counter) becomes each expert's own."""
    if name in stacked and tensor.ndim == 0:
        tensor = tensor.expand(len(stacked[name]))
    return split_experts({name: tensor}, stacked)


def optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, stacked: Mapping[str, list[str]]
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any], list[dict[str, Any]]]:
    """Tensors by slot and parameter name, other values by ``slot/name`` and expert, and the groups' settings."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    tensors: dict[str, dict[str, Tensor]] = {}
    values: dict[str, Any] = {}
    for parameter, slots in optimizer.state.items():
        for slot, value in slots.items():
            if isinstance(value, Tensor):
                tensors.setdefault(slot, {})[names[parameter]] = value
            elif value is None or isinstance(value, bool | int | float | str):
                name = names[parameter]
                values |= {f"{slot}/{piece}": value for piece in stacked.get(name, [name])}
            else:
                raise UserError(
                    f"optimizer state {slot!r} is a {type(value).__name__}; only tensors and plain values can be saved without pickle"
                )
    groups = [
        {k: v for k, v in group.items() if k != "params" and isinstance(v, int | float | str | None)}
        for group in optimizer.param_groups
    ]
    return tensors, values, groups


def restore(
    contents: Contents, model: nn.Module, optimizer: torch.optim.Optimizer, precision: Precision
) -> Progress:
    """Put a checkpoint into the living parts. Returns how far it had come. UserError where it is none of ours, though its hashes are
    right: they can be had for anything."""
    progress = _progress(contents.state)
    restore_model(contents, model)
    try:
        _restore_optimizer(contents, model, optimizer)
        precision.load_state_dict(contents.state["precision"])
        _restore_random(contents.state["random"])
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        raise UserError(
            f"the checkpoint's state is none that a run of this model wrote ({type(error).__name__}: {error}); {_ELSE}"
        ) from None
    return progress


def _progress(state: Mapping[str, Any]) -> Progress:
    from pydantic import TypeAdapter, ValidationError

    try:
        found = TypeAdapter(Progress).validate_json(json.dumps(state.get("progress")), strict=True)
        known = set(state["progress"]) <= {f.name for f in fields(Progress)}
    except (ValidationError, TypeError, KeyError) as error:
        first = error.errors()[0] if isinstance(error, ValidationError) else None
        where = ".".join(str(part) for part in first["loc"]) if first else ""
        raise UserError(
            f"the checkpoint's progress is none that a run wrote ({where or 'it is missing'}); {_ELSE}"
        ) from None
    counts = (
        found.step,
        found.epoch,
        found.position,
        found.samples,
        found.best_step or 0,
        found.bad_evaluations,
    )
    if not known or not all(0 <= count < 2**62 for count in counts):
        raise UserError(
            f"the checkpoint's progress is none that a run wrote (step {found.step}, epoch {found.epoch}); {_ELSE}"
        )
    return found


_ELSE = "resume from another one, or give it to --init-from for its weights alone"


@torch.no_grad()
def restore_model(contents: Contents, model: nn.Module) -> None:
    """The weights alone (``--init-from``), by name: every one must be there, of the right shape."""
    if "model" not in contents.tensors:
        raise UserError("the checkpoint has no model.safetensors, and so no weights; give another one")
    saved = _joined(contents.tensors["model"], stacked_names(model), "the checkpoint")
    for name, tensor in model_tensors(model).items():
        if name not in saved:
            raise UserError(
                f"the checkpoint has no {name}; the model needs it: is it of the same task and sizes?"
            )
        if saved[name].shape != tensor.shape:
            was, now = tuple(saved[name].shape), tuple(tensor.shape)
            raise UserError(
                f"{name} is {was} in the checkpoint and {now} in the model; give the sizes it was trained with"
            )
        copy_into(tensor, saved[name])


def _joined(tensors: Mapping[str, Tensor], stacked: Mapping[str, list[str]], what: str) -> dict[str, Tensor]:
    try:
        return join_experts(tensors, stacked)
    except KeyError as error:
        raise UserError(
            f"{what} has no {error.args[0]}; the model has that expert: give the number of experts it was trained with"
        ) from None
    except RuntimeError as error:
        raise UserError(
            f"{what} has experts of other sizes than the model: give the sizes it was trained with ({error})"
        ) from None


def _restore_optimizer(contents: Contents, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    saved = contents.state["optimizer"]
    if saved["kind"] != type(optimizer).__name__:
        raise UserError(
            f"the checkpoint's optimizer is {saved['kind']}, this run's {type(optimizer).__name__}; use --init-from for the weights alone"
        )
    slots: dict[str, dict[str, Tensor]] = {}
    for key, tensor in contents.tensors["optimizer"].items():
        slot, _, name = key.partition("/")
        slots.setdefault(slot, {})[name] = tensor
    parameters, elsewhere = dict(model.named_parameters()), remote_expert_names(model)
    for slot, tensors in slots.items():
        held = {name: tensor for name, tensor in tensors.items() if name not in elsewhere}
        for name, tensor in _joined_slot(held, model).items():
            _put(optimizer, parameters[name], slot, tensor)
    stack_of = {piece: name for name, pieces in stacked_names(model).items() for piece in pieces}
    for key, value in saved["values"].items():
        slot, _, name = key.partition("/")
        if value is not None and not isinstance(value, bool | int | float | str):
            raise TypeError(f"{key} is a {type(value).__name__}")
        if name not in elsewhere:
            optimizer.state[parameters[stack_of.get(name) or name]][slot] = value
    _check_slots(optimizer, parameters)
    for group, settings in zip(optimizer.param_groups, saved["groups"], strict=True):
        group |= {k: v for k, v in settings.items() if k in ("lr", "initial_lr")}


_ADAM = frozenset({"step", "exp_avg", "exp_avg_sq"})
_SLOTS: Mapping[type, Set[str]] = {
    torch.optim.AdamW: _ADAM,
    torch.optim.Adam: _ADAM,
    torch.optim.SGD: frozenset({"momentum_buffer"}),
}
"""What torch's usual optimizers keep of a parameter: counters, and tensors like it. Of others too little is known."""


def _check_slots(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
    """What is restored, before the first step stumbles over it."""
    known = _SLOTS.get(type(optimizer))
    for name, parameter in parameters.items():
        slots = optimizer.state.get(parameter)
        if known is None or not slots:
            continue
        if slots.keys() - {"max_exp_avg_sq"} != known:
            raise ValueError(
                f"the optimizer keeps {', '.join(sorted(known))} of {name}, not {', '.join(sorted(slots))}"
            )
        for slot, value in slots.items():
            wanted = ((), value.dtype) if slot == "step" else (tuple(parameter.shape), parameter.dtype)
            if (tuple(value.shape), value.dtype) != wanted:
                raise ValueError(f"{slot} of {name} is {value.dtype} of shape {tuple(value.shape)}")


def _joined_slot(tensors: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """One slot's tensors for the model at hand. Where it has any of the experts that are trained, it must have all."""
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    stacked = {name: pieces for name, pieces in stacked_names(model).items() if name in trained}
    if not any(piece in tensors for pieces in stacked.values() for piece in pieces):
        stacked = {}
    joined = _joined(tensors, stacked, "the checkpoint's optimizer")
    return {
        name: _one_counter(tensor) if name in stacked and tensor.ndim == 1 else tensor
        for name, tensor in joined.items()
    }


def _one_counter(counters_E: Tensor) -> Tensor:
    """A stacked parameter has one step counter: its experts' counters, which agree."""
    if not bool((counters_E == counters_E[0]).all()):
        raise UserError(
            f"experts of one size have different step counters ({counters_E.tolist()}); this version keeps one per size"
        )
    return counters_E[0]


def _put(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, slot: str, tensor: Tensor) -> None:
    """Where the optimizer keeps it: moments beside the parameter; a step counter on the device only if it is fused there."""
    fused = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    device = parameter.device if slot != "step" or fused else torch.device("cpu")
    optimizer.state[parameter][slot] = shard_like(tensor.to(device, copy=True), parameter)


def random_state() -> dict[str, Any]:
    """Python's and numpy's generators, for user code in the training process. Torch's is set anew at each step."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(words), gauss],
        "numpy": [
            str(kind),
            [int(k) for k in np.asarray(keys)],
            int(position),
            int(has_gauss),
            float(cached),
        ],
    }


def _restore_random(state: Mapping[str, Any]) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.asarray(keys, dtype=np.uint32), position, has_gauss, cached))
