"""The team of threads that the kernels in C share: every job once, and no time burnt without work.

Most of it is C (team_stress.c), which runs as it is and under gcc's thread sanitizer, where the machine has it.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from octavo.model.cpu import native
from octavo.model.cpu.invariant import InvariantWeight

FOLDER = Path(native.__file__).parent
STRESS = Path(__file__).with_name("team_stress.c")
COMPILER = shutil.which("cc") or shutil.which("gcc")
SETARCH = shutil.which("setarch")

pytestmark = pytest.mark.skipif(native.native_library() is None or COMPILER is None, reason="no C compiler here")

Run = Callable[[str], subprocess.CompletedProcess[str]]


def compiled(folder: Path, *flags: str) -> Path:
    """team_stress with these flags. Raises CalledProcessError."""
    program = folder / "team_stress"
    sources = (str(STRESS), str(FOLDER / "team.c"))
    command = [str(COMPILER), "-O2", "-Wall", "-Wextra", "-Werror", "-pthread", f"-I{FOLDER}", *flags, *sources]
    subprocess.run([*command, "-o", str(program)], check=True, capture_output=True, timeout=240)
    return program


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


@pytest.fixture(scope="module")
def stress(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs one scenario."""
    program = compiled(tmp_path_factory.mktemp("plain"))
    return lambda scenario: run(str(program), scenario)


@pytest.fixture(scope="module")
def watched_stress(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same, with every access to memory watched. Fixed addresses: old sanitizers do not take all of them."""
    try:
        program = compiled(tmp_path_factory.mktemp("watched"), "-g", "-fsanitize=thread")
    except subprocess.CalledProcessError:
        pytest.skip("the compiler has no thread sanitizer")
    fixed = (SETARCH, "-R") if SETARCH is not None and run(SETARCH, "-R", "true").returncode == 0 else ()
    if run(*fixed, str(program), "none").returncode != 2:
        pytest.skip("the thread sanitizer does not run here")
    return lambda scenario: run(*fixed, str(program), scenario)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("scenario", ["tiny", "uneven", "many_threads", "callers", "forked", "idle", "sparse", "exits"])
def test_every_job_is_done_once_and_no_time_burnt(scenario: str, stress: Run) -> None:
    result = stress(scenario)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("scenario", ["tiny", "uneven", "many_threads", "callers"])
def test_no_race(scenario: str, watched_stress: Run) -> None:
    result = watched_stress(scenario)
    assert (result.returncode, result.stderr) == (0, "")


def product() -> tuple[Callable[[], torch.Tensor], torch.Tensor]:
    """One large enough for two threads, and what it gives on one."""
    generator = torch.Generator().manual_seed(0)
    weight = InvariantWeight.pack(torch.randn(700, 512, generator=generator), None)
    x = torch.randn(3, 512, generator=generator)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    alone = weight.multiply(x)
    torch.set_num_threads(before)
    return lambda: weight.multiply(x), alone


def test_callers_at_once_get_the_bits_of_one_thread(two_threads: None) -> None:
    multiply, alone = product()
    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(out, alone) for out in pool.map(lambda _: multiply(), range(400)))


def test_a_forked_child_multiplies_too(two_threads: None) -> None:
    multiply, alone = product()
    assert torch.equal(multiply(), alone)
    child = os.fork()
    if child == 0:
        os._exit(0 if all(torch.equal(multiply(), alone) for _ in range(50)) else 1)
    assert os.waitpid(child, 0) == (child, 0)
    assert torch.equal(multiply(), alone)


def test_nothing_is_burnt_when_the_work_is_done(two_threads: None) -> None:
    multiply, _ = product()

    def burnt_s() -> float:
        for _ in range(100):
            multiply()
        before_s = time.process_time()
        time.sleep(0.3)
        return time.process_time() - before_s

    # The best of three: a pause of the machine in the middle of a spin may count as its work.
    assert any(burnt_s() < 0.03 for _ in range(3))


def test_an_interpreter_ends_while_a_thread_works() -> None:
    """The thread calls nothing of torch's, whose functions may abort when their interpreter has ended."""
    script = (
        "import threading, time, torch\n"
        "from octavo.model.cpu.ops import loaded_library\n"
        "norm, x, out = loaded_library().octavo_rms_norm_f32, torch.randn(512, 512), torch.empty(512, 512)\n"
        "arguments = (x.data_ptr(), x.data_ptr(), out.data_ptr(), 512, 512, 1e-6, 2)\n"
        "def work():\n"
        "    while True: norm(*arguments)\n"
        "threading.Thread(target=work, daemon=True).start()\n"
        "time.sleep(0.2)\n"
    )
    result = run(sys.executable, "-c", script)
    assert (result.returncode, result.stderr) == (0, "")
