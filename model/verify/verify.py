"""Compares this model with transformers on one checkpoint, for every backend: RoPE, hidden states, logits, greedy
tokens, prefilled whole and in chunks.

transformers is the other party, loaded by its own loader from the same folder in the same dtype
(model/verify/reference.py).
Must not know: how the table is printed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from octavo.model.attention.interface import BACKENDS, get_backend
from octavo.model.attention.paged import PagedSequences
from octavo.model.checkpoint.loading import load_model
from octavo.model.dtypes import parse_dtype
from octavo.model.numerics import NumericFinding, watch_numerics
from octavo.model.verify.checks import (
    Comparison,
    VerifyRow,
    compare_greedy,
    compare_hidden_states,
    compare_logits,
    compare_rope,
)
from octavo.model.verify.prompts import make_prompts
from octavo.model.verify.reference import load_transformers


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """Everything that was compared, in order."""

    rows: tuple[VerifyRow, ...]

    @property
    def is_ok(self) -> bool:
        """Whether every row is within its limit."""
        return all(row.is_ok for row in self.rows)


def verify_checkpoint(
    folder: Path,
    *,
    dtype: torch.dtype | str | None = None,
    backends: Sequence[str] = BACKENDS,
    num_prompts: int = 8,
    max_new_tokens: int = 32,
    context_len: int | None = None,
) -> VerifyReport:
    """Load the checkpoint twice (in this library and in transformers) on the CPU and compare.

    context_len: how far positions go; None: the config's max_position_embeddings, extended by YaRN.
    dtype: of both, by name or as torch has it; None takes the checkpoint's. Needs memory for two models.
    Raises CheckpointError where it cannot be loaded, BackendName for an unknown backend, ValueError for an unknown
    dtype or a count below 1.
    """
    if num_prompts < 1 or max_new_tokens < 1:
        raise ValueError(f"num_prompts {num_prompts} and max_new_tokens {max_new_tokens} must be at least 1")
    chosen_backends = [get_backend(name) for name in backends]
    model = load_model(folder, dtype=parse_dtype(dtype))
    comparison = Comparison(
        model,
        load_transformers(folder, model.dtype),
        make_prompts(folder, model.config, num_prompts),
        context_len or model.config.context_len,
    )
    with torch.inference_mode():
        rows = compare_rope(comparison)
        for backend in chosen_backends:
            rows += compare_hidden_states(comparison, backend)
            rows += compare_logits(comparison, backend)
            rows += compare_greedy(comparison, backend, max_new_tokens)
    return VerifyReport(rows=tuple(rows))


def find_numeric_fault(
    folder: Path, *, dtype: torch.dtype | str | None = None, limit: float | None = None, num_prompts: int = 8
) -> NumericFinding | None:
    """The first layer whose activations exceed the limit (None: `default_limit`) or turn NaN or infinite on prompts;
    None where all are well. Raises as `verify_checkpoint` does."""
    model = load_model(folder, dtype=parse_dtype(dtype))
    prompts = make_prompts(folder, model.config, num_prompts)
    with torch.inference_mode(), watch_numerics(model, limit=limit) as watch:
        for prompt in prompts:
            sequences = PagedSequences(model, get_backend("sdpa"), num_sequences=1, max_tokens=len(prompt))
            model.logits(sequences.step({0: prompt})[0])
            if watch.first is not None:
                break
    return watch.first
