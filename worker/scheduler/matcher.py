"""What the scheduler must know of a grammar: a protocol, so that it stays free of the library behind it."""

from collections.abc import Iterable
from typing import Protocol

import numpy as np


class Matcher(Protocol):
    """How far one output has come in its grammar."""

    def fork(self) -> "Matcher":
        """Another output at the same place."""

    def accept(self, token_id: int) -> bool:
        """The output goes on with this token; False where the grammar does not allow it, and then this is broken."""

    def replay(self, token_ids: Iterable[int]) -> bool:
        """Output that was made elsewhere; False as in `accept`."""

    @property
    def is_complete(self) -> bool:
        """Nothing may follow, or an end token was accepted."""

    @property
    def ended_by_token(self) -> bool:
        """The last token accepted was an end token."""

    @property
    def error(self) -> str:
        """Why it is broken; empty while it is not."""

    def fill(self, bits_W: np.ndarray) -> bool:
        """Writes the mask of the next token; False where the grammar broke at it."""
