"""The settings of a run: a tree of frozen values, each documented under its field and checked where
it is declared.

The plan decides settings of ``None`` and ``"auto"``, and gives its reason. Names are unique
across the sections, so a flag needs no prefix: ``optim.learning_rate`` is ``--learning-rate``.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_type_hints

from orchestrator.config.metric import split_metric
from orchestrator.config.names.aliases import Form, SettingNames, aliases
from orchestrator.config.names.nearest import did_you_mean
from orchestrator.config.sections.checks import Switch, at_least, possible_path, within
from orchestrator.config.sections.cross_checks import (
    check_batch_product,
    check_bounded_rows,
    check_contradictions,
    check_devices,
    check_evolution,
    check_language_model,
    check_strategy,
)
from orchestrator.config.sections.data import BatchSettings, DataSettings
from orchestrator.config.sections.evolution import EvolutionSettings
from orchestrator.config.sections.model import ModelSettings, MoeSettings
from orchestrator.config.sections.optim import OptimSettings
from orchestrator.config.sections.outputs import CheckpointSettings, WatchSettings
from orchestrator.config.sections.parallel import ParallelSettings
from orchestrator.config.values import as_declared
from orchestrator.errors import UserError

Precision = Literal["auto", "fp32", "bf16", "fp16", "fp8"]
WeightPrecision = Literal["fp32", "bf16"]
GpuMode = Literal["auto", "cpu", "single_gpu", "multi_gpu"]
CompileMode = Literal["default", "reduce-overhead", "max-autotune"]
CompileParts = Literal["all", "experts", "gate"]
ExpertKernel = Literal["auto", "loop", "grouped"]

_MAX_NAME_CHARACTERS = 100
_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")


@dataclass(frozen=True)
class RunSettings:
    """The length of the run, and its folder."""

    name: str | None = None
    """Name of the run; its folder is results/NAME, below the current folder. Default: the task with
    the date and time."""
    run_dir: Path | None = None
    """Folder of the run, in place of results/NAME. An address (s3://bucket/run1, gs://...,
    file:///...): the run works in results/, and is uploaded while it trains."""
    epochs: int = 10
    """Passes over the training data."""
    max_steps: int | None = None
    """Stop after this many optimizer steps, whatever --epochs says."""
    early_stopping_patience: int | None = None
    """Stop after this many evaluations in a row without improvement."""
    early_stopping_metric: str = "loss"
    """Validation metric for early stopping and the best checkpoint. Usual names have a direction
    (loss, mae: smaller is better; accuracy, f1: larger); for others write NAME:min or NAME:max."""
    seed: int = 0
    """Seed of initial weights, sample order and randomness inside the model."""
    deterministic: bool = False
    """Same seed, same result to the bit: deterministic kernels, tf32 and cuDNN benchmarking off."""
    reproducible: bool = False
    """The same weights to the bit on any number of workers, with experts anywhere, after kills and
    resumes, on devices of one kind: one worker computes each micro-batch, and sums are exact.
    Includes --deterministic."""
    auto: bool = True
    """Let the plan decide open settings. With --no-auto it uses plain defaults and says so."""
    debug: bool = False
    """A quick test: batch of 4, 4 steps, 2 evaluation batches, every step logged."""

    @property
    def repeats(self) -> bool:
        """Whether a run with the same settings on as many workers gives the same bits."""
        return self.deterministic or self.reproducible

    def __post_init__(self) -> None:
        if self.name is not None:
            _check_name(self.name)
        at_least("epochs", self.epochs, 1)
        at_least("max_steps", self.max_steps, 1)
        at_least("early_stopping_patience", self.early_stopping_patience, 1)
        within("seed", self.seed, 0, 2**63 - 1)
        try:
            split_metric(self.early_stopping_metric)
        except ValueError as error:
            raise ValueError(f"early_stopping_metric {error}") from None


def _check_name(name: str) -> None:
    """Raise ValueError for a name that could leave the results folder, or that no file system takes."""
    if not name or name[0] in ".-" or not set(name) <= _NAME_CHARACTERS:
        raise ValueError(
            f"name is {reprlib.repr(name)}; use letters, digits, '.', '_' and '-', beginning with a "
            "letter or digit"
        )
    if len(name) > _MAX_NAME_CHARACTERS:
        raise ValueError(
            f"name is {reprlib.repr(name)}, {len(name)} characters; "
            f"at most {_MAX_NAME_CHARACTERS} are possible"
        )


@dataclass(frozen=True)
class DeviceSettings:
    """The device of the computation, its precision and its kernels."""

    gpu_mode: GpuMode = "auto"
    """auto takes every GPU, or the CPU if there is none; cpu, single_gpu and multi_gpu (two or
    more) force it."""
    precision: Precision = "auto"
    """Precision of the forward and backward pass; fp16 scales the loss. fp8, for GPUs of compute capability
    9 and 10: bf16, but for the products of experts' rows. Weights are stored as --weight-precision says."""
    weight_precision: WeightPrecision = "fp32"
    """Type in which weights are stored. bf16 takes half the memory, without a copy in fp32: the optimizer
    computes each update in fp32, and stochastic rounding lets small updates count in full on average."""
    tf32: Switch = "auto"
    """tf32 for fp32 matrix products on GPUs that have it."""
    compile: Switch = "auto"
    """Compile the model with torch.compile; falls back with a warning. auto: on a GPU, if the
    run is long enough to pay for it; --compile alone is on, --no-compile off."""
    compile_mode: CompileMode = "default"
    """Mode of torch.compile."""
    compile_parts: CompileParts = "all"
    """Compile the whole model, or only its experts or gates."""
    cuda_graph: Switch = "auto"
    """Capture a whole step in a CUDA graph, which replaces hundreds of launches by one; falls back
    with a warning. auto: for steps that are shorter than the Python around them, in one process."""
    expert_kernel: ExpertKernel = "auto"
    """Compute experts one after another (loop), or all of one size together (grouped); auto:
    together if the GPU has a kernel for it."""
    activation_checkpointing: Switch = "auto"
    """Recompute activations in the backward pass: less memory, about a third more compute."""
    recompute_experts: bool = False
    """Recompute the experts alone in the backward pass: of a model with experts they keep most of the
    activations. Their forward pass runs twice."""
    cudnn_benchmark: Switch = "auto"
    """Let cuDNN time its kernels for the shapes of the model."""
    empty_cache_every: int = 0
    """Return cached GPU memory to the driver every N steps; 0: only at the end of an epoch, if
    there is much of it."""

    @property
    def short_weights(self) -> bool:
        """Whether weights are stored in bf16."""
        return self.weight_precision == "bf16"

    def __post_init__(self) -> None:
        at_least("empty_cache_every", self.empty_cache_every, 0)


@dataclass(frozen=True)
class Config:
    """All settings of a run."""

    task: str = "digits"
    """digits, text, synthetic, lm (a model of transformers: --model), or package.module:Name for a task
    of your own."""
    run: RunSettings = field(default_factory=RunSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    moe: MoeSettings = field(default_factory=MoeSettings)
    evolution: EvolutionSettings = field(default_factory=EvolutionSettings)
    data: DataSettings = field(default_factory=DataSettings)
    batch: BatchSettings = field(default_factory=BatchSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    device: DeviceSettings = field(default_factory=DeviceSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    watch: WatchSettings = field(default_factory=WatchSettings)

    def __post_init__(self) -> None:
        values = {name: self.value_of(name) for name in flat_names()}
        check_contradictions(values, _defaults())
        check_bounded_rows(self.parallel, self.run.reproducible)
        for name, value in values.items():
            if isinstance(value, Path) or name in ("resume", "placement"):
                possible_path(name, value)
        check_language_model(self.task, self.model, self.moe)
        check_devices(self.device.gpu_mode, self.parallel)
        check_strategy(self.parallel, self.moe, self.evolution)
        check_batch_product(self.device.gpu_mode, self.parallel, self.batch, self.run.reproducible)
        check_evolution(self.evolution, self.moe, self.parallel)

    @classmethod
    def of(cls, **settings: Any) -> Config:
        """Return a config from flat names, as on the command line: ``Config.of(epochs=3, batch_size=32)``."""
        return cls().but(**settings)

    def but(self, **settings: Any) -> Config:
        """Return this config with some settings changed, by their flat names."""
        top: dict[str, Any] = {}
        sections: dict[str, dict[str, Any]] = {}
        known = flat_names()
        unknown = [_unknown_setting(name, value) for name, value in settings.items() if name not in known]
        if unknown:
            raise UserError("\n".join(unknown))
        for name, value in settings.items():
            section = known[name]
            values = sections.setdefault(section, {}) if section else top
            values[name] = as_declared(name, setting_types()[name], value)
        try:
            for section, values in sections.items():
                top[section] = replace(getattr(self, section), **values)
            changed = replace(self, **top)
        except ValueError as error:
            raise UserError(str(error)) from None
        # Not a field: it is no setting, and two configs with the same values are equal.
        object.__setattr__(changed, "_given", self.given | settings.keys())
        return changed

    def value_of(self, name: str) -> Any:
        """Return the value of a setting by its flat name."""
        section = flat_names()[name]
        return getattr(getattr(self, section) if section else self, name)

    @property
    def given(self) -> frozenset[str]:
        """The names that ``of`` and ``but`` were called with, also those with the default's value."""
        return self.__dict__.get("_given", frozenset())


@cache
def section_types() -> Mapping[str, type]:
    """Return the class of each section, by its name."""
    hints = get_type_hints(Config)
    return {f.name: hints[f.name] for f in fields(Config) if is_dataclass(hints[f.name])}


@cache
def flat_names() -> Mapping[str, str]:
    """Return the section of each setting, by its flat name ('' for the root)."""
    names = {f.name: "" for f in fields(Config) if f.name not in section_types()}
    for section, kind in section_types().items():
        names |= {f.name: section for f in fields(kind)}
    return names


@cache
def _defaults() -> Mapping[str, Any]:
    """Return the default of each setting, by its flat name."""
    defaults = {"task": Config.task}
    for kind in section_types().values():
        defaults |= {f.name: f.default for f in fields(kind)}
    return defaults


@cache
def setting_types() -> Mapping[str, Any]:
    """Return the declared type of each setting, by its flat name."""
    types: dict[str, Any] = {}
    # The root first: a section may have a setting of its own name.
    for kind in (Config, *section_types().values()):
        types |= {name: hint for name, hint in get_type_hints(kind).items() if name in flat_names()}
    return types


def foreign_name_advice(name: str, value: Any, form: Form) -> str | None:
    """Return the answer to a name of another trainer; None if it is not known."""
    alias = aliases().get(name.replace("-", "_").lower())
    names = SettingNames(flat_names(), setting_types())
    return alias.advice(as_flag_text(value), form, names) if alias else None


def as_flag_text(value: Any) -> str | None:
    """Return a value of YAML or Python as a flag would have it."""
    if value is None:
        return None
    if isinstance(value, list | tuple):
        return ",".join(str(entry) for entry in value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _unknown_setting(name: str, value: Any) -> str:
    advice = foreign_name_advice(name, value, "python")
    hint = f"; {advice}" if advice else did_you_mean(name, flat_names())
    return f"unknown setting {name!r}{hint}"
