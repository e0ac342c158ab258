"""The text side of one row: from token ids to what is sent, and when generation ends."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.request import Delta, FinishReason, Request, TokenLogprobs
from engine.tokenizer import Detokenizer


@dataclass(frozen=True, slots=True)
class Pushed:
    """What one token brings: a delta to send (or None), and why generation ends (or None)."""

    delta: Delta | None
    reason: FinishReason | None
    stop: str = ""


class Output:
    """Feeds tokens through the detokenizer and the stop conditions of its request.

    Text that may become a stop string is held back until it cannot; token ids and their
    log-probabilities never are. The stop itself, token or string, is not sent.
    """

    def __init__(self, request: Request, detokenizer: Detokenizer) -> None:
        self._request = request
        self._detokenizer = detokenizer
        self._stops = StopStrings(request.stop)
        self.tokens: list[int] = []

    def push(self, token: int, logprobs: TokenLogprobs | None = None) -> Pushed:
        """Take the next token; after a reason was given the row is over."""
        assert len(self.tokens) < self._request.max_tokens
        self.tokens.append(token)
        if token in self._request.stop_token_ids:
            return self._end(Delta((), ""), FinishReason.STOP)
        text = self._stops.push(self._detokenizer.push(token))
        delta = Delta((token,), text, () if logprobs is None else (logprobs,))
        if self._stops.matched is not None:
            return Pushed(delta, FinishReason.STOP, self._stops.matched)
        if len(self.tokens) == self._request.max_tokens:
            return self._end(delta, FinishReason.LENGTH)
        return Pushed(delta, None)

    def _end(self, delta: Delta, reason: FinishReason) -> Pushed:
        """Flush what the detokenizer and the stop strings hold back."""
        text = delta.text + self._stops.push(self._detokenizer.flush())
        if self._stops.matched is None:
            text += self._stops.flush()
        else:
            reason = FinishReason.STOP
        delta = replace(delta, text=text)
        sent = delta if delta.token_ids or delta.text else None
        return Pushed(sent, reason, self._stops.matched or "")


class StopStrings:
    """Finds the stop string that is complete first; of several that end together, the longest.

    The result does not depend on how the text is cut: all that could be the beginning of a stop is
    held back. After a match the rest of the text is dropped.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string matches everywhere"
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Text that is safe to show."""
        assert self.matched is None, "the text ended at a stop string"
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, self.matched = min(found)
            self._held = ""
            return text[:at]
        safe = len(text) - self._begun(text)
        self._held = text[safe:]
        return text[:safe]

    def flush(self) -> str:
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        return held

    def _begun(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = min(len(text), max((len(stop) for stop in self._stops), default=1) - 1)
        for length in range(longest, 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
