"""Handwritten digits: scikit-learn's 1,797 small ones, or MNIST if ``--data-dir`` holds its IDX files.

Shapes: N images, H height, W width.
"""

from __future__ import annotations

import gzip
import importlib.util
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experts.model import initialise
from orchestrator.config.settings import Config
from orchestrator.errors import UserError
from orchestrator.tasks.nets import Classifier, Shape, classification_loss
from orchestrator.tasks.task import Loss, Task, TensorData

_VALIDATION_SHARE = 5  # one small digit in five is for validation
_SIDE = 8  # pixels of a small digit
_BACKGROUND = -1.0
_IDX_BYTES = 8  # type code of unsigned bytes in an IDX header


class Digits(Task):
    """A small MoE classifier of digits."""

    def __init__(self, config: Config) -> None:
        self.config = config
        size = 96 if config.data.data_dir else 64  # MNIST has thirty times the samples
        self.shape = Shape.of(config.model, config.moe, width=size, layers=2, experts=4, hidden=size, top_k=2)
        data = _load_mnist(config.data.data_dir) if config.data.data_dir else _load_small_digits()
        self._train, self._validation = data

    def build_model(self) -> nn.Module:
        model = Classifier(self._train.tensors[0].shape[1], 10, self.shape)
        self.initialise(model)
        return model

    def initialise(self, model: nn.Module) -> None:
        initialise(model, self.config.run.seed)

    def train_data(self) -> TensorData:
        return self._train

    def validation_data(self) -> TensorData:
        return self._validation

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        images, labels = batch
        logits, routings = model(images)
        return classification_loss(model, logits, labels, routings, self.config.moe)


def _load_small_digits() -> tuple[TensorData, TensorData]:
    """Return scikit-learn's digits for training and for validation; the split is the same for every seed.

    The images for training are there five times, as they are and shifted: with so few of them the model
    would overfit. Those for validation stay as they are.
    """
    table = torch.from_numpy(_read_digits_table())
    images = table[:, :-1].float() / 8 - 1
    labels = table[:, -1].long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    num_validation = len(labels) // _VALIDATION_SHARE
    validation = order[:num_validation]
    train = order[num_validation:]
    shifted = _with_shifts(images[train])
    train_labels = labels[train].repeat(len(shifted) // len(train))
    return TensorData(shifted, train_labels), TensorData(images[validation], labels[validation])


def _with_shifts(images: Tensor) -> Tensor:
    """Return images, and each shifted by half a pixel to the four sides."""
    images_NHW = images.view(-1, _SIDE, _SIDE)
    padded_NHW = F.pad(images_NHW, (1, 1, 1, 1), value=_BACKGROUND)
    copies = [images_NHW]
    for row, column in ((0, 1), (2, 1), (1, 0), (1, 2)):
        moved_NHW = padded_NHW[:, row : row + _SIDE, column : column + _SIDE]
        copies.append((images_NHW + moved_NHW) / 2)
    return torch.cat(copies).flatten(1)


def _read_digits_table() -> np.ndarray:
    """Return scikit-learn's digits, one per row: 64 pixels of 0 to 16, and the label.

    They are read from its data file, because importing the package takes longer than training on them.
    """
    spec = importlib.util.find_spec("sklearn")
    folders = (spec.submodule_search_locations or []) if spec else []
    for folder in folders:
        path = Path(folder, "datasets", "data", "digits.csv.gz")
        if path.is_file():
            return np.loadtxt(gzip.open(path, "rt"), delimiter=",", dtype=np.float32)
    from sklearn.datasets import load_digits

    loaded: Any = load_digits()
    return np.column_stack([loaded.data, loaded.target]).astype(np.float32)


def _load_mnist(folder: Path) -> tuple[TensorData, TensorData]:
    return _load_mnist_part(folder, "train"), _load_mnist_part(folder, "t10k")


def _load_mnist_part(folder: Path, part: str) -> TensorData:
    images = _read_idx(folder, f"{part}-images-idx3-ubyte")
    labels = _read_idx(folder, f"{part}-labels-idx1-ubyte")
    return TensorData(images.flatten(1).float() / 127.5 - 1, labels.long())


def _read_idx(folder: Path, name: str) -> Tensor:
    """Read one IDX file, plain or gzipped, and check its length against its header."""
    path = next((p for p in (folder / name, folder / f"{name}.gz") if p.is_file()), None)
    if path is None:
        raise UserError(
            f"--data-dir {folder} has no {name} or {name}.gz; "
            "the digits task needs MNIST's four IDX files there"
        )
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        zero, kind, dims = struct.unpack(">HBB", data[:4])
        sizes = struct.unpack(f">{dims}I", data[4 : 4 + 4 * dims])
    except (OSError, EOFError, zlib.error, struct.error) as error:
        raise UserError(f"cannot read {path}: {error}; download the file again") from None
    expected = 4 + 4 * dims + int(torch.tensor(sizes).prod())
    if zero or kind != _IDX_BYTES or len(data) != expected:
        raise UserError(
            f"{path} is no IDX file of bytes, or cut short: {len(data)} bytes found, {expected} needed; "
            "download it again"
        )
    return torch.frombuffer(bytearray(data[4 + 4 * dims :]), dtype=torch.uint8).view(sizes)
