"""Whether steps are launched whose results are not known yet, and the wish to wait for them."""

from enum import Enum


class Pipeline(Enum):
    """EMPTY: what is released now is free at once. BUSY: it is free when the steps in flight have ended."""

    EMPTY = "empty"
    BUSY = "busy"


class ResultsFirst(Exception):
    """No step can be planned well before those in flight have ended."""
