"""A first start compiles its kernels beside each other: all that it launches later are among them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

import triton

from octavo.model.kernels.gluon import KNOWN_VERSIONS
from tests.support.forks import Forks
from tests.support.worker.compiled import CASES

MOST_KERNELS = 85
"""Of any case: each is time of a first start, a constant that could be an argument makes several of one.
Prompt attention of warp groups is two: steps of many tokens keep maxima. Six are products in CUDA C++: three sizes of
gate and up, and of down."""


@pytest.fixture(scope="module")
def program() -> Iterator[Forks]:
    """Which tells of one case after the other."""
    environment = {"TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    with Forks("tests.support.worker.kernels_known", environment) as forks:
        yield forks


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for what is compiled: cases for one device have kernels in common."""
    return tmp_path_factory.mktemp("kernels")


@pytest.mark.skipif(not triton.__version__.startswith(KNOWN_VERSIONS), reason="what is asked is this triton's")
@pytest.mark.parametrize("case", CASES)
def test_no_kernel_is_compiled_late(case: str, program: Forks, tmp_path: Path) -> None:
    *late, compiled = program.lines("tell_late", case, environment={"XDG_CACHE_HOME": str(tmp_path)})
    assert not late, "\n".join(late)
    assert 20 < int(compiled) <= MOST_KERNELS


@pytest.mark.parametrize(
    ("capability", "case"),
    [
        ("8.6", "heads of 64"),
        ("8.6", "deterministic"),
        ("8.6", "float32"),
        ("8.6", "float32, heads of 128"),
        ("8.9", "fp8 weights"),
        ("9.0", "short rows"),
        ("9.0", "heads of 256"),
    ],
)
def test_every_kernel_of_a_start_fits_the_device(
    capability: str, case: str, program: Forks, kernels: Path, tmp_path: Path
) -> None:
    """Cards with 99 KB of shared memory for a program, and models of a width that no published one has, among them."""
    folders = {"TRITON_CACHE_DIR": str(kernels), "XDG_CACHE_HOME": str(tmp_path)}
    *faults, compiled = program.lines("tell_faults", capability, case, environment=folders)
    assert not faults, "\n".join(faults)
    assert int(compiled) > 20
