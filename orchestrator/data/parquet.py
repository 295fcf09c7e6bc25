"""Parquet files with random access: a worker reads the row groups that hold its samples."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

from orchestrator.data.files import Files, find_data_files, open_data_file
from orchestrator.errors import UserError

_SUFFIXES = (".parquet",)
_ROWS_AT_ONCE = 1000
_INSTALL = "pip install 'expert-orchestrator[hf]'"


class ParquetRows:
    """The rows of Parquet files as samples: dicts by column, with random access.

    ``files`` is a file, a folder, a pattern, an address, or several of these. ``columns`` are those to read;
    all without it. ``transform`` makes a sample of a row, ``collate`` a batch of samples. The last
    ``cached_groups`` row groups stay in memory: shuffled rows come from all over the files.
    """

    def __init__(
        self,
        files: Files,
        *,
        columns: Sequence[str] | None = None,
        transform: Callable[[dict[str, Any]], Any] | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        cached_groups: int = 64,
    ) -> None:
        self.files = find_data_files(files, _SUFFIXES)
        self._columns = list(columns) if columns is not None else None
        self._transform = transform
        self._cached_groups = cached_groups
        if collate is not None:
            self.collate = collate
        sizes: list[int] = []
        self._groups: list[tuple[str, int]] = []
        for file in self.files:
            opened = self._open(file)
            self._check_columns(file, opened.schema_arrow.names)
            for group in range(opened.num_row_groups):
                self._groups.append((file, group))
                sizes.append(opened.metadata.row_group(group).num_rows)
        self._ends = list(accumulate(sizes))
        self._cache: OrderedDict[int, Any] = OrderedDict()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        number = bisect_right(self._ends, index)
        begin = self._ends[number - 1] if number else 0
        row = self._group(number).slice(index - begin, 1).to_pylist()[0]
        return self._transform(row) if self._transform is not None else row

    def in_order(self) -> Iterator[Any]:
        """Yield all rows in their order, with some of them in memory at a time."""
        for file in self.files:
            for row in self._rows_of(file):
                yield self._transform(row) if self._transform is not None else row

    def _rows_of(self, file: str) -> Iterator[dict[str, Any]]:
        try:
            for piece in self._open(file).iter_batches(_ROWS_AT_ONCE, columns=self._columns):
                yield from piece.to_pylist()
        except (OSError, ValueError) as error:
            raise UserError(f"cannot read the rows of {file}: {error}") from None

    def name_of(self, index: int) -> str:
        """Return the name of a row, for messages; the first of a file has number 1."""
        file, _ = self._groups[bisect_right(self._ends, index)]
        first = next(number for number, (name, _) in enumerate(self._groups) if name == file)
        return f"{file}, row {index + 1 - (self._ends[first - 1] if first else 0)}"

    def __getstate__(self) -> dict[str, Any]:
        # Row groups in memory are not sent to workers and loader processes.
        return {**self.__dict__, "_cache": OrderedDict()}

    def _group(self, number: int) -> Any:
        """Return a row group as a table; the one that was not used for longest leaves the memory."""
        if number in self._cache:
            self._cache.move_to_end(number)
            return self._cache[number]
        file, group = self._groups[number]
        try:
            table = self._open(file).read_row_group(group, columns=self._columns)
        except (OSError, ValueError) as error:
            raise UserError(f"cannot read row group {group} of {file}: {error}") from None
        self._cache[number] = table
        if len(self._cache) > self._cached_groups:
            self._cache.popitem(last=False)
        return table

    def _open(self, file: str) -> Any:
        try:
            from pyarrow.parquet import ParquetFile
        except ImportError:
            raise UserError(f"Parquet files need pyarrow, which is not installed: {_INSTALL}") from None
        try:
            return ParquetFile(open_data_file(file))
        except (OSError, ValueError) as error:
            raise UserError(f"{file} is not a Parquet file: {error}") from None

    def _check_columns(self, file: str, names: list[str]) -> None:
        missing = [name for name in self._columns or [] if name not in names]
        if missing:
            raise UserError(f"{file} has no column {', '.join(missing)}; it has {', '.join(names)}")
