"""Before the first launch, kernels are compiled beside each other, and so is what launches them."""

import json
import os
import subprocess
import sys
from collections import Counter

import pytest

pytest.importorskip("triton", reason="triton is not installed")


def test_each_kernel_is_compiled_once_and_each_kind_of_launcher_built_once(tmp_path) -> None:
    told = subprocess.run(
        [sys.executable, "-m", "tests.support.model.precompiled"],
        env=os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    found = json.loads(told.stdout)
    in_time = ["one_kernel", "one_kernel", "like_it_kernel", "other_kernel", "mistaken_kernel"]
    assert found["asked"][:5] == in_time, "a launch that repeats another asks for nothing"
    assert Counter(each.replace("like_it", "one") for each in found["built"]) == {"one_kernel": 1, "other_kernel": 1}
    assert found["progress"][0] == [0, 5]
    assert found["progress"][-1] == [5, 5]
    assert found["is_compiling"] == [True, False]
    assert found["raised"] == "CompilationError", "a kernel that does not compile says so where it is launched"
    assert found["woken"] == ["_kernel"]
    assert found["is_daemon"]
    assert found["threads"] == [], "none of them takes Python's lock while there is something to launch"
    assert found["left"] == 2, "a start that fails waits for no kernel, and keeps none that was not compiled"
    assert found["helped"] == {"own": [], "built": [], "has": ["one_kernel", "like_it_kernel"]}
    alone = found["hardly helped"]
    assert alone["own"] == ["like_it_kernel"], "what a helper compiled is not compiled again"
    assert alone["built"] == [], "nor is what launches it built again"
    assert alone["has"] == ["one_kernel", "like_it_kernel"], "a helper that ends is missed by nobody"
    assert found["meanwhile"] == [[0, 5]], "once, while they are compiled"
    assert found["begun"] == 2, "a start that is ended does not compile on"
