"""Settings of the samples: their source, and how many make up a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from orchestrator.config.sections.checks import at_least, within

TrainOn = Literal["assistant", "all"]


@dataclass(frozen=True)
class DataSettings:
    """The source of the samples."""

    data_dir: Path | None = None
    """Folder with the task's data (MNIST IDX files for digits; a text file or a folder of .txt
    files for text), or its address (s3://bucket/data); each machine keeps a copy in ~/.cache."""
    data: tuple[str, ...] = ()
    """Documents of the task lm: files, folders, patterns or addresses of JSONL, Parquet, text or token
    files, or the id of a data set on the Hugging Face hub (docs/language-models.md)."""
    data_weights: tuple[float, ...] = ()
    """Weight of each entry of --data, in its order: its share of the samples of an epoch. An entry with too
    few is repeated, one with more gives others in the next epoch. Default: each sample once."""
    validation_data: tuple[str, ...] = ()
    """Documents for validation, given in the same way. Default: a share of --data is held out."""
    validation_share: float | None = None
    """Share of the training data that is held out for validation, chosen by the seed; 0 holds out nothing.
    Default for lm: 0.05. For tensors or a data set given to Trainer: 0."""
    chat_template: Path | None = None
    """File with a chat template (Jinja) for the task lm, in place of that of the model's tokenizer."""
    packing: bool = True
    """Let documents share a sequence, without attention from one to another; --no-packing pads each."""
    train_on: TrainOn = "assistant"
    """Tokens of a conversation that are trained: assistant, the answers alone, or all of them."""
    text_column: str = "text"
    """Column of --data with the text of a document."""
    skip_bad: bool = False
    """Leave out rows of the data that cannot be read or transformed. They are counted, and the
    first are named."""
    samples: int | None = None
    """Training samples of the synthetic task."""
    shuffle_buffer: int = 0
    """Samples that are shuffled together, if the data is read in order (docs/data.md); 0 keeps the
    order of the data. Data with random access is always shuffled as a whole."""
    loader_workers: int = -1
    """Processes that load data; -1 lets the plan choose, 0 loads in the training process."""

    def __post_init__(self) -> None:
        at_least("loader_workers", self.loader_workers, -1)
        at_least("samples", self.samples, 1)
        at_least("shuffle_buffer", self.shuffle_buffer, 0)
        _check_weights(self.data, self.data_weights)
        share = self.validation_share
        if share is not None and not 0 <= share < 1:
            raise ValueError(f"validation_share is {share}; it must be at least 0 and below 1")
        if share and self.validation_data:
            raise ValueError(
                f"validation_share is {share}, and validation_data is given too; leave one of them out"
            )


def _check_weights(entries: Sequence[str], weights: Sequence[float]) -> None:
    """Raise ValueError for weights that do not say the share of each entry."""
    if not weights:
        return
    bad = [weight for weight in weights if not 0 <= weight < math.inf]
    if bad:
        raise ValueError(f"data_weights has {bad[0]}; each must be a number of at least 0")
    if not sum(weights):
        raise ValueError("data_weights are all 0; at least one must be larger")
    if math.isinf(sum(weights)):
        raise ValueError(f"data_weights has {max(weights)}; their sum must be a number, so give smaller ones")
    # Flags of a resumed run are read before its data is known.
    if entries and len(weights) != len(entries):
        raise ValueError(
            f"data_weights has {len(weights)} of the {len(entries)} numbers that are needed, one for each "
            f"entry of data ({', '.join(entries)}), in the same order"
        )
    if len(set(entries)) != len(entries):
        twice = next(entry for entry in entries if entries.count(entry) > 1)
        raise ValueError(f"data has {twice!r} twice; with data_weights name it once, with a larger weight")


@dataclass(frozen=True)
class BatchSettings:
    """The number of samples in a step."""

    batch_size: int | Literal["auto"] | None = None
    """Samples per worker and micro-batch; auto measures the largest that fits (GPU) or the
    fastest (CPU), in steps of all workers together where they divide the model. Default: by the plan's memory
    estimate."""
    accumulation_steps: int | None = None
    """Micro-batches per optimizer step, of each worker; with --reproducible those of all workers together,
    8 by default."""
    global_batch_size: int | None = None
    """Samples per optimizer step over all workers. It stays the same if the number of workers changes."""
    eval_batch_size: int | None = None
    """Samples per worker and batch in evaluation."""
    gpu_memory_fraction: float = 0.9
    """Share of the GPU's memory that the run may use."""

    def __post_init__(self) -> None:
        if isinstance(self.batch_size, int):
            at_least("batch_size", self.batch_size, 1)
        for name in ("accumulation_steps", "global_batch_size", "eval_batch_size"):
            at_least(name, getattr(self, name), 1)
        within("gpu_memory_fraction", self.gpu_memory_fraction, 0.05, 1.0)
        for name in ("batch_size", "accumulation_steps"):
            value = getattr(self, name)
            total = self.global_batch_size
            if isinstance(value, int) and total is not None and value > total:
                raise ValueError(
                    f"{name} is {value} but a whole step has global_batch_size {total} samples; "
                    "lower the one or raise the other"
                )
