"""Judges what a service gave: log-probabilities of known tokens against transformers on the same checkpoint.

The yardstick is transformers itself: its own error in the served dtype, which is how far its log-probabilities there
are from those in float32. Two sound implementations round differently, so ours may be as far away, and a little more;
a float32 pass may be a small part of that away. On top of it, errors are fitted to what known mistakes would look like
(`MISTAKES`): a mistake leans every error the same way and shows long before it is as large as the rounding.

Legend: T tokens of a sequence · V vocabulary · E values compared, over all positions and tokens of a sequence.
Must not know: runners, sockets, how rows are printed.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from octavo.model.verify.reference import MISTAKES, NOT_ROUNDED, Reference, Rounded

HALF_LIMIT = 1.3
"""Largest error in units of transformers' own, in bfloat16 and float16, over many positions; a few positions may be
further by chance (`_half_limit`). Sound kernels of ours are at 0.8 to 1.1."""
FLOAT32_LIMIT = 2.0**-8
"""The same for a float32 pass; rounding is 2^-15 of bfloat16's, and sums are added up in another order."""
REPEATED_LIMIT = 2.0**-28
"""What a float32 pass may be further off for each position of a context that repeats a few keys: sums of the same term
over and over are rounded the same way each time. torch's attention was seen at 2^-29.5."""
MISTAKE_LIMIT = 0.5
"""Largest share of a known mistake in errors, beside what transformers' own have of it; by chance it is below 0.1."""
MISTAKE = "known mistake"
LONG_TEXT = 384
"""Tokens of a long prompt."""
NUM_TOP = 20
"""Tokens that are compared at each position, the likeliest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScore:
    """What was said of the token after `token_ids[after]` of a sequence: its log-probability, and the likely tokens
    with theirs. sampled: the token, where it was chosen greedily; None where it was given."""

    after: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    chosen_logprob: float
    sampled: int | None = None


@dataclass(slots=True, kw_only=True)
class ServedSequence:
    """Tokens as they were fed, and the scores that came back.

    check, mode: what it is an example of. The first num_shared tokens were at positions 0, 1, 2 …, their keys repeated
    as often as `repeats` says; the others were at positions from `start` on.
    """

    check: str
    mode: str
    token_ids: list[int]
    num_shared: int = 0
    start: int = 0
    repeats: tuple[int, ...] = ()
    scores: list[TokenScore] = field(default_factory=list)

    @property
    def num_sampled(self) -> int:
        """Tokens that were chosen greedily."""
        return sum(score.sampled is not None for score in self.scores)

    @property
    def positions(self) -> list[int]:
        """Of each token."""
        behind = range(self.start, self.start + len(self.token_ids) - self.num_shared)
        return [*range(self.num_shared), *behind]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedPass:
    """Everything that was served one way. dtype: of weights and activations. rounded: what has fewer bits than it.
    is_deterministic: a row has the same bits whatever runs beside it."""

    label: str
    dtype: torch.dtype
    sequences: Sequence[ServedSequence]
    rounded: Rounded = NOT_ROUNDED
    is_deterministic: bool = False

    @property
    def yardstick_dtype(self) -> torch.dtype:
        """float32 has no error of its own that could be measured: a part of bfloat16's is its limit."""
        return torch.bfloat16 if self.dtype == torch.float32 else self.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRow:
    """One comparison. error: root mean square over num_values log-probabilities, in nats; own: that of transformers in
    the served dtype. For `MISTAKE`, error is the share of the mistake that was found, own that in transformers' error.
    num_equal of num_sampled greedy tokens are transformers' first choice; gap: how far transformers finds ours below
    its first at most, in nats, and may be gap_limit."""

    label: str
    check: str
    mode: str
    num_values: int
    error: float
    max_error: float
    own: float
    limit: float
    num_equal: int = 0
    num_sampled: int = 0
    gap: float = 0.0
    gap_limit: float = 0.0

    @property
    def is_ok(self) -> bool:
        """Whether it is within its limits; NaN is not."""
        return self.error <= self.limit and math.isfinite(self.max_error) and self.gap <= self.gap_limit


@dataclass(frozen=True, slots=True, eq=False)
class _Read:
    """Log-probabilities of a sequence's values by one model; sampled_S: of greedy tokens, best_S: of its own."""

    values_E: torch.Tensor
    sampled_S: torch.Tensor
    best_S: torch.Tensor


_Reads = dict[int, _Read]
"""By id() of the sequence."""


def judge(reference: Reference, passes: Sequence[ServedPass], *, vocab_size: int) -> list[ServedRow]:
    """Rows of all passes. vocab_size: ids that are sampled (the tokenizer's). Raises CheckpointError."""
    return [row for each in passes for row in _judge_pass(reference, each, vocab_size)]


def _judge_pass(reference: Reference, served: ServedPass, vocab_size: int) -> Iterator[ServedRow]:
    model = reference.load(served.yardstick_dtype, weights_dtype=served.dtype, rounded=served.rounded)
    own = _read(reference, model, served, vocab_size)
    model = reference.load(torch.float32, weights_dtype=served.dtype, rounded=served.rounded)
    exact = _read(reference, model, served, vocab_size)
    for check, mode in dict.fromkeys((each.check, each.mode) for each in served.sequences):
        group = [each for each in served.sequences if (each.check, each.mode) == (check, mode)]
        num_scores = sum(len(each.scores) for each in group)
        factor = FLOAT32_LIMIT if served.dtype == torch.float32 else _half_limit(num_scores)
        yield _row(served.label, check, mode, group, exact, own, factor)
    ours_E = _cat(_ours(each) for each in served.sequences)
    exact_E, own_E = (_cat(reads[id(each)].values_E for each in served.sequences) for reads in (exact, own))
    num_scores = sum(len(each.scores) for each in served.sequences)
    for name, mistake in MISTAKES.items():
        with mistake(model):
            mistaken = _read(reference, model, served, vocab_size)
        lean_E = _cat(mistaken[id(each)].values_E for each in served.sequences) - exact_E
        yield _mistake_row(served, name, ours_E - exact_E, own_E - exact_E, lean_E, num_scores)
    reference.forget()
    if served.is_deterministic:
        yield _same_bits_row(served)


def _half_limit(num_scores: int) -> float:
    return HALF_LIMIT * (1 + num_scores**-0.5)


def _same_bits_row(served: ServedPass) -> ServedRow:
    """Outputs of the same prompt in other company, by their largest difference; infinite where tokens differ."""
    alike: dict[tuple[int, ...], list[ServedSequence]] = {}
    for each in served.sequences:
        if each.num_sampled > 1 and not each.num_shared:
            prompt = each.token_ids[: len(each.token_ids) - each.num_sampled]
            alike.setdefault(tuple(prompt), []).append(each)
    worst, num_values = 0.0, 0
    for first, *others in alike.values():
        for other in others:
            num_values += len(_ours(other))
            is_same = first.token_ids == other.token_ids and len(first.scores) == len(other.scores)
            worst = max(worst, float((_ours(first) - _ours(other)).abs().max()) if is_same else math.inf)
    return ServedRow(
        label=served.label,
        check="the same bits",
        mode="alone, together, among prompts",
        num_values=num_values,
        error=worst,
        max_error=worst,
        own=0.0,
        limit=0.0,
    )


def _mistake_row(
    served: ServedPass,
    name: str,
    error_E: torch.Tensor,
    own_error_E: torch.Tensor,
    lean_E: torch.Tensor,
    num_scores: int,
) -> ServedRow:
    """How much of a mistake is in the errors, over how much of it rounding puts there by chance."""
    found, own = _share(error_E, lean_E), _share(own_error_E, lean_E)
    chance = _rms(own_error_E) / max(_rms(lean_E), 1e-30) / num_scores**0.5
    if served.dtype == torch.float32:
        error, limit = abs(found), max(MISTAKE_LIMIT, chance) * FLOAT32_LIMIT
    else:
        error, limit = abs(found - own), max(MISTAKE_LIMIT, 8 * chance)
    return ServedRow(
        label=served.label,
        check=MISTAKE,
        mode=name,
        num_values=len(error_E),
        error=error,
        max_error=error,
        own=abs(own),
        limit=limit,
    )


def _row(
    label: str, check: str, mode: str, group: Sequence[ServedSequence], exact: _Reads, own: _Reads, factor: float
) -> ServedRow:
    exact_E, own_E = (_cat(found[id(each)].values_E for each in group) for found in (exact, own))
    error_E, own_error_E = _cat(_ours(each) for each in group) - exact_E, own_E - exact_E
    repeated = max(sum(each.repeats) for each in group) if factor == FLOAT32_LIMIT else 0
    reads = [exact[id(each)] for each in group]
    gap_S = _cat(each.best_S - each.sampled_S for each in reads)
    return ServedRow(
        label=label,
        check=check,
        mode=mode,
        num_values=len(error_E),
        error=_rms(error_E),
        max_error=float(error_E.abs().max()),
        own=_rms(own_error_E),
        limit=factor * _rms(own_error_E) + REPEATED_LIMIT * repeated,
        num_equal=int((gap_S == 0).sum()),
        num_sampled=len(gap_S),
        gap=float(gap_S.max()) if len(gap_S) else 0.0,
        gap_limit=2 * factor * float(own_error_E.abs().max()),
    )


def _read(reference: Reference, model: Any, served: ServedPass, vocab_size: int) -> _Reads:
    """Sequences of the same tokens at the same positions are computed once."""
    alike: dict[tuple[Any, ...], list[ServedSequence]] = {}
    for each in served.sequences:
        alike.setdefault((tuple(each.token_ids), each.num_shared, each.start, each.repeats), []).append(each)
    reads: _Reads = {}
    for group in alike.values():
        logits_TV = reference.logits(model, group[0], served.rounded)
        logprobs_TV = logits_TV[:, :vocab_size].log_softmax(-1)
        reads |= {id(each): _read_values(logprobs_TV, each) for each in group}
    return reads


def _read_values(logprobs_TV: torch.Tensor, sequence: ServedSequence) -> _Read:
    after_E, ids_E = _indices(sequence)
    sampled = [(score.after, score.sampled) for score in sequence.scores if score.sampled is not None]
    after_S, token_S = torch.tensor(sampled, dtype=torch.long).reshape(-1, 2).unbind(1)
    return _Read(logprobs_TV[after_E, ids_E], logprobs_TV[after_S, token_S], logprobs_TV[after_S].amax(-1))


def _indices(sequence: ServedSequence) -> tuple[torch.Tensor, torch.Tensor]:
    """Position and token of each value: of every score its own token first, then the likely ones."""
    pairs = [
        (score.after, token)
        for score in sequence.scores
        for token in (sequence.token_ids[score.after + 1] if score.sampled is None else score.sampled, *score.token_ids)
    ]
    after_E, ids_E = torch.tensor(pairs, dtype=torch.long).reshape(-1, 2).unbind(1)
    return after_E, ids_E


def _ours(sequence: ServedSequence) -> torch.Tensor:
    return torch.tensor(
        [value for score in sequence.scores for value in (score.chosen_logprob, *score.logprobs)], dtype=torch.float64
    )


def _cat(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([torch.empty(0, dtype=torch.float64), *(part.double() for part in parts)])


def _rms(values_E: torch.Tensor) -> float:
    return float(values_E.square().mean().sqrt())


def _share(error_E: torch.Tensor, lean_E: torch.Tensor) -> float:
    """How much of the lean is in the error: 1 where the mistake was made, 0 where errors lean nowhere."""
    return float((error_E * lean_E).sum() / lean_E.square().sum().clamp_min(1e-60))
