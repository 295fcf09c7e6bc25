"""The safetensors files of a model's folder, read by ranges of rows.

Nothing is read but headers and the rows that are asked for. Nothing is unpickled."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from experts.tensor_format import LENGTH_BYTES, Entry, bytes_of, header_length, parse_header

SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_QUANTISED_DTYPES = {torch.float8_e4m3fn, torch.float8_e5m2}
_DOWNLOAD_AGAIN = "download or copy it again"


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
        self._lock = Lock()

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
            self.entries[entry.name] = entry
            self._shard_of[entry.name] = shard

    def file_of(self, name: str) -> str:
        """Return the name of the file that holds a tensor."""
        return self._shard_of[name].path.name

    def num_bytes(self, part: Slice) -> int:
        entry = self.entries[part.name]
        if part.rows is None:
            return entry.end - entry.begin
        begin, end = part.rows
        return (end - begin) * _row_bytes(entry)

    def read(self, part: Slice, into: Tensor | None = None) -> Tensor:
        """Return a tensor, or some of its rows.

        ``into`` is memory for them: a contiguous tensor on the CPU, of the type in the file."""
        entry = self.entries[part.name]
        shape = entry.shape
        offset = 0
        if part.rows is not None:
            begin, end = part.rows
            shape = (end - begin, *entry.shape[1:])
            offset = begin * _row_bytes(entry)
        tensor = torch.empty(shape, dtype=entry.dtype) if into is None else into
        shard = self._shard_of[part.name]
        try:
            self._read_into(shard.file, shard.data_begin + entry.begin + offset, bytes_of(tensor))
        except OSError as error:
            reason = error.strerror or error
            raise ValueError(
                f"{shard.path}: {part.name} cannot be read: {reason}; {_DOWNLOAD_AGAIN}"
            ) from None
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
        yield shards


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
    if method:
        name = method.get("quant_method", "unknown") if isinstance(method, dict) else method
        raise ValueError(_quantised(folder, f"config.json has quantization_config ({str(name)[:40]})"))


def _quantised(folder: Path, found: str) -> str:
    return (
        f"{folder} is quantised: {found}. Training needs whole weights: take the unquantised model of the "
        "same name, or load it with transformers with dequantize=True in its quantization_config and write "
        "it again with save_pretrained"
    )
