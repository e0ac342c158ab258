"""The text side of one row: from token ids to what is sent, and when generation ends."""

from dataclasses import dataclass, replace

from engine.request import Delta, FinishReason, Request, TokenLogprobs
from engine.tokenizer import Detokenizer, StopStrings


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
