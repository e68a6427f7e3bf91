"""Compiles Gluon kernels for a Hopper GPU, without having one, each in a fork of this process, which has imported what
that takes.

    TRITON_INTERPRET=0 python -m tests.support.model.assembled

Leaves a kernel's assembly in kernel.ptx of a folder, and prints what the assembler says of it.
"""

from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.cache import triton_key

from octavo.model.kernels.attention import warp_groups
from octavo.model.kernels.attention.invariant_hopper import CHUNK_TOKENS
from octavo.model.kernels.attention.prefill_hopper import FORMS, SUMS
from octavo.model.kernels.products.overlapping_kernel import overlapping_product_kernel
from tests.support.forks import serve


def tell_attention(folder: str, H: int, S: int, contexts: str) -> None:
    """Prompt attention of warp groups. contexts: whole, kept or cut."""
    is_cut = contexts == "cut"
    rows = f"tensordesc<bf16[{min(S, warp_groups.KEYS.value)}, {warp_groups.COLUMNS.value}],{warp_groups.SMEM.value!r}>"
    cubes = f"tensordesc<bf16[{warp_groups.QUERIES.value}, 1, {warp_groups.COLUMNS.value}],"
    types = {
        "q_cubes": f"{cubes}{warp_groups.SMEM_OF_QUERIES.value!r}>", "k_rows": rows, "v_rows": rows,
        "out_TNH": "*bf16", "table_RM": "*i32", "tiles_W4": "*i32", "table_width": "i32", "num_items": "i32",
        "nowhere": "i32", "log2_scale": "fp32",
    }  # fmt: skip
    form = FORMS[H]
    constants = {
        "N": 14, "K": 2, "H": H, "S": S, "BUFFERS": form.buffers, "KEEPS_ORDER": form.keeps_order,
        "CONSUMER_REGISTERS": form.registers[0], "PRODUCER_REGISTERS": form.registers[1],
        "CHUNK": CHUNK_TOKENS if is_cut else 0, "SUMS": form.sums if is_cut else SUMS,
        "KEPT": form.kept if contexts == "kept" else 0, "PDL": not is_cut,
    }  # fmt: skip
    _assemble(folder, warp_groups.attend_kernel, types, constants, num_warps=4)


def tell_product(
    folder: str, then: int, outputs: int, tokens: int, blocks: int, stages: int, splits: int, warps: int
) -> None:
    """A product that overlaps with its neighbours, with the numbers of its cut."""

    def tiles(*shape: int) -> str:
        layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=len(shape))
        return f"tensordesc<bf16{list(shape)},{layout!r}>"

    rows = (2, outputs // 2) if then == 2 else (outputs,)
    types = {
        "w_desc": tiles(blocks, *rows, 64), "x_desc": tiles(blocks, tokens, 64), "x_TK": "*bf16", "out_TO": "*bf16",
        "parts": "*fp32", "arrived": "*i32", "T": "i32", "eps": "fp32",
    }  # fmt: skip
    constants = {
        "O": 640, "K": 1024, "OUTPUTS": outputs, "TOKENS": tokens, "BLOCKS": blocks, "STAGES": stages,
        "SPLITS": splits, "TURNS": 1, "GROUP": 16, "THEN": then, "WARPS": warps, "PDL": False,
    }  # fmt: skip
    _assemble(folder, overlapping_product_kernel, types, constants, num_warps=warps)


def _assemble(folder: str, kernel: Any, types: dict[str, str], constants: dict[str, Any], *, num_warps: int) -> None:
    triton.knobs.nvidia.dump_ptxas_log = True
    source = GluonASTSource(kernel, types | dict.fromkeys(constants, "constexpr"), constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})
    (Path(folder) / "kernel.ptx").write_text(compiled.asm["ptx"])


TOLD = {each.__name__: each for each in (tell_attention, tell_product)}


def tell(name: str, *arguments: Any) -> None:
    """Compile a kernel of this kind."""
    TOLD[name](*arguments)


if __name__ == "__main__":
    triton_key()  # hashes all of Triton, which otherwise takes each fork a second
    serve(tell)
