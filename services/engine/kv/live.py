"""Which caches the layers of a model have while a request runs."""

from dataclasses import dataclass
from typing import Any

from mlx_lm.models.cache import make_prompt_cache

from engine.kv.history import FULL
from engine.kv.kinds import KINDS


@dataclass(frozen=True, slots=True)
class LiveCaches:
    """Makes the empty caches of one request: ours for the kinds we know, mlx-lm's for others."""

    model: Any

    def fresh(self) -> list[Any]:
        caches = make_prompt_cache(self.model)
        return [KINDS[type(c)].fresh(FULL) if type(c) in KINDS else c for c in caches]
