"""A first start compiles its kernels beside each other: all that it launches later are among them."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="triton is not installed")

import triton

from octavo.model.kernels.gluon import KNOWN_VERSIONS
from tests.support.worker.compiled import CASES

MOST_KERNELS = 78
"""Of any case: each is time of a first start, a constant that could be an argument makes several of one."""


@pytest.mark.skipif(not triton.__version__.startswith(KNOWN_VERSIONS), reason="what is asked is this triton's")
@pytest.mark.parametrize("case", CASES)
def test_no_kernel_is_compiled_late(case: str, tmp_path) -> None:
    told = subprocess.run(
        [sys.executable, "-m", "tests.support.worker.compiled", case],
        env=os.environ | {"TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    *late, compiled = told.stdout.splitlines()
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
def test_every_kernel_of_a_start_fits_the_device(capability: str, case: str, tmp_path) -> None:
    """Cards with 99 KB of shared memory for a program, and models of a width that no published one has, among them."""
    told = subprocess.run(
        [sys.executable, "-m", "tests.support.worker.fitting", capability, case],
        env=os.environ | {"TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(tmp_path)}
        | {"XDG_CACHE_HOME": str(tmp_path), "PYTHONWARNINGS": "ignore"},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    *faults, compiled = told.stdout.splitlines()
    assert not faults, "\n".join(faults)
    assert int(compiled) > 20
