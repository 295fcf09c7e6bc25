"""Generations of a language model: equal to greedy ones of ``transformers``, in one process and on hosts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.hosts.ranks import run_ranks
from harness.lm.language_models import DoubleLanguageModel, lm_config
from harness.lm.lm_runs import train_lm, train_lm_on_host
from orchestrator.config.settings import Config
from orchestrator.errors import UserError
from orchestrator.tasks.generation import GenerationOptions
from orchestrator.tasks.lm.task import LanguageModel
from orchestrator.train.device.precision import Precision
from orchestrator.train.evaluation.generation import find_prompts, generate
from orchestrator.train.group.world import World
from orchestrator.train.strategies.base import Strategy
from tests.test_evaluations import Splits

PROMPTS = ("what is the sum of 1 and 2?", "hello")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return lm_config(tmp_path_factory.mktemp("lm"), precision="fp32")


def generated(task: LanguageModel, options: GenerationOptions) -> list[dict[str, Any]]:
    strategy = Strategy(task.build_model(), task)
    prompts = find_prompts(task, options)
    precision = Precision("fp32", CPU)
    return generate(strategy, World.single_process(), precision, prompts, options.max_new_tokens)


def greedy(task: LanguageModel, text: str, new_tokens: int) -> str:
    """Return the continuation of a user's message by ``transformers`` alone."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        task.folder, dtype=torch.float64, experts_implementation="eager"
    )
    messages = [{"role": "user", "content": text}]
    inputs = task.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    found = model.generate(**inputs, do_sample=False, max_new_tokens=new_tokens)
    tokens = found[0, inputs["input_ids"].shape[1] :].tolist()
    ends = [number for number, token in enumerate(tokens) if token in task.stop_tokens]
    return task.decode(tokens[: ends[0]] if ends else tokens)


def test_prompts_are_continued_as_by_transformers(config: Config) -> None:
    task = DoubleLanguageModel(config)
    found = generated(task, GenerationOptions(PROMPTS, 20))
    assert [generation["text"] for generation in found] == [greedy(task, text, 20) for text in PROMPTS]
    assert all(generation["text"] for generation in found)
    assert all(text in str(generation["prompt"]) for text, generation in zip(PROMPTS, found, strict=True))


def test_the_first_prompts_of_the_data_end_where_the_answers_begin(config: Config) -> None:
    task = DoubleLanguageModel(config)
    found = generated(task, GenerationOptions(max_new_tokens=4))
    assert len(found) == 3
    for generation in found:
        assert "what is the sum of" in str(generation["prompt"])
        assert "it is" not in str(generation["prompt"])
        assert str(generation["reference"]).strip().startswith("it is")


def test_texts_are_continued_from_their_beginnings(config: Config, tmp_path: Path) -> None:
    text = "the quick brown fox jumps over the lazy dog. " * 9
    (tmp_path / "texts.txt").write_text(text)
    task = DoubleLanguageModel(config.but(data=[str(tmp_path / "texts.txt")], sequence_length=48))
    (found, *_) = generated(task, GenerationOptions(max_new_tokens=4))
    prompt = str(found["prompt"])
    assert prompt
    assert prompt in text
    assert prompt + str(found["reference"]) in text


@pytest.mark.extended
def test_short_samples_leave_prompts_whole(config: Config) -> None:
    task = DoubleLanguageModel(config)
    short = DoubleLanguageModel(config.but(sequence_length=40))
    found = generated(short, GenerationOptions(PROMPTS, 64))
    assert found == generated(task, GenerationOptions(PROMPTS, 64))
    with pytest.raises(UserError, match="positions for 256 tokens, prompts included; lower it"):
        generated(task, GenerationOptions(PROMPTS, 256))


@pytest.mark.parametrize("as_messages", [False, True])
def test_prompts_have_the_template_if_the_data_had_it(
    config: Config, tmp_path: Path, as_messages: bool
) -> None:
    prompt: Any = "two plus"
    completion: Any = " three"
    if as_messages:
        prompt = [{"role": "user", "content": prompt}]
        completion = [{"role": "assistant", "content": completion}]
    line = json.dumps({"prompt": prompt, "completion": completion})
    (tmp_path / "rows.jsonl").write_text(f"{line}\n" * 30)
    task = DoubleLanguageModel(config.but(data=[str(tmp_path / "rows.jsonl")]))
    (of_data, *_) = generated(task, GenerationOptions(max_new_tokens=4))
    (given,) = generated(task, GenerationOptions(("two plus",), 4))
    assert given["prompt"] == of_data["prompt"]
    assert (given["prompt"] == "two plus") is not as_messages


def test_a_text_that_the_tokenizer_or_the_template_refuses_is_named(config: Config) -> None:
    task = DoubleLanguageModel(config)
    with pytest.raises(UserError, match=r"--prompts 'a\\udcff': the tokenizer refuses the text \("):
        find_prompts(task, GenerationOptions(("hello", "a\udcff")))
    task.tokenizer.chat_template = "{{ raise_exception('a system message is needed') }}"
    with pytest.raises(UserError, match=r"--prompts 'hello': .*\(a system message is needed\); change it"):
        find_prompts(task, GenerationOptions(("hello",)))


@pytest.mark.extended
@pytest.mark.parametrize("hosts", [2, 3])
def test_hosts_generate_as_one_process_does(config: Config, hosts: int) -> None:
    expected = train_lm(config, World.single_process(), PROMPTS)
    for run in run_ranks(train_lm_on_host, hosts, config, "gloo", PROMPTS, timeout=300.0):
        assert run.losses == pytest.approx(expected.losses, rel=1e-5)
        assert run.generations == expected.generations


def test_a_stop_token_ends_a_generation(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    task = DoubleLanguageModel(config)
    monkeypatch.setattr(task, "decode", lambda tokens: " ".join(map(str, tokens)), raising=False)
    (whole,) = generated(task, GenerationOptions(PROMPTS[:1], 20))
    tokens = str(whole["text"]).split()
    monkeypatch.setattr(task, "stop_tokens", frozenset({int(tokens[3])}), raising=False)
    (ended,) = generated(task, GenerationOptions(PROMPTS[:1], 20))
    assert str(ended["text"]).split() == tokens[: tokens.index(tokens[3])]


def test_a_task_without_text_generates_nothing() -> None:
    task = Splits()
    strategy = Strategy(task.build_model(), task)
    world = World.single_process()
    prompts = find_prompts(task, GenerationOptions())
    assert generate(strategy, world, Precision("fp32", CPU), prompts, 4) == []


def test_files_of_prompts_have_one_a_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("one\n\n two \n")
    assert GenerationOptions.of([str(path), "three"], 5) == GenerationOptions(("one", " two ", "three"), 5)
    path.write_text("\n")
    with pytest.raises(UserError, match="the file has no line with text"):
        GenerationOptions.of([str(path)], 5)
    with pytest.raises(UserError, match=r"questions.txt: there is no such file"):
        GenerationOptions.of([str(tmp_path / "questions.txt")], 5)
    with pytest.raises(UserError, match="--max-new-tokens is -1"):
        GenerationOptions.of([], -1)
