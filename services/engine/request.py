"""A request as plain data, what is sent back for it, and the checks that turn one into the other.

Nothing here touches MLX: handlers make these, the worker consumes them.
"""

import enum
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import grpc

from cachestore.client import MatchKind
from engine import config
from engine.checkpoints import UNKNOWN, Boundaries
from engine.v1 import engine_pb2 as pb


class InvalidRequest(ValueError):
    """A request that cannot be served; the message names the field and says what to do."""


@dataclass(frozen=True, slots=True)
class Penalty:
    """Falls on the tokens that are among the last `context_tokens` of prompt and reply."""

    value: float
    context_tokens: int = config.PENALTY_CONTEXT_DEFAULT


@dataclass(frozen=True, slots=True)
class Penalties:
    """What changes logits; None is off. `logit_bias` is by token."""

    repetition: Penalty | None = None
    presence: Penalty | None = None
    frequency: Penalty | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sampling:
    """Temperature 0 is greedy. Seed None is random."""

    temperature: float = 0.0
    top_p: float | None = None
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    penalties: Penalties = Penalties()


@dataclass(frozen=True, slots=True)
class Request:
    """`tokens` are the whole prompt, at least one. `warm`: store the prompt, generate nothing."""

    tokens: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    # Alternatives to report with each token's log-probability; None: report neither.
    logprobs: int | None = None
    warm: bool = False
    # Of a chat, where the model needs them.
    boundaries: Boundaries = UNKNOWN


class FinishReason(enum.Enum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request. `match` is None when the cachestore gave no usable answer."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    match: MatchKind | None


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds of each stage; the stages follow each other, so their sum is the whole."""

    queue_ms: float
    lookup_ms: float
    attach_ms: float
    prefill_ms: float
    decode_ms: float


@dataclass(frozen=True, slots=True)
class Alternative:
    token: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Of the chosen token, and of the best ones, best first."""

    logprob: float
    top: tuple[Alternative, ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """`logprobs`: one for each of `token_ids` when they were asked for, else empty."""

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Done:
    reason: FinishReason
    stop: str
    usage: Usage
    timing: Timing
    stored_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Failed:
    code: grpc.StatusCode
    message: str


Event = Delta | Done | Failed
# Takes the events of one request, in order, on the worker thread: must not block or raise.
Sink = Callable[[Event], None]


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a request is checked against."""

    context_tokens: int
    vocabulary_tokens: int
    eos_token_ids: frozenset[int]


def check_prompt(tokens: list[int], limits: ModelLimits) -> None:
    """Raise InvalidRequest unless the prompt leaves room for one token of reply."""
    if len(tokens) >= limits.context_tokens:
        raise InvalidRequest(
            f"prompt: {len(tokens)} tokens, but the model's context holds {limits.context_tokens} "
            "and the reply needs at least one: shorten the prompt"
        )


def sampling_from(message: pb.Sampling, limits: ModelLimits) -> Sampling:
    """Check the sampling fields; raises InvalidRequest naming the first that is wrong."""
    if not 0.0 <= message.temperature <= config.TEMPERATURE_MAX:
        raise InvalidRequest(
            f"sampling.temperature: {message.temperature:g} is not between 0 and "
            f"{config.TEMPERATURE_MAX:g}"
        )
    top_p = message.top_p if message.HasField("top_p") else None
    if top_p is not None and not 0.0 < top_p <= 1.0:
        raise InvalidRequest(f"sampling.top_p: {top_p:g} is not above 0 and at most 1")
    if message.top_k > limits.vocabulary_tokens:
        raise InvalidRequest(
            f"sampling.top_k: {message.top_k} is more than the vocabulary of "
            f"{limits.vocabulary_tokens}"
        )
    if not 0.0 <= message.min_p <= 1.0 or math.isnan(message.min_p):
        raise InvalidRequest(f"sampling.min_p: {message.min_p:g} is not between 0 and 1")
    seed = message.seed if message.HasField("seed") else None
    # Keeping all tokens is no filter, and mlx-lm's takes only fewer.
    top_k = message.top_k if message.top_k < limits.vocabulary_tokens else 0
    penalties = penalties_from(message, limits)
    return Sampling(message.temperature, top_p, top_k, message.min_p, seed, penalties)


def penalties_from(message: pb.Sampling, limits: ModelLimits) -> Penalties:
    """As `sampling_from`, for the fields that change logits."""
    least, most = config.REPETITION_PENALTY_MIN, config.REPETITION_PENALTY_MAX
    repetition = message.repetition_penalty
    if repetition != 0 and not least <= repetition <= most:
        raise InvalidRequest(
            f"sampling.repetition_penalty: {repetition:g} is neither 0 (off) nor between "
            f"{least:g} and {most:g}"
        )
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(message, name)
        if not -config.PENALTY_MAX <= value <= config.PENALTY_MAX:
            raise InvalidRequest(
                f"sampling.{name}: {value:g} is not between {-config.PENALTY_MAX:g} and "
                f"{config.PENALTY_MAX:g}"
            )
    if repetition == 1:
        repetition = 0.0  # dividing by 1 changes nothing
    return Penalties(
        _penalty(repetition, message.repetition_context_size, limits),
        _penalty(message.presence_penalty, message.presence_context_size, limits),
        _penalty(message.frequency_penalty, message.frequency_context_size, limits),
        _logit_bias(message, limits),
    )


def _penalty(value: float, context_size: int, limits: ModelLimits) -> Penalty | None:
    if not value:
        return None
    context_tokens = context_size or config.PENALTY_CONTEXT_DEFAULT
    return Penalty(value, min(context_tokens, limits.context_tokens))


def _logit_bias(message: pb.Sampling, limits: ModelLimits) -> dict[int, float]:
    if len(message.logit_bias) > config.LOGIT_BIAS_TOKENS_MAX:
        raise InvalidRequest(
            f"sampling.logit_bias: {len(message.logit_bias)} tokens, at most "
            f"{config.LOGIT_BIAS_TOKENS_MAX}"
        )
    for token, bias in message.logit_bias.items():
        if token >= limits.vocabulary_tokens:
            raise InvalidRequest(
                f"sampling.logit_bias: {token} is not below the vocabulary of "
                f"{limits.vocabulary_tokens}"
            )
        if not -config.LOGIT_BIAS_MAX <= bias <= config.LOGIT_BIAS_MAX:
            raise InvalidRequest(
                f"sampling.logit_bias: {bias:g} of token {token} is not between "
                f"{-config.LOGIT_BIAS_MAX:g} and {config.LOGIT_BIAS_MAX:g}"
            )
    return dict(message.logit_bias)


def request_from(
    message: pb.GenerateRequest,
    tokens: list[int],
    limits: ModelLimits,
    boundaries: Boundaries = UNKNOWN,
) -> Request:
    """Check everything beside the prompt's own encoding; raises InvalidRequest."""
    check_prompt(tokens, limits)
    room = limits.context_tokens - len(tokens)
    max_tokens = min(config.MAX_TOKENS_DEFAULT, room)
    if message.HasField("max_tokens"):
        max_tokens = message.max_tokens
    if max_tokens < 1:
        raise InvalidRequest("max_tokens: 0, but at least 1 is needed (Warm generates nothing)")
    if max_tokens > room:
        raise InvalidRequest(
            f"max_tokens: {max_tokens}, but the context of {limits.context_tokens} tokens leaves "
            f"{room} after a prompt of {len(tokens)}"
        )
    eos = frozenset() if message.ignore_eos else limits.eos_token_ids
    return Request(
        tokens=tuple(tokens),
        max_tokens=max_tokens,
        sampling=sampling_from(message.sampling, limits),
        stop=_stop_strings(message),
        stop_token_ids=eos | _stop_tokens(message, limits),
        logprobs=_logprobs(message, limits),
        boundaries=boundaries,
    )


def _logprobs(message: pb.GenerateRequest, limits: ModelLimits) -> int | None:
    if not message.HasField("logprobs"):
        return None
    if message.logprobs > config.TOP_LOGPROBS_MAX:
        raise InvalidRequest(
            f"logprobs: {message.logprobs} alternatives, at most {config.TOP_LOGPROBS_MAX}"
        )
    return min(message.logprobs, limits.vocabulary_tokens)


def _stop_strings(message: pb.GenerateRequest) -> tuple[str, ...]:
    if len(message.stop) > config.STOP_STRINGS_MAX:
        raise InvalidRequest(
            f"stop: {len(message.stop)} strings, at most {config.STOP_STRINGS_MAX}"
        )
    for text in message.stop:
        if not 1 <= len(text.encode()) <= config.STOP_STRING_BYTES_MAX:
            raise InvalidRequest(
                f"stop: each string needs 1 to {config.STOP_STRING_BYTES_MAX} bytes, "
                f"one has {len(text.encode())}"
            )
    return tuple(message.stop)


def _stop_tokens(message: pb.GenerateRequest, limits: ModelLimits) -> frozenset[int]:
    if len(message.stop_token_ids) > config.STOP_TOKENS_MAX:
        raise InvalidRequest(
            f"stop_token_ids: {len(message.stop_token_ids)} ids, at most {config.STOP_TOKENS_MAX}"
        )
    for token in message.stop_token_ids:
        if token >= limits.vocabulary_tokens:
            raise InvalidRequest(
                f"stop_token_ids: {token} is not below the vocabulary of {limits.vocabulary_tokens}"
            )
    return frozenset(message.stop_token_ids)
