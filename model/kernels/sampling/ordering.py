"""Compares floats as integers, and finds the winner of a race.

Must not know: what the floats are.
"""

import triton
import triton.language as tl


@triton.jit
def ordered(value):
    """int32 that are ordered like the float32 values."""
    bits = value.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def float_of(integer):
    """The float32 that `ordered` turned into this integer."""
    return (integer ^ ((integer >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def kth_largest(integers, k):
    """The k-th largest of these int32; the least int32 if there are fewer."""
    low = tl.full([], -0x80000000, tl.int64)
    high = tl.max(integers, 0).to(tl.int64)
    while low < high:
        middle = (low + high + 1) >> 1
        count = tl.sum((integers >= middle).to(tl.int32), 0)
        if count == k:
            # The least of these k is the answer: most searches end here, half way.
            low = tl.min(tl.where(integers >= middle, integers, 0x7FFFFFFF), 0).to(tl.int64)
            high = low
        else:
            low = tl.where(count > k, middle, low)
            high = tl.where(count > k, high, middle - 1)
    return low.to(tl.int32)


@triton.jit
def largest_groups(maxima, group, BEST: tl.constexpr):
    """For groups with these maxima: whether each is among the BEST largest (of equal ones the first), its place among
    them, and the largest maximum of the other groups."""
    order = ordered(maxima)
    last = kth_largest(order, BEST)
    is_above = order > last
    is_last = order == last
    num_above = tl.sum(is_above.to(tl.int32), 0)
    place = tl.where(is_above, tl.cumsum(is_above.to(tl.int32), 0), num_above + tl.cumsum(is_last.to(tl.int32), 0)) - 1
    is_best = (order >= last) & (place < BEST)
    return is_best, place, tl.max(tl.where(is_best, float("-inf"), maxima), 0)


@triton.jit
def winner(score, token):
    """The largest score and the least token that has it."""
    most = tl.max(score, 0)
    return most, tl.min(tl.where(score == most, token, 0x7FFFFFFF), 0)
