"""Packing number by number, in plain Python: the oracle of ``experts.kernels.packed``."""

from __future__ import annotations

import struct
from collections.abc import Sequence

BLOCK = 64
GROUP = 256
# The table that bitsandbytes has in its source, rounded to fp32.
PUBLISHED_NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


def dynamic_table() -> list[float]:
    """Return the 256 values of a scale: 0, 1, and the middles of 2^i equal steps in each of seven decades."""
    values = [0.0, 1.0]
    for i in range(7):
        step = 0.9 / 2**i
        for number in range(2**i):
            value = (0.1 + step * (number + 0.5)) * 10.0 ** (i - 6)
            values += [value, -value]
    return sorted(values)


def nearest(value: float, table: Sequence[float]) -> int:
    return min(range(len(table)), key=lambda code: abs(table[code] - value))


def fp32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


def quantised(values: Sequence[float], packing: str) -> list[float]:
    """Return the numbers that a packed part stands for."""
    blocks = [values[begin : begin + BLOCK] for begin in range(0, len(values), BLOCK)]
    scales = quantised_scales([max(abs(value) for value in block) for block in blocks])
    numbers: list[float] = []
    for block, scale in zip(blocks, scales, strict=True):
        largest = max(abs(value) for value in block) or 1.0
        for value in block:
            if packing == "nf4":
                unit = PUBLISHED_NF4[nearest(value / largest, PUBLISHED_NF4)]
            else:
                unit = round(127 * value / largest) / 127
            numbers.append(unit * scale)
    return numbers


def quantised_scales(scales: Sequence[float]) -> list[float]:
    table = dynamic_table()
    mean = fp32(sum(scales) / len(scales))
    result: list[float] = []
    for begin in range(0, len(scales), GROUP):
        centred = [scale - mean for scale in scales[begin : begin + GROUP]]
        largest = max(map(abs, centred))
        result += [table[nearest(c / (largest or 1.0), table)] * largest + mean for c in centred]
    return result
