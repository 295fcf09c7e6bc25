"""Tests of reading the digits."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator.config.settings import Config
from orchestrator.errors import UserError
from orchestrator.tasks.digits import Digits


def write_idx(path: Path, values: torch.Tensor, kind: int = 8) -> None:
    header = struct.pack(f">HBB{values.ndim}I", 0, kind, values.ndim, *values.shape)
    data = header + bytes(values.flatten().tolist())
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


@pytest.fixture
def mnist(tmp_path: Path) -> Path:
    """A folder like MNIST's, with six images for training, zipped, and three for validation."""
    for part, count, suffix in (("train", 6, ".gz"), ("t10k", 3, "")):
        images = torch.arange(count * 4, dtype=torch.uint8).view(count, 2, 2) * 10
        write_idx(tmp_path / f"{part}-images-idx3-ubyte{suffix}", images)
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte{suffix}", torch.arange(count, dtype=torch.uint8))
    return tmp_path


def test_the_small_digits_are_split_once_for_every_seed() -> None:
    first = Digits(Config.of(seed=1))
    second = Digits(Config.of(seed=2))
    num_images = 1797 - 1797 // 5
    assert len(first.validation_data()) == 1797 // 5
    assert len(first.train_data()) == 5 * num_images
    for a, b in zip(first.train_data().tensors, second.train_data().tensors, strict=True):
        assert torch.equal(a, b)
    images = first.train_data().tensors[0]
    assert (float(images.min()), float(images.max())) == (-1.0, 1.0)


def test_the_training_images_are_there_as_they_are_and_shifted_by_half_a_pixel() -> None:
    images, labels = Digits(Config.of()).train_data().tensors
    copies = images.view(5, -1, 8, 8)
    original = copies[0]
    for copy, (down, right) in zip(copies[1:], ((1, 0), (-1, 0), (0, 1), (0, -1)), strict=True):
        expected = torch.empty_like(original)
        for row in range(8):
            for column in range(8):
                before = row - down, column - right
                inside = all(0 <= place < 8 for place in before)
                neighbour = original[:, *before] if inside else torch.full((len(original),), -1.0)
                expected[:, row, column] = (original[:, row, column] + neighbour) / 2
        assert torch.equal(copy, expected)
    assert torch.equal(labels, labels[: len(original)].repeat(5))


def test_no_image_of_the_validation_is_trained_on() -> None:
    task = Digits(Config.of())
    trained = {image.numpy().tobytes() for image in task.train_data().tensors[0]}
    validated = task.validation_data().tensors[0]
    assert not any(image.numpy().tobytes() in trained for image in validated)


def test_mnist_files_are_read_plain_or_zipped(mnist: Path) -> None:
    task = Digits(Config.of(data_dir=mnist))
    images, labels = task.train_data().tensors
    assert images.shape == (6, 4)
    assert labels.tolist() == [0, 1, 2, 3, 4, 5]
    assert float(images[0, 1]) == pytest.approx(10 / 127.5 - 1)
    assert len(task.validation_data()) == 3


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), "has no t10k-labels-idx1-ubyte or t10k-labels-idx1-ubyte.gz"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "cut short: 10 bytes found, 11 needed"),
        (lambda path: path.write_bytes(b"\0"), "cannot read .*; download the file again"),
        (lambda path: write_idx(path, torch.zeros(3, dtype=torch.uint8), kind=13), "is no IDX file of bytes"),
    ],
    ids=["missing", "cut short", "no header", "other type"],
)
def test_damaged_mnist_files_are_refused(damage: Callable[[Path], Any], message: str, mnist: Path) -> None:
    damage(mnist / "t10k-labels-idx1-ubyte")
    with pytest.raises(UserError, match=message):
        Digits(Config.of(data_dir=mnist))
