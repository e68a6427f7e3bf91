"""Deterministic mode's attention for Hopper GPUs: right, in the interpreter as far as it has one, and the same bits
however a context came to be, on a device."""

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

import triton.language as tl

from octavo.model.kernels.attention import invariant_hopper, invariant_ring, prefill_hopper
from octavo.model.kernels.attention.decode import DecodeArgs, decode_attention_reference, partial_buffers
from octavo.model.kernels.attention.decode_work import DecodeWork, FixedChunks, plan_work, plan_work_reference
from octavo.model.kernels.attention.invariant_hopper import (
    CHUNK_TOKENS,
    attend_decodes,
    attend_prompts,
    write_heads,
)
from octavo.model.kernels.attention.prefill import list_tiles, prefill_attention_reference
from octavo.model.kernels.attention.rope_write import rope_write_reference
from tests.model.kernels.test_decode_attention import make_case
from tests.support.model.gluon import interpreted

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
ON_HOPPER = pytest.mark.skipif(not IS_HOPPER, reason="no Hopper GPU")
INSTEAD = {
    "product": lambda x, y: x * y,
    "exp2": lambda x: tl.exp2(x),
    "for_rows_of": lambda matrix, x: tl.expand_dims(x, 1),
}
"""What the interpreter has no instruction or no layout for."""


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """The kernels of decodes and of prompts' heads can be launched here; for numbers of this dtype."""
    if DEVICE == "cuda":
        if not IS_HOPPER:
            pytest.skip("for devices of another kind")
        return torch.bfloat16
    for kernel in ("ring_kernel", "write_heads_kernel"):
        monkeypatch.setattr(invariant_hopper, kernel, interpreted(invariant_ring, kernel, instead=INSTEAD))
    return torch.float32


def in_fixed_chunks(args: DecodeArgs, max_context: int, target_items: int = 100) -> DecodeArgs:
    limits = FixedChunks(tokens=CHUNK_TOKENS, max_context=max_context, target_items=target_items)
    batch, device = len(args.rows_B), args.rows_B.device
    out, ml = partial_buffers(batch, args.num_heads, args.head_dim, device, limits)
    work = DecodeWork.allocate(batch, args.num_kv_heads, device, limits)
    return replace(args, work=work, partial_out=out.fill_(float("nan")), partial_ml=ml.fill_(float("nan")))


@pytest.mark.sanitize(only=lambda lengths: len(lengths) == 8)
@pytest.mark.parametrize("target_items", [1, 4, 200])
@pytest.mark.parametrize("lengths", [[70], [0], [511, 512, 10], [1, 2, 3, 5000, 0, 1023, 1024, 1025], [700] * 400])
def test_items_are_whole_chunks_and_have_the_new_token(lengths: list[int], target_items: int) -> None:
    order = torch.randperm(len(lengths)).int()
    positions = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    positions[order.long()] = torch.tensor(lengths, dtype=torch.int32)
    limits = FixedChunks(tokens=CHUNK_TOKENS, max_context=max(lengths) + 1, target_items=target_items)
    work = DecodeWork.allocate(len(lengths), 2, DEVICE, limits)
    plan_work(order.to(DEVICE), positions.to(DEVICE), work)
    items = plan_work_reference(order.tolist(), lengths, limits)
    assert work.count_1.tolist() == [len(items)]
    assert len(items) <= limits.capacity(len(lengths))
    assert len(items) <= len(lengths) + target_items
    assert work.item_W8[: len(items)].tolist() == [list(item) for item in items]
    assert sum(end - begin for _, _, _, begin, end, *_ in items) == sum(lengths) + len(lengths)
    assert all(begin % CHUNK_TOKENS == 0 and begin < end for _, _, _, begin, end, *_ in items)
    # A part for each chunk of an item, but one for a sequence's last item.
    parts = []
    for _, _, position, begin, end, _, _, first in items:
        chunks = range(begin // CHUNK_TOKENS, -(-end // CHUNK_TOKENS))
        parts += [first + chunks[0]] if end > position else [first + chunk for chunk in chunks]
    assert len(set(parts)) == len(parts) <= limits.capacity(len(lengths))


@pytest.mark.sanitize(only=lambda positions, has_bias: max(positions) in (256, 1100) and has_bias)
@pytest.mark.parametrize(
    ("N", "K", "H", "positions"),
    [
        (14, 2, 64, [0, 15, 127, 128, 129, 255, 256, 300]),
        (28, 4, 128, [129, 40, 256]),
        (16, 16, 64, [31, 150]),
        (14, 2, 64, [1100, 1]),
        (14, 2, 64, [2600, 1]),
    ],
)
@pytest.mark.parametrize(("has_bias", "has_norm"), [(True, False), (False, True)], ids=["bias", "norm of heads"])
@pytest.mark.parametrize("target_items", [2, 100])
def test_decodes_equal_their_reference(
    N: int, K: int, H: int, positions: list[int], target_items: int, has_bias: bool, has_norm: bool,
    kernels: torch.dtype, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Twice, as the counters are left by the first launch; with fewer programs than items."""
    torch.manual_seed(0)
    monkeypatch.setattr(invariant_hopper, "TARGET_PROGRAMS", 2 * K)
    monkeypatch.setattr(invariant_hopper, "PROGRAMS_OF_SEQUENCE", 2)
    (qkv, x, bias), (k_pool, v_pool), args = make_case(N, K, H, positions, kernels)
    args = in_fixed_chunks(args, max(positions) + 1, target_items)
    biases = bias if has_bias else None
    norm = torch.randn(2, H, device=DEVICE).to(kernels) if has_norm else None
    pools = k_pool.cpu().clone(), v_pool.cpu().clone()
    out = torch.full((len(positions), N, H), float("nan"), dtype=kernels, device=DEVICE)
    for _ in range(2):
        plan_work(args.rows_B, args.position_R, args.work)
        attend_decodes(qkv, x, biases, k_pool, v_pool, out, args, norm)
    on_host = {name: getattr(args, name) for name in DecodeArgs.__dataclass_fields__}
    on_host = {name: each.cpu() if isinstance(each, torch.Tensor) else each for name, each in on_host.items()}
    biases, norm = (None if tensor is None else tensor.cpu() for tensor in (biases, norm))
    expected = decode_attention_reference(qkv.cpu(), x.cpu(), biases, *pools, DecodeArgs(**on_host), norm)
    limit = 2e-5 if kernels == torch.float32 else 2e-2
    torch.testing.assert_close(out.cpu().float(), expected, atol=limit, rtol=limit)
    for pool, reference in zip((k_pool, v_pool), pools, strict=True):
        torch.testing.assert_close(pool.cpu().float(), reference.float(), atol=limit, rtol=limit, equal_nan=True)
    assert not args.work.arrived_BK.any()


@pytest.mark.sanitize
@pytest.mark.parametrize(("has_bias", "has_norm"), [(True, False), (False, True)], ids=["bias", "norm of heads"])
@pytest.mark.parametrize(("N", "K", "H"), [(14, 2, 64), (12, 2, 128)])
def test_heads_of_prompts_equal_their_reference(
    N: int, K: int, H: int, has_bias: bool, has_norm: bool, kernels: torch.dtype
) -> None:
    torch.manual_seed(1)
    rows, positions, S, D, C = [0, 0, 1, -1], [3, 4, 20, 0], 16, 96, (N + 2 * K) * H
    table = torch.tensor([[2, 3], [4, 1]], dtype=torch.int32)
    angle = torch.rand(32, H // 2) * 6.28
    pools = [torch.full((6, K, S, H), float("nan"), dtype=kernels) for _ in range(2)]
    qkv, x = torch.randn(4, C).to(kernels), torch.randn(4, D).to(kernels)
    bias = torch.randn(C).to(kernels) if has_bias else None
    norm = torch.randn(2, H).to(kernels) if has_norm else None
    row_T, position_T = torch.tensor(rows, dtype=torch.int32), torch.tensor(positions, dtype=torch.int32)
    inputs = (row_T, position_T, table, angle.cos(), angle.sin())
    got = [pool.to(DEVICE).clone() for pool in pools]
    q = torch.full((4, N, H), float("nan"), dtype=kernels, device=DEVICE)
    on_device = [None if each is None else each.to(DEVICE) for each in (qkv, x, bias, norm)]
    write_heads(*on_device[:3], q, *got, *(each.to(DEVICE) for each in inputs), 1e-6, on_device[3])
    expected = rope_write_reference(qkv, x, bias, *pools, *inputs, 1e-6, norm)
    limit = 2e-5 if kernels == torch.float32 else 4e-2
    torch.testing.assert_close(q.cpu().float(), expected[:, :N].float(), atol=limit, rtol=limit)
    for pool, reference in zip(got, pools, strict=True):
        torch.testing.assert_close(pool.cpu().float(), reference.float(), atol=limit, rtol=limit, equal_nan=True)


class Contexts:
    """Sequences of these lengths over blocks in random order, as prompts write them; what is not written is NaN."""

    def __init__(self, lengths: list[int], N: int, K: int, H: int, *, has_norm: bool) -> None:
        torch.manual_seed(N)
        self.lengths, self.N, self.K, self.H, self.S, D = lengths, N, K, H, 16, 896
        R, M, T, C = len(lengths), max(lengths) // self.S + 2, sum(lengths), (N + 2 * K) * H
        P = R * M + 3

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")

        self.table = torch.randperm(P, device="cuda")[: R * M].view(R, M).int()
        self.pools = [draw(P, K, self.S, H).fill_(float("nan")) for _ in range(2)]
        angle = torch.rand(max(lengths), H // 2, device="cuda") * 6.28
        self.cos, self.sin = angle.cos(), angle.sin()
        self.qkv, self.x = draw(T, C) * 2, draw(T, D)
        self.bias, self.norm = (None, draw(2, H)) if has_norm else (draw(C), None)
        self.firsts = np.cumsum([0, *lengths]).tolist()
        self.q = draw(T, N, H).fill_(float("nan"))
        row_T = torch.cat([torch.full((n,), row) for row, n in enumerate(lengths)]).int().cuda()
        position_T = torch.cat([torch.arange(n) for n in lengths]).int().cuda()
        write_heads(
            self.qkv, self.x, self.bias, self.q, *self.pools, row_T, position_T, self.table, self.cos, self.sin, 1e-6,
            self.norm,
        )  # fmt: skip

    def in_chunks(self, size: int) -> torch.Tensor:
        """Every token's heads, prompts cut into so many tokens."""
        chunks = [
            (row, self.firsts[row] + start, start, min(size, length - start))
            for row, length in enumerate(self.lengths)
            for start in range(0, length, size)
        ]
        out = torch.full_like(self.q, float("nan"))
        tiles = torch.from_numpy(list_tiles(chunks)).cuda()
        attend_prompts(self.q, *self.pools, out, self.table, tiles, self.H**-0.5)
        return out

    def decoded(self, batch: list[tuple[int, int]], target_items: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The heads of (row, position), and the pools, where nothing from there on was written before."""
        pools = [pool.clone() for pool in self.pools]
        position_R = torch.zeros(len(self.lengths), dtype=torch.int32, device="cuda")
        for row, position in batch:
            position_R[row] = position
            block, offset = divmod(position, self.S)
            for pool in pools:
                pool[self.table[row, block].long(), :, offset:] = float("nan")
                pool[self.table[row, block + 1 :].long()] = float("nan")
        rows = torch.tensor([row for row, _ in batch], dtype=torch.int32, device="cuda")
        blank = torch.empty(0, device="cuda")
        args = DecodeArgs(
            rows_B=rows, position_R=position_R, table_RM=self.table, cos_LH=self.cos, sin_LH=self.sin,
            work=DecodeWork.allocate(1, self.K, "cuda"), partial_out=blank, partial_ml=blank, num_heads=self.N,
            num_kv_heads=self.K, head_dim=self.H, scale=self.H**-0.5, eps=1e-6,
        )  # fmt: skip
        args = in_fixed_chunks(args, max(self.lengths), target_items)
        at = torch.tensor([self.firsts[row] + position for row, position in batch], device="cuda")
        out = torch.full((len(batch), self.N, self.H), float("nan"), dtype=torch.bfloat16, device="cuda")
        plan_work(rows, position_R, args.work)
        attend_decodes(self.qkv[at], self.x[at], self.bias, *pools, out, args, self.norm)
        return out, pools


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16)


@pytest.mark.sanitize
@ON_HOPPER
@pytest.mark.parametrize(("N", "K", "H"), [(4, 2, 64), (4, 4, 128)])
def test_prompts_equal_their_reference(N: int, K: int, H: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By few programs, which go from tile to tile; contexts of no, one and several whole chunks before the last."""
    monkeypatch.setattr(prefill_hopper, "_num_programs", lambda device: 5)
    here = Contexts([1, 130, CHUNK_TOKENS, 2 * CHUNK_TOKENS + 77], N, K, H, has_norm=False)
    chunks = [(row, here.firsts[row], 0, length) for row, length in enumerate(here.lengths)]
    wanted = prefill_attention_reference(
        here.q.cpu(), *(pool.cpu() for pool in here.pools), here.table.cpu(), torch.from_numpy(list_tiles(chunks)),
        H**-0.5,
    )  # fmt: skip
    torch.testing.assert_close(here.in_chunks(600).cpu().float(), wanted, atol=2e-2, rtol=2e-2)


@ON_HOPPER
@pytest.mark.parametrize("has_norm", [False, True], ids=["bias", "norm of heads"])
@pytest.mark.parametrize(("N", "K", "H"), [(14, 2, 64), (28, 4, 128), (16, 8, 128), (4, 4, 64)])
def test_a_token_has_the_same_bits_decoded_or_in_a_chunk_of_any_size(N: int, K: int, H: int, has_norm: bool) -> None:
    lengths = [1, 17, 128, 129, 255, 256, 257, 700, 2500]
    here = Contexts(lengths, N, K, H, has_norm=has_norm)
    whole = here.in_chunks(max(lengths))
    last = [(row, here.firsts[row] + length - 1, length - 1, 1) for row, length in enumerate(lengths)]
    queries, pools, table = here.q.cpu(), [pool.cpu() for pool in here.pools], here.table.cpu()
    wanted = prefill_attention_reference(queries, *pools, table, torch.tensor(last), H**-0.5)
    at = [first for _, first, _, _ in last]
    torch.testing.assert_close(whole.cpu()[at].float(), wanted[at], atol=2e-2, rtol=2e-2)
    for size in (1, 7, 64, 100, 200, 1000):
        assert torch.equal(bits(here.in_chunks(size)), bits(whole)), size
    places = (
        *(0, 1, 63, 64, 127, 128, 129, 254, 255, 256, 257, 300, 511, 512, 513, 640, 699, 1023, 1024, 1025, 1499),
        *(2047, 2048, 2049, 2499),
    )
    for place in places:
        batch = [(row, min(place, length - 1)) for row, length in enumerate(lengths)]
        out, pools = here.decoded(batch, target_items=1 + place % 3 * 4)
        assert torch.equal(bits(out), bits(whole[[here.firsts[row] + position for row, position in batch]])), place
        for row, position in batch:
            for pool, written in zip(pools, here.pools, strict=True):
                block, offset = here.table[row, position // here.S].long(), position % here.S
                assert torch.equal(bits(pool[block, :, offset]), bits(written[block, :, offset])), (row, position)
