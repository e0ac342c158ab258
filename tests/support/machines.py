"""How long the state machines look for a sequence of operations that breaks something."""

import os

import hypothesis

# HYPOTHESIS_EXAMPLES=20000 for a long look.
MACHINE = hypothesis.settings(
    max_examples=int(os.environ.get("HYPOTHESIS_EXAMPLES", "500")), deadline=None, print_blob=True
)
