"""Attention by torch's scaled_dot_product_attention over keys and values gathered by the block table: the fast backend
on a CPU. Any device.

Sequences with one new token (decodes) are read in place by the kernel of model.cpu where that works (bf16 on a CPU with
a C compiler). Elsewhere they go through one call of SDPA, padded to the longest context; the G query heads of a KV head
stand where SDPA expects query positions, so that keys and values are read once per KV head and never repeated.
Sequences with several new tokens (prefill chunks) get one call each, of model.cpu's kernel where that is faster
(bf16, a C compiler), else of SDPA.

Padding never reads a block outside the sequence's own context: it gathers the sequence's first token again and masks
it, since a NaN in a stranger's block would survive a mask (0 * NaN is NaN).

Legend: T tokens in this step · S decoding sequences · Q new tokens of one sequence · C context, padded ·
N query heads · K kv heads · G query heads per kv head · H head dim · P blocks · B block size · M table width.
Must not know: other backends.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from octavo.model.attention.interface import AttentionInputs
from octavo.model.attention.kv_pool import indexable
from octavo.model.cpu.ops import chunk_attention, decode_attention, takes, takes_chunks


class SdpaAttention:
    """Gathers keys and values, then calls SDPA."""

    name = "sdpa"

    def attend(
        self,
        q_TNH: torch.Tensor,
        k_pool_PKBH: torch.Tensor,
        v_pool_PKBH: torch.Tensor,
        inputs: AttentionInputs,
        scale: float,
    ) -> torch.Tensor:
        """See AttentionBackend.attend."""
        plan = plan_of(inputs, k_pool_PKBH)
        if plan.decode is not None and plan.decode.row_S is None:
            return attend_decodes(q_TNH, k_pool_PKBH, v_pool_PKBH, plan.decode, scale)
        out_TNH = torch.empty_like(q_TNH)
        if plan.decode is not None:
            q_SNH = q_TNH[plan.decode.row_S]
            out_TNH[plan.decode.row_S] = attend_decodes(q_SNH, k_pool_PKBH, v_pool_PKBH, plan.decode, scale)
        for chunk in plan.chunks:
            out_TNH[chunk.rows] = attend_chunk(q_TNH[chunk.rows], k_pool_PKBH, v_pool_PKBH, chunk, scale)
        return out_TNH


@dataclass(frozen=True, slots=True, eq=False)
class DecodePart:
    """Sequences with one new token. row_S: their rows in the step; None if they are all of it. table_SM, context_S:
    int32, of these sequences. gathered: what SDPA reads; None if model.cpu's kernel reads the blocks in place."""

    row_S: torch.Tensor | None
    table_SM: torch.Tensor
    context_S: torch.Tensor
    max_context_len: int
    gathered: "Gathered | None"


@dataclass(frozen=True, slots=True, eq=False)
class Gathered:
    """index_SKC: int64, rows of the pool seen as [P * K * B, H]. mask_S1GC: True at positions to read; None if no
    context is padded."""

    index_SKC: torch.Tensor
    mask_S1GC: torch.Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class ChunkPart:
    """One sequence with several new tokens. table_M: its blocks, int32. gathered: what SDPA reads; None where the
    kernel of model.cpu reads the blocks where they lie."""

    rows: slice
    table_M: torch.Tensor
    context_len: int
    gathered: "GatheredChunk | None"


@dataclass(frozen=True, slots=True, eq=False)
class GatheredChunk:
    """index_KC: as in `Gathered`, of one sequence. mask_QC: True where a query reads; None where nothing was cached
    before, so that plain causal attention is right."""

    index_KC: torch.Tensor
    mask_QC: torch.Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class SdpaPlan:
    """Shared by the layers of one step."""

    decode: DecodePart | None
    chunks: tuple[ChunkPart, ...]


def attend_decodes(
    q_SNH: torch.Tensor, k_pool_PKBH: torch.Tensor, v_pool_PKBH: torch.Tensor, part: DecodePart, scale: float
) -> torch.Tensor:
    """One new token per sequence."""
    if part.gathered is None:
        tables = (part.table_SM, part.context_S)
        return decode_attention(q_SNH, k_pool_PKBH, v_pool_PKBH, *tables, scale, max_context_len=part.max_context_len)
    q_SKGH = q_SNH.unflatten(1, (k_pool_PKBH.shape[1], -1))
    k_SKCH = gather(k_pool_PKBH, part.gathered.index_SKC).to(q_SNH.dtype)
    v_SKCH = gather(v_pool_PKBH, part.gathered.index_SKC).to(q_SNH.dtype)
    out_SKGH = scaled_dot_product_attention(q_SKGH, k_SKCH, v_SKCH, attn_mask=part.gathered.mask_S1GC, scale=scale)
    return out_SKGH.flatten(1, 2)


def attend_chunk(
    q_QNH: torch.Tensor, k_pool_PKBH: torch.Tensor, v_pool_PKBH: torch.Tensor, part: ChunkPart, scale: float
) -> torch.Tensor:
    """Several new tokens of one sequence over its prefix and themselves."""
    if part.gathered is None:
        return chunk_attention(q_QNH, k_pool_PKBH, v_pool_PKBH, part.table_M, scale, context_len=part.context_len)
    index_KC, mask_QC = part.gathered.index_KC, part.gathered.mask_QC
    out_1NQH = scaled_dot_product_attention(
        q_QNH.transpose(0, 1)[None],
        gather(k_pool_PKBH, index_KC)[None].to(q_QNH.dtype),
        gather(v_pool_PKBH, index_KC)[None].to(q_QNH.dtype),
        attn_mask=mask_QC,
        is_causal=mask_QC is None,
        scale=scale,
        enable_gqa=True,
    )
    return out_1NQH[0].transpose(0, 1)


def gather(pool_PKBH: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows of the pool, each [H], at an index of any shape: [*index.shape, H]."""
    rows = indexable(pool_PKBH).flatten(0, 2).index_select(0, index.flatten())
    return rows.unflatten(0, index.shape).view(pool_PKBH.dtype)


def plan_of(inputs: AttentionInputs, pool_PKBH: torch.Tensor) -> SdpaPlan:
    """This step's plan, made in its first layer."""
    plan = inputs.derived.get("sdpa")
    if plan is None:
        plan = inputs.derived["sdpa"] = make_plan(inputs, pool_PKBH)
    return plan


def make_plan(inputs: AttentionInputs, pool_PKBH: torch.Tensor) -> SdpaPlan:
    """Sort the sequences into decodes and chunks, and compute what each gathers."""
    in_place = takes_chunks(pool_PKBH)
    bounds, contexts = inputs.cu_query_lens_S1.tolist(), inputs.context_lens_S.tolist()
    decodes = [s for s in range(len(contexts)) if bounds[s + 1] - bounds[s] == 1]
    chunks = []
    for s in sorted(set(range(len(contexts))).difference(decodes)):
        if bounds[s + 1] > bounds[s]:
            rows = slice(bounds[s], bounds[s + 1])
            gathered = None if in_place else make_gathered_chunk(inputs, s, rows.stop - rows.start, pool_PKBH)
            chunks.append(ChunkPart(rows, inputs.table_SM[s], contexts[s], gathered))
    return SdpaPlan(make_decode_part(inputs, decodes, pool_PKBH) if decodes else None, tuple(chunks))


def make_decode_part(inputs: AttentionInputs, decodes: list[int], pool_PKBH: torch.Tensor) -> DecodePart:
    """What these sequences (by number) gather."""
    table_SM, context_S, row_S = inputs.table_SM, inputs.context_lens_S, None
    if inputs.max_query_len > 1:
        sequence_S = torch.tensor(decodes, device=table_SM.device)
        table_SM, context_S = table_SM[sequence_S], context_S[sequence_S]
        row_S = inputs.cu_query_lens_S1[sequence_S].long()
    gathered = None
    if not takes(pool_PKBH, width=pool_PKBH.shape[3]):
        gathered = make_gathered(table_SM, context_S, pool_PKBH)
    return DecodePart(row_S, table_SM, context_S, inputs.max_context_len, gathered)


def make_gathered(table_SM: torch.Tensor, context_S: torch.Tensor, pool_PKBH: torch.Tensor) -> Gathered:
    """Every context, padded to the longest."""
    index_SKC = pool_rows(table_SM, context_S, pool_PKBH.shape[1], pool_PKBH.shape[2])
    if bool((context_S == index_SKC.shape[2]).all()):
        return Gathered(index_SKC, None)
    mask_SC = torch.arange(index_SKC.shape[2], device=context_S.device) < context_S[:, None]
    return Gathered(index_SKC, mask_SC[:, None, None])


def make_gathered_chunk(inputs: AttentionInputs, s: int, query_len: int, pool_PKBH: torch.Tensor) -> GatheredChunk:
    """The whole context of sequence number s."""
    one = slice(s, s + 1)
    table_1M, context_1 = inputs.table_SM[one], inputs.context_lens_S[one]
    index_1KC = pool_rows(table_1M, context_1, pool_PKBH.shape[1], pool_PKBH.shape[2])
    return GatheredChunk(index_1KC[0], prefix_mask(query_len, int(context_1[0]), index_1KC.device))


def pool_rows(table_SM: torch.Tensor, context_S: torch.Tensor, num_heads: int, block_size: int) -> torch.Tensor:
    """index_SKC: row of [P * K * B] for every KV head and position; past a context, its position 0 again."""
    position_C = torch.arange(int(context_S.max()), device=table_SM.device)
    position_SC = torch.where(position_C < context_S[:, None], position_C, 0)
    block_SC = table_SM.long().gather(1, position_SC // block_size)
    head_K1 = torch.arange(num_heads, device=table_SM.device)[:, None]
    return (block_SC[:, None] * num_heads + head_K1) * block_size + (position_SC % block_size)[:, None]


def prefix_mask(query_len: int, context_len: int, device: torch.device) -> torch.Tensor | None:
    """[Q, C]: a query attends to the prefix and to the new tokens up to itself. None if there is no prefix."""
    if query_len == context_len:
        return None
    return torch.ones(query_len, context_len, dtype=torch.bool, device=device).tril(context_len - query_len)
