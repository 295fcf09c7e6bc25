"""Tests of the search for NaN and infinity in samples of any form."""

from __future__ import annotations

from collections import namedtuple
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from orchestrator.tasks.task import TensorData
from orchestrator.train.data.bad_inputs import find_bad_input

Sample = namedtuple("Sample", "image label")
NAN = torch.tensor([1.0, float("nan")])
GOOD = torch.ones(2)


def find_in(data: Any, indices: list[int]) -> str | None:
    """The sentence about samples of data with ``gather`` or ``__getitem__``."""

    def read(index: int) -> Any:
        return data.gather(torch.tensor([index])) if isinstance(data, TensorData) else data[index]

    return find_bad_input((str(index), partial(read, index)) for index in indices)


@pytest.mark.parametrize(
    ("sample", "field"),
    [
        ({"image": NAN, "label": 1}, " in field 'image'"),
        (Sample(GOOD, NAN), " in field 'label'"),
        ((GOOD, NAN), " in field 1"),
        ((GOOD, {"deep": [NAN]}), " in field 1"),
        ((np.array([1.0, np.nan]), 0), " in field 0"),
        ((GOOD, float("nan")), " in field 1"),
        (NAN, ""),
    ],
)
def test_the_field_is_named_in_every_form_of_a_sample(sample: Any, field: str):
    assert find_in([sample, sample], [1]) == f"training sample 1 has NaN{field}"


def test_only_the_samples_of_the_step_are_looked_at():
    data = TensorData(torch.stack([GOOD, NAN, GOOD / 0]))
    assert find_in(data, [0]) is None
    assert find_in(data, [0, 1]) == "training sample 1 has NaN in field 0"
    assert find_in(data, [2]) == "training sample 2 has infinity in field 0"


def test_data_that_cannot_be_read_again_hides_no_error():
    assert find_in(iter([GOOD]), [0]) is None
    assert find_in([torch.ones(2, dtype=torch.int64), "text", None], [0, 1, 2]) is None
