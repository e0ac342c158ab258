"""Text to token ids and back, without MLX: used by handlers and by the worker."""

import contextlib
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from engine.checkpoints import Boundaries

# What a decoder writes for bytes that are not (yet) a character.
REPLACEMENT = "\ufffd"
# A character has at most four bytes; what is longer incomplete is no character.
HELD_TOKENS_MAX = 16
# How a chat may go on. Users and assistants take turns, or many templates refuse it; and some
# render the last reply otherwise than those before.
_NEXT_TURN = ({"role": "assistant", "content": "0"}, {"role": "user", "content": "0"})


class PromptEncoder:
    """Encodes prompts exactly as the model is fed. Takes mlx-lm's TokenizerWrapper; may be used
    from several threads: fast tokenizers only read while they encode, others take turns."""

    def __init__(self, tokenizer: Any, vocabulary_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._vocabulary_tokens = vocabulary_tokens
        self._turn: contextlib.AbstractContextManager[object] = threading.Lock()
        if tokenizer.is_fast:
            # Settings in tokenizer.json that would cut or pad, and be switched at each call.
            tokenizer.backend_tokenizer.no_truncation()
            tokenizer.backend_tokenizer.no_padding()
            self._turn = contextlib.nullcontext()

    def encode_text(self, text: str) -> list[int]:
        """At least one id, each with an embedding, as of every method here; they raise ValueError
        naming the field at fault."""
        # A prompt copied with its BOS must not get another.
        bos = self._tokenizer.bos_token
        has_bos = bos is not None and text.startswith(bos)
        if not text:
            raise ValueError("prompt.text: empty")
        with self._turn:
            ids = self._tokenizer.encode(text, add_special_tokens=not has_bos)
        return self._checked("prompt.text", ids)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Messages have "role" and "content", as chat templates take them."""
        if not self._tokenizer.has_chat_template:
            raise ValueError("prompt.chat: the model has no chat template; use prompt.text")
        if not messages:
            raise ValueError("prompt.chat.messages: empty")
        for index, message in enumerate(messages):
            if not message.get("role"):
                raise ValueError(f"prompt.chat.messages[{index}].role: empty")
        try:
            ids = self._render(messages, generation_prompt=True)
        except Exception as error:  # A template is a program of the model's author.
            raise ValueError(
                f"prompt.chat.messages: the model's chat template refuses them: {error}"
            ) from error
        return self._checked("prompt.chat", ids)

    def boundaries(self, messages: Sequence[Mapping[str, str]], tokens: list[int]) -> Boundaries:
        """Of a chat that `encode_chat` made these tokens of, as far as its template tells."""
        next_turn = self._shared([*messages, *_NEXT_TURN], tokens)
        end_of_first = self._end_of_first(messages, tokens) if len(messages) > 1 else 0
        partings = tuple(sorted({next_turn, end_of_first} - {0}))
        users = (index for index, message in enumerate(messages) if message["role"] == "user")
        first_turn = messages[: next(users, -1) + 1]
        if len(first_turn) == len(messages):  # this is it
            return Boundaries(partings, next_turn)
        start = self._shared(first_turn, tokens, generation_prompt=True) if first_turn else 0
        return Boundaries(partings, start)

    def _end_of_first(self, messages: Sequence[Mapping[str, str]], tokens: list[int]) -> int:
        """Where a chat parts from those with the same first message and another second one: many
        templates fold a system message into the turn of the user, and refuse it alone."""
        first, second = messages[:2]
        other = "1" if second["content"].lstrip().startswith("0") else "0"
        return self._shared([first, {**second, "content": other}], tokens)

    def _shared(
        self,
        messages: Sequence[Mapping[str, str]],
        tokens: list[int],
        generation_prompt: bool = False,
    ) -> int:
        """How many tokens these messages begin with as well, 0 when the template refuses them."""
        try:
            return shared_tokens(self._render(messages, generation_prompt), tokens)
        except Exception:
            return 0

    def _render(self, messages: Sequence[Mapping[str, str]], generation_prompt: bool) -> list[int]:
        with self._turn:
            ids: list[int] = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], add_generation_prompt=generation_prompt
            )
        return ids

    def encode_ids(self, ids: Sequence[int]) -> list[int]:
        return self._checked("prompt.token_ids.ids", ids)

    def _checked(self, field: str, ids: Sequence[int]) -> list[int]:
        if not ids:
            raise ValueError(f"{field}: empty, but at least one token is needed")
        wrong = max(ids) if min(ids) >= 0 else min(ids)
        if not 0 <= wrong < self._vocabulary_tokens:
            raise ValueError(
                f"{field}: {wrong} is outside the vocabulary of {self._vocabulary_tokens} tokens"
            )
        return list(ids)


def shared_tokens(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    shorter = min(len(one), len(other))
    unequal = np.flatnonzero(np.asarray(one[:shorter]) != np.asarray(other[:shorter]))
    return int(unequal[0]) if unequal.size else shorter


class Detokenizer:
    """The text of one reply, token by token: the pieces joined are its decoded tokens.

    A piece never ends within a character. Decoders drop a space here or add one there at the
    beginning, so a few tokens that were shown are decoded again with the new ones.

        tokens  ... | shown, decoded again | new |
                    ^ _start               ^ _shown
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._start = 0
        self._shown = 0

    def push(self, token: int) -> str:
        """New text; empty while a character is incomplete."""
        self._tokens.append(token)
        text = self._new_text()
        if text.endswith(REPLACEMENT) and len(self._tokens) - self._shown < HELD_TOKENS_MAX:
            return ""
        if text:
            self._start, self._shown = self._shown, len(self._tokens)
        return text

    def flush(self) -> str:
        """What an unfinished character held back."""
        text = self._new_text()
        self._start = self._shown = len(self._tokens)
        return text

    def _new_text(self) -> str:
        shown = self._decode(self._tokens[self._start : self._shown])
        return self._decode(self._tokens[self._start :])[len(shown) :]

    def _decode(self, tokens: list[int]) -> str:
        # Cleaning up spaces would change text that was already shown.
        return str(self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False))
