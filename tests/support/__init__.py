"""What the user has set for daemons of their own reaches no test."""

import os

from cachestore import settings

os.environ.update(settings.silenced())
