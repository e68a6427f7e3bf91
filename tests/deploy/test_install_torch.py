"""deploy/install_torch.py takes the build for CPUs where one can be had and no GPU is there, and says what the other
one costs. pip and uv are played by scripts, which write down what they were asked."""

import hashlib
import re
import subprocess
import sys
import tomllib
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from packaging.requirements import Requirement

PIP_CPU, PIP_PLAIN = "pip torch==2.13.0+cpu", "pip torch==2.13.0"
PIP_UV, UV = "pip uv", "uv --torch-backend=cpu torch==2.13.0"

# The environment's Python: `-m pip install` notes what it was asked and refuses what the test says; `-c` tells of torch
# once it was installed.
PYTHON = """#!/bin/bash
if [ "$1" = -c ]; then test -f {folder}/torch && cat {folder}/torch; exit; fi
what="${{@: -1}}"
echo "pip $what" >> {folder}/asked
case " {refused} " in *" $what "*) echo "ERROR: No matching distribution found for $what" >&2; exit 1;; esac
echo "${{what#torch==}}" > {folder}/torch
"""
UV_PROGRAM = """#!/bin/bash
echo "uv ${{@: -2}}" >> {folder}/asked
test {exit_code} = 0 || exit {exit_code}
echo 2.13.0+cpu > {folder}/torch
"""


@dataclass
class Machine:
    """A machine on which only what the test puts there is found."""

    folder: Path
    refused: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.programs.mkdir()

    @property
    def programs(self) -> Path:
        return self.folder / "bin"

    def has(self, name: str, text: str) -> None:
        (self.programs / name).write_text(text)
        (self.programs / name).chmod(0o755)

    def has_uv(self, *, exit_code: int = 0) -> None:
        self.has("uv", UV_PROGRAM.format(folder=self.folder, exit_code=exit_code))

    def asked(self) -> list[str]:
        file = self.folder / "asked"
        return file.read_text().splitlines() if file.exists() else []

    def install(self, script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        self.has("python", PYTHON.format(folder=self.folder, refused=" ".join(self.refused)))
        # The script itself fetches uv with the Python that runs it: played too.
        code = f"import sys; sys.executable = {str(self.programs / 'python')!r}; sys.argv[0] = {str(script)!r}; "
        code += f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')"
        return subprocess.run(
            [sys.executable, "-c", code, *arguments],
            env={"PATH": f"{self.programs}:/usr/bin:/bin"}, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture
def script(repository: Path) -> Path:
    return repository / "deploy/install_torch.py"


def test_the_exact_build_for_cpus_is_tried_first(machine: Machine, script: Path) -> None:
    done = machine.install(script)
    assert (done.returncode, machine.asked()) == (0, [PIP_CPU])
    assert "torch 2.13.0+cpu is installed" in done.stdout
    assert "warning" not in done.stdout


def test_where_pip_has_none_uv_takes_it_from_pytorchs_index(machine: Machine, script: Path) -> None:
    machine.refused = ["torch==2.13.0+cpu"]
    machine.has_uv()
    done = machine.install(script)
    assert (done.returncode, machine.asked()) == (0, [PIP_CPU, UV])
    assert "torch 2.13.0+cpu is installed" in done.stdout
    assert "No matching distribution" not in done.stdout + done.stderr  # expected here, and no error


def test_the_build_for_cuda_comes_last_and_with_its_size(machine: Machine, script: Path) -> None:
    machine.refused = ["torch==2.13.0+cpu"]
    machine.has_uv(exit_code=2)
    done = machine.install(script)
    assert (done.returncode, machine.asked()) == (0, [PIP_CPU, UV, PIP_PLAIN])
    assert re.search(r"warning: no build for CPUs .*2\.7 GB to download, about 5 GB on disk", done.stdout)


def test_uv_is_fetched_where_the_machine_has_none(machine: Machine, script: Path) -> None:
    machine.refused = ["torch==2.13.0+cpu", "uv"]
    done = machine.install(script)
    assert (done.returncode, machine.asked()) == (0, [PIP_CPU, PIP_UV, PIP_PLAIN])


def test_where_nothing_can_be_had_one_sentence_says_so(machine: Machine, script: Path) -> None:
    machine.refused = ["torch==2.13.0+cpu", "uv", "torch==2.13.0"]
    done = machine.install(script)
    assert done.returncode == 1
    assert "no torch could be installed in" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("nvidia_smi", "expected"),
    [
        ("#!/bin/bash\necho 'GPU 0: NVIDIA H100 (UUID: GPU-1)'\n", [PIP_PLAIN]),
        ("#!/bin/bash\necho 'NVIDIA-SMI has failed' >&2; exit 9\n", [PIP_CPU]),
        ("#!/bin/bash\necho 'No devices were found'\n", [PIP_CPU]),
    ],
    ids=["a GPU", "a driver that fails", "a driver without a GPU"],
)
def test_a_gpu_gets_the_build_for_cuda(machine: Machine, script: Path, nvidia_smi: str, expected: list[str]) -> None:
    machine.has("nvidia-smi", nvidia_smi)
    done = machine.install(script)
    assert (done.returncode, machine.asked()) == (0, expected)
    assert ("2.7 GB to download" in done.stdout) == (expected == [PIP_PLAIN])  # said before it begins


@pytest.mark.parametrize(("device", "expected"), [("cpu", [PIP_CPU]), ("cuda", [PIP_PLAIN])])
def test_a_device_that_is_named_is_not_looked_for(
    machine: Machine, script: Path, device: str, expected: list[str]
) -> None:
    machine.has("nvidia-smi", "#!/bin/bash\necho GPU 0\n" if device == "cpu" else "#!/bin/bash\nexit 9\n")
    machine.install(script, "--device", device)
    assert machine.asked() == expected


def bare_python(folder: Path) -> Path:
    """Of an environment with pip and nothing else."""
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True, timeout=120)
    return folder / "venv/bin/python"


def wheel_of_torch(folder: Path) -> Path:
    """A package of that name and version, without anything in it."""
    info = "torch-2.13.0+cpu.dist-info"
    path = folder / "torch-2.13.0+cpu-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("torch/__init__.py", "__version__ = '2.13.0+cpu'\n")
        file.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0+cpu\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")
    return path


@pytest.mark.parametrize("is_the_file", [True, False], ids=["the file", "another file"])
def test_pip_checks_the_hash_of_the_build_for_cpus(script: Path, tmp_path: Path, is_the_file: bool) -> None:
    wheel = wheel_of_torch(tmp_path)
    digest = hashlib.sha256(wheel.read_bytes() if is_the_file else b"another").hexdigest()
    done = subprocess.run(
        [sys.executable, str(script), "--python", str(bare_python(tmp_path)), "--device", "cpu", f"--sha256={digest}"],
        env={"PATH": "/usr/bin:/bin", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == (0 if is_the_file else 1)
    assert ("torch 2.13.0+cpu is installed" in done.stdout) == is_the_file
    assert ("DO NOT MATCH THE HASHES" in done.stderr) == (not is_the_file)


def test_a_hash_that_is_none_is_refused_by_its_flag(machine: Machine, script: Path) -> None:
    done = machine.install(script, "--sha256", "abc")
    assert (done.returncode, machine.asked()) == (2, [])
    assert "--sha256: 'abc' is not 64 hexadecimal digits" in done.stderr


def test_a_torch_that_is_there_stays(machine: Machine, script: Path) -> None:
    (machine.folder / "torch").write_text("2.11.0+cu130")
    done = machine.install(script)
    assert (done.returncode, machine.asked()) == (0, [])
    assert "torch 2.11.0+cu130 is there" in done.stdout


def test_a_torch_that_is_too_old_is_replaced_by_a_build_for_cpus(machine: Machine, script: Path) -> None:
    (machine.folder / "torch").write_text("2.9.1+cpu")
    machine.install(script)
    assert machine.asked() == [PIP_CPU]


def test_one_place_says_which_torch_is_installed(repository: Path, script: Path) -> None:
    found = re.search(r'^TORCH = "(.*)"$', script.read_text(), re.MULTILINE)
    assert found is not None
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    (allowed,) = [Requirement(each) for each in project["dependencies"] if Requirement(each).name == "torch"]
    assert found[1] in allowed.specifier
    others = ("Makefile", "deploy/worker.Dockerfile", "cli/tools/doctor_checks.py")
    assert [name for name in others if re.search(r"torch==\d", (repository / name).read_text())] == []
    assert all("deploy/install_torch.py" in (repository / name).read_text() for name in others)


def test_make_installs_torch_with_the_script(repository: Path, tmp_path: Path) -> None:
    said = subprocess.run(
        ["make", "-n", "install", f"VENV={tmp_path}/venv"], cwd=repository, capture_output=True, text=True, check=True
    ).stdout
    assert f"deploy/install_torch.py --python {tmp_path}/venv/bin/python" in said
