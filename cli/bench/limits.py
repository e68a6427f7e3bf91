"""How much one run may ask for: all requests and prompts of a run are drawn before it begins, and kept."""

MOST_REQUESTS = 1_000_000
MOST_DRAWN_TOKENS = 1_000_000
"""Of one prompt or output, whether the command line or a trace says how long it is."""
LOWEST_RATE, HIGHEST_RATE = 1e-6, 1_000_000
"""Requests a second; beyond the highest, all at once (inf) is meant."""
LEAST_BURSTINESS, MOST_BURSTINESS = 0.001, 1000
