"""`octavo serve` as a user has it, with the oracle in the place of a model: commands against it, faults, the end."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from octavo import Client
from octavo.cli.main import main
from octavo.cli.serve.readiness import read_metrics
from octavo.client.errors import OctavoError
from tests.support.services.service import Service, environment, free_port, serve

ORACLE = ("--runner=oracle", "--num-blocks=512", "--max-model-len=2048")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serve(tmp_path_factory.mktemp("service"), *ORACLE, "--oracle-eos-every=1000000") as running:
        yield running


@pytest.fixture(autouse=True)
def plain_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")


def wait_for_summary(service: Service) -> str:
    deadline_s = time.monotonic() + 60
    while "octavo chat --port" not in (text := service.log.read_text()):
        assert time.monotonic() < deadline_s, text
        time.sleep(0.05)
    return text


def test_the_summary_tells_addresses_model_and_room(service: Service) -> None:
    text = wait_for_summary(service)
    assert f"gRPC:     127.0.0.1:{service.port}" in text
    assert f"admin:    127.0.0.1:{service.admin_port}" in text
    assert "512 blocks × 16 = 8,192 tokens" in text
    assert "4 requests of 2,048 tokens at once" in text
    assert f"octavo chat --port {service.port}" in text
    assert (service.log.parent / "run/ready").read_text().strip() == service.target


def test_generate_gives_the_same_text_streamed_whole_and_by_ids(
    service: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["generate", "once upon", "--port", str(service.port), "--max-tokens", "9", "--seed", "7"]
    assert main([*asked, "--receipt"]) == 0
    streamed = capsys.readouterr()
    assert main([*asked, "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert streamed.out == whole["text"] + "\n"
    assert (whole["finished"]["reason"], whole["finished"]["usage"]["completion_tokens"]) == ("FINISH_REASON_LENGTH", 9)
    assert "first token" in streamed.err
    assert main([*asked, "--token-ids"]) == 0
    assert [int(word) for word in capsys.readouterr().out.split()] == whole["token_ids"]
    with Client(service.target) as client:
        ids = client.tokenize("once upon")
    assert main(["generate", "--as", "ids", *map(str, ids), *asked[2:]]) == 0
    assert capsys.readouterr().out == streamed.out


def test_a_prompt_may_come_from_stdin(
    service: Service, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_PORT", str(service.port))
    monkeypatch.setenv("OCTAVO_MAX_TOKENS", "3")
    monkeypatch.setenv("OCTAVO_SEED", "7")
    assert main(["generate", "from a pipe"]) == 0
    expected = capsys.readouterr().out
    done = subprocess.run(
        [sys.executable, "-m", "octavo.cli.main", "generate", "-"],
        input="from a pipe",
        env=environment() | {name: os.environ[name] for name in os.environ if name.startswith("OCTAVO_")},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, expected, "")


def test_a_chat_remembers_until_it_is_reset(service: Service) -> None:
    lines = ["one", "two", "/reset", "two", "/nonsense", "/exit", "never"]
    done = subprocess.run(
        [sys.executable, "-m", "octavo.cli.main", "chat", f"--port={service.port}", "--max-tokens=4", "--seed=7"],
        input="\n".join(lines),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    with Client(service.target) as client:

        def answer(*turns: tuple[str, str]) -> str:
            return client.complete(messages=turns, max_tokens=4, seed=7).text

        first = answer(("user", "one"))
        second = answer(("user", "one"), ("assistant", first), ("user", "two"))
        anew = answer(("user", "two"))
    assert second != anew
    said = done.stdout
    assert said.index(first) < said.index(second) < said.index("starts anew") < said.rindex(anew)
    assert "never" not in said


def test_models_health_and_an_unknown_model(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    port = ["--port", str(service.port)]
    assert main(["models", *port]) == 0
    assert "folio-chat" in capsys.readouterr().out
    assert main(["health", *port]) == 0
    assert capsys.readouterr().out == "SERVING\n"
    assert main(["generate", "x", "--model-name", "folio-cat", *port]) == 1
    assert "MODEL_NOT_FOUND" in capsys.readouterr().err


def test_a_field_that_the_server_refuses_is_named(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "x", "--typical-p", "0", "--port", str(service.port)]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "error: the request failed: INVALID_FIELD"
    assert lines[1].strip().startswith("sampling.typical_p: ")


def test_a_busy_port_names_its_flag(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["serve", "--runner=oracle", "--metrics-port=0", "--worker-metrics-port=0", f"--port={service.port}"]) == 1
    )
    assert [line.strip() for line in capsys.readouterr().err.splitlines()] == [
        f"error: port {service.port} is busy",
        f"another process listens on 127.0.0.1:{service.port}",
        "→ stop it, or choose another port with --port (0 takes a free one)",
    ]


def test_a_killed_worker_is_started_again_and_the_next_request_succeeds(service: Service) -> None:
    wait_for_summary(service)
    before = service.children("worker")[0]
    before.kill()
    before.wait(60)
    deadline_s = time.monotonic() + 60
    reasons = set()
    with Client(service.target) as client:
        while time.monotonic() < deadline_s:
            try:
                answer = client.complete(text="again", max_tokens=2)
                break
            except OctavoError as error:
                reasons.add(error.reason)
    assert answer.finished.usage.completion_tokens == 2
    assert reasons <= {"NO_WORKER", "WORKER_LOST"}
    assert [each.pid for each in service.children("worker")] != [before.pid]


def start(folder: Path, *arguments: str, port: int) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "octavo.cli.main",
        "serve",
        f"--port={port}",
        "--metrics-port=0",
        "--worker-metrics-port=0",
    ]
    with (folder / "service.log").open("wb") as output:
        return subprocess.Popen(
            [*command, f"--run-dir={folder / 'run'}", *ORACLE, *arguments],
            cwd=folder,
            env=environment(),
            stdout=output,
            stderr=output,
        )


def wait_until_ready(process: subprocess.Popen[bytes], folder: Path) -> list[psutil.Process]:
    """Every process of the service but the supervisor."""
    deadline_s = time.monotonic() + 120
    while not (folder / "run/ready").exists():
        assert process.poll() is None, (folder / "service.log").read_text()
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    return psutil.Process(process.pid).children(recursive=True)


def num_services(process: subprocess.Popen[bytes]) -> int:
    """Gateways and workers: the supervisor's own children. Those that gateways render chats in are the gateways', and
    come and go."""
    return len(psutil.Process(process.pid).children())


def test_a_supervisor_that_is_killed_leaves_no_orphan_and_its_ports_free(tmp_path: Path) -> None:
    port = free_port()
    process = start(tmp_path, port=port)
    children = wait_until_ready(process, tmp_path)
    assert num_services(process) == 2
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(children, timeout=60)
    for orphan in alive:
        orphan.kill()
    assert alive == []
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))


def test_a_drain_lets_a_stream_end_and_the_second_signal_does_not(tmp_path: Path) -> None:
    port = free_port()
    process = start(tmp_path, "--oracle-step-delay-s=0.02", "--oracle-eos-every=1000000", port=port)
    children = wait_until_ready(process, tmp_path)
    ended: dict[str, object] = {}
    begun = {name: threading.Event() for name in ("short", "long")}

    def read(name: str, max_tokens: int) -> None:
        with Client(f"127.0.0.1:{port}") as client:
            stream = client.stream(text="x", max_tokens=max_tokens)
            try:
                for _ in stream:
                    begun[name].set()
                ended[name] = stream.finished.usage.completion_tokens if stream.finished else None
            except OctavoError as error:
                ended[name] = error.reason

    readers = [threading.Thread(target=read, args=each) for each in (("short", 80), ("long", 2000))]
    for reader in readers:
        reader.start()
    assert all(each.wait(60) for each in begun.values())
    process.send_signal(signal.SIGTERM)
    readers[0].join(60)
    assert ended == {"short": 80}
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0, (tmp_path / "service.log").read_text()
    readers[1].join(60)
    assert ended["long"] == "DRAINING"
    assert psutil.wait_procs(children, timeout=60)[1] == []
    assert not (tmp_path / "run").exists()


def test_a_log_that_nobody_reads_stops_nothing(tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "octavo.cli.main", "serve", f"--port={port}", "--metrics-port=0"]
    command += ["--worker-metrics-port=0", f"--run-dir={tmp_path / 'run'}", *ORACLE]
    reading, writing = os.pipe()
    process = subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=writing, stderr=writing)
    os.close(writing)
    os.close(reading)
    try:
        deadline_s = time.monotonic() + 120
        while not (tmp_path / "run/ready").exists():
            assert process.poll() is None
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        with Client(f"127.0.0.1:{port}") as client:
            for _ in range(3):
                client.complete(text="x", max_tokens=2)
    finally:
        process.terminate()
        process.wait(60)


def gateway_metrics_ports(folder: Path) -> list[int]:
    """As the summary tells them."""
    return [int(port) for port in re.findall(r":(\d+)/metrics  \(gateway-", (folder / "service.log").read_text())]


def num_completed(metrics_port: int) -> int:
    samples = read_metrics(f"http://127.0.0.1:{metrics_port}/metrics").get("octavo_requests_total", [])
    return sum(int(value) for labels, value in samples if labels["method"].endswith("Complete"))


def test_two_gateways_on_one_port_and_two_models(tmp_path: Path) -> None:
    port = free_port()
    models = ("--model=one=x", "--model=two=y", f"--model-port=two={(of_two := free_port())}")
    process = start(tmp_path, "--gateways=2", *models, "--workers=2", "--heartbeat-timeout-s=60", port=port)
    try:
        wait_until_ready(process, tmp_path)
        assert num_services(process) == 6
        asked = ["health", f"--port={port}"]
        for model, code in (("", 0), ("one", 0), ("two", 0), ("three", 1)):
            assert main([*asked, *([f"--model-name={model}"] if model else [])]) == code
        with Client(f"127.0.0.1:{of_two}") as client:
            assert client.complete(text="x", max_tokens=2).model == "two"
        texts = set()
        for _ in range(16):  # each connection lands on either gateway
            with Client(f"127.0.0.1:{port}", options=[("grpc.use_local_subchannel_pool", 1)]) as client:
                assert {(model.name, model.num_workers) for model in client.models()} == {("one", 2), ("two", 2)}
                texts.add(client.complete(model="two", text="x", max_tokens=5, seed=7).text)
        assert len(texts) == 1
        deadline_s = time.monotonic() + 60
        while sum(answered := [num_completed(each) for each in gateway_metrics_ports(tmp_path)]) < 17:
            assert time.monotonic() < deadline_s, answered  # a caller can be faster than the count
        assert (len(answered), sum(answered)) == (2, 17)
        assert all(answered)
    finally:
        process.terminate()
        assert process.wait(60) == 0


def test_a_worker_that_cannot_start_ends_the_service_with_its_reason(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "octavo.cli.main",
        "serve",
        "--port=0",
        "--metrics-port=0",
        "--worker-metrics-port=0",
    ]
    done = subprocess.run(
        [*command, "--max-num-seqs=64", "--max-batch-tokens=8", "--runner=oracle"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-3:] == [
        "error: worker-0 cannot start: bad value",
        "  max_batch_tokens (8) must be at least max_num_seqs (64)",
        "  → see --help",
    ]
    assert done.stderr.count("max_batch_tokens") == done.stderr.count("error:") == 1


def test_the_tour_ends_well_and_shows_answers_receipts_and_metrics(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "octavo.cli.main", "tour", "--runner=oracle"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("first token  ") == 3
    assert done.stdout.index("Octavo is ready") < done.stdout.index("What is your name?")
    assert "generated tokens" in done.stdout
    assert re.search(r"the live page was at http://127\.0\.0\.1:\d+/ while", done.stdout)
    assert "stopped with exit code 0" in done.stdout
