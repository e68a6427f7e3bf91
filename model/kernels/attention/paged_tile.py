"""A tile of paged keys and values, loaded and added to the attention of one KV head's queries.

A loop over tiles has one buffer with three or four stages, and two with five or more: the loads depend on loads from
the table, and the compiler spends two stages on that (triton 3.6). With many programs on a multiprocessor one buffer is
faster. Pools of e4m3 are converted to the queries' dtype when they are multiplied.

Legend: K kv heads · H head dim · P blocks · S block size; pools are [P, K, S, H], q is scaled by log2(e) / sqrt(H).
"""

import triton
import triton.language as tl


@triton.jit
def load_tile(
    k_pool, v_pool, table, start, end, kv_head, K: tl.constexpr, H: tl.constexpr, S: tl.constexpr, TILE: tl.constexpr
):
    """Keys and values of tokens start … start + TILE of one KV head, [TILE, H], and which of them are before end."""
    token = start + tl.arange(0, TILE)
    h = tl.arange(0, H)
    has = token < end
    block = tl.load(table + token // S, mask=has, other=0).to(tl.int64)
    at = ((block * K + kv_head) * S + token % S) * H
    keys = tl.load(k_pool + at[:, None] + h[None, :], mask=has[:, None], other=0.0)
    values = tl.load(v_pool + at[:, None] + h[None, :], mask=has[:, None], other=0.0)
    return keys, values, has


@triton.jit
def add_tile(acc, most, total, q, keys, values, has):
    """One step of the online softmax (base 2): acc, most and total with a tile's tokens added."""
    score = tl.dot(q, tl.trans(keys.to(q.dtype)), input_precision="ieee")
    score = tl.where(has[None, :], score, float("-inf"))
    new_most = tl.maximum(most, tl.max(score, 1))
    base = tl.where(new_most == float("-inf"), 0.0, new_most)
    shrink = tl.exp2(most - base)
    weight = tl.exp2(score - base[:, None])
    total = total * shrink + tl.sum(weight, 1)
    acc = acc * shrink[:, None] + tl.dot(weight.to(q.dtype), values.to(q.dtype), input_precision="ieee")
    return acc, new_most, total
