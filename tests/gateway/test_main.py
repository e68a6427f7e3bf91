"""The gateway as a process of its own: how it starts, refuses to start, shares a port, and ends."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from octavo.v1 import inference_pb2 as pb
from octavo.v1 import inference_pb2_grpc
from tests.support.gateway.rpc_errors import refused

PROGRAM = """
import json
import sys
from pathlib import Path
from octavo.gateway.config import AccessConfig, Exposure, GatewayConfig, LogFormat, PortSharing
from octavo.gateway.main import main
from octavo.gateway.workers.config import WorkerPoolConfig
run_dir, arguments = sys.argv[1], eval(sys.argv[2])
workers = WorkerPoolConfig(endpoints=(f"ipc://{run_dir}/gateway-{arguments.pop('index', 0)}.sock",))
try:
    code = main(GatewayConfig(workers=workers, metrics_address=None, log_format=LogFormat.JSON, **arguments))
except Exception as error:
    print(json.dumps({"event": "raised", "error": str(error)}), file=sys.stderr)
    code = 1
sys.exit(code)
"""


GRACE_S = 60.0


@contextmanager
def gateway(run_dir: Path, arguments: str) -> Iterator["subprocess.Popen[str]"]:
    run_dir.mkdir(mode=0o700, exist_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(run_dir), arguments],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def lines_until(process: "subprocess.Popen[str]", event: str) -> dict[str, object]:
    """The first log line of that event; the process has to write it."""
    assert process.stderr is not None
    for line in process.stderr:
        entry = json.loads(line)
        if entry["event"] == event:
            return dict(entry)
    raise AssertionError(f"the process ended without {event!r}")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_an_idle_gateway_cleanly(tmp_path: Path, number: signal.Signals) -> None:
    with gateway(tmp_path / "run", f"{{'listen_address': '127.0.0.1:0', 'drain_grace_s': {GRACE_S}}}") as process:
        address = str(lines_until(process, "listening")["address"])

        async def ask() -> tuple[object, str]:
            async with grpc.aio.insecure_channel(address, options=[("grpc.enable_retries", 0)]) as channel:
                stub = inference_pb2_grpc.InferenceServiceStub(channel)
                refusal = await refused(stub.Generate(pb.GenerateRequest(text="x"), timeout=60))
                return refusal.code, refusal.reason

        assert asyncio.run(ask()) == (grpc.StatusCode.UNAVAILABLE, "NO_WORKER")
        begin_s = time.monotonic()
        process.send_signal(number)
        assert process.wait(60) == 0
        assert time.monotonic() - begin_s < GRACE_S / 2, "nobody was left to wait for"
        lines_until(process, "stopped")
    assert not list((tmp_path / "run").glob("*.sock"))


def test_the_command_writes_no_lines_but_its_own(tmp_path: Path) -> None:
    """gRPC's C core wrote one of its format when the process that renders chats was forked."""
    (tmp_path / "run").mkdir(mode=0o700)
    command = [
        sys.executable,
        "-m",
        "octavo.cli.main",
        "gateway",
        "--port",
        "0",
        "--metrics-port",
        "0",
        "--page",
        "off",
    ]
    command += ["--log-format", "json", "--log-level", "debug", "--run-dir", str(tmp_path / "run")]
    variables = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=variables) as process:
        lines_until(process, "listening")
        while not children_of(process.pid):
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        assert [line for line in process.stderr if not line.startswith("{")] == []
        assert process.wait(10) == 0


@pytest.mark.parametrize("module", ["octavo.gateway.main", "octavo.cli.main"])
def test_grpc_starts_nothing_in_processes_that_become_other_programs(module: str) -> None:
    """Its threads there ended one process for constraints in a dozen by a segmentation fault, and a request with it."""
    code = f"import os, {module}; print(os.environ['GRPC_ENABLE_FORK_SUPPORT'])"
    if module == "octavo.cli.main":
        code = code.replace("; print", "; octavo.cli.main.main(['--version']); print")
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=variables, check=True)
    assert done.stdout.split()[-1] == "false"


def children_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("{'listen_address': '0.0.0.0:0'}", "--exposure insecure"),
        ("{'listen_address': 'nonsense'}", "host:port"),
        ("{'listen_address': '127.0.0.1:BUSY'}", "--port 127.0.0.1:BUSY"),
    ],
)
def test_a_start_that_fails_says_which_setting(tmp_path: Path, arguments: str, words: str) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        with gateway(tmp_path / "run", arguments.replace("BUSY", port)) as process:
            assert words.replace("BUSY", port) in str(lines_until(process, "raised")["error"])
            assert process.wait(10) == 1


def test_a_run_directory_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    run_dir.chmod(0o777)
    with gateway(run_dir, "{'listen_address': '127.0.0.1:0'}") as process:
        assert "chmod 700" in str(lines_until(process, "raised")["error"])
        assert process.wait(10) == 1


def test_a_hangup_takes_the_keys_anew_and_ends_nothing(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.touch(mode=0o600)
    access = f"AccessConfig(api_keys_file=Path({str(keys)!r}), reload_interval_s=3600.0)"
    with gateway(tmp_path / "run", f"{{'listen_address': '127.0.0.1:0', 'access': {access}}}") as process:
        lines_until(process, "listening")
        process.send_signal(signal.SIGHUP)
        assert lines_until(process, "reloaded")["files"] == "keys"
        keys.write_text("nonsense")
        process.send_signal(signal.SIGHUP)
        assert "not TOML" in str(lines_until(process, "reload_refused")["error"])
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0


def test_keys_that_cannot_be_used_let_nothing_start(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.touch(mode=0o644)
    access = f"AccessConfig(api_keys_file=Path({str(keys)!r}))"
    with gateway(tmp_path / "run", f"{{'listen_address': '127.0.0.1:0', 'access': {access}}}") as process:
        assert "chmod 600" in str(lines_until(process, "raised")["error"])
        assert process.wait(10) == 1


def test_several_gateways_share_one_port_and_strangers_do_not(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = f"{{'listen_address': '127.0.0.1:{port}', 'port_sharing': PortSharing.SHARED, 'index': %d}}"
    exclusive = f"{{'listen_address': '127.0.0.1:{port}', 'index': 2}}"
    with gateway(tmp_path / "run", shared % 0) as first:
        lines_until(first, "listening")
        with gateway(tmp_path / "run", shared % 1) as second:
            assert lines_until(second, "listening")["address"] == f"127.0.0.1:{port}"
            with gateway(tmp_path / "run", exclusive) as third:
                assert third.wait(20) == 1


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc")
def test_tokenizing_starts_no_threads_of_the_library() -> None:
    program = """
import os
from octavo.gateway.text.model_text import ModelText
from tests.support.gateway.tokenizers_tiny import tiny_files
before = len(os.listdir("/proc/self/task"))
text = ModelText(tiny_files(), num_ids=600)
assert len(text.encode("one two three", max_bytes=1000).ids_T)
assert len(os.listdir("/proc/self/task")) == before
"""
    kept = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
    subprocess.run([sys.executable, "-c", program], env=kept, timeout=120, check=True)


def test_rendering_a_chat_brings_no_torch_into_the_process() -> None:
    program = """
import sys
import octavo.gateway.main
from octavo.gateway.text.chat_template import ChatInput
from octavo.gateway.text.model_text import ModelText
from tests.support.gateway.tokenizers_tiny import encode_chat, tiny_files
text = ModelText(tiny_files(), num_ids=600)
tool = {"type": "function", "function": {"name": "f"}}
assert len(encode_chat(text, ChatInput(messages=[{"role": "user", "content": "<|im_end|>"}], tools=[tool]),
                            max_bytes=1000).ids_T)
assert "torch" not in sys.modules and "model" not in sys.modules and "worker" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


STUCK = """
import asyncio, time
from octavo.gateway.main import guard_loop

async def work():
    guard = asyncio.create_task(guard_loop(2.0))
    for _ in range(30):  # a loop that turns is left alone, whatever the time in all
        await asyncio.sleep(0.1)
    print("turned", flush=True)
    if {stuck}:
        time.sleep(60)
    guard.cancel()

asyncio.run(work())
time.sleep(2.5)
"""


@pytest.mark.parametrize("stuck", [True, False])
def test_a_process_whose_loop_stands_still_ends_and_says_where(stuck: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STUCK.format(stuck=stuck)], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout) == (int(stuck), "turned\n")
    assert ('File "<string>", line 11 in work' in done.stderr) is stuck, done.stderr
