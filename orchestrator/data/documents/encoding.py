"""Tokens of texts, chats and completions, and which of them have a loss.

Shapes: T tokens of a document.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from orchestrator.data.documents.chat import ChatRenderer, RenderedChat
from orchestrator.data.documents.counts import BadRows, ReadingCounts
from orchestrator.data.documents.kinds import BadRowError, Chat, Completion, TextRow
from orchestrator.data.documents.options import DocumentOptions
from orchestrator.data.documents.store import TokenDocument
from orchestrator.errors import UserError

_MAX_TOKENS = 2**26


class Encoder:
    """Tokenises rows, many at a time. ``counts`` are those of the reading."""

    def __init__(
        self, tokenizer: Any, options: DocumentOptions, counts: ReadingCounts, bad_rows: BadRows
    ) -> None:
        """Raises ``UserError`` if the tokenizer has no end-of-sequence token."""
        if tokenizer.eos_token_id is None:
            raise UserError(
                "the tokenizer has no end-of-sequence token, with which documents end; "
                "set eos_token in its tokenizer_config.json"
            )
        self.eos: int = tokenizer.eos_token_id
        self._tokenizer = tokenizer
        self._trains_all = options.train_on == "all"
        self._counts = counts
        self._bad_rows = bad_rows
        self._renderer: ChatRenderer | None = None

    def encode_texts(self, texts: Sequence[TextRow]) -> list[TokenDocument]:
        """Return texts that end with EOS; all of their tokens are trained."""
        tokenised = self._tokenise([text.text for text in texts], special=True)
        documents = [_all_trained(np.append(tokens_T, self.eos)) for tokens_T in tokenised]
        return self._trainable(documents, len(texts))

    def encode_completions(self, rows: Sequence[Completion]) -> list[TokenDocument]:
        """Return prompts with their completions and EOS.

        The prompt has the tokens that it has alone, as when the model is used: its last word and the
        first of the completion are not joined into one token."""
        prompts = self._tokenise([row.prompt for row in rows], special=True)
        wholes = self._tokenise([row.prompt + row.completion for row in rows], special=True)
        documents = []
        for row, prompt_T, whole_T in zip(rows, prompts, wholes, strict=True):
            if not row.completion.strip():
                self._counts.empty_answers += 1
                continue
            if not np.array_equal(whole_T[: len(prompt_T)], prompt_T):
                whole_T = np.concatenate([prompt_T, self._continuation(row.completion)])
            tokens_T = np.append(whole_T, self.eos)
            trained_T = np.arange(len(tokens_T)) >= (0 if self._trains_all else len(prompt_T))
            documents.append(TokenDocument(tokens_T, trained_T))
        return self._trainable(documents, len(rows))

    def render(self, chat: Chat) -> RenderedChat:
        """Raises ``BadRowError`` for a chat that the template refuses."""
        self._renderer = self._renderer or ChatRenderer(self._tokenizer)
        rendered = self._renderer.render_whole(chat) if self._trains_all else self._renderer.render(chat)
        self._counts.empty_answers += rendered.empty_answers
        self._counts.without_stop += rendered.without_stop
        return rendered

    def encode_chats(self, chats: Sequence[RenderedChat]) -> list[TokenDocument]:
        """Return the tokens of rendered chats; those of the answers are trained."""
        if not chats:
            return []
        # The template has written all special tokens.
        encoded = self._tokenizer(
            [chat.text for chat in chats],
            add_special_tokens=False,
            return_attention_mask=False,
            verbose=False,
        )
        documents = []
        num_bad = 0
        for number, chat in enumerate(chats):
            tokens_T = np.array(encoded["input_ids"][number], dtype=np.int64)
            offsets = encoded.encodings[number].offsets if encoded.encodings is not None else None
            try:
                trained_T = self._trained(tokens_T, offsets, chat)
            except BadRowError as error:
                num_bad += 1
                self._bad_rows.add(f"{chat.place} {error}")
            else:
                documents.append(TokenDocument(tokens_T, trained_T))
        return self._trainable(documents, len(chats) - num_bad)

    def encode_tokens(self, tokens_T: np.ndarray) -> Iterator[list[TokenDocument]]:
        """Divide tokens after each EOS. Very long documents are cut: they must fit into the memory."""
        for begin in range(0, len(tokens_T), _MAX_TOKENS):
            part_T = np.asarray(tokens_T[begin : begin + _MAX_TOKENS])
            if part_T.min() < 0:
                raise UserError(f"a file of tokens holds {part_T.min()}; no token is below 0")
            ends = np.flatnonzero(part_T == self.eos) + 1
            documents = [_all_trained(document_T) for document_T in np.split(part_T, ends) if len(document_T)]
            yield self._trainable(documents, len(documents))

    def _tokenise(self, texts: list[str], special: bool) -> list[np.ndarray]:
        """Return the tokens of texts without an EOS at their end, and with at most one BOS."""
        if not texts:
            return []
        encoded = self._tokenizer(
            texts, add_special_tokens=special, return_attention_mask=False, verbose=False
        )
        result = []
        for tokens in encoded["input_ids"]:
            tokens_T = np.array(tokens, dtype=np.int64)
            if len(tokens_T) > 1 and tokens_T[0] == tokens_T[1] == self._tokenizer.bos_token_id:
                tokens_T = tokens_T[1:]  # the text had one of its own
            if len(tokens_T) and tokens_T[-1] == self.eos:
                tokens_T = tokens_T[:-1]
            result.append(tokens_T)
        return result

    def _continuation(self, text: str) -> np.ndarray:
        """Return the tokens of a text that follows another one.

        At the beginning of a text some tokenizers insert a space; after a special token they do not."""
        after_special_T = self._tokenise([self._tokenizer.eos_token + text], special=False)[0]
        return after_special_T[1:]

    def _trained(self, tokens_T: np.ndarray, offsets: Any, chat: RenderedChat) -> np.ndarray:
        if offsets is not None:
            return _trained_by_offsets(np.array(offsets), chat.answers)
        return self._trained_by_prefixes(tokens_T, chat)

    def _trained_by_prefixes(self, tokens_T: np.ndarray, chat: RenderedChat) -> np.ndarray:
        """Find answers by the tokens of the text before them, for tokenizers that tell no offsets."""
        trained_T = np.zeros(len(tokens_T), dtype=bool)
        for begin, end in chat.answers:
            places = [self._tokens_before(tokens_T, chat.text[:place]) for place in (begin, end)]
            trained_T[places[0] : places[1]] = True
        return trained_T

    def _tokens_before(self, tokens_T: np.ndarray, text: str) -> int:
        before = self._tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
        if not np.array_equal(tokens_T[: len(before)], before):
            raise BadRowError(
                "has an answer that begins or ends within a token; a fast tokenizer was needed to find it, "
                "or --train-on all"
            )
        return len(before)

    def _trainable(self, documents: list[TokenDocument], num_rows: int) -> list[TokenDocument]:
        # The first token is the label of no position.
        kept = [document for document in documents if document.trained_T[1:].any()]
        self._counts.nothing_to_train += num_rows - len(kept)
        return kept


def _all_trained(tokens_T: np.ndarray) -> TokenDocument:
    return TokenDocument(tokens_T, np.ones(len(tokens_T), dtype=bool))


def _trained_by_offsets(offsets_T2: np.ndarray, answers: list[tuple[int, int]]) -> np.ndarray:
    """Return which tokens are of an answer, by the characters of each token.

    A token that begins before the answer is not trained: the model is given it. One that reaches beyond the
    answer is. Some tokenizers tell no characters for white space, only the place where it ends."""
    trained_T = np.zeros(len(offsets_T2), dtype=bool)
    if not len(offsets_T2):
        return trained_T
    start_T, end_T = offsets_T2.T
    for begin, end in answers:
        is_after_prompt_T = (start_T >= begin) & (end_T > begin)
        is_before_end_T = (start_T < end) | (end_T <= end)
        trained_T |= is_after_prompt_T & is_before_end_T
    return trained_T
