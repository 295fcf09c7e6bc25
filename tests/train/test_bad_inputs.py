"""Tests of the search for NaN and infinity in samples of any form."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch

from orchestrator.tasks.task import TensorData
from orchestrator.train.bad_inputs import find_bad_input

Sample = namedtuple("Sample", "image label")
NAN = torch.tensor([1.0, float("nan")])
GOOD = torch.ones(2)


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
    assert find_bad_input([sample, sample], [1]) == f"training sample 1 has NaN{field}"


def test_only_the_samples_of_the_step_are_looked_at():
    data = TensorData(torch.stack([GOOD, NAN, GOOD / 0]))
    assert find_bad_input(data, [0]) is None
    assert find_bad_input(data, [0, 1]) == "training sample 1 has NaN in field 0"
    assert find_bad_input(data, [2]) == "training sample 2 has infinity in field 0"


def test_data_that_cannot_be_read_again_hides_no_error():
    assert find_bad_input(iter([GOOD]), [0]) is None
    assert find_bad_input([torch.ones(2, dtype=torch.int64), "text", None], [0, 1, 2]) is None
