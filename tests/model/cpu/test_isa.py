"""Instructions can be hidden from our compiler and from torch; each class's kernels compute what the reference does."""

import ctypes
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from octavo.model.attention.paged import PagedSequences
from octavo.model.cpu import isa, native, ops, products
from octavo.model.cpu.isa import BOUNDS, CpuIsaError, Isa
from octavo.model.cpu.products import Layout, PanelWeight, multiplies_integers, pack_bf16, pack_int8, pack_int8_rounding
from octavo.model.layers.linear import WeightFormat, packed
from octavo.model.quantization.rounding import round_inputs
from tests.model import test_invariant
from tests.model.cpu import test_largest, test_layer, test_ops, test_prefill
from tests.support.model import foreign
from tests.support.model.invariant_model import random_model

AVX512 = "avx512f avx512bw avx512cd avx512dq avx512vl"
AVX2 = "sse2 avx2 fma f16c bmi1 bmi2"


@pytest.fixture
def no_bound(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Whatever the suite runs under; what was found out of the machine is forgotten again."""
    monkeypatch.delenv(isa.VARIABLE, raising=False)
    isa.machine_isa.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    isa.machine_isa.cache_clear()


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", Isa.BASELINE),
        ("sse2 avx avx2 f16c", Isa.BASELINE),
        (f"{AVX2} avx_vnni", Isa.AVX2),
        (f"{AVX2} avx512f", Isa.AVX2),
        (f"{AVX2} {AVX512}", Isa.AVX512),
        (f"{AVX2} {AVX512} avx512_vnni", Isa.VNNI),
        (f"{AVX2} {AVX512} avx512_vnni avx512_bf16", Isa.BF16),
        (f"{AVX2} {AVX512} avx512_vnni avx512_bf16 amx_tile amx_int8", Isa.BF16),
        (f"{AVX2} {AVX512} avx512_vnni avx512_bf16 amx_tile amx_bf16", Isa.AMX),
    ],
)
def test_a_class_has_all_of_its_instructions(flags: str, expected: Isa, no_bound: pytest.MonkeyPatch) -> None:
    no_bound.setattr(isa, "cpu_flags", lambda: frozenset(flags.split()))
    no_bound.setattr(isa, "_may_use_tiles", lambda: True)
    assert isa.machine_isa() is isa.cpu_isa() is expected
    assert isa.compiler_flags()[0] == "-march=native"
    assert ("-mno-amx-tile" in isa.compiler_flags()) is ("amx_tile" in flags and expected is not Isa.AMX)


def test_a_process_that_may_not_use_tiles_computes_without_them(no_bound: pytest.MonkeyPatch) -> None:
    """A kernel of Linux before 5.16, or a sandbox: an instruction of AMX would end the process by a signal."""
    everything = frozenset(f"{AVX2} {AVX512} avx512_vnni avx512_bf16 amx_tile amx_bf16 amx_int8".split())
    no_bound.setattr(isa, "cpu_flags", lambda: everything)
    no_bound.setattr(isa, "_may_use_tiles", lambda: False)
    assert isa.machine_isa() is Isa.BF16
    assert isa.compiler_flags() == ("-march=native", "-mno-amx-tile", "-mno-amx-bf16", "-mno-amx-int8")
    if isa.bound() is None:
        no_bound.setenv(isa.VARIABLE, "amx")
        with pytest.raises(isa.CpuIsaError, match="but this CPU has bf16"):
            isa.cpu_isa()


def test_a_bound_hides_what_is_better_from_the_compiler_and_from_torch(no_bound: pytest.MonkeyPatch) -> None:
    no_bound.setattr(isa, "machine_isa", lambda: Isa.AMX)
    no_bound.setattr(os, "environ", dict(os.environ))
    for word in BOUNDS[:-1]:
        os.environ[isa.VARIABLE] = word
        assert isa.cpu_isa().word == word
        assert ("-mavx512bf16" in isa.compiler_flags()) is (word == "bf16")
        assert ("-mavx512f" in isa.compiler_flags()) is (word != "avx2")
        isa.hide_instructions()
        names = {"avx2": "AVX2", "avx512": "AVX512_CORE", "vnni": "AVX512_CORE_VNNI", "bf16": "AVX512_CORE_BF16"}
        assert os.environ["ONEDNN_MAX_CPU_ISA"] == names[word]
    for word in ("amx", "auto", ""):
        os.environ[isa.VARIABLE] = word
        assert isa.bound() is None
        assert isa.cpu_isa() is Isa.AMX


@pytest.mark.parametrize(
    ("word", "there", "message"),
    [
        ("sse", Isa.AMX, "OCTAVO_CPU_ISA is 'sse'; give one of avx2, avx512, vnni, bf16, amx, or auto"),
        ("amx", Isa.BF16, "OCTAVO_CPU_ISA is 'amx', but this CPU has bf16; it can only hide instructions"),
        ("avx2", Isa.BASELINE, "OCTAVO_CPU_ISA is 'avx2', but this CPU has none of them"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(
    word: str, there: Isa, message: str, no_bound: pytest.MonkeyPatch
) -> None:
    no_bound.setattr(isa, "machine_isa", lambda: there)
    no_bound.setenv(isa.VARIABLE, word)
    with pytest.raises(CpuIsaError, match=message):
        isa.cpu_isa()


SEEN = """
import torch, model, os
from octavo.model.cpu.native import kernels_arithmetic
print(torch.backends.cpu.get_cpu_capability(), os.environ["ONEDNN_MAX_CPU_ISA"], kernels_arithmetic())
"""


@pytest.mark.skipif(isa.machine_isa() <= Isa.AVX2, reason="nothing to hide here")
def test_a_process_computes_as_the_lesser_cpu_even_where_torch_is_imported_first() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SEEN],
        env=os.environ | {isa.VARIABLE: "avx2"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    capability, onednn, kernels = done.stdout.strip().split(" ", 2)
    assert (capability, onednn) == ("AVX2", "AVX2")
    assert not kernels or kernels.startswith("AVX2")


TILES_IN_C = ("-D__AMX_BF16__", f'-DOCTAVO_TILES_IN_C="{Path(__file__).with_name("tiles_in_c.h")}"')
"""Tiles on a CPU that has none, right and slow."""

AVX_VNNI = ("-march=x86-64", "-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2", "-mavxvnni")


FOREIGN = {"aarch64": ("-march=armv8-a",), "aarch64 with dots": ("-march=armv8.2-a+dotprod",)}
"""Of another architecture, under an emulator: right or wrong can be seen there, fast or slow cannot."""


def classes() -> list[str]:
    """What this machine can be taken for; "portable" is what a CPU without any of it compiles, "avx2 with vnni" one
    that has the newest of AVX2's instructions and nothing of AVX-512. And what it is not (FOREIGN)."""
    words = ["portable", *(word for word in BOUNDS if Isa[word.upper()] <= isa.cpu_isa()), *FOREIGN]
    words += ["amx in C"] if isa.cpu_isa() is Isa.BF16 else []
    return [*words, "avx2 with vnni"] if "avx_vnni" in isa.cpu_flags() else words


@pytest.fixture(scope="module")
def foreign_programs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Compiles the kernels for a class, once."""
    return cache(lambda name: foreign.compiled(tmp_path_factory.mktemp("foreign"), *FOREIGN[name]))


@pytest.fixture(params=classes())
def of_class(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, foreign_programs: Callable[[str], Path]
) -> Iterator[str]:
    """The kernels as they are compiled for a class."""
    if request.param in FOREIGN:
        if (missing := foreign.why_not()) is not None:
            pytest.skip(missing)
        library = foreign.ForeignLibrary(foreign_programs(request.param))
        for module in (native, ops, products):
            monkeypatch.setattr(module, "native_library", lambda: library)
        monkeypatch.setattr(torch.Tensor, "data_ptr", lambda tensor: library.seen(tensor))
        yield request.param
        monkeypatch.undo()
        library.close()
        return
    if native.native_library() is None:
        pytest.skip("no C compiler here")
    made_by_hand = {"portable": (), "avx2 with vnni": AVX_VNNI, "amx in C": (*isa.compiler_flags(), *TILES_IN_C)}
    if request.param in made_by_hand:
        monkeypatch.setattr(native, "compiler_flags", lambda: made_by_hand[request.param])
    else:
        monkeypatch.setenv(isa.VARIABLE, request.param)
    forget_the_class()
    yield request.param
    monkeypatch.undo()
    forget_the_class()


def forget_the_class() -> None:
    native._outcome.cache_clear()
    native.native_library.cache_clear()


def test_products_of_each_class_are_those_of_the_reference(of_class: str) -> None:
    arithmetic = {"portable": "vectors of 4", "avx2": "AVX2", "avx512": "AVX-512", "vnni": "AVX-512"}
    arithmetic |= {"avx2 with vnni": "AVX2"} | dict.fromkeys(FOREIGN, "NEON")
    arithmetic |= {"bf16": "AVX512-BF16", "amx": "AMX", "amx in C": "AMX"}
    assert native.kernels_arithmetic().startswith(arithmetic[of_class])
    for num_in, num_out in ((64, 48), (100, 37), (2, 1), (514, 33)):
        weight, bias = (torch.randn(num_out, num_in) * 0.1).bfloat16(), torch.randn(num_out).bfloat16()
        x = torch.randn(510, num_in).bfloat16()
        for panels in (pack_bf16(weight, bias), pack_int8(weight, bias)):
            check_product(panels, x, bias)


def check_product(
    panels: PanelWeight, x: torch.Tensor, bias: torch.Tensor, as_multiplied: torch.Tensor | None = None
) -> None:
    """Right, and a row's bits are its own, around every size of a tile. as_multiplied: x, or what it is rounded to."""
    rounded, whole = x if as_multiplied is None else as_multiplied, panels.multiply(x)
    exact = rounded.double() @ panels.unpacked().double().T + bias.double()
    torch.testing.assert_close(whole.double(), exact, rtol=2**-8, atol=1e-4)
    for count in (1, 2, 3, 5, 6, 7, 12, 13, 14, 15, 18, 19, 28, 29, 112, 113, 215, 217, 503, 505):
        assert torch.equal(panels.multiply(x[:count]), whole[:count]), count
        assert torch.equal(panels.multiply(x[-count:], torch.float32), whole[-count:].float()), count


def at_the_end_of_memory(rows: torch.Tensor) -> torch.Tensor:
    """The same, in front of a page that nobody may read."""
    page = mmap.PAGESIZE
    room = -(-rows.nbytes // page) * page
    memory = mmap.mmap(-1, room + page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + room), page, 0) == 0
    copy = torch.frombuffer(memory, dtype=rows.dtype, offset=room - rows.nbytes, count=rows.numel()).view(rows.shape)
    return copy.copy_(rows)


@pytest.mark.parametrize("count", [1, 15, 17, 33, 50])
def test_nothing_behind_the_rows_is_read(count: int, of_class: str) -> None:
    if of_class in FOREIGN:
        pytest.skip("an emulator has memory of its own")
    x, weight = torch.randn(count, 100).bfloat16(), torch.randn(40, 100).bfloat16()
    at_end = at_the_end_of_memory(x)
    for panels in (pack_bf16(weight, None), pack_int8(weight, None)):
        expected = panels.multiply(x)
        child = os.fork()
        if not child:
            os._exit(0 if torch.equal(panels.multiply(at_end), expected) else 1)
        assert os.waitpid(child, 0)[1] == 0, "ended by a signal, or other bits"


def test_many_rows_of_many_inputs_have_the_bits_of_few(of_class: str) -> None:
    """They are multiplied in pieces that fit a cache, some panels together."""
    if of_class in FOREIGN:
        pytest.skip("minutes under an emulator, and no pieces there")
    weight, x = (torch.randn(330, 2180) * 0.1).bfloat16(), torch.randn(550, 2180).bfloat16()
    for panels in (pack_bf16(weight, None), pack_int8(weight, None)):
        whole = panels.multiply(x)
        exact = x.double() @ panels.unpacked().double().T
        torch.testing.assert_close(whole.double(), exact, rtol=2**-8, atol=1e-3)
        for rows in (slice(0, 32), slice(500, 516), slice(511, 543), slice(540, 550), slice(3, 68), slice(450, 523)):
            assert torch.equal(panels.multiply(x[rows]), whole[rows])


INTEGERS = {"portable": "", "avx2": "AVX2", "avx512": "AVX-512"}
INTEGERS |= {"aarch64": "NEON", "aarch64 with dots": "NEON dot products"}
"""What multiplies them; VNNI everywhere else."""


def test_products_of_integers_are_those_of_rounded_inputs(of_class: str) -> None:
    assert native.integer_arithmetic() == INTEGERS.get(of_class, "VNNI")
    if not multiplies_integers():
        assert packed(torch.ones(2, 2).bfloat16(), None, WeightFormat.INT8).layout is Layout.INTEGER_PAIRS  # type: ignore[union-attr]
        return
    for num_in, num_out in ((64, 48), (100, 37), (2, 1), (514, 33), (896, 64)):
        weight, bias = (torch.randn(num_out, num_in) * 0.1).bfloat16(), torch.randn(num_out).bfloat16()
        x = torch.randn(510, num_in).bfloat16()
        check_product(pack_int8_rounding(weight, bias), x, bias, round_inputs(x))


def test_integers_at_their_bounds_are_summed_exactly(of_class: str) -> None:
    """Where sums of 16 bits would overflow, and where all inputs have one sign."""
    if not multiplies_integers():
        pytest.skip("no such instructions")
    for sign in (1, -1):
        weight = torch.full((33, 256), 127.0).bfloat16()
        weight[::2] = -127
        x = torch.full((15, 256), sign * 127.0).bfloat16()
        x[::3, ::2] *= -1
        exact = x.double() @ weight.double().T
        found = pack_int8_rounding(weight, None).multiply(x, torch.float32)
        torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=0)


def test_rounded_inputs_that_are_no_numbers_stay_in_their_row(of_class: str) -> None:
    if not multiplies_integers():
        pytest.skip("no such instructions")
    weight, x = torch.randn(40, 100).bfloat16(), torch.randn(30, 100).bfloat16()
    panels, wrong = pack_int8_rounding(weight, None), x.clone()
    wrong[3, 5], wrong[7, 99], wrong[20, 0] = float("nan"), float("inf"), -float("inf")
    wrong[9] = 0
    wrong[10], wrong[11] = x[10] * 1e-38, x[11] * 2.0**90
    found, expected = panels.multiply(wrong), panels.multiply(x)
    assert not found[[3, 7, 20]].isfinite().any()
    assert torch.equal(found[9], torch.zeros_like(found[9]))
    assert bool((found[10].abs() < 1e-36).all())
    assert torch.equal(found[11], expected[11] * 2.0**90)
    others = [row for row in range(30) if row not in (3, 7, 9, 10, 11, 20)]
    assert torch.equal(found[others], expected[others])


def test_infinity_and_what_is_no_number_stay_in_their_row_and_column(of_class: str) -> None:
    weight = torch.randn(40, 64).bfloat16()
    weight[3, 5] = float("nan")
    x = torch.randn(20, 64).bfloat16()
    x[7, 9] = float("inf")
    out = pack_bf16(weight, None).multiply(x)
    expected = x.float() @ weight.float().T
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.isinf(), expected.isinf())


def test_no_vector_is_wider_than_the_registers(of_class: str, tmp_path: Path) -> None:
    """Of wider ones the compiler makes pieces in memory: attention then took ten times as long. It says so before it
    optimizes."""
    compiler = foreign.COMPILER if of_class in FOREIGN else native._compiler()
    flags = FOREIGN.get(of_class) or native.compiler_flags()
    version = subprocess.run(
        [str(compiler), "--version"], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    if "Free Software Foundation" not in version:
        pytest.skip(f"{compiler} does not tell: it is no GCC")
    command = [str(compiler), "-O0", "-Werror=vector-operation-performance", *flags, "-c", *map(str, native.SOURCES)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr[:2000]


def test_what_lies_between_products_is_right_in_each_class(of_class: str) -> None:
    test_ops.test_the_norm_is_the_plain_norm(3, 896)
    test_ops.test_silu_times_up_is_the_expression_of_the_layer(3, 4864)
    test_ops.test_not_a_number_stays_in_its_row()
    for shape in ((14, 2, 64), (4, 4, 32)):
        test_ops.test_queries_turn_and_keys_and_values_find_their_slots(5, *shape)
        test_ops.test_decodes_read_their_own_blocks_and_nothing_else(*shape, 16)
    test_ops.test_a_sequence_gets_the_same_bits_alone_and_among_others()
    for width in (1, 17, 2049):
        test_largest.test_it_is_torchs_max(3, width)
    test_largest.test_infinities_and_nan_are_seen_wherever_they_stand()


def test_deterministic_kernels_are_right_in_each_class(of_class: str) -> None:
    test_invariant.test_a_product_equals_its_reference_and_its_rows_are_their_own(17, 70, 96)
    test_invariant.test_norm_and_silu_in_fp32_equal_their_references()
    if of_class not in FOREIGN:
        test_invariant.test_a_token_has_the_same_bits_in_any_step(torch.float32)
    elif of_class != "aarch64":  # whose kernels in fp32 are those with dots, and as slow to emulate
        test_invariant.check_steps(torch.float32, test_invariant.CUTS)


@pytest.mark.parametrize(("num_tokens", "context"), [(1, 1), (13, 13), (5, 31), (33, 33), (20, 257), (256, 300)])
def test_chunks_attend_as_the_reference_does(num_tokens: int, context: int, of_class: str) -> None:
    for shape in ((14, 2, 64, 16), (3, 1, 96, 5), (4, 4, 32, 1)):
        test_prefill.test_a_chunk_reads_its_own_blocks_up_to_each_token(num_tokens, context, *shape)


def test_chunks_keep_their_bits_and_what_is_no_number_its_head(of_class: str) -> None:
    if of_class in FOREIGN:
        test_prefill.check_cuts(300, num_heads=2, num_kv_heads=1)
    else:
        test_prefill.test_a_token_has_the_same_bits_however_its_prompt_is_cut()
    test_prefill.test_scores_far_apart_neither_overflow_nor_vanish()
    test_prefill.test_not_a_number_stays_in_its_head()


@pytest.mark.parametrize("wanted", [WeightFormat.BF16, WeightFormat.INT8, WeightFormat.INT8_WEIGHTS])
def test_a_fused_layer_has_the_bits_of_its_stages(wanted: WeightFormat, of_class: str) -> None:
    for num_tokens in (13, 65):
        test_layer.test_the_bits_are_those_of_the_stages_one_by_one(wanted, 352, num_tokens)


def test_a_packed_model_steps_as_the_plain_one(of_class: str) -> None:
    from octavo.model import dense_logits, get_backend

    plain, packed = random_model(torch.bfloat16), random_model(torch.bfloat16)
    packed.pack_weights()
    assert packed.lm_head.panels is not None
    ids = list(range(40))
    expected_V = dense_logits(plain, torch.tensor(ids))[-1]
    sequences = PagedSequences(packed, get_backend("sdpa"), num_sequences=1, max_tokens=64, block_size=4)
    sequences.step({0: ids[:30]})
    sequences.step({0: ids[30:39]})
    found_V = packed.logits(sequences.step({0: ids[39:]})[0])[-1]
    assert (found_V - expected_V).norm() / expected_V.norm() < 6e-2
