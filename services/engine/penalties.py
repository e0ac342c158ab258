"""What is done to the logits of one row before its next token is chosen: mlx-lm's own formulas."""

import logging

import mlx.core as mx
from mlx_lm.sample_utils import make_logits_processors

from engine.request import Penalties, Penalty

log = logging.getLogger(__name__)


class Penalizer:
    """Takes the tokens of the row so far, cached ones too, and logits of shape (1, vocabulary).

    Never raises, as Sampler: a failure is kept, and the row must be dropped.
    """

    def __init__(self, penalties: Penalties) -> None:
        repetition = penalties.repetition or Penalty(0.0)
        presence = penalties.presence or Penalty(0.0)
        frequency = penalties.frequency or Penalty(0.0)
        self._processors = make_logits_processors(
            logit_bias=dict(penalties.logit_bias),
            repetition_penalty=repetition.value,
            repetition_context_size=repetition.context_tokens,
            presence_penalty=presence.value,
            presence_context_size=presence.context_tokens,
            frequency_penalty=frequency.value,
            frequency_context_size=frequency.context_tokens,
        )
        self.failure: Exception | None = None

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        try:
            for process in self._processors:
                logits = process(tokens, logits)
        except Exception as error:
            log.exception("a penalty failed")
            self.failure = error
        return logits


def penalizer_for(penalties: Penalties) -> Penalizer | None:
    """None when there is nothing to do."""
    return Penalizer(penalties) if penalties != Penalties() else None
