"""Data sets of Hugging Face ``datasets``: a folder of ``save_to_disk``, or a name on the hub."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from orchestrator.data.documents.rows import BadRow, Row, RowFile
from orchestrator.data.files import data_file_version
from orchestrator.errors import UserError
from orchestrator.types import first_line

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?(:[^:/\\]+){0,2}")
_DEFAULT_SPLIT = "train"
_ONE_SPLIT = "state.json"
_MANY_SPLITS = "dataset_dict.json"
_ROWS_AT_ONCE = 1000
_MAX_ERROR_CHARACTERS = 300
_INSTALL = "pip install 'expert-orchestrator[hf]'"


def is_saved_data_set(entry: str) -> bool:
    """Return whether an entry is a folder of ``save_to_disk``, perhaps with ``:split`` after it."""
    folder = _folder_and_split(entry)[0]
    return any((folder / name).is_file() for name in (_ONE_SPLIT, _MANY_SPLITS))


def is_hub_name(entry: str) -> bool:
    """Return whether an entry reads ``name``, ``owner/name``, with ``:split`` or ``:configuration:split``."""
    return _HUB_NAME.fullmatch(entry) is not None


class DataSetRows(RowFile):
    """The rows of a data set of ``datasets``."""

    def __init__(self, name: str, data: Any, version: Sequence[str]) -> None:
        self._name = name
        self._data = data
        self._version = version
        self.size = len(data)

    def version(self) -> Sequence[str]:
        return self._version

    def rows(self) -> Iterator[Row | BadRow]:
        number = 0
        for columns in self._data.iter(batch_size=_ROWS_AT_ONCE):
            for values in zip(*columns.values(), strict=True):
                number += 1
                value = dict(zip(columns, values, strict=True))
                yield Row(f"{self._name}, row {number}", value, 1)


def open_saved_data_set(entry: str) -> DataSetRows:
    """Open a folder of ``save_to_disk``. Raises ``UserError`` if it cannot be read."""
    folder, split = _folder_and_split(entry)
    datasets = _import_datasets()
    try:
        data = datasets.load_from_disk(str(folder))
    except (OSError, ValueError) as error:
        reason = first_line(error, _MAX_ERROR_CHARACTERS)
        raise UserError(f"cannot read the data set in {folder}: {reason}") from None
    if isinstance(data, dict):
        data = _choose_split(folder, data, split)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    version = [entry, *(f"{path.name} {data_file_version(str(path))}" for path in files)]
    return DataSetRows(entry, data, version)


def open_hub_data_set(entry: str) -> DataSetRows:
    """Open a data set by its name on the hub; ``datasets`` keeps a copy. Raises ``UserError``."""
    name, *rest = entry.split(":")
    split = rest.pop() if rest else _DEFAULT_SPLIT
    datasets = _import_datasets()
    try:
        data = datasets.load_dataset(name, *rest, split=split)
    except Exception as error:  # each of its back ends has errors of its own
        raise UserError(
            f"there is no file or folder {entry}, and as a data set of Hugging Face it cannot be loaded "
            f"({first_line(error, _MAX_ERROR_CHARACTERS)}); check the name, or download it where the network "
            "can be reached and give the folder of its save_to_disk"
        ) from None
    return DataSetRows(entry, data, [entry, str(data._fingerprint), str(len(data))])


def _folder_and_split(entry: str) -> tuple[Path, str | None]:
    path = Path(entry).expanduser()
    folder, _, split = entry.rpartition(":")
    if path.is_dir() or not folder:
        return path, None
    return Path(folder).expanduser(), split


def _choose_split(folder: Path, data: dict[str, Any], split: str | None) -> Any:
    chosen = split or _DEFAULT_SPLIT
    if chosen not in data:
        raise UserError(
            f"the data set in {folder} has the splits {', '.join(data)}, not {chosen}; "
            f"write {folder}:SPLIT for one of them"
        )
    return data[chosen]


def _import_datasets() -> Any:
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"data sets of Hugging Face need datasets, which is not installed: {_INSTALL}"
        ) from None
    return datasets
