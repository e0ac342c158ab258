import os
from pathlib import Path

import platformdirs

from cachestore import variables


def cache_folder() -> Path:
    """What can be made again: converted models, remembered digests. May not exist yet."""
    override = os.environ.get(variables.CACHE_DIR)
    return Path(override) if override else platformdirs.user_cache_path("mlx-cachestore")
