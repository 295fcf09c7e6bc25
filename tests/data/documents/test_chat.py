"""Tests of chats: which tokens are trained, against the marks of a template and against plain text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from harness.lm.packed_samples import open_rows, segments_of
from harness.lm.tokenizers import CHATML, EOS, PLAIN_CHATML, chat_tokenizer
from orchestrator.data.documents.packed import PackedDocuments
from orchestrator.errors import UserError


def message(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def trained_text(samples: PackedDocuments, tokenizer: Any) -> list[str]:
    """Return the labels of each document as text, in the order of the text of the documents."""
    segments = sorted((tokenizer.decode(s.tokens), s) for sample in segments_of(samples) for s in sample)
    return [tokenizer.decode([label for _, label in segment.labelled()]) for _, segment in segments]


CHAT = [
    message("system", "Be brief."),
    message("user", "What is 12?"),
    message("assistant", "It is 12. 🙂"),
    message("user", "And\n\nthen?"),
    message("assistant", "\n\n  An answer\n"),
]

words = st.text(st.sampled_from("ab \n.é🙂<|"), min_size=0, max_size=12)
chats = st.lists(
    st.tuples(st.sampled_from(["user", "assistant", "tool"]), words), min_size=1, max_size=6
).map(lambda turns: [message("user", "?"), *(message(role, text) for role, text in turns)])


@settings(max_examples=30, deadline=None)
@given(messages=chats)
@example(messages=[message("user", "?"), message("assistant", "   <")])
def test_trained_tokens_are_those_that_a_template_with_marks_says(
    tmp_path_factory: pytest.TempPathFactory, messages: list[dict[str, Any]]
) -> None:
    marked = chat_tokenizer(template=CHATML)
    oracle = marked.apply_chat_template(messages, return_assistant_tokens_mask=True)
    # An empty answer is not trained, though the template marks its stop token.
    stop = marked.convert_tokens_to_ids("<|im_end|>")
    ids = oracle["input_ids"]
    mask = [bool(bit) for bit in oracle["assistant_masks"]]
    empty = [m["role"] == "assistant" and not m["content"].strip() for m in messages]
    stops = [place for place, token in enumerate(ids) if token == stop]
    for place, is_empty in zip(stops, empty, strict=True):
        while is_empty and place >= 0 and mask[place]:
            mask[place] = False
            place -= 1
    # A token that begins in the prompt and reaches into the answer is given to the model.
    text = marked.apply_chat_template(messages, tokenize=False)
    offsets = marked(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    for header in re.finditer(r"<\|im_start\|>assistant\n", text):
        for place, (begin, end) in enumerate(offsets):
            mask[place] = mask[place] and not begin < header.end() < end
    expected = [token for token, bit in zip(ids, mask, strict=True) if bit]
    folder = tmp_path_factory.mktemp("chat")
    row = {"messages": messages}
    if not expected:
        with pytest.raises(UserError, match="no document to train on"):
            open_rows(folder / "a.jsonl", [row], chat_tokenizer(), sequence_length=400)
        return
    for template in (CHATML, PLAIN_CHATML):
        tokenizer = chat_tokenizer(template=template)
        samples = open_rows(folder / "a.jsonl", [row], tokenizer, sequence_length=400)
        [[segment]] = segments_of(samples)
        assert list(segment.tokens) == ids
        assert [label for _, label in segment.labelled()] == expected
        assert samples.counts.empty_answers == sum(empty)


def test_the_answers_and_their_stop_tokens_are_trained(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    samples = open_rows(tmp_path / "a.jsonl", [{"messages": CHAT}], tokenizer, sequence_length=128)
    assert trained_text(samples, tokenizer) == ["It is 12. 🙂<|im_end|>\n\n  An answer\n<|im_end|>"]


def test_all_tokens_but_the_first_are_trained_on_request(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    samples = open_rows(
        tmp_path / "a.jsonl", [{"messages": CHAT}], tokenizer, sequence_length=128, train_on="all"
    )
    text = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert trained_text(samples, tokenizer) == [text.removeprefix("<|im_start|>")]


def test_a_chat_that_begins_with_an_answer_trains_no_header(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    row = {"messages": [message("assistant", "Hello."), message("user", "Hm"), message("assistant", "So?")]}
    samples = open_rows(tmp_path / "a.jsonl", [row], tokenizer)
    assert trained_text(samples, tokenizer) == ["Hello.<|im_end|>So?<|im_end|>"]


def test_answers_of_tools_are_not_trained_but_calls_are(tmp_path: Path) -> None:
    template = PLAIN_CHATML.replace(
        "{% else %}", "{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}{% else %}"
    ).replace("message.content + '<|im_end|>'", "message.content", 1)
    template = template.replace("{{ '\n' }}{% endfor %}", "<|im_end|>\n{% endfor %}").replace(
        "{{ message.content + '<|im_end|>' }}{% endif %}", "{{ message.content }}{% endif %}"
    )
    tokenizer = chat_tokenizer(template=template)
    messages = [
        message("user", "Add."),
        message("assistant", None, tool_calls=[{"name": "add"}]),
        message("tool", "3"),
        message("assistant", "It is 3."),
    ]
    row = {"messages": messages, "tools": '[{"name": "add"}]'}
    samples = open_rows(tmp_path / "a.jsonl", [row], tokenizer, sequence_length=256)
    assert trained_text(samples, tokenizer) == ['[{"name": "add"}]<|im_end|>It is 3.<|im_end|>']
    [[segment]] = segments_of(samples)
    assert tokenizer.decode(segment.tokens).startswith('<|im_start|>tools\n[{"name": "add"}]')


def test_conversations_of_sharegpt_are_chats(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    row = {"conversations": [{"from": "human", "value": "Hm?"}, {"from": "gpt", "value": "Yes."}]}
    samples = open_rows(tmp_path / "a.jsonl", [row], tokenizer)
    assert trained_text(samples, tokenizer) == ["Yes.<|im_end|>"]


# A template that leaves earlier reasoning out, puts an empty one before the last answer, and has another
# token at the end of the chat than at the end of a turn.
UNSTABLE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% set answer = message.content.split('</think>')[-1] %}"
    "{% if message.role == 'assistant' and loop.last %}"
    "{{ message.content if '</think>' in message.content else '<think></think>' + answer }}<|endoftext|>"
    "{% else %}{{ answer }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_a_template_that_drops_earlier_reasoning_is_followed(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(template=UNSTABLE)
    messages = [
        message("user", "Two?"),
        message("assistant", "<think>one and one</think>Two."),
        message("user", "Sure?"),
        message("assistant", "<think>it is</think>Sure."),
    ]
    rows = [{"messages": messages}, {"messages": [message("user", "A?"), message("assistant", "B.")]}]
    samples = open_rows(tmp_path / "a.jsonl", rows, tokenizer, sequence_length=200)
    trained = trained_text(samples, tokenizer)
    assert sorted(trained) == [
        f"<think></think>B.{EOS}",
        f"Two.<|im_end|><think>it is</think>Sure.{EOS}",
    ]


THINKING = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' and (loop.last or message.reasoning_content) %}"
    "<think>{{ message.reasoning_content }}</think>\n{% endif %}"
    "{% if message.content is string %}{{ message.content }}{% endif %}"
    "{% for call in message.tool_calls %}<call>{{ call.function.name }}</call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think></think>\n' }}{% endif %}"
)
"""The last answer has reasoning, if only an empty one; the prompt for an answer has an empty one."""


def test_calls_of_tools_are_found_where_the_last_turn_is_rendered_differently(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(template=THINKING)
    call = [{"function": {"name": "add"}}]
    messages = [
        message("user", "Add."),
        message("assistant", "", tool_calls=call),
        message("tool", "3"),
        message("assistant", "It is 3."),
        message("user", "Sure?"),
        message("assistant", "", tool_calls=call, reasoning_content="again"),
    ]
    samples = open_rows(tmp_path / "a.jsonl", [{"messages": messages}], tokenizer, sequence_length=256)
    assert trained_text(samples, tokenizer) == [
        "<call>add</call><|im_end|>It is 3.<|im_end|><think>again</think>\n<call>add</call><|im_end|>"
    ]


def test_reasoning_is_trained_where_the_prompt_has_an_empty_one(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(template=THINKING)
    rows = [
        {"messages": [message("user", "a?"), message("assistant", "A.", reasoning_content="so")]},
        {"messages": [message("user", "b?"), message("assistant", "B.")]},
    ]
    samples = open_rows(tmp_path / "a.jsonl", rows, tokenizer, sequence_length=256)
    assert trained_text(samples, tokenizer) == ["<think>so</think>\nA.<|im_end|>", "B.<|im_end|>"]


def test_an_answer_that_the_template_leaves_out_is_an_empty_one(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(template=THINKING)
    parts = [{"type": "text", "text": "lost"}]
    messages = [
        message("user", "a?"),
        message("assistant", parts),
        message("user", "b?"),
        message("assistant", "B."),
    ]
    samples = open_rows(tmp_path / "a.jsonl", [{"messages": messages}], tokenizer, sequence_length=256)
    assert trained_text(samples, tokenizer) == ["B.<|im_end|>"]
    assert samples.counts.empty_answers == 1


def test_a_message_that_no_rendering_shows_is_not_found(tmp_path: Path) -> None:
    template = (
        "{% for message in messages if message.role == 'user' %}{{ message.content }}{% endfor %}"
        "{{ messages | length }}"
    )
    tokenizer = chat_tokenizer(template=template)
    messages = [message("assistant", "A."), message("user", "b?"), message("assistant", "B.")]
    with pytest.raises(UserError, match=r"messages\[0\], that cannot be found"):
        open_rows(tmp_path / "a.jsonl", [{"messages": messages}], tokenizer)


def test_an_answer_that_is_not_found_names_the_row(tmp_path: Path) -> None:
    # The template shows how many messages there are, so that no beginning is one of the whole text.
    template = "{{ messages | length }}" + PLAIN_CHATML.replace("message.content", "message.content | upper")
    tokenizer = chat_tokenizer(template=template)
    messages = [*CHAT[:2], message("assistant", "x", tool_calls=[{}]), *CHAT[3:]]
    with pytest.raises(
        UserError, match=r"a.jsonl, line 1 has an answer, messages\[2\], that cannot be found"
    ):
        open_rows(tmp_path / "a.jsonl", [{"messages": messages}], tokenizer)


def test_a_template_without_a_stop_token_gets_eos_at_the_end(tmp_path: Path) -> None:
    template = (
        "{% for message in messages %}{{ message.role + ': ' + message.content + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    tokenizer = chat_tokenizer(template=template)
    samples = open_rows(tmp_path / "a.jsonl", [{"messages": CHAT[1:3] * 2}], tokenizer)
    assert samples.counts.reading.without_stop == 1
    [text] = trained_text(samples, tokenizer)
    assert text == f"It is 12. 🙂\nIt is 12. 🙂\n{EOS}"


def test_the_token_that_begins_the_next_turn_is_a_stop_token(tmp_path: Path) -> None:
    template = (
        "{% for message in messages %}"
        "{{ '<|im_start|>' + message.role + '\n' + message.content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    tokenizer = chat_tokenizer(template=template)
    samples = open_rows(tmp_path / "a.jsonl", [{"messages": CHAT[1:3] * 2}], tokenizer)
    assert trained_text(samples, tokenizer) == [f"It is 12. 🙂<|im_start|>It is 12. 🙂{EOS}"]
    assert samples.counts.reading.without_stop == 0


def test_a_tokenizer_without_offsets_finds_answers_by_beginnings(tmp_path: Path) -> None:
    class Slow:
        """A tokenizer whose results have no ``encodings``."""

        backend_tokenizer = None

        def __init__(self) -> None:
            self.fast = chat_tokenizer()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.fast, name)

        def __call__(self, text: Any, **options: Any) -> Any:
            encoded = self.fast(text, **options)
            encoded._encodings = None
            return encoded

    fast = open_rows(tmp_path / "a.jsonl", [{"messages": CHAT}], chat_tokenizer(), sequence_length=128)
    slow = open_rows(tmp_path / "a.jsonl", [{"messages": CHAT}], Slow(), sequence_length=128)
    assert segments_of(slow) == segments_of(fast)


def test_messages_without_a_chat_template_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the tokenizer has no chat template"):
        open_rows(tmp_path / "a.jsonl", [{"messages": CHAT}], chat_tokenizer(template=None))


def test_a_chat_that_the_template_refuses_names_the_row(tmp_path: Path) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(UserError, match=r"line 1 is refused by the chat template: roles must alternate"):
        open_rows(tmp_path / "a.jsonl", [{"messages": CHAT}], chat_tokenizer(template=template))


def test_a_token_that_reaches_past_the_end_of_an_answer_is_trained(tmp_path: Path) -> None:
    """Without stop tokens the last letters of an answer may share a token with the next turn."""
    tokenizer = chat_tokenizer(template="{% for message in messages %}{{ message.content }}{% endfor %}")
    assert tokenizer.tokenize("expert") == ["ex", "pert"]
    rows = [message("user", "?"), message("assistant", "an expe"), message("user", "rt?")]
    samples = open_rows(tmp_path / "a.jsonl", [{"messages": rows}], tokenizer)
    assert trained_text(samples, tokenizer) == ["an expert"]
