"""How much one run may ask for: all requests and prompts of a run are drawn before it begins, and kept."""

MOST_REQUESTS = 1_000_000
MOST_DRAWN_TOKENS = 1_000_000
"""Of one prompt or output, whether the command line or a trace says how long it is."""
