"""Fast and deterministic, by their names on a command line."""

from octavo.worker.config import Deterministic

MODES = {"fast": Deterministic.OFF, "deterministic": Deterministic.ON}
