"""The command `engine`, which here also knows the architecture of tests/support/fingerprints.py."""

import sys

from engine import backend

backend.prepare()

import tests.support.fingerprints  # noqa: E402, F401
from engine.cli import main  # noqa: E402

sys.exit(main())
