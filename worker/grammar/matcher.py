"""How far one output has come in its grammar: `worker.scheduler.request.Matcher` by llguidance. Owned by the engine's
thread.

A preempted request keeps its matcher: what was accepted stays accepted.
"""

from collections.abc import Iterable

import numpy as np
from llguidance import LLMatcher

from octavo.grammar.check import refused


class GrammarMatcher:
    """Accepts tokens, and says which may come next."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher

    def fork(self) -> "GrammarMatcher":
        """A matcher for another output at the same position."""
        return GrammarMatcher(self.matcher.deep_copy())

    def accept(self, token_id: int) -> bool:
        """Advance by this token. False if the grammar does not allow it; then the matcher is broken."""
        return self.matcher.consume_token(token_id)

    def replay(self, token_ids: Iterable[int]) -> bool:
        """Advance by output generated elsewhere; False as in `accept`."""
        return self.matcher.consume_tokens(list(token_ids))

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow, or an end token was accepted."""
        return self.matcher.is_stopped() and not self.matcher.is_error()

    @property
    def ended_by_token(self) -> bool:
        """Whether the last token accepted was an end token."""
        return self.matcher.stop_reason() == "EndOfSentence"

    @property
    def error(self) -> str:
        """Why it is broken; empty if it is not."""
        said = self.matcher.get_error()
        return refused(said).description if said else ""

    def fill(self, bits_W: np.ndarray) -> bool:
        """Write the mask of the next token. bits_W: int32, contiguous. False if the grammar failed: no token is left,
        or it took more work than the limits allow."""
        self.matcher.unsafe_compute_mask_ptr(bits_W.ctypes.data, bits_W.nbytes)
        return not self.matcher.is_error()
