"""Log-probabilities for the rows that ask, as plain data. On the worker thread."""

from collections.abc import Mapping, Sequence

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from engine.batch import Token
from engine.request import Alternative, TokenLogprobs


class LogprobReader:
    """Reads what a step has computed while the next step runs.

    It has a stream of its own: on the batch's, every read would wait for the step that was begun
    already, and all replies with it. The best are found by numpy, which takes a fifth of the time
    of MLX's sort on a CPU and leaves a GPU to the batch.
    """

    def __init__(self) -> None:
        self._stream: mx.Stream | None = None

    def read(self, tokens: Sequence[Token], asked: Mapping[int, int]) -> dict[int, TokenLogprobs]:
        """By uid, for the tokens whose uid is in `asked`, which says how many alternatives."""
        if not asked:
            return {}
        if self._stream is None:
            self._stream = mx.new_stream(mx.default_device())
        tokens = [token for token in tokens if token.uid in asked]
        with mx.stream(self._stream):
            # Without alternatives only one number has to leave the device.
            values = [
                (t.logprobs if asked[t.uid] else t.logprobs[t.token]).astype(mx.float32)
                for t in tokens
            ]
            mx.eval(values)
        return {
            token.uid: _of(token.token, np.array(value), asked[token.uid])
            for token, value in zip(tokens, values, strict=True)
        }


def _of(token: int, logprobs: npt.NDArray[np.float32], count: int) -> TokenLogprobs:
    if not count:
        return TokenLogprobs(float(logprobs))
    best = np.argpartition(logprobs, -count)[-count:]
    best = best[np.lexsort((best, -logprobs[best]))]
    top = tuple(Alternative(int(t), float(logprobs[t])) for t in best)
    return TokenLogprobs(float(logprobs[token]), top)
