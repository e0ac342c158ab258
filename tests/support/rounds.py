"""How often daemons are ended under load."""

import os

# LIFECYCLE_ROUNDS=20 for a long look.
ROUNDS = int(os.environ.get("LIFECYCLE_ROUNDS", "4"))
