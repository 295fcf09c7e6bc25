"""The task lm on two hosts with recomputation, and settings that it refuses."""

from __future__ import annotations

import pytest

from harness.hosts.ranks import run_ranks
from harness.lm.language_models import lm_config
from harness.lm.lm_runs import train_lm, train_lm_on_host
from orchestrator.config.settings import Config
from orchestrator.errors import UserError
from orchestrator.train.group.world import World
from orchestrator.trainer import Trainer


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return lm_config(tmp_path_factory.mktemp("lm"), precision="fp32")


@pytest.mark.extended
def test_two_hosts_that_recompute_have_the_losses_of_a_plain_process(config: Config) -> None:
    expected = train_lm(config, World.single_process())
    recomputed = config.but(activation_checkpointing="on")
    for run in run_ranks(train_lm_on_host, 2, recomputed, timeout=300.0):
        assert run.losses == pytest.approx(expected.losses, rel=1e-5)


def test_evolution_is_refused_before_anything_starts(config: Config) -> None:
    with pytest.raises(UserError, match="--evolution bold: the routers of a language model know"):
        Trainer(config=config.but(evolution="bold"), quiet=True).prepare()
