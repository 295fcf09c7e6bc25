"""What a user may ask for: a tree of frozen values, each documented under its field and checked where it is declared.

A field of ``None`` or ``"auto"`` is left to the plan, which says what it chose and why. Names are unique across the
sections, so a flag needs no prefix: ``optim.learning_rate`` is ``--learning-rate``.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_type_hints

from orchestrator.config.values import as_declared
from orchestrator.errors import UserError

Switch = Literal["auto", "on", "off"]
Precision = Literal["auto", "fp32", "bf16", "fp16"]
GpuMode = Literal["auto", "cpu", "single_gpu", "multi_gpu"]
ParallelStrategy = Literal["auto", "data_parallel"]
Backend = Literal["auto", "nccl", "gloo"]
Sharding = Literal["auto", "none", "zero2", "zero3"]
Schedule = Literal["cosine", "constant"]
CompileMode = Literal["default", "reduce-overhead", "max-autotune"]
CompileParts = Literal["all", "experts", "gate"]
Tracker = Literal["tensorboard", "wandb", "mlflow"]

_HOST_AND_PORT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})")
_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")


def _at_least(name: str, value: float | None, least: float) -> None:
    if value is not None and not least <= value < math.inf:
        raise ValueError(f"{name} is {value}; it must be at least {least}" + ("" if math.isfinite(value) else " and finite"))


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name} is {value}; it must lie between {low} and {high}")


@dataclass(frozen=True)
class RunSettings:
    """How long the run lasts and where it leaves its record."""

    name: str | None = None
    """Name of the run; its folder is results/NAME. Default: the task and the time of day."""
    run_dir: Path | None = None
    """Folder of the run, in place of results/NAME."""
    epochs: int = 10
    """Passes over the training data."""
    max_steps: int | None = None
    """Stop after this many optimizer steps, whatever --epochs says."""
    early_stopping_patience: int | None = None
    """Stop after this many evaluations in a row without improvement."""
    early_stopping_metric: str = "loss"
    """Validation metric that early stopping and the best checkpoint follow: a loss is better smaller, others larger."""
    seed: int = 0
    """Seed of initial weights, sample order and randomness inside the model."""
    deterministic: bool = False
    """Same seed, same result to the bit: deterministic kernels, tf32 and cuDNN benchmarking off."""
    auto: bool = True
    """Let the plan choose what was left open. With --no-auto plain defaults are used and said so."""
    debug: bool = False
    """A quick look: batch of 4, 4 steps, 2 evaluation batches, every step logged."""

    def __post_init__(self) -> None:
        if self.name is not None and (not self.name or self.name[0] in ".-" or not set(self.name) <= _NAME_CHARACTERS):
            raise ValueError(f"name is {self.name!r}; use letters, digits, '.', '_' and '-', beginning with a letter or digit")
        _at_least("epochs", self.epochs, 1)
        _at_least("max_steps", self.max_steps, 1)
        _at_least("early_stopping_patience", self.early_stopping_patience, 1)
        _within("seed", self.seed, 0, 2**63 - 1)


@dataclass(frozen=True)
class ModelSettings:
    """Sizes of the built-in tasks' models. What is left open is the task's own default."""

    experts: int | None = None
    """Experts per MoE layer; 0 gives a dense model."""
    expert_hidden_size: tuple[int, ...] = ()
    """Hidden size of the experts: one number for all, or one per expert."""
    top_k: int | None = None
    """Experts that each token is sent to."""
    width: int | None = None
    """Width of the model (features per token)."""
    layers: int | None = None
    """Number of blocks."""
    context_length: int | None = None
    """Tokens per sample, for text and for synthetic sequences."""
    vocabulary: int | None = None
    """Number of distinct tokens of the synthetic task."""
    balance_loss: float = 0.01
    """Weight of the loss that keeps experts evenly used."""
    z_loss: float = 0.0
    """Weight of the loss that keeps gate scores small."""

    def __post_init__(self) -> None:
        _at_least("experts", self.experts, 0)
        for size in self.expert_hidden_size:
            _at_least("expert_hidden_size", size, 1)
        for name in ("top_k", "width", "layers", "vocabulary"):
            _at_least(name, getattr(self, name), 1)
        _at_least("context_length", self.context_length, 0)
        _at_least("balance_loss", self.balance_loss, 0)
        _at_least("z_loss", self.z_loss, 0)
        if self.experts and len(self.expert_hidden_size) not in (0, 1, self.experts):
            raise ValueError(
                f"expert_hidden_size has {len(self.expert_hidden_size)} sizes for {self.experts} experts; give one size, or one per expert"
            )
        if self.experts and self.top_k and self.top_k > self.experts:
            raise ValueError(f"top_k is {self.top_k} but there are only {self.experts} experts; lower --top-k or raise --experts")


@dataclass(frozen=True)
class DataSettings:
    """Where samples come from."""

    data_dir: Path | None = None
    """Folder with the task's data (MNIST IDX files for digits; a text file or a folder of .txt files for text)."""
    samples: int | None = None
    """Training samples of the synthetic task."""
    loader_workers: int = -1
    """Processes that load data; -1 lets the plan choose, 0 loads in the training process."""

    def __post_init__(self) -> None:
        _at_least("loader_workers", self.loader_workers, -1)
        _at_least("samples", self.samples, 1)


@dataclass(frozen=True)
class BatchSettings:
    """How many samples meet in a step."""

    batch_size: int | Literal["auto"] | None = None
    """Samples per worker and micro-batch; auto measures the largest that fits (GPU) or the fastest (CPU).
    Default: by the plan's memory estimate."""
    accumulation_steps: int | None = None
    """Micro-batches per optimizer step."""
    global_batch_size: int | None = None
    """Samples per optimizer step over all workers; fixes batch size × accumulation × workers, however many those become."""
    eval_batch_size: int | None = None
    """Samples per worker and batch in evaluation."""
    gpu_memory_fraction: float = 0.9
    """Share of the GPU's memory that the run may use."""

    def __post_init__(self) -> None:
        if isinstance(self.batch_size, int):
            _at_least("batch_size", self.batch_size, 1)
        for name in ("accumulation_steps", "global_batch_size", "eval_batch_size"):
            _at_least(name, getattr(self, name), 1)
        _within("gpu_memory_fraction", self.gpu_memory_fraction, 0.05, 1.0)
        for name in ("batch_size", "accumulation_steps"):
            part, whole = getattr(self, name), self.global_batch_size
            if isinstance(part, int) and whole is not None and part > whole:
                raise ValueError(
                    f"{name} is {part} but a whole step has global_batch_size {whole} samples; lower the one or raise the other"
                )


@dataclass(frozen=True)
class OptimSettings:
    """The optimizer (AdamW) and its schedule."""

    learning_rate: float = 3e-3
    """Peak learning rate."""
    schedule: Schedule = "cosine"
    """Course of the learning rate after warm-up: cosine to a tenth, or constant."""
    warmup_steps: int | None = None
    """Steps of linear warm-up. Default: a twentieth of the run, at most 1000."""
    weight_decay: float = 0.01
    """Decoupled weight decay."""
    clip_norm: float = 1.0
    """Largest global gradient norm; 0 turns clipping off."""

    def __post_init__(self) -> None:
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate is {self.learning_rate}; it must be positive and finite")
        for name in ("warmup_steps", "weight_decay", "clip_norm"):
            _at_least(name, getattr(self, name), 0)


@dataclass(frozen=True)
class DeviceSettings:
    """What the computation runs on, and how."""

    gpu_mode: GpuMode = "auto"
    """auto takes every GPU there is, else the CPU; cpu, single_gpu and multi_gpu (two or more) force it."""
    precision: Precision = "auto"
    """Arithmetic of the forward and backward pass; fp16 scales the loss. Weights stay fp32."""
    tf32: Switch = "auto"
    """tf32 for fp32 matrix products on GPUs that have it."""
    compile: bool = False
    """Compile the model with torch.compile; falls back with a warning."""
    compile_mode: CompileMode = "default"
    """Mode handed to torch.compile."""
    compile_parts: CompileParts = "all"
    """Compile the whole model, or only its experts or gates."""
    activation_checkpointing: Switch = "auto"
    """Recompute activations in the backward pass: less memory, about a third more compute."""
    cudnn_benchmark: Switch = "auto"
    """Let cuDNN time its kernels for the shapes at hand."""
    empty_cache_every: int = 0
    """Return cached GPU memory to the driver every N steps; 0 only at epoch ends, where there is much of it."""

    def __post_init__(self) -> None:
        _at_least("empty_cache_every", self.empty_cache_every, 0)


@dataclass(frozen=True)
class ParallelSettings:
    """Training on several devices: who takes part, what is kept where, and how long one waits for the others."""

    parallel_strategy: ParallelStrategy = "auto"
    """auto trains data-parallel where there are two GPUs or more, and inside a Ray job; data_parallel forces it, on CPUs too."""
    workers: int | Literal["auto"] = "auto"
    """Workers that train together, one device each; auto takes every GPU there is, or a few CPU workers where there is none."""
    devices: tuple[int, ...] = ()
    """GPUs of this machine to use, as CUDA counts them: 0,2 or 0 2. Default: all."""
    backend: Backend = "auto"
    """What carries sums between the workers; auto takes nccl on GPUs and gloo on CPUs."""
    sharding: Sharding = "auto"
    """What is divided among the workers: none, gradients and optimizer (zero2), parameters too (zero3); auto: what memory asks for."""
    cpu_offload: bool = False
    """Keep sharded parameters and optimizer state in host memory: less GPU memory, slower steps. Needs zero2 or zero3."""
    sync_batchnorm: bool = False
    """Batch norm over the samples of all workers instead of each worker's own; on GPUs."""
    share_by_speed: Switch = "auto"
    """Shares of the global batch in proportion to measured speed; auto: where the workers' devices differ."""
    bucket_cap_mb: int | None = None
    """MiB of gradients that are summed together, without sharding. Default: torch's own (25)."""
    static_graph: bool = False
    """Promise that every step uses the same parameters in the same order, so that the sums can be planned once."""
    find_unused_parameters: bool = False
    """Look for parameters that a step did not use; costs time in every step."""
    broadcast_buffers: Switch = "auto"
    """Give every worker the first one's buffers before each step: on all of them, auto running statistics that are not synchronized."""
    gradient_as_bucket_view: bool = True
    """Gradients live in the buckets they are summed in; without it there is a second copy of them."""
    max_failures: int = 3
    """Restarts after a lost worker, a lost node or running out of memory, before the run gives up."""
    collective_timeout: int = 120
    """Seconds that workers wait for each other before the run counts as stuck."""
    resource_timeout: int = 300
    """Seconds to wait for a cluster with an autoscaler to bring what is missing."""
    ray_address: str = "auto"
    """auto joins the Ray cluster that runs here (or that RAY_ADDRESS names) and starts one where none does; local always
    starts one; HOST:PORT joins that one."""
    nccl_debug: bool = False
    """NCCL's own messages, in the workers' logs."""

    def __post_init__(self) -> None:
        if isinstance(self.workers, int):
            _at_least("workers", self.workers, 1)
        for device in self.devices:
            _at_least("devices", device, 0)
        if len(set(self.devices)) < len(self.devices):
            raise ValueError(f"devices is {_listed(self.devices)}; name each GPU once")
        for name, least in (("bucket_cap_mb", 1), ("max_failures", 0), ("collective_timeout", 1), ("resource_timeout", 1)):
            _at_least(name, getattr(self, name), least)
        if self.cpu_offload and self.sharding == "none":
            raise ValueError(
                "cpu_offload and sharding none contradict each other: shards are what is offloaded; give --sharding zero2 or zero3"
            )
        _check_address(self.ray_address)


def _listed(numbers: Iterable[int]) -> str:
    return ",".join(str(number) for number in numbers)


def _check_address(address: str) -> None:
    if address in ("auto", "local"):
        return
    if address.startswith("ray://"):
        raise ValueError(
            f"ray_address is {address!r}; Ray client addresses are not supported. Submit a job to the cluster instead: "
            f"ray job submit --address http://HOST:8265 --working-dir . -- python -m orchestrator train"
        )
    found = _HOST_AND_PORT.fullmatch(address)
    if found is None or not 1 <= int(found[2]) <= 65535:
        raise ValueError(f"ray_address is {address!r}; it must be auto, local or HOST:PORT, as 'ray start' shows it")


@dataclass(frozen=True)
class CheckpointSettings:
    """What is kept of a run, and where a run begins."""

    checkpoint_every: int = 0
    """Steps between checkpoints; 0 saves at the end of each epoch."""
    keep: int = 3
    """Checkpoints kept besides the best one."""
    resume: str | None = None
    """Continue: auto takes the newest good checkpoint of the run folder (or starts afresh), PATH a given one."""
    init_from: Path | None = None
    """Begin with the weights of this checkpoint, and nothing else of it."""

    def __post_init__(self) -> None:
        _at_least("checkpoint_every", self.checkpoint_every, 0)
        _at_least("keep", self.keep, 1)
        if self.resume is not None and self.init_from is not None:
            raise ValueError("resume and init_from contradict each other: resume continues a run, init_from begins one; give one of them")


@dataclass(frozen=True)
class WatchSettings:
    """What is measured, logged and shown."""

    log_every: int | None = None
    """Steps between fetches of the losses from the device."""
    evaluate_every: int = 0
    """Steps between evaluations; 0 evaluates at the end of each epoch."""
    monitor_gpu: bool = True
    """Sample device and host use in the background."""
    gpu_log_interval: int = 50
    """Steps between monitor events; 0 turns them off."""
    trackers: tuple[Tracker, ...] = ("tensorboard",)
    """Trackers that read along; wandb and mlflow are extras. Give "--trackers" alone for none."""
    profile: bool = False
    """Trace a few steps: trace.json and the table of the most expensive operations."""

    def __post_init__(self) -> None:
        _at_least("log_every", self.log_every, 1)
        _at_least("evaluate_every", self.evaluate_every, 0)
        _at_least("gpu_log_interval", self.gpu_log_interval, 0)


@dataclass(frozen=True)
class Config:
    """Everything a run is asked to do."""

    task: str = "digits"
    """digits, text, synthetic, or package.module:Name for a task of your own."""
    run: RunSettings = field(default_factory=RunSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    batch: BatchSettings = field(default_factory=BatchSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    device: DeviceSettings = field(default_factory=DeviceSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    watch: WatchSettings = field(default_factory=WatchSettings)

    def __post_init__(self) -> None:
        if self.run.deterministic and self.device.tf32 == "on":
            raise ValueError("deterministic and tf32 on contradict each other; leave --tf32 out")
        if self.run.deterministic and self.device.cudnn_benchmark == "on":
            raise ValueError("deterministic and cudnn_benchmark on contradict each other; leave --cudnn-benchmark out")
        if self.device.gpu_mode == "cpu" and self.device.tf32 == "on":
            raise ValueError("tf32 is arithmetic of NVIDIA GPUs, but gpu_mode is cpu; leave --tf32 out")
        if self.batch.batch_size == "auto" and self.parallel.sharding in ("zero2", "zero3"):
            raise ValueError("batch_size auto measures whole models, and sharding cuts them up; leave --batch-size out, or give a number")
        if self.batch.batch_size == "auto" and not self.run.auto:
            raise ValueError("batch_size auto and --no-auto contradict each other; give a number")
        if self.run.deterministic and self.parallel.share_by_speed == "on":
            raise ValueError("deterministic and share_by_speed on contradict each other: speed is measured anew in each run; leave one out")
        _check_devices(self.device.gpu_mode, self.parallel)
        _check_product(self.batch, 1 if self.device.gpu_mode == "single_gpu" else self.parallel.workers)

    @classmethod
    def of(cls, **settings: Any) -> Config:
        """A config from flat names, as on the command line: ``Config.of(epochs=3, batch_size=32)``."""
        return cls().but(**settings)

    def but(self, **settings: Any) -> Config:
        """This config with some settings changed, by their flat names."""
        top: dict[str, Any] = {}
        sections: dict[str, dict[str, Any]] = {}
        known = flat_names()
        for name, value in settings.items():
            if name not in known:
                raise UserError(f"unknown setting {name!r}{did_you_mean(name, known)}")
            place = sections.setdefault(known[name], {}) if known[name] else top
            place[name] = as_declared(name, setting_types()[name], value)
        try:
            top |= {section: replace(getattr(self, section), **values) for section, values in sections.items()}
            return replace(self, **top)
        except ValueError as error:
            raise UserError(str(error)) from None


def _check_devices(mode: GpuMode, parallel: ParallelSettings) -> None:
    """The four ways to say how many devices train must not contradict each other."""
    workers, named = parallel.workers, len(parallel.devices)
    if mode == "cpu" and named:
        raise ValueError(f"devices {_listed(parallel.devices)} are GPUs, but gpu_mode is cpu; leave one of them out")
    if mode == "cpu" and parallel.backend == "nccl":
        raise ValueError("backend nccl works between GPUs, but gpu_mode is cpu; leave --backend out, or give gloo")
    if mode == "single_gpu" and workers not in ("auto", 1):
        raise ValueError(
            f"gpu_mode single_gpu is one worker, but workers is {workers}; leave one of them out, or give --gpu-mode multi_gpu"
        )
    if mode == "single_gpu" and named > 1:
        raise ValueError(
            f"gpu_mode single_gpu takes one GPU, but devices names {named} ({_listed(parallel.devices)}); leave one of them out"
        )
    if mode == "multi_gpu" and (workers == 1 or named == 1):
        found = "workers is 1" if workers == 1 else f"devices names one ({_listed(parallel.devices)})"
        raise ValueError(f"gpu_mode multi_gpu is two GPUs or more, but {found}; leave one of them out")
    if named and isinstance(workers, int) and workers > named:
        raise ValueError(
            f"workers is {workers}, one GPU each, but devices names {named} ({_listed(parallel.devices)}); lower --workers or name more"
        )


def _check_product(batch: BatchSettings, workers: int | Literal["auto"]) -> None:
    size, parts, whole = batch.batch_size, batch.accumulation_steps, batch.global_batch_size
    if not isinstance(size, int) or parts is None or whole is None:
        return
    product = f"batch_size {size} × accumulation_steps {parts} × workers {workers}"
    if workers == "auto":
        raise ValueError(f"{product} may or may not be global_batch_size {whole}; give two of the three sizes, or --workers N")
    if size * parts * workers != whole:
        raise ValueError(f"{product} is {size * parts * workers}, not global_batch_size {whole}; give two of the three sizes")


@cache
def section_types() -> Mapping[str, type]:
    """The sections of the tree, by name."""
    hints = get_type_hints(Config)
    return {f.name: hints[f.name] for f in fields(Config) if is_dataclass(hints[f.name])}


@cache
def flat_names() -> Mapping[str, str]:
    """Each setting's flat name with the section it lives in ('' for the root)."""
    names = {f.name: "" for f in fields(Config) if f.name not in section_types()}
    for section, kind in section_types().items():
        names |= {f.name: section for f in fields(kind)}
    return names


@cache
def setting_types() -> Mapping[str, Any]:
    """Each setting's declared type, by its flat name."""
    types: dict[str, Any] = {}
    for kind in (Config, *section_types().values()):
        types |= {name: hint for name, hint in get_type_hints(kind).items() if name in flat_names()}
    return types


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """' (did you mean 'X'?)' when a known name is near, else ''."""
    near = nearest(name, known)
    return f" (did you mean {near!r}?)" if near else ""


def nearest(name: str, known: Iterable[str]) -> str | None:
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)), None)
