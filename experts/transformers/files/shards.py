"""The safetensors files of a model's folder, read by ranges of rows.

Nothing is read but headers and the rows that are asked for. Nothing is unpickled."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experts.tensor_format import LENGTH_BYTES, Entry, bytes_of, header_length, parse_header
from experts.transformers.files.quantised import QuantisedMatrix, accepts, quantised_matrices

SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_QUANTISED_DTYPES = {torch.float8_e4m3fn, torch.float8_e5m2}
_DOWNLOAD_AGAIN = "download or copy it again"
_FINGERPRINT_CHARACTERS = 32
_FINGERPRINT_SAMPLES = 64
"""Tensors of which a fingerprint covers a row."""


@dataclass(frozen=True)
class _Shard:
    """An open file."""

    path: Path
    file: int
    data_begin: int


@dataclass(frozen=True)
class Slice:
    """A tensor in the files, or a range of its rows."""

    name: str
    rows: tuple[int, int] | None = None


def _row_bytes(entry: Entry) -> int:
    return (entry.end - entry.begin) // max(1, entry.shape[0])


class Shards:
    """The tensors of a folder by their names in the files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bytes_read = 0
        self.entries: dict[str, Entry] = {}
        self._shard_of: dict[str, _Shard] = {}
        self._stored: dict[str, Entry] = {}
        """All tensors of the files, as they are."""
        self._quantised: dict[str, QuantisedMatrix] = {}
        self._last = threading.local()
        self._lock = threading.Lock()

    def add(self, path: Path, file: int) -> None:
        """Read the header of an open file."""
        file_bytes = os.fstat(file).st_size
        try:
            length = header_length(self._read_bytes(file, 0, min(LENGTH_BYTES, file_bytes)), file_bytes)
            data_begin = LENGTH_BYTES + length
            header = self._read_bytes(file, LENGTH_BYTES, length)
            entries = parse_header(header, file_bytes - data_begin)
        except (ValueError, TypeError, KeyError, RecursionError, AttributeError, OSError) as error:
            raise ValueError(
                f"{path} is damaged or cut off ({str(error)[:200]}); {_DOWNLOAD_AGAIN}"
            ) from None
        shard = _Shard(path, file, data_begin)
        for entry in entries:
            if entry.name in self.entries:
                first = self._shard_of[entry.name].path.name
                raise ValueError(
                    f"{entry.name} is in {first} and in {path.name} of {self.folder}; remove the file that "
                    "belongs to another model"
                )
            if entry.dtype in _QUANTISED_DTYPES:
                raise ValueError(_quantised(self.folder, f"{entry.name} is {entry.dtype}"))
            self.entries[entry.name] = self._stored[entry.name] = entry
            self._shard_of[entry.name] = shard

    def find_quantised(self) -> None:
        """Show quantised matrices as matrices of numbers in fp32, without the tensors beside them."""
        try:
            found = quantised_matrices(self._stored, self._read_stored)
        except ValueError as error:
            raise ValueError(_quantised(self.folder, str(error))) from None
        for matrix in found:
            self._quantised[matrix.name] = matrix
            self.entries[matrix.name] = self._stored[matrix.name]._replace(
                dtype=torch.float32, shape=matrix.shape
            )
            for part in matrix.parts:
                del self.entries[part]

    def file_of(self, name: str) -> str:
        """Return the name of the file that holds a tensor."""
        return self._shard_of[name].path.name

    def is_quantised(self, name: str) -> bool:
        return name in self._quantised

    def is_packed(self, name: str) -> bool:
        """Whether a matrix can be taken as packed bytes."""
        return name in self._quantised and self._quantised[name].offset is not None

    def packed(self, parts: Sequence[Slice]) -> Tensor | None:
        """Return whole matrices as packed bytes, one after another; None if some are not packed."""
        if not all(self.is_packed(part.name) for part in parts):
            return None
        return torch.cat([self._quantised[part.name].packed() for part in parts])

    def num_bytes(self, part: Slice) -> int:
        entry = self.entries[part.name]
        if part.rows is None:
            return entry.end - entry.begin
        begin, end = part.rows
        return (end - begin) * _row_bytes(entry)

    def read(self, part: Slice, into: Tensor | None = None) -> Tensor:
        """Return a tensor, or some of its rows.

        ``into`` is memory for them: a contiguous tensor on the CPU, of the type in the file."""
        if part.name in self._quantised:
            numbers = self._numbers(part.name)
            numbers = numbers if part.rows is None else numbers[slice(*part.rows)]
            return numbers.clone() if into is None else into.copy_(numbers)
        return self._read_stored(part.name, part.rows, into)

    def _numbers(self, name: str) -> Tensor:
        """Return a quantised matrix in fp32. The last one of a thread is kept: rows are asked for in turn."""
        if getattr(self._last, "name", None) != name:
            self._last.numbers = self._quantised[name].numbers()
            self._last.name = name
        return self._last.numbers

    def _read_stored(
        self, name: str, rows: tuple[int, int] | None = None, into: Tensor | None = None
    ) -> Tensor:
        entry = self._stored[name]
        shape = entry.shape
        offset = 0
        if rows is not None:
            begin, end = rows
            shape = (end - begin, *entry.shape[1:])
            offset = begin * _row_bytes(entry)
        tensor = torch.empty(shape, dtype=entry.dtype) if into is None else into
        shard = self._shard_of[name]
        try:
            self._read_into(shard.file, shard.data_begin + entry.begin + offset, bytes_of(tensor))
        except OSError as error:
            reason = error.strerror or error
            raise ValueError(f"{shard.path}: {name} cannot be read: {reason}; {_DOWNLOAD_AGAIN}") from None
        return tensor

    def _read_bytes(self, file: int, begin: int, num_bytes: int) -> bytearray:
        content = bytearray(num_bytes)
        self._read_into(file, begin, memoryview(content))
        return content

    def _read_into(self, file: int, begin: int, target: memoryview) -> None:
        num_bytes = len(target)
        while target:
            count = os.preadv(file, [target], begin)
            if count == 0:
                raise OSError("the file has become shorter")
            target = target[count:]
            begin += count
        with self._lock:
            self.bytes_read += num_bytes


@contextmanager
def open_shards(folder: Path) -> Iterator[Shards]:
    """Open the safetensors files of a folder and read their headers.

    Raises ``ValueError`` for a folder without them, and for damaged, missing or quantised files."""
    check_not_quantised(folder)
    files = _shard_files(folder)
    shards = Shards(folder)
    with ExitStack() as stack:
        for name in dict.fromkeys(files.values()):
            file = _open(folder, name)
            stack.callback(os.close, file)
            shards.add(folder / name, file)
        lost = [name for name in files if name and name not in shards.entries]
        if lost:
            raise ValueError(
                f"{folder / files[lost[0]]} does not hold {lost[0]}, which {INDEX} says it does; "
                f"it belongs to another model: {_DOWNLOAD_AGAIN}"
            )
        shards.find_quantised()
        yield shards


def fingerprint(folder: Path) -> str:
    """Return the fingerprint of a folder's files, by which a later start of a run recognises them.

    It covers the names and shapes of all tensors, and the first rows of some: files of many gigabytes are not
    read as a whole. Raises ``ValueError`` for files that are missing, damaged or quantised."""
    digest = hashlib.sha256()
    with open_shards(folder) as shards:
        names = sorted(shards.entries)
        for name in names:
            entry = shards.entries[name]
            digest.update(f"{name} {entry.dtype} {entry.shape}\n".encode())
        for name in names[:: max(1, len(names) // _FINGERPRINT_SAMPLES)]:
            shape = shards.entries[name].shape
            first_row = Slice(name, (0, 1)) if shape and shape[0] else Slice(name)
            digest.update(shards.read(first_row).double().numpy().tobytes())
    return digest.hexdigest()[:_FINGERPRINT_CHARACTERS]


def _open(folder: Path, name: str) -> int:
    try:
        return os.open(folder / name, os.O_RDONLY)
    except OSError as error:
        reason = (
            "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
        )
        raise ValueError(f"{folder / name} {reason}; {_DOWNLOAD_AGAIN}") from None


def _shard_files(folder: Path) -> Mapping[str, str]:
    """Return the file of each tensor in the index; the single file under "" where there is no index."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give the folder of a model, with its safetensors files")
    if (folder / INDEX).exists():
        return _read_index(folder / INDEX)
    if (folder / SINGLE_FILE).exists():
        return {"": SINGLE_FILE}
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickled:
        raise ValueError(
            f"{folder} holds {pickled[0]} and no safetensors files. Pickled weights can run any code and are "
            f'not read. Convert them where you trust them: python -c "from transformers import '
            f"AutoModelForCausalLM as M; M.from_pretrained('{folder}').save_pretrained('{folder}-safe')\""
        )
    parts = sorted(path.name for path in folder.glob("*.safetensors"))
    found = f"holds {parts[0]}, but no {INDEX}" if parts else f"holds no {SINGLE_FILE} and no {INDEX}"
    raise ValueError(f"{folder} {found}; {_DOWNLOAD_AGAIN}, or train with --from-scratch")


def _read_index(path: Path) -> Mapping[str, str]:
    try:
        weight_map = json.loads(path.read_bytes())["weight_map"]
        names = {str(name): file for name, file in weight_map.items()}
        is_valid = bool(names) and all(isinstance(file, str) for file in names.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        names, is_valid = {}, False
    if not is_valid:
        raise ValueError(f"{path} is no index of weights; {_DOWNLOAD_AGAIN}")
    outside = [file for file in names.values() if Path(file).name != file]
    if outside:
        raise ValueError(f"{path} names the file {outside[0]!r}, which is not in its folder")
    return names


def check_not_quantised(folder: Path) -> None:
    """Refuse a model whose config says that its weights are quantised."""
    try:
        config: Any = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return  # the code that builds the model reads it, and names the fault
    method = (config.get("quantization_config") or {}) if isinstance(config, dict) else {}
    if method and not (isinstance(method, dict) and accepts(method)):
        name = method.get("quant_method", "unknown") if isinstance(method, dict) else method
        raise ValueError(_quantised(folder, f"config.json has quantization_config ({str(name)[:40]})"))


def _quantised(folder: Path, found: str) -> str:
    return (
        f"{folder} is quantised: {found}. Training needs whole weights, or those of bitsandbytes in nf4: "
        "take the unquantised model of the same name, or load it with transformers with dequantize=True in "
        "its quantization_config and write it again with save_pretrained"
    )
