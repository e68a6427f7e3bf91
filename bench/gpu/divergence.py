"""Where an output leaves a reference's, and how near the reference's own choice was there.

Must not know: our side, devices.
"""

from dataclasses import dataclass

import numpy as np

from bench.gpu.hf_reference import Reference


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Where an output leaves the reference's. gap: reference's logit of its own choice less that of ours. spacing: of
    bf16 numbers at that size. fp32_gap: the same gap by an fp32 forward pass. noise: largest error of the reference's
    bf16 logits there."""

    request: int
    num_prompt: int
    index: int
    ours: int
    theirs: int
    gap: float
    spacing: float
    fp32_gap: float
    noise: float

    @property
    def is_near_tie(self) -> bool:
        """Closer than bf16 logits can tell."""
        return self.gap <= self.spacing


def spacing_of(value: float) -> float:
    """Between bf16 numbers of this size (8 significant bits)."""
    return float(2.0 ** (np.floor(np.log2(max(abs(value), 1e-30))) - 7))


def first_difference(ours: list[int], theirs: list[int]) -> int | None:
    """The index; None where they are the same."""
    return next((i for i, (one, other) in enumerate(zip(ours, theirs, strict=True)) if one != other), None)


def divergences(
    prompts: list[np.ndarray], ours: list[list[int]], theirs: list[list[int]], bf16: Reference, fp32: Reference
) -> list[Divergence]:
    """The first of each request that has one."""
    found = []
    for request, (prompt, mine, other) in enumerate(zip(prompts, ours, theirs, strict=True)):
        index = first_difference(mine, other)
        if index is None:
            continue
        ids = [*prompt.tolist(), *other[:index]]
        logits_V, exact_V = bf16.logits(ids), fp32.logits(ids)
        best = float(logits_V[other[index]])
        found.append(
            Divergence(
                request=request,
                num_prompt=len(prompt),
                index=index,
                ours=mine[index],
                theirs=other[index],
                gap=best - float(logits_V[mine[index]]),
                spacing=spacing_of(best),
                fp32_gap=float(exact_V[other[index]] - exact_V[mine[index]]),
                noise=float((logits_V - exact_V).abs().max()),
            )
        )
    return found


def show(title: str, num_requests: int, found: list[Divergence]) -> None:
    """A line of counts, then a line for each divergence."""
    ties = sum(each.is_near_tie for each in found)
    within = sum(each.gap <= each.noise for each in found)
    print(
        f"{title}: {num_requests - len(found)} of {num_requests} outputs equal; {len(found)} part, {ties} of them at a "
        f"near-tie, {within} at a gap within the reference's own error"
    )
    for each in found:
        print(
            f"    request {each.request:3d} (prompt {each.num_prompt:4d}) token {each.index:3d}: {each.ours} for "
            f"{each.theirs}, gap {each.gap:.5f} (spacing {each.spacing:.5f}, noise {each.noise:.5f}), "
            f"in fp32 {each.fp32_gap:+.5f}",
            flush=True,
        )
