"""Environment variables that stand for no flag. The others follow from flags (settings.py)."""

from collections.abc import Mapping
from typing import Final

PREFIX: Final = "MLX_CACHESTORE_"
CONFIG: Final = PREFIX + "CONFIG"
RUNTIME_DIR: Final = PREFIX + "RUNTIME_DIR"
CACHE_DIR: Final = PREFIX + "CACHE_DIR"
SHM: Final = PREFIX + "SHM"

# Of each, who reads it and what it says.
MEANINGS: Final[Mapping[str, str]] = {
    CONFIG: "both daemons: the file of settings, where `--config` names none",
    RUNTIME_DIR: "both daemons and every client: the folder of the sockets, which nobody else may "
    "enter. Without it `~/.mlx-cachestore/run` on macOS, and on Linux "
    "`$XDG_RUNTIME_DIR/mlx-cachestore`, or else `/tmp/mlx-cachestore-UID`",
    CACHE_DIR: "engine: the folder of converted models and remembered digests. Without it the "
    "user's cache folder",
    SHM: "cachestore: how shared memory is made, `memfd` (Linux only, and its default) or `posix`",
}
