"""The cut of top-k, top-p and typical-p where the largest few logits do not tell: by search over the whole row.

A cut is a number: the least distance such that the columns within it weigh enough. Its bits are searched as an
integer, several candidates in each pass over the row, and a pass divides what is left by as many.

    top-k       distance: below the largest logit         weight: 1          goal: k
    top-p       the same                                  exp(v)             p of all that is left
    typical-p   from the mean of v under the distribution, which is as far as the information is from its expectation

v: a logit less the largest one, by the temperature. What lies further than FARTHEST below the largest is left out
throughout: it cannot win the draw. One program does all of it; its passes read the row from the cache.
"""

import triton
import triton.language as tl

from model.kernels.columns import load_part
from model.kernels.noise import log_exponential
from model.kernels.ordering import winner

FARTHEST = tl.constexpr(32.0)
_FARTHEST_BITS = tl.constexpr(0x42000000)
_PART = tl.constexpr(2048)
_FAN = tl.constexpr(8)


@triton.jit
def _load(columns, start, top, scale):
    token, x, is_token = load_part(columns, start, _PART)
    return token, tl.where(is_token, (x - top) / scale, float("-inf"))


@triton.jit
def _search(columns, end, top, scale, least, center, goal, BY_COUNT: tl.constexpr):
    """The least distance from `center` within which the columns of v >= least weigh `goal`, at most FARTHEST."""
    near = tl.full([], 0, tl.int64)
    far = tl.full([], _FARTHEST_BITS, tl.int64)
    fan = tl.arange(0, _FAN)
    while near < far:
        stride = (far - near + _FAN - 1) // _FAN
        edge = tl.minimum(near + stride * fan, far).to(tl.int32)
        weights = tl.zeros([_PART, _FAN], tl.float32)
        for start in range(0, end, _PART):
            _, v = _load(columns, start, top, scale)
            distance = tl.abs(v - center).to(tl.int32, bitcast=True)
            weight = tl.where(v >= least, 1.0 if BY_COUNT else tl.exp(v), 0.0)
            weights += tl.where(distance[:, None] <= edge[None, :], weight[:, None], 0.0)
        num_short = tl.sum((tl.sum(weights, 0) < goal).to(tl.int32), 0)
        first = near
        near = tl.where(num_short == 0, first, tl.minimum(first + (num_short - 1) * stride + 1, far))
        far = tl.where(num_short == _FAN, far, tl.minimum(first + num_short * stride, far))
    return far.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _weigh(columns, end, top, scale, least):
    """Sum of exp(v), and mean of v under it, of the columns of v >= least."""
    total = tl.zeros([_PART], tl.float32)
    moment = tl.zeros([_PART], tl.float32)
    for start in range(0, end, _PART):
        _, v = _load(columns, start, top, scale)
        weight = tl.where(v >= least, tl.exp(v), 0.0)
        total += weight
        moment += tl.where(v >= least, weight * v, 0.0)
    mass = tl.sum(total, 0)
    return mass, tl.sum(moment, 0) / mass


@triton.jit
def choose_in_row(columns, end, top, scale, top_k, top_p, log_min_p, typical_p, key_low, key_high, FAST: tl.constexpr):
    """The token of a row. end: columns that there are. log_min_p: at least -FARTHEST."""
    least = log_min_p
    if top_k > 0:
        least = tl.maximum(least, -_search(columns, end, top, scale, least, 0.0, top_k.to(tl.float32), True))
    if top_p < 1.0:
        mass, _ = _weigh(columns, end, top, scale, least)
        least = tl.maximum(least, -_search(columns, end, top, scale, least, 0.0, top_p * mass, False))
    center = tl.full([], 0.0, tl.float32)
    reach = tl.full([], float("inf"), tl.float32)
    if typical_p < 1.0:
        mass, center = _weigh(columns, end, top, scale, least)
        reach = _search(columns, end, top, scale, least, center, typical_p * mass, False)
    most = tl.full([], float("-inf"), tl.float32)
    chosen = tl.full([], 0x7FFFFFFF, tl.int32)
    for start in range(0, end, _PART):
        token, v = _load(columns, start, top, scale)
        is_kept = (v >= least) & (tl.abs(v - center) <= reach)
        score = tl.where(is_kept, v - log_exponential(token, key_low, key_high, FAST), float("-inf"))
        here, where = winner(score, token)
        chosen = tl.where((here > most) | ((here == most) & (where < chosen)), where, chosen)
        most = tl.maximum(here, most)
    return chosen
