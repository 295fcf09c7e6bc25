"""The matrices of a ``transformers`` model that get adapters.

PEFT takes the names of linear layers, or the ends of their names, and names of the experts' stacked
parameters. Ours are the same, with three words: ``experts``, ``attention`` and ``all-linear``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from experts.moe.bank import MATRICES
from experts.transformers.layout import is_experts_module, parameter_names

ALL_LINEAR = "all-linear"
ATTENTION = "attention"
EXPERTS = "experts"
INSTALL = "pip install 'expert-orchestrator[hf]'"
_ROUTERS = ("gate", "shared_expert_gate")
"""The last part of the name of a router, or of the gate of a shared expert."""


@dataclass(frozen=True)
class Targets:
    """The linear layers that get adapters, by name, and the matrices of all experts that get them."""

    linears: tuple[str, ...]
    matrices: tuple[str, ...]


def find_targets(model: nn.Module, targets: Sequence[str]) -> Targets:
    """Return what the words and names of ``targets`` stand for in this model.

    Without targets: the experts and all linear layers but routers and the output. Raises ValueError for a
    name that the model does not have."""
    experts = [module for module in model.modules() if is_experts_module(module)]
    names = linear_names(model)
    linears: set[str] = set()
    matrices: set[str] = set()
    for target in targets or ((EXPERTS, ALL_LINEAR) if experts else (ALL_LINEAR,)):
        found = _matrices(experts, target)
        chosen = _linears(model, names, target)
        if not found and not chosen:
            raise ValueError(_unknown(model, experts, target))
        matrices |= set(found)
        linears |= set(chosen)
    return Targets(
        tuple(name for name in names if name in linears),
        tuple(matrix for matrix in MATRICES if matrix in matrices),
    )


def linear_names(model: nn.Module) -> list[str]:
    """Return the names of all linear layers, of adapted ones too."""
    return [
        name.removesuffix(".base_layer")
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and ".lora_" not in name
    ]


def usual_linears(model: Any) -> list[str]:
    """Return the names of all linear layers but routers and the output."""
    return _linears(model, linear_names(model), ALL_LINEAR)


def short_names(chosen: Iterable[str], model: nn.Module) -> list[str]:
    """Return the names for PEFT: the last part of a name where it stands for chosen layers alone."""
    chosen = set(chosen)
    others = {_leaf(name) for name, _ in model.named_modules() if name not in chosen and ".lora_" not in name}
    return sorted({name if _leaf(name) in others else _leaf(name) for name in chosen})


def expert_parameters(model: nn.Module, matrices: Sequence[str]) -> list[str]:
    """Return the experts' parameters for PEFT, by the end of their names: it is the same in all layers."""
    names: set[str] = set()
    for prefix, module in model.named_modules():
        if is_experts_module(module):
            of_role = parameter_names(module)
            names |= {f"{name_in_block(prefix)}.{of_role[matrix]}" for matrix in matrices}
    return sorted(names)


def name_in_block(name: str) -> str:
    """Return the part of a module's name after the number of its layer."""
    parts = name.split(".")
    numbers = [position for position, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[numbers[-1] + 1 :]) if numbers else name


def peft_names(model: nn.Module, linears: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the names of linear layers for PEFT: of their weights where PEFT would take the name of the
    module for routed experts, else of their modules."""
    names = short_names(linears, model)
    as_experts = {leaf for leaf in {_leaf(name) for name in names} if _read_as_experts(model, leaf)}
    modules = [name for name in names if _leaf(name) not in as_experts]
    return modules, [f"{name}.weight" for name in names if _leaf(name) in as_experts]


def _read_as_experts(model: Any, leaf: str) -> bool:
    """Whether PEFT takes the last part of a linear layer's name for experts of older ``transformers``.

    It does so with ``gate_proj``, ``up_proj`` and ``down_proj`` of some families."""
    peft: Any = import_peft()
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    config = peft.LoraConfig(target_modules=[leaf])
    try:
        convert_peft_config_for_transformers(config, model, None)
    except ValueError:  # PEFT takes the name for half of a fused stack, and misses the other half
        return True
    return leaf not in config.target_modules


def import_peft() -> Any:
    """Return PEFT. Only models with adapters need it."""
    try:
        import peft
    except ImportError as error:
        raise ImportError(f"adapters need peft ({error}): {INSTALL}") from None
    return peft


def _matrices(experts: Sequence[Any], target: str) -> tuple[str, ...]:
    if not experts:
        return ()
    if target == EXPERTS:
        return MATRICES
    # Linear layers have the same names: without the name of the experts' module, the target means those.
    module, _, parameter = target.rpartition(".")
    if _leaf(module) != EXPERTS:
        return ()
    names = parameter_names(experts[0])
    return tuple(matrix for matrix in MATRICES if names[matrix] == parameter)


def _linears(model: Any, names: Sequence[str], target: str) -> list[str]:
    if target == EXPERTS:
        return []
    if target in (ALL_LINEAR, ATTENTION):
        output = model.get_output_embeddings()
        outputs = {name for name, module in model.named_modules() if module is output}
        usual = [name for name in names if name not in outputs and not _is_router(name)]
        return [name for name in usual if _is_attention(name)] if target == ATTENTION else usual
    return [name for name in names if _ends_with(name, target)]


def _is_router(name: str) -> bool:
    return _leaf(name) in _ROUTERS or any("router" in part for part in name.split("."))


def _is_attention(name: str) -> bool:
    return any("attn" in part or "attention" in part for part in name.split(".")[:-1])


def _ends_with(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _unknown(model: nn.Module, experts: Sequence[Any], target: str) -> str:
    unsupported = _conv1d_names(model)
    has_it = target in (ALL_LINEAR, ATTENTION) or any(_ends_with(name, target) for name in unsupported)
    if unsupported and has_it:
        leaves = ", ".join(sorted({_leaf(name) for name in unsupported}))
        layers = f"its layers {leaves} are Conv1D, which adapters do not support"
        return (
            f"{type(model).__name__} can have no adapters on {target!r}: {layers}, only nn.Linear. "
            "Train all its weights, without adapters (no --lora), or choose a model with linear layers"
        )
    return (
        f"{type(model).__name__} has no linear layer and no experts named {target!r}; it has "
        f"{', '.join(_known(model, experts)) or 'none at all'}"
    )


def _known(model: nn.Module, experts: Sequence[Any]) -> list[str]:
    """Return the words and names that stand for some layer of this model."""
    names = linear_names(model)
    words = [word for word in (ALL_LINEAR, ATTENTION) if _linears(model, names, word)]
    leaves = sorted({_leaf(name) for name in names})
    if not experts:
        return [*words, *leaves]
    stacks = [f"{EXPERTS}.{parameter_names(experts[0])[matrix]}" for matrix in MATRICES]
    return [EXPERTS, *words, *stacks, *leaves]


def _conv1d_names(model: nn.Module) -> list[str]:
    """Return the names of transformers' Conv1D layers (GPT-2): linear layers with a transposed weight."""
    from transformers.pytorch_utils import Conv1D

    return [name for name, module in model.named_modules() if isinstance(module, Conv1D)]
