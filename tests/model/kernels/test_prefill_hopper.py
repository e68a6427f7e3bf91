"""Prompt attention for Hopper GPUs: what is compiled for one, anywhere; what it computes, on one."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

import triton

from octavo.model.kernels.attention import prefill_hopper
from octavo.model.kernels.attention.prefill import LOG2_E, list_tiles, prefill_attention_reference
from octavo.model.kernels.attention.prefill_hopper import attend
from octavo.model.kernels.gluon import KNOWN_VERSIONS
from octavo.model.kernels.overlap import Overlap
from tests.support.forks import Forks

needs_compiler = pytest.mark.skipif(
    not triton.__version__.startswith(KNOWN_VERSIONS),
    reason=f"Gluon of triton {triton.__version__} is another language",
)
needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)


@pytest.fixture(scope="module")
def program() -> Iterator[Forks]:
    """Which compiles one kernel after the other."""
    with Forks("tests.support.model.assembled", {"TRITON_INTERPRET": "0"}) as forks:
        yield forks


@needs_compiler
@pytest.mark.parametrize("contexts", ["whole", "kept", "cut"])
@pytest.mark.parametrize(("H", "S"), [(64, 16), (128, 256)])
def test_what_is_compiled_overlaps_its_products(H: int, S: int, contexts: str, program: Forks, tmp_path: Path) -> None:
    """The assembler says so when it has to wait for each product at once, and keeps the loop in registers. No place of
    a tile of values is written by both consumers."""
    cache = {"TRITON_CACHE_DIR": str(tmp_path / "cache")}
    told = "\n".join(program.lines("tell_attention", str(tmp_path), H, S, contexts, environment=cache))
    assert "registers" in told
    assert "serialized" not in told, told
    assembly = (tmp_path / "kernel.ptx").read_text()
    for instruction in ("wgmma.mma_async", "cp.async.bulk.tensor", "setmaxnreg"):
        assert instruction in assembly
    assert ("griddepcontrol.wait" in assembly) == (contexts != "cut")
    written = re.findall(r"st\.shared\.v4\.b32\s+\[ ?(%r\d+) ?\+ ?(\d+) ?\]", assembly)
    assert written
    places = {offset for _, offset in written}
    if places == {"0"}:  # triton 3.7 and later have an address for each
        places = {register for register, _ in written}
    assert len(places) == len(written)


def test_what_does_not_fit_goes_to_the_plain_kernel() -> None:
    queries, pool = torch.zeros(1, 2, 64, dtype=torch.bfloat16), torch.zeros(1, 2, 16, 64, dtype=torch.bfloat16)
    nobody = torch.zeros(1, 4, dtype=torch.int32)
    assert not attend(queries, pool, pool, queries, nobody, nobody, 1.0)


def test_a_kernel_that_does_not_compile_is_said_once_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    class Broken:
        def warmup(self, *arguments: object, **constants: object) -> None:
            tried.append(arguments)
            raise RuntimeError("at 28:8:\nno such word")

    monkeypatch.setattr(prefill_hopper, "attend_kernel", Broken())
    monkeypatch.setattr(prefill_hopper, "fits", lambda *tensors: True)
    monkeypatch.setattr(prefill_hopper, "_num_programs", lambda device: 1)
    monkeypatch.setattr(prefill_hopper, "_compiled", {})
    queries, pool = torch.zeros(1, 2, 64, dtype=torch.bfloat16), torch.zeros(1, 2, 16, 64, dtype=torch.bfloat16)
    tiles = torch.zeros(1, 4, dtype=torch.int32)
    with pytest.warns(UserWarning, match="plain attention kernel: the one for Hopper GPUs fails: no such word"):
        assert not attend(queries, pool, pool, queries, tiles, tiles, 1.0)
    assert not attend(queries, pool, pool, queries, tiles, tiles, 1.0)
    assert len(tried) == 1


def dense(q_TNH: torch.Tensor, keys_CKH: torch.Tensor, values_CKH: torch.Tensor, position: int) -> torch.Tensor:
    """float32 attention of one chunk, whose first query stands at that position."""
    group = q_TNH.shape[1] // keys_CKH.shape[1]
    score = torch.einsum("tnh,cnh->ntc", q_TNH.float(), keys_CKH.float().repeat_interleave(group, 1))
    token_C = torch.arange(len(keys_CKH), device=score.device)
    query_T = position + torch.arange(len(q_TNH), device=score.device)
    score.masked_fill_(token_C[None] > query_T[:, None], float("-inf"))
    weight = torch.softmax(score * q_TNH.shape[2] ** -0.5, -1)
    return torch.einsum("ntc,cnh->tnh", weight, values_CKH.float().repeat_interleave(group, 1))


@dataclass(frozen=True, kw_only=True)
class Paged:
    """Chunks of prompts, (position, tokens) each: what `attend` takes of them, and by first tokens what it gives."""

    q_TNH: torch.Tensor
    pools: torch.Tensor
    table: torch.Tensor
    tiles: torch.Tensor
    wanted: dict[int, torch.Tensor]

    @classmethod
    def of(
        cls, chunks: list[tuple[int, int]], *, N: int, K: int, S: int, H: int, dtype: torch.dtype, tower: float = 1.0,
        device: str = "cuda",
    ) -> "Paged":  # fmt: skip
        """Pools are NaN where no token was written, and so are two tokens of nobody behind each chunk. tower: by how
        much seven keys of one head, each row's, are larger than others."""
        M = max(start + count for start, count in chunks) // S + 3
        P = M * len(chunks) + 2
        pools = torch.full((2, P, K, S, H), float("nan"), dtype=dtype, device=device)
        table = torch.randperm(P, device=device)[: M * len(chunks)].view(len(chunks), M).int()
        wanted, placed, queries, first = {}, [], [], 0
        for row, (start, count) in enumerate(chunks):
            token = torch.arange(start + count, device=device)
            both = torch.randn(2, len(token), K, H, device=device).to(dtype)
            both[0, 5 + 20 * row : 12 + 20 * row, row % K] *= tower
            pools[:, table[row, token // S].long(), :, token % S] = both.transpose(0, 1)
            q = (torch.randn(count, N, H, device=device) * 2).to(dtype)
            wanted[first] = dense(q, both[0], both[1], start)
            queries += [q, torch.full((2, N, H), float("nan"), dtype=dtype, device=device)]
            placed.append((row, first, start, count))
            first += count + 2
        tiles = torch.from_numpy(list_tiles(placed)).to(device)
        return cls(q_TNH=torch.cat(queries), pools=pools, table=table, tiles=tiles, wanted=wanted)

    def check(self, out_TNH: torch.Tensor) -> None:
        """Of every chunk, and that rows of nobody stay NaN."""
        for first, expected in self.wanted.items():
            behind = first + len(expected)
            torch.testing.assert_close(out_TNH[first:behind].float(), expected, atol=2e-2, rtol=2e-2)
            assert out_TNH[behind : behind + 2].isnan().all()


def test_what_is_wanted_is_what_the_obvious_reference_gives() -> None:
    torch.manual_seed(1)
    paged = Paged.of([(0, 3), (20, 5)], N=4, K=2, S=16, H=8, dtype=torch.float32, tower=30.0, device="cpu")
    paged.check(prefill_attention_reference(paged.q_TNH, *paged.pools, paged.table, paged.tiles, 8**-0.5))


@needs_hopper
@needs_compiler
@pytest.mark.parametrize(
    ("N", "K", "H", "chunks", "num_programs"),
    [
        (14, 2, 64, [(0, 1500), (900, 700), (0, 200)], None),
        (14, 2, 64, [(700, 300), (0, 400), (2000, 90)], 2),  # more turns than there are bits
        (2, 1, 128, [(0, 900), (3000, 130)], None),
        (28, 4, 128, [(300, 300), (0, 290)], 5),
    ],
)
def test_scores_that_tower_above_those_of_the_newest_tokens(
    N: int, K: int, H: int, chunks: list[tuple[int, int]], num_programs: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some heads' oldest keys are so large that weights by the maximum of the newest ones are beyond any number."""
    if num_programs is not None:
        monkeypatch.setattr(prefill_hopper, "_num_programs", lambda device: num_programs)
    monkeypatch.setattr(prefill_hopper, "LEAST_KEPT", 0)
    torch.manual_seed(H)
    paged = Paged.of(chunks, N=N, K=K, S=16, H=H, dtype=torch.bfloat16, tower=300.0)
    out = torch.full_like(paged.q_TNH, float("nan"))
    assert attend(paged.q_TNH, *paged.pools, out, paged.table, paged.tiles, H**-0.5 * LOG2_E)
    paged.check(out)


@pytest.mark.sanitize(only=lambda num_programs: num_programs is not None)
@needs_hopper
@needs_compiler
@pytest.mark.parametrize("overlap", list(Overlap))
@pytest.mark.parametrize("least_kept", [prefill_hopper.LEAST_KEPT, 0])
@pytest.mark.parametrize(
    ("N", "K", "S", "H", "dtype", "chunks", "num_programs"),
    [
        (
            14,
            2,
            16,
            64,
            torch.bfloat16,
            [(0, 1), (0, 300), (77, 130), (1000, 1), (127, 129), (128, 128), (1280, 517)],
            None,
        ),
        (28, 4, 16, 128, torch.bfloat16, [(0, 128), (129, 127), (0, 64), (63, 65), (5, 700)], None),
        (4, 1, 256, 64, torch.bfloat16, [(255, 3), (0, 1025)], None),  # blocks longer than a tile of keys
        (3, 3, 8, 128, torch.float16, [(5, 700), (8, 8)], None),
        (2, 2, 32, 64, torch.float16, [(0, 3000), (3000, 2100)], None),
        # Small ones, whose programs still go from tile to tile: each has some turns, and each buffer is filled again.
        (4, 2, 16, 64, torch.bfloat16, [(0, 1), (77, 130), (128, 128), (500, 17)], 5),
        (2, 1, 256, 64, torch.bfloat16, [(255, 3), (400, 130)], 2),
        (3, 3, 8, 128, torch.float16, [(5, 140), (300, 8)], 4),
    ],
)
def test_attention_equals_the_dense_one(
    N: int, K: int, S: int, H: int, dtype: torch.dtype, chunks: list[tuple[int, int]], num_programs: int | None,
    overlap: Overlap, least_kept: int, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Empty tiles are skipped, rows without one stay as they are."""
    if num_programs is not None:
        monkeypatch.setattr(prefill_hopper, "_num_programs", lambda device: num_programs)
    monkeypatch.setattr(prefill_hopper, "LEAST_KEPT", least_kept)
    torch.manual_seed(H + S)
    paged = Paged.of(chunks, N=N, K=K, S=S, H=H, dtype=dtype)
    tiles = torch.cat([paged.tiles, torch.zeros(9, 4, dtype=torch.int32, device="cuda")])
    out = torch.full_like(paged.q_TNH, float("nan"))
    assert attend(paged.q_TNH, *paged.pools, out, paged.table, tiles, H**-0.5 * LOG2_E, overlap=overlap)
    paged.check(out)
