"""Settings of the engine, and every limit it enforces. Its flags are in serve.py and kvflags.py."""

from dataclasses import dataclass, field
from pathlib import Path

from cachestore import endpoint
from cachestore.endpoint import TcpAddress
from cachestore.histogram import doubling
from engine.flags import ConfigError
from engine.kvconfig import KvConfig

MESSAGE_BYTES_MAX = 16 << 20
STOP_STRINGS_MAX = 16
STOP_STRING_BYTES_MAX = 256
STOP_TOKENS_MAX = 64
TEMPERATURE_MAX = 100.0
TOP_LOGPROBS_MAX = 20
# Beyond these, logits of 16 bits could overflow.
REPETITION_PENALTY_MIN, REPETITION_PENALTY_MAX = 0.01, 100.0
PENALTY_MAX = 100.0
PENALTY_CONTEXT_DEFAULT = 20
LOGIT_BIAS_MAX = 100.0
LOGIT_BIAS_TOKENS_MAX = 1024
MAX_TOKENS_DEFAULT = 512
QUEUE_REQUESTS_MAX = 256

# For running streams and pending writes after SIGTERM, and for the worker's step after that.
DRAIN_SECONDS_DEFAULT = 10
STOP_SECONDS = 5.0
# A step of the slowest machine that anybody would use: a prompt's 256 tokens at one a second.
STALL_SECONDS_DEFAULT = 300

# How long a request waits for rows of its prompt that another one computes.
LOOKUP_WAIT_SECONDS = 120.0

MODEL_DEFAULT = "smollm2"
MAX_BATCH_DEFAULT = 16
# Without an engine, of a cachestore that an engine started.
IDLE_EXIT_SECONDS_DEFAULT = 1800
TURBO_CODECS = ("turbo1", "turbo2", "turbo3", "turbo4")
CACHE_CODECS = ("none", "q8", "q4", "k8v4", *TURBO_CODECS)
CACHE_CODEC_DEFAULT = "q8"
# Shorter sequences are stored without loss.
MIN_QUANTIZE_TOKENS_DEFAULT = 256
# Tokens between two checkpoints of a long prompt. The prompt stops at each, and all of the model's
# state is copied there, which can be more than so many rows.
CHECKPOINT_STRIDE_DEFAULT = 2048
CHECKPOINT_STRIDE_MIN = 256
# What the cachestore takes as the name of a namespace.
LABEL_BYTES_MAX = 256

# Classes of what Stats counts. A step of mixed length is between two tokens of a reply.
REQUEST_SECONDS = doubling(0.001, 20)
TOKEN_SECONDS = doubling(0.001, 28, per_doubling=2)
BATCH_REQUESTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)

# Packed rows that wait for the cachestore; a write beyond this is dropped and counted.
WRITE_BACKLOG_BYTES_MAX = 1 << 30


@dataclass(frozen=True, slots=True)
class PrefillStep:
    """Prompt tokens computed in one forward: alone, and while other rows decode.

    A decoding row waits for one such forward between two of its tokens.
    """

    idle: int
    busy: int


# Measured for "cpu" and "cuda" (docs/benchmarks.md). "metal" is not measured yet: idle is mlx-lm's
# default, busy keeps the gap between two tokens of a stream short.
PREFILL_STEPS = {
    "cpu": PrefillStep(idle=256, busy=64),
    "metal": PrefillStep(idle=2048, busy=512),
    "cuda": PrefillStep(idle=2048, busy=512),
}


@dataclass(frozen=True, slots=True)
class Listen:
    """Where gRPC is served: a Unix socket or a TCP address of the loopback interface."""

    unix_path: Path | None
    tcp_address: str | None

    @property
    def target(self) -> str:
        """The address as grpc understands it."""
        if self.unix_path is not None:
            return endpoint.grpc_target(self.unix_path)
        assert self.tcp_address is not None
        return self.tcp_address

    def __str__(self) -> str:
        return f"unix:{self.unix_path}" if self.unix_path is not None else str(self.tcp_address)


def parse_listen(text: str, flag: str = "--listen") -> Listen:
    """Read "unix:PATH" or "HOST:PORT"; raises ConfigError naming `flag`."""
    if text.startswith("unix:"):
        try:
            path = endpoint.socket_path(text.removeprefix("unix:"), flag=flag)
        except endpoint.EndpointError as error:
            raise ConfigError(str(error)) from None
        return Listen(path, None)
    try:
        endpoint.tcp_address(text, or_else=" or unix:PATH")
    except endpoint.EndpointError as error:
        raise ConfigError(f"{flag}: {error}") from None
    return Listen(None, text)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What `engine serve` was asked for; None where the user said nothing.

    Raises ConfigError for a value that no engine can use, or that would have no effect.
    """

    model: str
    listen: Listen
    cachestore: str = "auto"
    adapter: Path | None = None
    cachestore_budget_bytes: int | None = None
    idle_exit_seconds: float | None = None
    # With "auto": where the store is, unless in the runtime directory, and its log, unless in the
    # user's log folder; and its file of settings.
    cachestore_socket: Path | None = None
    cachestore_log: Path | None = None
    config_file: Path | None = None
    cache_codec: str | None = None
    cache_min_quantize_tokens: int | None = None
    kv_rotate: bool = False
    turbo_keep_first: int | None = None
    checkpoint_stride: int | None = None
    max_batch: int | None = None
    prefill_step: int | None = None
    wired_limit_bytes: int = 0
    drain_seconds: int = DRAIN_SECONDS_DEFAULT
    stall_seconds: float = STALL_SECONDS_DEFAULT
    reflection: bool = False
    log_requests: bool = True
    log_prompts: bool = False
    metrics: TcpAddress | None = None
    kv: KvConfig = field(default_factory=KvConfig)

    def __post_init__(self) -> None:
        if self.cachestore not in ("auto", "off") and not self.cachestore.startswith("unix:"):
            raise ConfigError(
                f"--cachestore: {self.cachestore!r} is none of auto, off and unix:PATH"
            )
        self.kv.check_batch(self.max_batch)
        if self.codec not in CACHE_CODECS:
            raise ConfigError(
                f"--cache-codec {self.codec!r}: no such codec; use one of {', '.join(CACHE_CODECS)}"
            )
        if self.cachestore != "auto":
            self._refuse(
                f"--cachestore {self.cachestore} starts no store",
                ("--cachestore-budget", self.cachestore_budget_bytes),
                ("--idle-exit", self.idle_exit_seconds),
            )
        if self.checkpoint_stride is not None and self.checkpoint_stride < CHECKPOINT_STRIDE_MIN:
            raise ConfigError(
                f"--checkpoint-stride {self.checkpoint_stride}: the state of the model is copied "
                f"at each; give at least {CHECKPOINT_STRIDE_MIN}"
            )
        if self.cachestore == "off":
            self.refuse_cache_flags("nothing is cached with --cachestore off")
            self.refuse_checkpoint_flags("nothing is cached with --cachestore off")
        if self.kv.bits is not None:
            self.refuse_cache_flags("with --kv-bits the store keeps the bytes of the live cache")
        else:
            self._check_codec()

    def _check_codec(self) -> None:
        """Of the store, when live caches are in full precision."""
        rotate = ("--kv-rotate", self.kv_rotate or None)
        if self.codec == "none":
            self._refuse(
                "--cache-codec none stores everything without loss",
                ("--cache-min-quantize-tokens", self.cache_min_quantize_tokens),
                rotate,
            )
        if self.codec in TURBO_CODECS:
            self._refuse(f"--cache-codec {self.codec} rotates already", rotate)
        else:
            self._refuse(
                f"only --cache-codec {TURBO_CODECS[0]} to {TURBO_CODECS[-1]} can keep tokens",
                ("--turbo-keep-first", self.turbo_keep_first),
            )

    @property
    def codec(self) -> str:
        """Of the store, which keeps rows of quantized live caches as they are."""
        default = CACHE_CODEC_DEFAULT if self.kv.bits is None else "none"
        return default if self.cache_codec is None else self.cache_codec

    @property
    def codec_rotates(self) -> bool:
        """Whether it is the store that rotates rows."""
        return self.kv_rotate and self.kv.bits is None

    @property
    def min_quantize_tokens(self) -> int:
        asked = self.cache_min_quantize_tokens
        return MIN_QUANTIZE_TOKENS_DEFAULT if asked is None else asked

    @property
    def stride(self) -> int:
        """Tokens between two checkpoints of a long prompt."""
        return self.checkpoint_stride or CHECKPOINT_STRIDE_DEFAULT

    def refuse_cache_flags(self, reason: str) -> None:
        """Raises ConfigError when the user said how to store what, for `reason`, is not stored."""
        self._refuse(
            reason,
            ("--cache-codec", self.cache_codec),
            ("--cache-min-quantize-tokens", self.cache_min_quantize_tokens),
            ("--turbo-keep-first", self.turbo_keep_first),
            # With quantized live caches it is they that are rotated.
            ("--kv-rotate", self.codec_rotates or None),
        )

    def refuse_checkpoint_flags(self, reason: str) -> None:
        """As refuse_cache_flags, where no checkpoint is taken."""
        self._refuse(reason, ("--checkpoint-stride", self.checkpoint_stride))

    def _refuse(self, reason: str, *flags: tuple[str, object]) -> None:
        for flag, value in flags:
            if value is not None:
                raise ConfigError(f"{flag} would have no effect: {reason}; leave it out")

    def steps(self, backend: str) -> PrefillStep:
        """Prefill steps on this backend: "cpu", "metal" or "cuda". `prefill_step` replaces the
        backend's idle one and bounds both."""
        chosen = PREFILL_STEPS[backend]
        if self.prefill_step is None:
            return chosen
        return PrefillStep(self.prefill_step, min(self.prefill_step, chosen.busy))
