"""What all windows of the zoo have in common."""

# Tokens that a window or a chunk holds: several steps of a prefill, and passed by a short prompt.
WINDOW = 32

SLIDING, FULL = "sliding_attention", "full_attention"
