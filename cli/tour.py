"""`octavo tour`: a whole service seen at work by one command: started, asked three questions, measured, stopped."""

import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from octavo.client import Client
from rich.console import Console

from cli.errors import CliError
from cli.launch import command_line, environment, write_settings
from cli.metrics_table import metrics_table
from cli.ports import free_port
from cli.readiness import read_metrics
from cli.receipt import receipt_table
from cli.run_folder import READY_FILE
from cli.settings import ServeSettings

QUESTIONS = ("What is your name?", "Do you like music?", "Tell me a story about a fox.")
MAX_TOKENS = 200
NUM_BLOCKS = 1024  # enough for three questions; the default would take most of the memory
NUM_THREADS = 1  # on a busy machine, two threads that wait for each other made a step of this model ten times longer
STOP_TIMEOUT_S = 60.0
READY_POLL_S = 0.05
HOST = "127.0.0.1"
OPEN_DOOR = {"tls_cert_file": None, "tls_key_file": None, "tls_client_ca_file": None, "api_keys_file": None}


def tour(settings: ServeSettings) -> int:
    """Run the tour on free ports; 0 where every step worked. Raises CliError where the service does not start."""
    console = Console()
    taken: set[int] = set()
    port, gateway_metrics, worker_metrics = (free_port(HOST, taken) for _ in range(3))
    changes = {"port": port, "metrics_port": gateway_metrics, "worker_metrics_port": worker_metrics}
    with _service(_tour_settings(settings, changes)) as process, Client(f"{HOST}:{port}") as client:
        for question in QUESTIONS:
            _ask(client, question, console)
        pages = [read_metrics(f"http://{HOST}:{each}/metrics") for each in (gateway_metrics, worker_metrics)]
        console.print(metrics_table(pages))
        process.send_signal(signal.SIGTERM)
        code = process.wait(STOP_TIMEOUT_S)
    console.print(f"[dim]the service has drained and stopped with exit code {code}[/]")
    return 0 if code == 0 else 1


def _tour_settings(settings: ServeSettings, changes: dict[str, int]) -> ServeSettings:
    """The settings given, on our ports, with a small pool and a quiet log unless others were asked for."""
    small = {} if settings.num_blocks else {"num_blocks": NUM_BLOCKS}
    small |= {} if settings.num_threads else {"num_threads": NUM_THREADS}
    quiet = {"log_level": "error"} if settings.log_level == "info" else {}
    quiet |= {"log_format": "console"} if settings.log_format == "auto" else {}
    return settings.model_copy(
        update={"host": HOST, "metrics_host": HOST, "admin_port": None, "model_port": ()}
        | OPEN_DOOR
        | small
        | quiet
        | changes
    )


@contextmanager
def _service(settings: ServeSettings) -> Iterator[subprocess.Popen[bytes]]:
    """`octavo serve` in a process of its own, ready; nothing of it is left at the end."""
    with tempfile.TemporaryDirectory(prefix="octavo-tour-") as made:
        run_dir = Path(made) / "run"
        file = write_settings(settings.model_dump() | {"run_dir": run_dir}, Path(made) / "serve.toml")
        process = subprocess.Popen(command_line("serve", file), env=environment(), start_new_session=True)
        try:
            _wait_until_ready(process, run_dir / READY_FILE, settings.startup_timeout_s)
            yield process
        finally:
            _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], ready_file: Path, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not ready_file.exists():
        if process.poll() is not None:
            numbers = f"`octavo serve` ended with exit code {process.returncode}"
            raise CliError("the service did not start", numbers, "its own lines above say why")
        if time.monotonic() > deadline_s:
            raise CliError("the service is not ready", f"after {timeout_s:g} s", "give a longer --startup-timeout-s")
        time.sleep(READY_POLL_S)


def _ask(client: Client, question: str, console: Console) -> None:
    """Print the question, the answer as it comes, and the receipt."""
    console.rule(f"[bold cyan]{question}", align="left")
    stream = client.stream(messages=[("user", question)], max_tokens=MAX_TOKENS, temperature=0.0, timeout_s=120.0)
    for text in stream:
        console.out(text, end="", highlight=False)
    console.print()
    if stream.finished is not None:
        console.print(receipt_table(stream.finished))
