"""Mistakes that are seen before a process is started, and what people read then."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.cli.errors import CliError
from octavo.cli.explain import explain
from octavo.cli.main import main
from octavo.cli.serve import ports, preflight
from octavo.cli.serve.launch import environment
from octavo.cli.serve.preflight import (
    BACKENDS,
    OTHER_VARIABLES,
    check_device,
    check_device_here,
    check_group_devices,
    check_workers,
    check_workers_elsewhere,
    unknown_variables,
)
from octavo.cli.serve.summary import ModelSummary, summary_rows
from octavo.cli.settings.groups import ALL_KEYS, ServeSettings
from octavo.cli.settings.setting import variable_of
from octavo.gateway.workers.errors import NoWorker
from octavo.model import BACKENDS as MODEL_BACKENDS
from octavo.model.checkpoint.source import EMBEDDED
from octavo.model.cpu.isa import CpuIsaError, Isa
from octavo.model.layers.linear import FormatUnavailable

pytestmark = pytest.mark.usefixtures("nothing_set")

EVERYWHERE = ("serve", "worker")


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Processes that would have been started, and models that would have been loaded."""
    started: list[object] = []
    monkeypatch.setattr("octavo.cli.serve.serve._serve", lambda *args: started.append(args))
    monkeypatch.setattr("octavo.worker.main._load", lambda *args: started.append(args))
    monkeypatch.setattr("octavo.worker.main.configure_logs", lambda *args: None)
    monkeypatch.setattr("octavo.worker.main.Shutdown.install", lambda self: None)
    return started


def checkpoint(folder: Path, **changes: object) -> Path:
    """The embedded model with other settings and without weights, which nothing here gets to see."""
    shutil.copytree(EMBEDDED / "folio-chat", folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line.strip() for line in capsys.readouterr().err.splitlines() if line.strip()]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--model", "nothing-like-it"], "'nothing-like-it' is neither a folder, nor an embedded model, nor a hub id"),
        (["--model", "folio-chta"], "did you mean folio-chat?"),
        (["--model", "empty"], "there is no config.json in it"),
        (["--model", "bare"], "there is no tokenizer.json in it"),
        (["--model", "folio-chat", "--model", "folio-chat"], "--model folio-chat and --model folio-chat are both"),
        (["--model", "a=folio-chat", "--model", "a=empty"], "are both served as 'a'"),
        (["--model", "folio-chat", "--model", "x/folio-chat"], "are both served as 'folio-chat'"),
        (["--revision", "v1"], "--revision is 'v1', and folio-chat is no Hugging Face id"),
        (["--revision", "v1", "--model", "a=bare"], "--revision is 'v1', and a=bare is no Hugging Face id"),
        (["--num-blocks", "10"], "--num-blocks 10 × --block-size 16 = 160 tokens, and requests may have 2,048"),
        (["--num-blocks", "10", "--max-model-len", "161"], "--num-blocks 10 × --block-size 16 = 160"),
        (["--max-model-len", "999999"], "--max-model-len is 999,999, and folio-chat has 2,048 positions"),
        (
            ["--tensor-parallel-size", "3", "--device", "cpu"],
            "--tensor-parallel-size is 3, and of folio-chat intermediate_size: 896 cannot be divided among 3 "
            "tensor-parallel ranks → give 2 or 1",
        ),
        (["--tensor-parallel-size", "2", "--runner", "oracle"], "--tensor-parallel-size is 2, and the oracle has none"),
        (["--device", "tpu"], "--device is 'tpu', which is no device"),
        (["--max-batch-tokens", "3"], "--max-batch-tokens is 3, and --max-num-seqs is 256"),
        (["--attention-backend", "nope"], "--attention-backend is 'nope', which is none of them"),
        (["--device", "cuda:x"], "--device is 'cuda:x', which is no device"),
        (["--peer-endpoint", "tcp://a:1"], "--peer-endpoint needs --control-endpoint"),
        (["--control-endpoint", "a:1"], "bad value for --control-endpoint 'a:1' is neither ipc:///path nor"),
        (["--control-endpoint", "ipc:///run/x.sock"], "no tcp://host:port with a port for each of 1 gateways"),
        (["--control-endpoint", "tcp://a:65535", "--gateways", "2"], "with a port for each of 2 gateways"),
        (["--control-endpoint", "tcp://a:1", "--peer-endpoint", "b"], "bad value for --peer-endpoint 'b' is neither"),
        (
            ["--control-endpoint", "tcp://a:1", "--peer-endpoints-file", "none"],
            "bad value for --peer-endpoints-file none with endpoints cannot be read: No such file",
        ),
        (
            ["--control-endpoint", "tcp://a:1", "--peer-endpoints-file", "wrong"],
            "bad value for --peer-endpoints-file wrong: 'a:1' is neither ipc:///path nor tcp://host:port",
        ),
        (["--control-endpoint", "tcp://a:1"], "--control-endpoint needs --gateway-key-file"),
        (
            ["--control-endpoint", "tcp://a:1", "--gateway-key-file", "no.key"],
            "bad value for --gateway-key-file cannot read key file no.key",
        ),
    ],
)
def test_a_mistake_is_told_once_and_nothing_is_started(
    arguments: list[str], told: str, starts: list[object], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "wrong").write_text("tcp://b:1\na:1\n")
    checkpoint(tmp_path / "bare")
    (tmp_path / "bare" / "tokenizer.json").unlink()
    checkpoint(tmp_path / "x" / "folio-chat")
    assert main(["serve", *arguments, "--port", "0", "--metrics-port", "0", "--worker-metrics-port", "0"]) != 0
    shown = lines(capsys)
    assert told in " ".join(shown)
    assert len([line for line in shown if line.startswith("error: ")]) == 1
    assert len(shown) == 3
    assert starts == []


DRIVER = """
int cuDriverGetVersion(int *version) { *version = VERSION; return 0; }
int cuInit(unsigned flags) { return FAILS; }
int cuDeviceGetCount(int *count) { *count = 3; return 0; }
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no C compiler")
@pytest.mark.parametrize(
    ("cuda", "version", "fails", "visible", "expected"),
    [
        ("'13.0'", 13000, 0, None, ("13.0", "3")),
        ("'13.0'", 12080, 0, None, ("13.0", "0")),  # the driver is too old for this torch
        ("'12.8'", 13000, 0, None, ("12.8", "3")),
        ("'13.0'", 13000, 100, None, ("13.0", "0")),
        ("None", 13000, 0, None, ("no", "0")),
        ("'13.0'", 13000, 0, "MIG-a,MIG-b", ("13.0", "2")),
    ],
)
def test_gpus_are_counted_without_importing_torch(
    cuda: str, version: int, fails: int, visible: str | None, expected: tuple[str, str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('seconds of a start')\n")
    (tmp_path / "torch" / "version.py").write_text(f"__version__ = '2.11.0+x'\ncuda = {cuda}\nhip = None\n")
    (tmp_path / "driver.c").write_text(DRIVER)
    macros = [f"-DVERSION={version}", f"-DFAILS={fails}"]
    made = ["gcc", "-shared", "-fPIC", *macros, str(tmp_path / "driver.c"), "-o", str(tmp_path / "libcuda.so.1")]
    subprocess.run(made, check=True, timeout=120)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert preflight._gpus() == ("2.11.0+x", *expected)


def test_a_gpu_that_is_not_there_is_told_by_the_flag(
    monkeypatch: pytest.MonkeyPatch, starts: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("octavo.cli.serve.preflight._gpus", lambda: ("2.13.0", "no", "0"))
    for command in EVERYWHERE:
        assert main([command, "--device", "cuda"]) == 1
        shown = lines(capsys)
        assert shown[0] == "error: there is no such GPU"
        assert shown[1].startswith("--device is cuda, and torch ")
    assert starts == []
    monkeypatch.setattr("octavo.cli.serve.preflight._gpus", lambda: ("2.13.0", "12.8", "2"))
    check_device("cuda:1")
    with pytest.raises(Exception, match=r"torch 2\.13\.0 sees 2 GPUs"):
        check_device("cuda:2")
    check_device_here("cpu")
    check_device_here("auto")


def test_more_ranks_than_gpus_are_told_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, starts: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("octavo.cli.serve.preflight._gpus", lambda: ("2.13.0", "13.0", "3"))
    for device in ("auto", "cuda"):
        flags = ["--tensor-parallel-size", "2", "--workers", "2", "--device", device, "--port", "0"]
        assert main(["serve", *flags, "--metrics-port", "0", "--worker-metrics-port", "0"]) == 1
        shown = lines(capsys)
        assert shown[:2] == [
            "error: there are too few GPUs",
            "--tensor-parallel-size 2 in 2 workers needs 4 GPUs, and torch sees 3",
        ]
    assert main(["serve", "--tensor-parallel-size", "2", "--device", "cuda:1", "--port", "0"]) != 0
    assert "--device is cuda:1, and a group of 2 ranks takes the first 2 GPUs" in " ".join(lines(capsys))
    assert starts == []
    check_group_devices(ServeSettings(tensor_parallel_size=3, device="cuda"))
    monkeypatch.setattr("octavo.cli.serve.preflight._gpus", lambda: ("2.13.0", "no", "0"))
    check_group_devices(ServeSettings(tensor_parallel_size=3))  # on the CPU


@pytest.mark.slow  # starts processes that import torch
@pytest.mark.parametrize("size", [1, 2])
def test_ranks_that_can_share_a_model_are_not_refused(size: int) -> None:
    check_workers(ServeSettings(tensor_parallel_size=size, device="cpu"))


@pytest.mark.parametrize("command", EVERYWHERE)
@pytest.mark.parametrize(
    ("changes", "size", "told"),
    [
        ({"vocab_size": 6146}, 3, "vocab_size: 6146 cannot be divided among 3 tensor-parallel ranks → give 2 or 1"),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 3, "intermediate_size": 768},
            2,
            "num_key_value_heads: 3 can neither be divided among 2 tensor-parallel ranks nor repeated → "
            "give 12 or 6 or 3 or 1",
        ),
    ],
)
def test_a_size_that_does_not_fit_is_told_with_those_that_do(
    command: str, changes: dict[str, int], size: int, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("octavo.worker.main.configure_logs", lambda *args: None)
    monkeypatch.setattr("octavo.worker.main.Shutdown.install", lambda self: None)
    monkeypatch.setattr("octavo.worker.main.let_threads_sleep", lambda: None)
    folder = checkpoint(tmp_path / "own", **{"intermediate_size": 768} | changes)
    flags = ["--model", str(folder), "--tensor-parallel-size", str(size), "--device", "cpu"]
    worker = ["--gateway-endpoint", f"ipc://{tmp_path}/x.sock", "--worker-metrics-port", "0"]
    alone = worker if command == "worker" else ["--port", "0"]
    assert main([command, *flags, *alone]) == 2
    shown = lines(capsys)[-3:]
    assert shown[0] == "error: a model cannot be cut into so many parts"
    assert " ".join(shown[1:]) == f"--tensor-parallel-size is {size}, and of {folder} {told}"


def test_too_few_threads_are_told_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ports, "threads_to_be_had", lambda wanted: 5)
    assert main(["serve", "--port", "0", "--num-threads", "3", "--gateways", "2", "--device", "cpu"]) == 1
    assert lines(capsys) == [
        "error: too few threads and processes are allowed",
        "5 more can be started here, and this takes 67",  # four processes of 16, and three that compute
        "→ raise ulimit -u, or the container's limit of processes (pids); or give fewer --num-threads",
    ]


def test_more_connections_than_files_are_told_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "0", "--max-connections", "65536", "--device", "cpu"]) == 1
    told = lines(capsys)
    assert told[0] == "error: too few files may be open"
    assert told[1].startswith("--max-connections 65536 is more than the ")


def test_a_workers_busy_port_is_told_before_its_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main(["worker", "--gateway-endpoint", "ipc:///tmp/x.sock", "--worker-metrics-port", port]) == 1
    assert lines(capsys)[0] == f"error: port {port} is busy"


LOOK = """import os, sys, types
from octavo.cli.main import main
def load_group(config, on_progress, meanwhile):
    import torch
    print("ONEDNN_MAX_CPU_ISA" in os.environ, torch.backends.cpu.get_cpu_capability(), flush=True)
    os._exit(0)
sys.modules["octavo.worker.loading.group"] = types.SimpleNamespace(load_group=load_group)
if sys.argv[1] == "planted":
    from octavo.model.cpu import isa
    isa.machine_isa = lambda: isa.Isa.AMX
sys.exit(main(["worker", *sys.argv[2:]]))
"""


@pytest.mark.slow  # starts processes that import torch
def test_a_flag_hides_instructions_from_torch_and_overrides_the_variable(tmp_path: Path) -> None:
    def seen(variable: str, *arguments: str) -> list[str]:
        flags = ("--device=cpu", "--worker-metrics-port=0", f"--gateway-endpoint=ipc://{tmp_path}/x.sock")
        environment = {**os.environ, variable_of("cpu_isa"): variable}
        command = [sys.executable, "-c", LOOK, *arguments, *flags]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()[-1].split()

    hidden, capability = seen("auto", "planted", "--cpu-isa=avx2")
    assert (hidden, capability in ("AVX2", "DEFAULT", "NO")) == ("True", True)
    assert seen("avx2", "as it is", "--cpu-isa=auto")[0] == "False"


@pytest.mark.slow  # starts processes that import torch
def test_the_embedded_model_is_cut_here_before_a_cluster_is_asked_for_places() -> None:
    with pytest.raises(CliError, match="intermediate_size: 896 cannot be divided among 3 tensor-parallel ranks"):
        check_workers_elsewhere(ServeSettings(tensor_parallel_size=3, device="cpu"))
    check_workers_elsewhere(ServeSettings(tensor_parallel_size=2, device="cpu"))


def test_attention_backends_are_those_that_there_are() -> None:
    assert set(BACKENDS) == {"auto", *MODEL_BACKENDS}


def test_torch_is_asked_for_gpus_in_a_process_of_its_own() -> None:
    with pytest.raises(Exception, match="--device is cuda:99, and torch "):
        check_device("cuda:99")


def test_variables_that_nothing_reads_are_told_with_what_was_meant(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"OCTAVO_MODL": "x", "OCTAVO_MODEL": "x", "OCTAVO_ZZZZZ": "1", "PATH": "", "OCTAVO_NATIVE": "off"}
    assert unknown_variables(given) == [("OCTAVO_MODL", "did you mean OCTAVO_MODEL?"), ("OCTAVO_ZZZZZ", "unset it")]
    monkeypatch.setenv("OCTAVO_MODL", "x")
    for command in ("serve", "worker", "gateway"):
        assert main([command, "--log-level", "nonsense"]) == 2
        assert main([command, *(["--model", "?"] if command != "gateway" else ["--tls-cert-file", "/none"])]) != 0
        warnings = [line for line in lines(capsys) if line.startswith("warning: ")]
        assert warnings == ["warning: OCTAVO_MODL is no setting, so nothing reads it; did you mean OCTAVO_MODEL?"]


def test_every_variable_that_code_reads_is_known(repository: Path) -> None:
    names = set[str]()
    for folder in (
        "cli",
        "gateway",
        "worker",
        "model",
        "wire",
        "grammar",
        "blockmgr",
        "proto",
        "tests",
        "bench",
        "sim",
    ):
        for path in (repository / folder).rglob("*.py"):
            reads = r"(?:environ(?:\.get|\.pop|\.setdefault)?|getenv)[\[(]\s*[\"'](OCTAVO_[A-Z_]+)"
            names |= set(re.findall(reads, path.read_text()))
    assert "OCTAVO_NATIVE" in names
    assert names - OTHER_VARIABLES <= {variable_of(name) for name in ALL_KEYS}


def test_what_kernels_and_ranks_read_reaches_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_NATIVE", "off")
    monkeypatch.setenv("OCTAVO_SUMS", "library")
    monkeypatch.setenv("OCTAVO_MODEL", "x")
    passed = environment()
    assert (passed["OCTAVO_NATIVE"], passed["OCTAVO_SUMS"]) == ("off", "library")
    assert "OCTAVO_MODEL" not in passed


def test_sentences_name_the_flag_or_say_what_is_missing() -> None:
    told = explain(FormatUnavailable("fp8 weights need a GPU"))
    assert (told.what, told.numbers) == ("the weights cannot be had in that form", "fp8 weights need a GPU")
    assert "--quantization" in told.change
    assert str(NoWorker("")) == "no worker is ready yet"
    assert str(NoWorker("m")) == "no worker that serves model 'm' is ready"
    small = ModelSummary(
        name="m", device="cpu", dtype="f", num_workers=1, num_blocks=12, block_size=16, max_model_len=4096
    )
    shown = dict(summary_rows_of(small))
    assert shown["room for"].startswith("one request of 192 tokens at most")


def summary_rows_of(model: ModelSummary) -> list[tuple[str, str]]:
    from octavo.cli.serve.summary import ServiceSummary

    return summary_rows(
        ServiceSummary(address="h:1", admin_address=None, metrics=(), models=(model,), ready_after_s=0.0)
    )


def test_looking_at_a_checkpoint_needs_no_torch(repository: Path) -> None:
    code = "import sys, octavo.cli.serve.serve; from octavo.model.checkpoint.source import look_for_checkpoint; "
    code += "look_for_checkpoint('folio-chat'); assert 'torch' not in sys.modules; "
    code += "import octavo.model; assert octavo.model.load_model and 'torch' in sys.modules"
    done = subprocess.run(
        [str(Path(__import__("sys").executable)), "-c", code],
        env=environment(),
        cwd=repository,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_instructions_that_the_cpu_lacks_are_found_before_a_process_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.model.cpu.isa.machine_isa", lambda: Isa.AVX2)
    with pytest.raises(CpuIsaError, match="is 'amx', but this CPU has avx2"):
        check_workers(ServeSettings(cpu_isa="amx", device="cpu"))


@pytest.mark.parametrize(
    ("given", "version", "visible", "wanted"),
    [
        ({"device": "cpu"}, "2.11.0", None, False),
        ({"device": "cuda:1"}, "2.11.0", None, True),
        ({}, "2.11.0", None, True),
        ({}, "2.11.0", "0,1", True),
        ({}, "2.11.0", "", False),
        ({}, "2.11.0", "-1", False),
        ({}, "2.11.0+cpu", None, False),
        ({"runner": "oracle"}, "2.11.0", None, False),
    ],
)
def test_whether_a_gpu_serves_is_told_without_torch(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    given: dict[str, str],
    version: str,
    visible: str | None,
    wanted: bool,
) -> None:
    monkeypatch.setattr(preflight, "version", lambda name: version)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    (tmp_path / "nvidia0").touch()
    settings = ServeSettings(**given)  # type: ignore[arg-type]
    assert preflight.serves_on_gpu(settings, tmp_path) is wanted
    if not given:
        assert not preflight.serves_on_gpu(settings, tmp_path / "no-gpu")
