"""`octavo tour`: starts a service, asks it three questions, shows receipts, metrics and where its page is, stops it."""

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from rich.console import Console
from rich.table import Table

from octavo import Client
from octavo.cli.client.receipt import receipt_table
from octavo.cli.errors import CliError
from octavo.cli.serve.launch import READY_FILE, command_line, environment, write_settings
from octavo.cli.serve.ports import free_port
from octavo.cli.serve.readiness import IMPATIENT, Samples, read_metrics
from octavo.cli.settings.groups import ServeSettings
from octavo.wire.run_dir import folder_of_sockets

QUESTIONS = ("What is your name?", "Do you like music?", "Tell me a story about a fox.")
MAX_TOKENS = 200
NUM_BLOCKS = 1024  # enough for three questions; the default would take most of the memory
NUM_THREADS = 1  # on a busy machine, two threads that wait for each other made a step of this model ten times longer
STOP_TIMEOUT_S = 60.0
READY_POLL_S = 0.05
FILE_PATIENCE_S = 3.0  # for the file that says ready, once the service says so itself
HEALTH_TIMEOUT_S = 2.0
HOST = "127.0.0.1"
OPEN_DOOR = {"tls_cert_file": None, "tls_key_file": None, "tls_client_ca_file": None, "api_keys_file": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A line of the table: its label, the samples that it sums, and its format."""

    label: str
    sample: str
    show: Callable[[float], str] = "{:,.0f}".format


FIGURES = (
    Figure(label="requests finished", sample="octavo_request_success_total"),
    Figure(label="prompt tokens", sample="octavo_prompt_tokens_total"),
    Figure(label="generated tokens", sample="octavo_generation_tokens_total"),
    Figure(label="prefix cache hits (tokens)", sample="octavo_prefix_cache_hits_total"),
    Figure(label="preemptions", sample="octavo_num_preemptions_total"),
    Figure(label="KV blocks leaked", sample="octavo_kv_blocks_leaked"),
)
MEANS = (
    ("time to first token, mean", "octavo_time_to_first_token_seconds"),
    ("inter-token latency, mean", "octavo_inter_token_latency_seconds"),
    ("engine step, mean", "octavo_step_time_seconds"),
)


def metric_rows(pages: Sequence[Samples]) -> list[tuple[str, str]]:
    """Label and value of each figure that is present."""
    rows = []
    for figure in FIGURES:
        values = [value for page in pages for _, value in page.get(figure.sample, ())]
        rows += [(figure.label, figure.show(sum(values)))] if values else []
    for label, name in MEANS:
        total, count = _sum(pages, name + "_sum"), _sum(pages, name + "_count")
        rows += [(label, f"{total / count * 1000:,.2f} ms")] if count else []
    return rows


def metrics_table(pages: Sequence[Samples]) -> Table:
    """The figures as a table for a terminal."""
    table = Table("from /metrics", "value", title_justify="left")
    for label, value in metric_rows(pages):
        table.add_row(label, value)
    return table


def _sum(pages: Sequence[Samples], name: str) -> float:
    return sum(value for page in pages for _, value in page.get(name, ()))


def tour(settings: ServeSettings) -> int:
    """Run the tour on free ports. Returns 0 if every step worked. Raises CliError if the service does not start."""
    console = Console()
    taken: set[int] = set()
    port, gateway_metrics, worker_metrics, page = (free_port(HOST, taken) for _ in range(4))
    changes = {"port": port, "metrics_port": gateway_metrics, "worker_metrics_port": worker_metrics}
    changes |= {"page_port": page}
    with _service(_tour_settings(settings, changes)) as process, Client(f"{HOST}:{port}") as client:
        for question in QUESTIONS:
            _ask(client, question, console)
        pages = [read_metrics(f"http://{HOST}:{each}/metrics") for each in (gateway_metrics, worker_metrics)]
        console.print(metrics_table(pages))
        _show_page(f"http://{HOST}:{page}/", console)
        process.send_signal(signal.SIGTERM)
        code = process.wait(STOP_TIMEOUT_S)
    console.print(f"[dim]the service has drained and stopped with exit code {code}[/]")
    return 0 if code == 0 else 1


def _show_page(address: str, console: Console) -> None:
    """On a terminal, keep the service running until Enter, so that the page can be looked at."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        console.print(f"the live page was at {address} while this ran; `octavo serve` has it for as long as you like")
        return
    console.print(f"[bold]look at the live page:[/] [bold green]{address}[/]")
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        console.input("[dim]Enter stops the service[/] ")


def _tour_settings(settings: ServeSettings, changes: dict[str, int]) -> ServeSettings:
    """The given settings with free ports, and a small pool and a quiet log unless others were asked for."""
    small = {} if settings.num_blocks else {"num_blocks": NUM_BLOCKS}
    small |= {} if settings.num_threads else {"num_threads": NUM_THREADS}
    quiet = {"log_level": "error"} if settings.log_level == "info" else {}
    quiet |= {"log_format": "console"} if settings.log_format == "auto" else {}
    return settings.model_copy(
        update={
            "host": HOST,
            "metrics_host": HOST,
            "page_host": HOST,
            "page": "on",
            "admin_port": None,
            "model_port": (),
        }
        | OPEN_DOOR
        | small
        | quiet
        | changes
    )


@contextmanager
def _service(settings: ServeSettings) -> Iterator[subprocess.Popen[bytes]]:
    """`octavo serve` as a child process, ready; everything of it is gone at the end."""
    with folder_of_sockets("octavo-tour-") as made:
        run_dir = made / "run"
        file = write_settings(settings.model_dump() | {"run_dir": run_dir}, made / "serve.toml")
        process = subprocess.Popen(command_line("serve", file), env=environment(), start_new_session=True)
        try:
            _wait_until_ready(process, run_dir / READY_FILE, settings)
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


def _wait_until_ready(process: subprocess.Popen[bytes], ready_file: Path, settings: ServeSettings) -> None:
    """The ready file comes last. If it cannot be written (a full disk), the service goes on without it."""
    started_s, serving_s = time.monotonic(), None
    with grpc.insecure_channel(f"{HOST}:{settings.port}", options=IMPATIENT) as channel:
        asking = _is_serving(channel)
        while not ready_file.exists():
            now_s = time.monotonic()
            if process.poll() is not None:
                numbers = f"`octavo serve` ended with exit code {process.returncode}"
                raise CliError("the service did not start", numbers, "its own lines above say why")
            if asking.done():
                serving_s = (serving_s or now_s) if _serves(asking) else None
                asking = _is_serving(channel)
            if serving_s is not None and now_s - serving_s > FILE_PATIENCE_S:
                return
            if now_s - started_s > settings.startup_timeout_s:
                numbers = f"after {settings.startup_timeout_s:g} s"
                raise CliError("the service is not ready", numbers, "give a longer --startup-timeout-s")
            time.sleep(READY_POLL_S)


def _is_serving(channel: grpc.Channel) -> "grpc.Future[HealthCheckResponse]":
    """Whether requests are taken for all its models."""
    request = HealthCheckRequest(service="octavo.v1.InferenceService")
    asked = HealthStub(channel).Check.future(request, timeout=HEALTH_TIMEOUT_S)
    return cast("grpc.Future[HealthCheckResponse]", asked)


def _serves(asked: "grpc.Future[HealthCheckResponse]") -> bool:
    return asked.exception() is None and asked.result().status == HealthCheckResponse.SERVING


def _ask(client: Client, question: str, console: Console) -> None:
    """Print the question, the answer as it comes, and the receipt."""
    console.rule(f"[bold cyan]{question}", align="left")
    stream = client.stream(messages=[("user", question)], max_tokens=MAX_TOKENS, temperature=0.0, timeout_s=120.0)
    for text in stream:
        console.out(text, end="", highlight=False)
    console.print()
    if stream.finished is not None:
        console.print(receipt_table(stream.finished))
