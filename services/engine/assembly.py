"""The parts of an engine, and how they are put together from its settings."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from cachestore import client as cachestore_client
from cachestore import endpoint, logs, record
from cachestore.client import StoreRefused, StoreUnavailable
from engine import backend, config, identity, model, selfcheck
from engine.backend import Backend
from engine.batch import BatchMode, BatchShape, Token
from engine.config import EngineConfig
from engine.core import Core
from engine.flags import ConfigError
from engine.folders import cache_folder
from engine.kv import start
from engine.kv.codec import CodecPolicy
from engine.kv.kinds import NotCacheable
from engine.kv.layout import probe
from engine.kv.live import LiveCaches
from engine.link import StoreLink
from engine.model import LoadedModel, ModelSpec
from engine.prefix import Prefix
from engine.request import ModelLimits
from engine.scheduler import Scheduler
from engine.service import ServedModel
from engine.tokenizer import Detokenizer, PromptEncoder
from engine.worker import Worker

log = logging.getLogger(__name__)


@dataclass
class Engine:
    """The parts of one engine that outlive a request. `start` loads; `served` is set by then."""

    settings: EngineConfig
    # As Core.observe.
    observe: Callable[[int, Token], None] | None = None

    def __post_init__(self) -> None:
        self.link = _link(self.settings)
        self.worker = Worker(self._make_core)
        self.served: ServedModel | None = None
        self.prefix: Prefix | None = None

    def start(self) -> None:
        """Load the model, then reach the cachestore: one that is not used must not be started.

        Raises what loading raised: BackendError, ConfigError, ModelError, CodecError,
        SelfCheckFailed, AttentionCheckFailed.
        """
        self.worker.start()
        self.worker.ready.result()
        assert self.prefix is not None
        if self.link is not None and not self.prefix.status.not_cached_reason:
            self.link.start()
            _compare_budget(self.link, self.settings.cachestore_budget_bytes)

    def stop(self, write_seconds: float | None = None) -> None:
        """Idempotent. Running requests fail with UNAVAILABLE; given writes are finished, or
        dropped after so many seconds."""
        self.worker.stop()
        if self.prefix is not None:
            self.prefix.close(write_seconds)
        if self.link is not None:
            self.link.close()

    def _make_core(self) -> Core:
        """On the worker thread."""
        device = backend.describe()
        limits = backend.memory_limits(device, self.settings.wired_limit_bytes)
        backend.apply_memory_limits(limits)
        began = time.monotonic()
        loaded = model.load(ModelSpec(self.settings.model, self.settings.adapter), device)
        mode = selfcheck.choose_mode(loaded.model, loaded.vocabulary_tokens)
        rows_max = self._rows_max(mode)
        steps = self.settings.steps(device.name)
        caches = self._live_caches(loaded, device)
        self.prefix = self._make_prefix(loaded, caches)
        self.served = ServedModel(
            name=loaded.name,
            architecture=loaded.architecture,
            dtype=loaded.dtype,
            backend=device.name,
            batch_mode=mode.value,
            limits=ModelLimits(
                loaded.context_tokens,
                loaded.vocabulary_tokens,
                frozenset(loaded.eos_token_ids),
            ),
            encoder=PromptEncoder(loaded.tokenizer, loaded.vocabulary_tokens),
            checkpointed=self.prefix.checkpointed,
        )
        log.info(
            "%s (%s, %s) on %s, %s, ready in %.1f s",
            loaded.name,
            loaded.architecture,
            loaded.dtype,
            device.device_name,
            mode.value,
            time.monotonic() - began,
        )
        return Core(
            caches=caches,
            shape=BatchShape(mode, rows_max, steps, self.settings.wired_limit_bytes),
            scheduler=Scheduler(rows_max, mode is BatchMode.BATCHED, steps.idle),
            prefix=self.prefix,
            new_detokenizer=lambda: Detokenizer(loaded.tokenizer),
            observe=self.observe,
        )

    def _rows_max(self, mode: BatchMode) -> int:
        asked = self.settings.max_batch
        if mode is not BatchMode.ONE_ROW:
            return asked or config.MAX_BATCH_DEFAULT
        if asked is not None and asked > 1:
            raise ConfigError(
                f"--max-batch {asked}: this model runs one request at a time "
                "(docs/architecture.md); give 1, or leave it out"
            )
        return 1

    def _live_caches(self, loaded: LoadedModel, device: Backend) -> LiveCaches:
        """Raises AttentionCheckFailed when no way to attend to packed rows is right here."""
        kv, rotate = self.settings.kv, self.settings.kv_rotate
        caches = start.live_caches(loaded.model, kv, rotate, device.name)
        if kv.max_size is not None:
            selfcheck.check_bounded(loaded.model, loaded.vocabulary_tokens)
        for note in caches.notes() if self.settings.kv.changes else ():
            log.info("live caches: %s", note)
        return caches

    def _make_prefix(self, loaded: LoadedModel, caches: LiveCaches) -> Prefix:
        try:
            layout = probe(caches)
            for note in layout.notes():
                log.info("layers in the store: %s", note)
        except NotCacheable as error:
            reason = f"this model is not cached ({error})"
            self.settings.refuse_cache_flags(reason)
            self.settings.refuse_checkpoint_flags(reason)
            log.warning("not cached: %s", error)
            return Prefix(self.worker.post, not_cached_reason=str(error))
        if not layout.checkpointed:
            self.settings.refuse_checkpoint_flags("this model's caches can be cut at any token")
        policy = CodecPolicy.of(
            layout,
            self.settings.codec,
            min_quantize_tokens=self.settings.min_quantize_tokens,
            explicit=self.settings.cache_codec is not None,
            rotate=self.settings.codec_rotates,
            keep_first=self.settings.turbo_keep_first or 0,
        )
        if self.link is None:
            return Prefix(self.worker.post, not_cached_reason="--cachestore off")
        for note in policy.codec.notes():
            log.warning("--cache-codec %s: %s", policy.codec.name, note)
        if layout.checkpointed:
            log.info("cached by checkpoints, every %d tokens and at messages", self.settings.stride)
        prefix = Prefix(
            self.worker.post,
            self.link,
            policy,
            identity.label(loaded.name),
            checkpoint_stride=self.settings.stride,
        )
        # Hashing takes long the first time; until it is done the store is not used.
        threading.Thread(
            target=_identify, args=(prefix, loaded, policy), name="identity", daemon=True
        ).start()
        return prefix


def _identify(prefix: Prefix, loaded: LoadedModel, policy: CodecPolicy) -> None:
    remembered = cache_folder() / identity.MEMORY_FILE
    try:
        digest = identity.weights_digest(loaded.files, remembered)
        parts = identity.NamespaceParts(
            weights_digest=digest,
            architecture=loaded.config,
            dtype=loaded.dtype,
            dequantized=loaded.dequantized,
            cache=policy.codec.layout.describe(),
            codec=policy.describe(),
            mlx_lm_version=metadata.version("mlx-lm"),
            record_version=record.VERSION,
        )
        prefix.identify(identity.namespace(parts))
    except (identity.IdentityError, OSError, TypeError, ValueError) as error:
        log.error("nothing is cached: the model's content cannot be identified: %s", error)


def _link(settings: EngineConfig) -> StoreLink | None:
    match settings.cachestore:
        case "off":
            return None
        case "auto":
            path = settings.cachestore_socket or endpoint.cachestore_socket()
            return StoreLink(path, lambda cancelled: _spawn(path, settings, cancelled))
        case text:
            path = endpoint.socket_path(
                text.removeprefix("unix:"), flag="--cachestore", suffix=endpoint.SESSION_SUFFIX
            )
            return StoreLink(path, None)


def _spawn(path: Path, settings: EngineConfig, cancelled: threading.Event) -> None:
    log_file = settings.cachestore_log or logs.file_in_folder("cachestore")
    log.info("starting a cachestore at %s; its log is %s", path, log_file)
    budget_bytes = settings.cachestore_budget_bytes
    cachestore_client.spawn(
        path,
        None if budget_bytes is None else str(budget_bytes),
        settings.idle_exit_seconds or config.IDLE_EXIT_SECONDS_DEFAULT,
        log_file,
        cancelled,
        settings.config_file,
    )


def _compare_budget(link: StoreLink, asked_bytes: int | None) -> None:
    if asked_bytes is None:
        return
    with contextlib.suppress(StoreUnavailable, StoreRefused), link.borrow() as client:
        stats = client.stats()
        if stats.bytes_budget != asked_bytes:
            log.warning(
                "a cachestore runs already (process %d), with a budget of %d bytes and not of the "
                "%d that were asked for; end it to start one with those",
                stats.pid,
                stats.bytes_budget,
                asked_bytes,
            )
