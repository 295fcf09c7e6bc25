"""Tests of telling a lost peer from a fault of this worker."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from experts.hosts.membership import GroupLeft
from orchestrator.train.group.comm_errors import is_communication_error


def feature_store() -> None:
    raise RuntimeError("gloo/transport: connection reset by peer")


def test_an_error_of_the_users_code_is_the_users_whatever_its_message() -> None:
    with pytest.raises(RuntimeError) as raised:
        feature_store()
    assert not is_communication_error(raised.value)


def test_an_error_from_another_process_is_judged_by_its_message() -> None:
    assert is_communication_error(RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer"))
    assert not is_communication_error(RuntimeError("could not open a socket to the feature store"))
    assert not is_communication_error(ValueError("gloo timed out")), "torch raises runtime errors"


def test_errors_of_torchs_distributed_package_and_a_left_group_are_communication_errors() -> None:
    assert is_communication_error(dist.DistNetworkError("anything"))
    assert is_communication_error(GroupLeft("the group was left"))
