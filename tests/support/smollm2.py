import functools
from pathlib import Path

from engine import smollm2


@functools.cache
def smollm2_folder() -> Path:
    """The real model in the user's own cache folder, downloaded by the first run ever."""
    return smollm2.folder()
