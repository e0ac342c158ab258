"""The command `engine`, which here also knows the architecture of tests/support/fingerprints.py,
and rests after a shorter pause."""

import sys

from engine import backend

backend.prepare()

import engine.worker  # noqa: E402
import tests.support.fingerprints  # noqa: E402, F401
from engine.cli import main  # noqa: E402
from tests.soak.places import REST_SECONDS  # noqa: E402

engine.worker.REST_SECONDS = REST_SECONDS
sys.exit(main())
