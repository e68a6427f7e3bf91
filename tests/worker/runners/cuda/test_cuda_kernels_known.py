"""A first start compiles its kernels beside each other: all that it launches later are among them."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="triton is not installed")

import triton

from octavo.model.kernels.attention.decode_ring import KNOWN_VERSIONS
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
