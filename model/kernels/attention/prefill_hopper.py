"""Prompt attention on Hopper GPUs: when a kernel of warp groups (warp_groups.py) replaces the plain one.

The plain kernel of prefill.py computes the same, and is used if this one does not fit or does not compile.

Legend: T tokens · N query heads · K kv heads · H head dim · R rows of the state · M table width · P blocks · S block
size · W tiles. Must not know: layers.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
import triton
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from octavo.model.kernels.attention.kept_maxima import KEYS, QUERIES
from octavo.model.kernels.attention.warp_groups import COLUMNS, SMEM, SMEM_OF_QUERIES, attend_kernel
from octavo.model.kernels.checks import is_hopper
from octavo.model.kernels.gluon import KNOWN_VERSIONS
from octavo.model.kernels.overlap import Overlap
from octavo.model.kernels.precompile import is_compiling

LEAST_BLOCK = 8  # tokens: the rows of one swizzle pattern in shared memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """Settings that depend on the head dim. buffers: tiles of keys, and of values, in shared memory. registers: of a
    thread that computes, and of one that loads. keeps_order: whether the product with the values is waited for after
    the exponentials, as written, rather than where the compiler chooses. kept: tiles of a round whose maxima are kept.
    sums: partial sums of a query's weights if contexts are split: as many as let each thread of a decode have its own
    (invariant_ring.py), if registers hold them."""

    buffers: int
    registers: tuple[int, int]
    keeps_order: bool
    kept: int
    sums: int


LEAST_KEPT = 4096
"""Tokens of a step from which on queries' maxima are kept: with fewer, it does not make up for fetching more
instructions."""
SUMS = 8
"""Partial sums of a query's weights if contexts are not split."""
FORMS = {
    64: Form(buffers=3, registers=(232, 40), keeps_order=True, kept=2, sums=32),
    128: Form(buffers=2, registers=(240, 24), keeps_order=True, kept=1, sums=8),
}
"""The fastest forms of a prototype that was timed alone on an H100 and an H200 (bench/RESULTS.md)."""
_compiled: dict[tuple[object, ...], bool] = {}


def fits(q_TNH: torch.Tensor, k_pool_PKSH: torch.Tensor) -> bool:
    """Whether `attend` supports these: 16-bit numbers on a Hopper GPU, with head dims and blocks that copies
    support."""
    S, H = k_pool_PKSH.shape[2:]
    return (
        q_TNH.is_cuda
        and q_TNH.element_size() == 2
        and k_pool_PKSH.dtype == q_TNH.dtype
        and H in FORMS
        and S >= LEAST_BLOCK
        and S & (S - 1) == 0
        and triton.__version__.startswith(KNOWN_VERSIONS)
        and is_hopper(q_TNH.device)
    )


@cache
def _num_programs(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def attend(
    q_TNH: torch.Tensor,
    k_pool_PKSH: torch.Tensor,
    v_pool_PKSH: torch.Tensor,
    out_TNH: torch.Tensor,
    table_RM: torch.Tensor,
    tiles_W4: torch.Tensor,
    log2_scale: float,
    *,
    chunk_tokens: int = 0,
    overlap: Overlap = Overlap.NONE,
) -> bool:
    """`prefill.prefill_attention` for checked tensors, if they fit and this compiles. Returns whether it was done.

    log2_scale: the scale times log2(e). chunk_tokens: length of the chunks that contexts are split into, whole tiles of
    keys; 0: they are not split.
    """
    if not fits(q_TNH, k_pool_PKSH):
        return False
    T, N, H = q_TNH.shape
    P, K, S, _ = k_pool_PKSH.shape
    form, num_rows, num_items = FORMS[H], P * K * S, len(tiles_W4) * N
    q_cubes = TensorDescriptor(
        q_TNH, [T, N, H], [N * H, H, 1], [QUERIES.value, 1, COLUMNS.value], SMEM_OF_QUERIES.value
    )
    k_rows, v_rows = (
        TensorDescriptor(pool, [num_rows, H], [H, 1], [min(S, KEYS.value), COLUMNS.value], SMEM.value)
        for pool in (k_pool_PKSH, v_pool_PKSH)
    )
    arguments = (
        q_cubes, k_rows, v_rows, out_TNH, table_RM, tiles_W4, table_RM.shape[1], num_items, num_rows, log2_scale
    )  # fmt: skip
    # float16 has no range above a maximum that is not final; deterministic mode must match the bits of its decodes.
    keeps_maxima = T >= LEAST_KEPT and q_TNH.dtype is torch.bfloat16 and not chunk_tokens
    constants = {
        "N": N, "K": K, "H": H, "S": S, "BUFFERS": form.buffers, "KEEPS_ORDER": form.keeps_order, "CHUNK": chunk_tokens,
        "SUMS": form.sums if chunk_tokens else SUMS, "KEPT": form.kept if keeps_maxima else 0,
        "CONSUMER_REGISTERS": form.registers[0], "PRODUCER_REGISTERS": form.registers[1], "PDL": overlap.value,
        "launch_pdl": overlap.value, "num_warps": 4,
    }  # fmt: skip
    grid = (min(num_items, _num_programs(q_TNH.device)),)
    if not _compiles(
        (N, K, H, S, chunk_tokens, keeps_maxima, overlap, q_TNH.dtype, q_TNH.device), arguments, constants, grid
    ):
        return False
    attend_kernel[grid](*arguments, **constants)
    return True


def _compiles(
    shape: tuple[object, ...], arguments: tuple[object, ...], constants: Mapping[str, object], grid: tuple[int]
) -> bool:
    """Whether the kernel of this shape compiles, tried once: with another toolchain prompts are slower, not lost. While
    kernels are only being compiled, that is assumed."""
    if is_compiling():
        return True
    if shape not in _compiled:
        try:
            attend_kernel.warmup(*arguments, grid=grid, **constants)
            _compiled[shape] = True
        except Exception as error:
            _compiled[shape] = False
            cause = (str(error).strip() or type(error).__name__).splitlines()[-1]
            warnings.warn(
                f"prompts take the plain attention kernel: the one for Hopper GPUs fails: {cause}", stacklevel=2
            )
    return _compiled[shape]
