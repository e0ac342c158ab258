import os
from pathlib import Path

import platformdirs

CACHE_ENVIRONMENT = "MLX_CACHESTORE_CACHE_DIR"


def cache_folder() -> Path:
    """What can be made again: converted models, remembered digests. May not exist yet."""
    override = os.environ.get(CACHE_ENVIRONMENT)
    return Path(override) if override else platformdirs.user_cache_path("mlx-cachestore")
