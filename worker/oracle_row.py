"""What the oracle's runner knows of the request in a slot. Must not know slots, blocks or plans.

Shapes: D embedding width
"""

from dataclasses import dataclass, field

import numpy as np

from wire.messages import Pooling, Sampling
from worker.oracle_faults import OracleFaults
from worker.oracle_model import EMBEDDING_WIDTH, state_vector


@dataclass(slots=True)
class OracleRow:
    """token_ids: prompt and output. is_suspect: a step failed or gave NaN, so that its tokens are no longer what plans
    assume. pooled_D: float64, of num_pooled states."""

    token_ids: list[int]
    num_prompt_tokens: int
    sampling: Sampling
    has_nan_token: bool
    pooling: Pooling | None = None
    pooled_D: np.ndarray = field(default_factory=lambda: np.zeros(EMBEDDING_WIDTH))
    num_pooled: int = 0
    is_suspect: bool = False

    @property
    def num_output_tokens(self) -> int:
        """What came after the prompt."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_ids(self) -> list[int]:
        """The same, as tokens."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def embedding_D(self) -> np.ndarray:
        """float32: of what was pooled so far."""
        return (self.pooled_D / self.num_pooled).astype(np.float32)

    def is_nan_at(self, num_tokens: int, faults: OracleFaults) -> bool:
        """Whether its activations are NaN once so many of its tokens are in the cache."""
        return self.has_nan_token and num_tokens - self.num_prompt_tokens >= faults.nan_output_index

    def pool(self, state: int | None) -> None:
        """The state after its next token; None: NaN. With LAST_TOKEN only the last one counts."""
        vector_D = np.full(EMBEDDING_WIDTH, np.nan) if state is None else np.asarray(state_vector(state))
        if self.pooling is Pooling.MEAN:
            self.pooled_D, self.num_pooled = self.pooled_D + vector_D, self.num_pooled + 1
        else:
            self.pooled_D, self.num_pooled = vector_D, 1
