"""Attention whose result for a token does not depend on the batch, on how its prompt was split, or on whether the token
was part of a prompt or decoded: one kernel for all cases.

A context is split at absolute positions into chunks, and a chunk into tiles of keys. Within a chunk the softmax streams
over the tiles (FlashAttention-2, arXiv:2307.08691); the chunks' results are then merged in order. The operations for a
token depend on its position alone: later keys have a weight of zero, which changes no bit of a sum.

    context    |--- chunk 0 ---|--- chunk 1 ---|- chunk 2 -|
    prompt     one program goes through the chunks and merges as it goes
    decode     a program for each chunk leaves its part, a second kernel merges them by the same operations

A program's rows are (token, query head) pairs of one KV head, so that keys are read once for the whole group: nine
tokens of seven heads, or one token's seven. Rows of a matrix instruction do not affect each other.

If the compiler could fuse either of two multiplications with the addition of their products, fma is written out:
otherwise two kernels that do the same could round differently.

Legend: T tokens · N query heads · K kv heads · G = N / K · H head dim · R rows of the state · M table width ·
P blocks · S block size · I items · B decodes · W parts.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from octavo.model.kernels.attention.invariant_work import CHUNK_TOKENS, InvariantWork
from octavo.model.kernels.checks import check_tensor
from octavo.model.kernels.overlap import Overlap, start_next, wait_for_previous

ROWS = 64  # of a program: those of the matrix instruction
KEYS = 64
WARPS = 4
STAGES = 3
MERGED_AT_ONCE = 8
PROGRAMS_OF_CPU = 3
PROGRAMS_OF_MULTIPROCESSOR = 4
LOG2_E = 1.4426950408889634


def tile_tokens(num_heads: int, num_kv_heads: int) -> int:
    """Tokens of a prompt that one program processes. Raises ValueError if a group of heads does not fit."""
    group = num_heads // num_kv_heads
    if num_heads % num_kv_heads or group > ROWS:
        raise ValueError(f"{num_heads} heads over {num_kv_heads} KV heads: need whole groups of at most {ROWS}")
    return ROWS // group


@dataclass(frozen=True, slots=True, eq=False)
class AttentionParts:
    """Results of the chunks of decodes. out_WNH: float32, sums of weighted values. most_WN, total_WN: float32, the
    largest score (base 2) and the sum of weights. num_programs: of the attention kernel."""

    out_WNH: torch.Tensor
    most_WN: torch.Tensor
    total_WN: torch.Tensor
    num_programs: int

    @classmethod
    def allocate(
        cls, max_decodes: int, max_chunks: int, num_heads: int, head_dim: int, device: torch.device | str
    ) -> "AttentionParts":
        """Parts for contexts of any length; those of one chunk need none."""
        parts = max_decodes * max_chunks if max_chunks > 1 else 1

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.float32, device=device)

        programs = PROGRAMS_OF_CPU
        if torch.device(device).type == "cuda":
            programs = PROGRAMS_OF_MULTIPROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count
        return cls(empty(parts, num_heads, head_dim), empty(parts, num_heads), empty(parts, num_heads), programs)


@triton.jit
def _merge(acc, most, total, chunk_acc, chunk_most, chunk_total):
    """What was merged so far, and a chunk, both as [rows, H], [rows], [rows]. Initially most is -inf, the others 0."""
    new_most = tl.maximum(most, chunk_most)
    base = tl.where(new_most == float("-inf"), 0.0, new_most)
    shrink = tl.exp2(most - base)
    weight = tl.exp2(chunk_most - base)
    total = tl.fma(chunk_total, weight, total * shrink)
    acc = tl.fma(chunk_acc, tl.broadcast_to(weight[:, None], acc.shape), acc * shrink[:, None])
    return acc, new_most, total


@triton.jit
def _invariant_attention_kernel(
    q_TNH, k_pool, v_pool, out_TNH, table_RM, item_I8, count_1, part_WNH, most_WN, total_WN, table_width, log2_scale,
    N: tl.constexpr, K: tl.constexpr, H: tl.constexpr, S: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_next(PDL)
    wait_for_previous(PDL)
    G: tl.constexpr = N // K
    m = tl.arange(0, ROWS)
    h = tl.arange(0, H)
    element = k_pool.dtype.element_ty
    for index in range(tl.program_id(0), tl.load(count_1) * K, tl.num_programs(0)):
        kv_head = index % K
        item = item_I8 + index // K * 8
        row = tl.load(item).to(tl.int64)
        first = tl.load(item + 1).to(tl.int64)
        position = tl.load(item + 2)
        count = tl.load(item + 3)
        first_chunk = tl.load(item + 4)
        end_chunk = tl.load(item + 5)
        part = tl.load(item + 6).to(tl.int64)
        table = table_RM + row * table_width
        head = kv_head * G + m % G
        is_row = m // G < count
        query_position = position + m // G
        at = ((first + m // G) * N + head)[:, None] * H + h[None, :]
        mask = is_row[:, None] & (h >= 0)[None, :]
        q = (tl.load(q_TNH + at, mask=mask, other=0.0).to(tl.float32) * log2_scale).to(element)
        acc = tl.zeros([ROWS, H], tl.float32)
        most = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        for chunk in range(first_chunk, end_chunk):
            c_acc = tl.zeros([ROWS, H], tl.float32)
            c_most = tl.full([ROWS], float("-inf"), tl.float32)
            c_total = tl.zeros([ROWS], tl.float32)
            end = tl.minimum((chunk + 1) * CHUNK, position + count)
            for start in range(chunk * CHUNK, end, KEYS):
                token = start + tl.arange(0, KEYS)
                has = token < end
                block = tl.load(table + token // S, mask=has, other=0).to(tl.int64)
                kv_at = ((block * K + kv_head) * S + token % S)[:, None] * H + h[None, :]
                keys = tl.load(k_pool + kv_at, mask=has[:, None], other=0.0)
                values = tl.load(v_pool + kv_at, mask=has[:, None], other=0.0)
                score = tl.dot(q, tl.trans(keys), input_precision="ieee")
                score = tl.where(has[None, :] & (token[None, :] <= query_position[:, None]), score, float("-inf"))
                new_most = tl.maximum(c_most, tl.max(score, 1))
                base = tl.where(new_most == float("-inf"), 0.0, new_most)
                shrink = tl.exp2(c_most - base)
                weight = tl.exp2(score - base[:, None])
                c_total = tl.fma(c_total, shrink, tl.sum(weight, 1))
                c_acc = tl.dot(weight.to(element), values, c_acc * shrink[:, None], input_precision="ieee")
                c_most = new_most
            acc, most, total = _merge(acc, most, total, c_acc, c_most, c_total)
        is_whole = part < 0
        safe = tl.where(is_row, total, 1.0)
        tl.store(out_TNH + at, (acc / safe[:, None]).to(element), mask=mask & is_whole)
        part_at = part * N + head
        tl.store(part_WNH + part_at[:, None] * H + h[None, :], acc, mask=mask & (part >= 0))
        tl.store(most_WN + part_at, most, mask=is_row & (part >= 0))
        tl.store(total_WN + part_at, total, mask=is_row & (part >= 0))


@triton.jit
def _merge_parts_kernel(
    part_WNH, most_WN, total_WN, first_B, chunks_B, out_BNH,
    N: tl.constexpr, H: tl.constexpr, HEADS: tl.constexpr, AT_ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_next(PDL)
    wait_for_previous(PDL)
    b = tl.program_id(0)
    chunks = tl.load(chunks_B + b)
    if chunks < 2:
        return
    first = tl.load(first_B + b).to(tl.int64)
    n = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    h = tl.arange(0, H)
    is_head = n < N
    acc = tl.zeros([HEADS, H], tl.float32)
    most = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    for begin in range(0, chunks, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            # A part beyond the last one changes nothing: its maximum is -inf.
            has = is_head & (begin + i < chunks)
            at = (first + begin + i) * N + n
            c_most = tl.load(most_WN + at, mask=has, other=float("-inf"))
            c_total = tl.load(total_WN + at, mask=has, other=0.0)
            c_acc = tl.load(part_WNH + at[:, None] * H + h[None, :], mask=has[:, None], other=0.0)
            acc, most, total = _merge(acc, most, total, c_acc, c_most, c_total)
    total = tl.where(is_head, total, 1.0)
    out_at = (b.to(tl.int64) * N + n)[:, None] * H + h[None, :]
    tl.store(out_BNH + out_at, (acc / total[:, None]).to(out_BNH.dtype.element_ty), mask=is_head[:, None])


def invariant_attention(
    q_TNH: torch.Tensor,
    k_pool_PKSH: torch.Tensor,
    v_pool_PKSH: torch.Tensor,
    out_TNH: torch.Tensor,
    table_RM: torch.Tensor,
    work: InvariantWork,
    parts: AttentionParts,
    scale: float,
    *,
    num_decodes: int,
    overlap: Overlap = Overlap.NONE,
) -> None:
    """Write the attention of every token in the list to out_TNH; other tokens are left as they are.

    q, pools, out of one dtype (float32, float16, bfloat16); the keys and values of all listed tokens must be in the
    pools. num_decodes: number of decodes, the step's first tokens, as planned in the list. The reference is
    model.kernels.attention.prefill.prefill_attention_reference. Raises ValueError if a tensor does not fit.
    """
    T, N, H = q_TNH.shape
    K, S, dtype = k_pool_PKSH.shape[1], k_pool_PKSH.shape[2], q_TNH.dtype
    check_tensor("q_TNH", q_TNH, shape=(T, N, H), dtype=dtype)
    check_tensor("out_TNH", out_TNH, shape=(T, N, H), dtype=dtype)
    check_tensor("k_pool_PKSH", k_pool_PKSH, shape=(None, K, S, H), dtype=dtype)
    check_tensor("v_pool_PKSH", v_pool_PKSH, shape=tuple(k_pool_PKSH.shape), dtype=dtype)
    check_tensor("table_RM", table_RM, shape=(None, None), dtype=torch.int32)
    check_tensor("out_WNH", parts.out_WNH, shape=(None, N, H), dtype=torch.float32)
    if tile_tokens(N, K) != work.tile_tokens:
        raise ValueError(f"the list has tiles of {work.tile_tokens} tokens, not of {tile_tokens(N, K)}")
    _invariant_attention_kernel[(parts.num_programs,)](
        q_TNH, k_pool_PKSH, v_pool_PKSH, out_TNH, table_RM, work.item_I8, work.count_1,
        parts.out_WNH, parts.most_WN, parts.total_WN, table_RM.shape[1], scale * LOG2_E,
        N=N, K=K, H=H, S=S, ROWS=ROWS, KEYS=KEYS, CHUNK=CHUNK_TOKENS,
        PDL=overlap.value, launch_pdl=overlap.value, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    if num_decodes and work.max_chunks > 1:
        heads = 2
        _merge_parts_kernel[(num_decodes, triton.cdiv(N, heads))](
            parts.out_WNH, parts.most_WN, parts.total_WN, work.first_B, work.chunks_B, out_TNH,
            N=N, H=H, HEADS=heads, AT_ONCE=MERGED_AT_ONCE, PDL=overlap.value, launch_pdl=overlap.value,
            num_warps=1,
        )  # fmt: skip
