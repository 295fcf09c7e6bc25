"""Random initial weights: the distribution of ``transformers``, the same wherever an expert lives."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, Qwen3MoeForCausalLM

from experts.transformers.files.initial import initialise_weights, restore_buffers
from experts.transformers.registration import restore
from harness.lm.families import COMMON, FAMILIES, build
from harness.storage.model_files import HOSTS, assert_holds, built_on_host, computed_buffers, on_meta


def config_of(name: str, **changes: Any) -> Any:
    config = copy.deepcopy(build(name, torch.float32).config)
    for key, value in changes.items():
        setattr(config, key, value)
    return config


def initialised(config: Any, rank: int | None, seed: int = 5) -> Any:
    model = built_on_host(config, rank)
    initialise_weights(model, seed)
    return model


@pytest.mark.extended(but_first=3)
@pytest.mark.parametrize("name", FAMILIES)
def test_each_of_three_hosts_has_the_weights_of_one_process(name: str) -> None:
    config = config_of(name)
    whole = restore(initialised(config, None))
    for rank in HOSTS:
        assert_holds(initialised(config, rank), whole)


@pytest.mark.extended(but_first=2)
@pytest.mark.parametrize("name", FAMILIES)
def test_weights_have_the_distribution_of_the_family(name: str) -> None:
    """Each tensor has the mean and the spread that the class itself gives it; constants are the same."""
    config = config_of(name)
    wide = {"hidden_size": 64, "vocab_size": 99, "moe_intermediate_size": 32, "intermediate_size": 32}
    for key, value in wide.items():
        if hasattr(config, key):
            setattr(config, key, value)
    config.initializer_range = 0.3
    ours = restore(initialised(config, None)).state_dict()
    torch.manual_seed(0)
    theirs = type(restore(initialised(config, None)))(copy.deepcopy(config)).state_dict()
    assert ours.keys() == theirs.keys()
    for key, expected in theirs.items():
        found = ours[key]
        if expected.numel() < 2 or expected.std() == 0:
            assert torch.equal(found, expected), key
        elif expected.numel() > 1000:
            torch.testing.assert_close(found.std(), expected.std(), rtol=0.1, atol=0, msg=key)
            assert abs(float(found.mean() - expected.mean())) < 0.1 * float(expected.std()), key


def test_no_two_experts_start_alike_and_the_seed_counts() -> None:
    config = config_of("Mixtral")
    first = restore(initialised(config, None)).model.layers[0].mlp.experts.down_proj
    other = restore(initialised(config, None, seed=6)).model.layers[0].mlp.experts.down_proj
    rows = [*first, *other]
    assert all(not torch.equal(a, b) for i, a in enumerate(rows) for b in rows[:i])


def test_the_random_state_of_the_process_stays() -> None:
    before = torch.get_rng_state()
    model = built_on_host(config_of("Mixtral"), 0)
    torch.set_rng_state(before)
    initialise_weights(model, 3)
    assert torch.equal(torch.get_rng_state(), before)


def test_tied_embeddings_have_the_values_of_the_embedding() -> None:
    untied = initialised(config_of("Qwen3-MoE"), None)
    tied = initialised(config_of("Qwen3-MoE", tie_word_embeddings=True), None)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert torch.equal(tied.model.embed_tokens.weight, untied.model.embed_tokens.weight)
    assert not tied.lm_head.weight[0].any()  # the padding token


def test_weights_are_drawn_in_fp32_whatever_their_type() -> None:
    whole = restore(initialised(config_of("Mixtral"), None)).to(torch.bfloat16)
    assert_weights_equal(restore(initialised(config_of("Mixtral", dtype=torch.bfloat16), None)), whole)


def assert_weights_equal(model: nn.Module, expected: nn.Module) -> None:
    found = model.state_dict()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("rope", ["linear", "dynamic", "yarn", "llama3"])
def test_rotary_buffers_are_computed_again(rope: str) -> None:
    scaling = {
        "rope_type": rope,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    sizes: dict[str, Any] = {**COMMON, "rope_scaling": scaling}
    config = LlamaConfig(**sizes)
    from transformers import LlamaForCausalLM

    expected = computed_buffers(LlamaForCausalLM(copy.deepcopy(config)))
    model = on_meta(config)
    model.to_empty(device="cpu")
    for buffer in model.buffers():
        buffer.fill_(77)
    restore_buffers(model)
    found = computed_buffers(model)
    assert found.keys() == expected.keys() != set()
    assert all(torch.equal(found[name], buffer) for name, buffer in expected.items())


def test_a_parameter_that_the_family_does_not_initialise_is_named() -> None:
    class Scaled(Qwen3MoeForCausalLM):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.scale = nn.Parameter(torch.ones(3))

    with torch.device("meta"):
        model = Scaled(config_of("Qwen3-MoE"))
    model.to_empty(device="cpu")
    with pytest.raises(ValueError, match="_init_weights gives no value to scale; load weights"):
        initialise_weights(model, 0)
