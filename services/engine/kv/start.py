"""Live caches and the attention that reads them, chosen together when a model is loaded."""

from typing import Any

from engine.backend import Name
from engine.kv import attention, attention_check, live, routing
from engine.kv.live import LiveCaches
from engine.kvconfig import KvConfig


def live_caches(model: Any, config: KvConfig, rotate: bool, device: Name) -> LiveCaches:
    """What the flags come to for this model on this backend, on the MLX thread.

    Attention over packed rows is installed: the default strategy, or the first other one where
    that gives wrong numbers. Raises ConfigError as `live.choose`, and AttentionCheckFailed when no
    strategy is right.
    """
    # Which layers can be packed is tried out, so some strategy has to be there.
    routing.install(attention.DEFAULTS[device])
    caches = live.choose(model, config, rotate)
    candidates = attention.preferred(device)
    routing.install(attention_check.first_right(candidates, live.geometries(caches)))
    return caches
