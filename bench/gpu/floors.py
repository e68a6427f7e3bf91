"""The least time that a GPU needs for a workload: every weight and every live key and value is read once per step, and
all arithmetic runs at the rate of the matrix units. Measured figures are compared with this.

Must not know: engines, kernels.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from octavo.model.config import ModelConfig

BF16_BYTES = 2
MATMUL_FLOPS = 790e12
"""bf16 multiplications and additions per second that a large product reaches on one H100."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Floors:
    """bytes_per_s: of a large device copy, counting both read and written bytes."""

    config: ModelConfig
    bytes_per_s: float

    @property
    def body_weights(self) -> int:
        """Number of weights of all layers, without embedding and head."""
        config = self.config
        heads = config.num_attention_heads + config.num_key_value_heads
        attention = 2 * config.hidden_size * heads * config.head_dim
        return config.num_hidden_layers * (attention + 3 * config.hidden_size * config.intermediate_size)

    @property
    def head_weights(self) -> int:
        """Number of weights of the output head."""
        return self.config.vocab_size * self.config.hidden_size

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token's keys and values."""
        config = self.config
        return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * BF16_BYTES

    def decode_ms(self, batch: int, context: float) -> float:
        """Milliseconds of one step with this many rows, with `context` cached tokens each on average."""
        moved = (self.body_weights + self.head_weights) * BF16_BYTES + batch * context * self.kv_bytes
        flops = 2 * batch * (self.body_weights + self.head_weights)
        return 1e3 * max(moved / self.bytes_per_s, flops / MATMUL_FLOPS)

    def prefill_ms(self, lengths: Sequence[int]) -> float:
        """Milliseconds of whole prompts, and of the logits of their last tokens."""
        config = self.config
        attended = sum(length * (length + 1) / 2 for length in lengths)
        attention = 4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * attended
        flops = 2 * self.body_weights * sum(lengths) + attention + 2 * self.head_weights * len(lengths)
        read = (self.body_weights + self.head_weights) * BF16_BYTES
        return 1e3 * max(flops / MATMUL_FLOPS, read / self.bytes_per_s)

    def serve_ms(self, lengths_N2: np.ndarray) -> float:
        """Milliseconds of requests (prompt, output tokens) that all arrive and run at once: their prompts, then a
        decode step for every further token of the longest output."""
        prompts_N, outputs_N = lengths_N2.T
        total = self.prefill_ms(prompts_N.tolist())
        for step in range(1, int(outputs_N.max())):
            runs_N = outputs_N > step
            total += self.decode_ms(int(runs_N.sum()), float(prompts_N[runs_N].mean()) + step)
        return total
