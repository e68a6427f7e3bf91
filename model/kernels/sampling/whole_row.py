"""The cut of top-k, top-p and typical-p if the few largest logits do not determine it: by search over the whole row.

A cut is a number: the least distance such that the columns within it have enough weight. Each pass over the row sums
the weights within seven distances between the bounds known so far and moves the bounds to two neighbours among them,
until at most one distance is left between the bounds; with 16-bit logits that takes five passes.

    top-k       distance: below the largest logit         weight: 1          goal: k
    top-p       the same                                  exp(v)             p of all that is left
    typical-p   from the mean of v under the distribution, which is as far as the information is from its expectation

v: a logit minus the largest one, divided by the temperature. Logits more than FARTHEST below the largest are left out
throughout: they cannot win the draw. One program does everything; its passes read the row from the cache.
"""

import triton
import triton.language as tl

from octavo.model.kernels.sampling.columns import load_part
from octavo.model.kernels.sampling.noise import log_exponential
from octavo.model.kernels.sampling.ordering import winner

FARTHEST = tl.constexpr(32.0)
_PART = tl.constexpr(4096)
_MOST_PASSES = tl.constexpr(64)


@triton.jit
def _load(columns, start, top, per_scale):
    token, x, is_token = load_part(columns, start, _PART)
    return token, tl.where(is_token, (x - top) * per_scale, float("-inf"))


@triton.jit
def _within(weight, distance, near, stride):
    """The weights within each of seven distances: near + stride, near + 2 stride …"""
    return (
        tl.where(distance <= near + stride, weight, 0.0),
        tl.where(distance <= near + 2.0 * stride, weight, 0.0),
        tl.where(distance <= near + 3.0 * stride, weight, 0.0),
        tl.where(distance <= near + 4.0 * stride, weight, 0.0),
        tl.where(distance <= near + 5.0 * stride, weight, 0.0),
        tl.where(distance <= near + 6.0 * stride, weight, 0.0),
        tl.where(distance <= near + 7.0 * stride, weight, 0.0),
    )


@triton.jit
def _narrowed(near, far, edge, weight, goal):
    is_short = weight < goal
    return tl.where(is_short, tl.maximum(near, edge), near), tl.where(is_short, far, tl.minimum(far, edge))


@triton.jit
def _search(columns, end, top, per_scale, least, center, goal, BY_COUNT: tl.constexpr):
    """The least distance from `center` within which the columns with v >= least have a weight of `goal`; if there is
    none, the largest distance, or FARTHEST."""
    near = tl.full([], -1.0, tl.float32)
    far = tl.full([], FARTHEST, tl.float32)
    # Of the distances that were between the bounds before the last pass:
    smallest = tl.full([], 0.0, tl.float32)
    largest = tl.full([], 1.0, tl.float32)
    turn = 0
    while (smallest < largest) & (turn < _MOST_PASSES):
        stride = (far - near) * 0.125
        w1 = tl.zeros([_PART], tl.float32)
        w2 = tl.zeros([_PART], tl.float32)
        w3 = tl.zeros([_PART], tl.float32)
        w4 = tl.zeros([_PART], tl.float32)
        w5 = tl.zeros([_PART], tl.float32)
        w6 = tl.zeros([_PART], tl.float32)
        w7 = tl.zeros([_PART], tl.float32)
        low = tl.full([_PART], float("inf"), tl.float32)
        high = tl.full([_PART], -1.0, tl.float32)
        for start in range(0, end, _PART):
            _, v = _load(columns, start, top, per_scale)
            is_kept = v >= least
            distance = tl.where(is_kept, tl.abs(v - center), float("inf"))
            weight = tl.where(is_kept, 1.0 if BY_COUNT else tl.exp(v), 0.0)
            more = _within(weight, distance, near, stride)
            w1 += more[0]
            w2 += more[1]
            w3 += more[2]
            w4 += more[3]
            w5 += more[4]
            w6 += more[5]
            w7 += more[6]
            low = tl.minimum(low, tl.where(distance > near, distance, float("inf")))
            high = tl.maximum(high, tl.where(distance <= far, distance, -1.0))
        smallest = tl.min(low, 0)
        largest = tl.max(high, 0)
        if smallest < largest:
            first = near
            near, far = _narrowed(near, far, first + stride, tl.sum(w1, 0), goal)
            near, far = _narrowed(near, far, first + 2.0 * stride, tl.sum(w2, 0), goal)
            near, far = _narrowed(near, far, first + 3.0 * stride, tl.sum(w3, 0), goal)
            near, far = _narrowed(near, far, first + 4.0 * stride, tl.sum(w4, 0), goal)
            near, far = _narrowed(near, far, first + 5.0 * stride, tl.sum(w5, 0), goal)
            near, far = _narrowed(near, far, first + 6.0 * stride, tl.sum(w6, 0), goal)
            near, far = _narrowed(near, far, first + 7.0 * stride, tl.sum(w7, 0), goal)
        turn += 1
    return far


@triton.jit
def _weigh(columns, end, top, per_scale, least):
    """For the columns with v >= least: the sum of exp(v), and the mean of v weighted by exp(v)."""
    total = tl.zeros([_PART], tl.float32)
    moment = tl.zeros([_PART], tl.float32)
    for start in range(0, end, _PART):
        _, v = _load(columns, start, top, per_scale)
        weight = tl.where(v >= least, tl.exp(v), 0.0)
        total += weight
        moment += tl.where(v >= least, weight * v, 0.0)
    mass = tl.sum(total, 0)
    return mass, tl.sum(moment, 0) / mass


@triton.jit
def choose_in_row(columns, end, top, scale, top_k, top_p, log_min_p, typical_p, key_low, key_high, FAST: tl.constexpr):
    """Choose the token of a row. end: number of columns. log_min_p: at least -FARTHEST."""
    least = log_min_p
    per_scale = 1.0 / scale
    if top_k > 0:
        least = tl.maximum(least, -_search(columns, end, top, per_scale, least, 0.0, top_k.to(tl.float32), True))
    if top_p < 1.0:
        mass, _ = _weigh(columns, end, top, per_scale, least)
        least = tl.maximum(least, -_search(columns, end, top, per_scale, least, 0.0, top_p * mass, False))
    center = tl.full([], 0.0, tl.float32)
    reach = tl.full([], float("inf"), tl.float32)
    if typical_p < 1.0:
        mass, center = _weigh(columns, end, top, per_scale, least)
        reach = _search(columns, end, top, per_scale, least, center, typical_p * mass, False)
    most = tl.full([], float("-inf"), tl.float32)
    chosen = tl.full([], 0x7FFFFFFF, tl.int32)
    for start in range(0, end, _PART):
        token, v = _load(columns, start, top, per_scale)
        is_kept = (v >= least) & (tl.abs(v - center) <= reach)
        score = tl.where(is_kept, v - log_exponential(token, key_low, key_high, FAST), float("-inf"))
        here, where = winner(score, token)
        chosen = tl.where((here > most) | ((here == most) & (where < chosen)), where, chosen)
        most = tl.maximum(here, most)
    return chosen
