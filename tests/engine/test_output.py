"""From token ids to what is sent: against a naive reading of the whole text at each token."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm import utils

from engine.output import Output, Pushed, StopStrings
from engine.request import FinishReason, Request, TokenLogprobs
from engine.tokenizer import REPLACEMENT, Detokenizer
from tests.support.models import save_tiny_tokenizer

EOS = 258


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    save_tiny_tokenizer(folder)
    return utils.load_tokenizer(folder)


@dataclass
class Sent:
    """What a client has after all tokens, or after the reason came."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    reason: FinishReason | None = None
    stop: str = ""
    # Text sent after each token.
    after: list[str] = field(default_factory=list)

    def take(self, pushed: Pushed) -> None:
        if pushed.delta is not None:
            self.token_ids += pushed.delta.token_ids
            self.text += pushed.delta.text
            self.logprobs += pushed.delta.logprobs
        self.after.append(self.text)
        self.reason, self.stop = pushed.reason, pushed.stop


def request(stop: tuple[str, ...] = (), max_tokens: int = 1000, **fields: Any) -> Request:
    return Request((1,), max_tokens, stop=stop, **{"stop_token_ids": frozenset([EOS]), **fields})


def send(tokenizer: Any, tokens: list[int], of: Request) -> Sent:
    output = Output(of, Detokenizer(tokenizer))
    sent = Sent()
    told = [TokenLogprobs(-float(count)) for count in range(len(tokens))]
    for count, (token, logprobs) in enumerate(zip(tokens, told, strict=True), 1):
        sent.take(output.push(token, logprobs))
        assert output.tokens == tokens[:count]
        # Whatever becomes of the text, each token that was sent has its own.
        assert sent.logprobs == told[: len(sent.token_ids)]
        if sent.reason is not None:
            break
        assert len(sent.token_ids) == count
    return sent


def encode(tokenizer: Any, text: str | bytes) -> list[int]:
    """One token for each byte."""
    if isinstance(text, str):
        return [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]
    # Latin-1 has a character for each byte; its tokens show the rank of the byte.
    ranks = {byte: tokenizer.convert_tokens_to_ids(c) for byte, c in _byte_alphabet().items()}
    return [ranks[byte] for byte in text]


def _byte_alphabet() -> dict[int, str]:
    """The byte-level alphabet of GPT-2: printable bytes are themselves, others come after 255."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {
        **{byte: chr(byte) for byte in printable},
        **{byte: chr(256 + index) for index, byte in enumerate(others)},
    }


def test_text_comes_token_by_token(tokenizer: Any) -> None:
    sent = send(tokenizer, encode(tokenizer, "abc"), request())
    assert sent.after == ["a", "ab", "abc"]
    assert sent.reason is None


def test_without_log_probabilities_there_are_none(tokenizer: Any) -> None:
    pushed = Output(request(), Detokenizer(tokenizer)).push(encode(tokenizer, "a")[0])
    assert pushed.delta is not None
    assert pushed.delta.logprobs == ()


def test_a_stop_token_ends_the_reply_and_is_not_sent(tokenizer: Any) -> None:
    tokens = encode(tokenizer, "ab")
    sent = send(tokenizer, [*tokens, EOS, *tokens], request())
    assert (sent.token_ids, sent.text) == (tokens, "ab")
    assert (sent.reason, sent.stop) == (FinishReason.STOP, "")


def test_a_stop_token_as_the_first_token_sends_nothing(tokenizer: Any) -> None:
    output = Output(request(), Detokenizer(tokenizer))
    assert output.push(EOS) == Pushed(None, FinishReason.STOP)
    assert output.tokens == [EOS]


def test_a_stop_token_that_is_the_last_one_allowed_is_a_stop(tokenizer: Any) -> None:
    sent = send(tokenizer, [*encode(tokenizer, "a"), EOS], request(max_tokens=2))
    assert (sent.reason, sent.text) == (FinishReason.STOP, "a")


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_the_length_ends_the_reply_with_its_token(tokenizer: Any, max_tokens: int) -> None:
    tokens = encode(tokenizer, "abcd")
    sent = send(tokenizer, tokens, request(max_tokens=max_tokens))
    assert (sent.token_ids, sent.text) == (tokens[:max_tokens], "abcd"[:max_tokens])
    assert sent.reason is FinishReason.LENGTH


def test_a_stop_string_over_several_tokens_is_held_back_and_not_sent(tokenizer: Any) -> None:
    tokens = encode(tokenizer, "one END two")
    sent = send(tokenizer, tokens, request(stop=("END",)))
    assert sent.after[4:] == ["one ", "one ", "one "]
    assert (sent.text, sent.stop, sent.reason) == ("one ", "END", FinishReason.STOP)
    assert sent.token_ids == tokens[:7]


def test_text_that_only_began_a_stop_string_is_sent_late(tokenizer: Any) -> None:
    sent = send(tokenizer, encode(tokenizer, "xENx"), request(stop=("END",)))
    assert sent.after == ["x", "x", "x", "xENx"]


@pytest.mark.parametrize("ending", ["length", "token"])
def test_what_is_held_back_is_sent_at_the_end(tokenizer: Any, ending: str) -> None:
    tokens = encode(tokenizer, "xEN") + ([EOS] if ending == "token" else [])
    sent = send(tokenizer, tokens, request(stop=("END",), max_tokens=len(tokens)))
    assert sent.text == "xEN"
    assert sent.token_ids == tokens[:3]
    assert sent.reason is (FinishReason.STOP if ending == "token" else FinishReason.LENGTH)
    assert sent.stop == ""


def test_a_stop_string_with_the_last_token_is_a_stop_and_not_a_length(tokenizer: Any) -> None:
    sent = send(tokenizer, encode(tokenizer, "aEND"), request(stop=("END",), max_tokens=4))
    assert (sent.text, sent.reason, sent.stop) == ("a", FinishReason.STOP, "END")


def test_an_emoji_over_four_tokens_comes_whole(tokenizer: Any) -> None:
    tokens = encode(tokenizer, "a🚢b")
    assert len(tokens) == 6
    sent = send(tokenizer, tokens, request())
    assert sent.after == ["a", "a", "a", "a", "a🚢", "a🚢b"]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_half_an_emoji_at_the_end_is_shown_as_what_it_is(tokenizer: Any, count: int) -> None:
    tokens = encode(tokenizer, "🚢")[:count]
    sent = send(tokenizer, [*tokens, EOS], request())
    assert sent.text == tokenizer.decode(tokens)
    assert REPLACEMENT in sent.text


def test_a_stop_string_of_half_a_character_is_found_at_the_end(tokenizer: Any) -> None:
    tokens = [*encode(tokenizer, "a"), *encode(tokenizer, "🚢")[:2]]
    for ending in ([EOS], []):
        of = request(stop=(REPLACEMENT,), max_tokens=len(tokens) + len(ending))
        sent = send(tokenizer, tokens + ending, of)
        assert (sent.text, sent.reason, sent.stop) == ("a", FinishReason.STOP, REPLACEMENT)


@dataclass
class Pieces:
    """A detokenizer whose tokens are long texts."""

    texts: tuple[str, ...]

    def decode(self, tokens: list[int], **_: Any) -> str:
        return "".join(self.texts[token] for token in tokens)


def test_a_stop_string_inside_a_token_cuts_it() -> None:
    of = request(stop=("st",))
    sent = send(Pieces(("a first b", "more")), [0, 1], of)
    assert (sent.text, sent.stop, sent.token_ids) == ("a fir", "st", [0])


def test_a_stop_string_over_the_middle_of_three_tokens() -> None:
    sent = send(Pieces(("ab", "cd", "ef")), [0, 1, 2], request(stop=("bcde",)))
    assert sent.after == ["a", "a", "a"]
    assert (sent.text, sent.stop) == ("a", "bcde")


def test_of_two_stop_strings_the_one_that_is_complete_first_counts() -> None:
    sent = send(Pieces(("xabcd",)), [0], request(stop=("abcd", "bc")))
    assert (sent.text, sent.stop) == ("xa", "bc")


def test_after_the_end_nothing_may_be_pushed(tokenizer: Any) -> None:
    output = Output(request(max_tokens=1), Detokenizer(tokenizer))
    output.push(0)
    with pytest.raises(AssertionError):
        output.push(0)


# --- against a naive reading ---------------------------------------------------------------


@dataclass
class Naive:
    """Decodes everything anew at each token and looks for stops in all of the text."""

    tokenizer: Any
    of: Request

    def shown(self, tokens: list[int]) -> str:
        """Text of all tokens up to the last that completes a character."""
        for count in range(len(tokens), 0, -1):
            text = str(self.tokenizer.decode(tokens[:count]))
            if not text.endswith(REPLACEMENT):
                return text
        return ""

    def cut(self, text: str) -> tuple[str, str] | None:
        ends = [(at + len(stop), at, stop) for stop in self.of.stop if (at := text.find(stop)) >= 0]
        if not ends:
            return None
        _, at, stop = min(ends)
        return text[:at], stop

    def read(self, tokens: list[int]) -> tuple[list[int], str, FinishReason | None, str]:
        """Token ids, text, reason and stop string when all tokens have come."""
        for count, token in enumerate(tokens, 1):
            stopped = token in self.of.stop_token_ids
            sent = tokens[: count - 1] if stopped else tokens[:count]
            over = stopped or count == self.of.max_tokens
            for text in (self.shown(sent), self.tokenizer.decode(sent) if over else ""):
                found = self.cut(text)
                if found:
                    return sent, found[0], FinishReason.STOP, found[1]
            if over:
                reason = FinishReason.STOP if stopped else FinishReason.LENGTH
                return sent, str(self.tokenizer.decode(sent)), reason, ""
        return tokens, self.shown(tokens), None, ""

    def held(self, text: str) -> str:
        """The longest end of the text that may become a stop string."""
        for start in range(len(text)):
            end = text[start:]
            if any(stop != end and stop.startswith(end) for stop in self.of.stop):
                return end
        return ""


# Bytes of "é" and of an emoji, in and out of order, and two letters.
BYTES = b"ab\xc3\xa9\xf0\x9f\x9a\xa2"
texts = st.text("abé🚢" + REPLACEMENT, min_size=1, max_size=4)


@given(
    content=st.lists(
        st.sampled_from(["a", "b", "ab", "é", "🚢", EOS, 256]) | st.sampled_from(list(BYTES)),
        max_size=12,
    ),
    stop=st.lists(texts, max_size=3),
    max_tokens=st.integers(1, 20),
    stop_token_ids=st.sampled_from([frozenset[int](), frozenset([EOS])]),
)
def test_it_says_what_a_naive_reading_says(
    tokenizer: Any,
    content: list[str | int],
    stop: list[str],
    max_tokens: int,
    stop_token_ids: frozenset[int],
) -> None:
    tokens: list[int] = []
    for piece in content:
        if isinstance(piece, int) and piece < 256:
            tokens += encode(tokenizer, bytes([piece]))
        else:
            tokens += [piece] if isinstance(piece, int) else encode(tokenizer, piece)
    of = request(tuple(stop), max_tokens, stop_token_ids=stop_token_ids)
    naive = Naive(tokenizer, of)
    sent = send(tokenizer, tokens, of)
    ids, text, reason, stopped_at = naive.read(tokens)
    if reason is None:
        text = text.removesuffix(naive.held(text))
    assert (sent.token_ids, sent.text, sent.reason, sent.stop) == (ids, text, reason, stopped_at)
    # Nothing is held back that could not become a stop, and nothing is taken back.
    for count, so_far in enumerate(sent.after[:-1] if sent.reason else sent.after, 1):
        shown = naive.shown(tokens[:count])
        assert so_far + naive.held(shown) == shown


def shown(stops: list[str], deltas: list[str]) -> tuple[str, str | None]:
    finder = StopStrings(stops)
    text = ""
    for delta in deltas:
        text += finder.push(delta)
        if finder.matched is not None:
            return text, finder.matched
    return text + finder.flush(), None


def expected(stops: list[str], text: str) -> tuple[str, str | None]:
    found = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in stops if stop in text]
    return (text[: min(found)[1]], min(found)[2]) if found else (text, None)


# Few letters, so that stops overlap themselves, each other and the cuts.
LETTERS = st.text(alphabet="ab", max_size=6)


@given(
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3),
    deltas=st.lists(LETTERS, max_size=8),
)
def test_stop_strings_agree_with_a_search_of_the_whole_text(
    stops: list[str], deltas: list[str]
) -> None:
    assert shown(stops, deltas) == expected(stops, "".join(deltas))
    assert shown(stops, list("".join(deltas))) == shown(stops, deltas)


@given(stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1), deltas=st.lists(LETTERS))
def test_only_what_may_become_a_stop_is_held_back(stops: list[str], deltas: list[str]) -> None:
    finder = StopStrings(stops)
    given_text, shown_text = "", ""
    for delta in deltas:
        given_text += delta
        shown_text += finder.push(delta)
        if finder.matched is not None:
            return
        held = given_text[len(shown_text) :]
        assert not held or any(stop.startswith(held) for stop in stops)


def test_without_stop_strings_nothing_is_held_back() -> None:
    finder = StopStrings([])
    assert finder.push("text") == "text"
    assert finder.flush() == ""
