"""The commands that ask a service one question: embed, cancel, models, health.

Embeddings are printed as one JSON object a line. Health asks grpc.health.v1 of a gateway, or /ready of a worker.
"""

import http.client
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from octavo.cli.client.connect import channel_options_of, connect, credentials_of, metadata_of
from octavo.cli.client.json_fields import json_fields, numeric_fields
from octavo.cli.errors import usage
from octavo.cli.settings.addresses import join_address, reachable
from octavo.cli.settings.groups import CallSettings, HealthSettings, RequestSettings
from octavo.client.embeddings import EmbedFields
from octavo.client.options import open_channel

TIMEOUT_S = 3.0
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a worker is never behind a proxy
_REFUSALS = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
EMBED_BATCH = 256  # inputs that one call takes


def embed(settings: RequestSettings, texts: Sequence[str], *, pooling: str, normalize: bool) -> int:
    """Embed all texts, in as many calls as they need."""
    fields = EmbedFields(pooling=pooling, normalize=normalize)
    if settings.model_name:
        fields["model"] = settings.model_name
    with connect(settings) as client:
        for start in range(0, len(texts), EMBED_BATCH):
            batch = texts[start : start + EMBED_BATCH]
            try:
                response = client.embed(batch, timeout_s=settings.timeout_s, **fields)
            except ValueError as error:
                raise usage("bad request", str(error), "give texts of UTF-8") from None
            for text, embedding in zip(batch, response.embeddings, strict=True):
                figures = json_fields(embedding)
                _write({"text": text} | figures)
    return 0


def read_texts(words: Sequence[str]) -> list[str]:
    """The arguments, or the lines of stdin for `-` or none. Raises CliError if there is no text."""
    if list(words) not in ([], ["-"]):
        return list(words)
    texts = [] if sys.stdin.isatty() else [line.rstrip("\r\n") for line in sys.stdin if line.strip()]
    if not texts:
        raise usage("no texts", "neither the command line nor stdin has one", 'octavo embed "a fox" "a dog"')
    return texts


def _write(entry: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(entry, ensure_ascii=False) + "\n")


def cancel(settings: CallSettings, request_id: str) -> int:
    """Print what became of the request. Returns 0 if it was in flight, 1 if it was not or may still be running."""
    with connect(settings) as client:
        response = client.cancel(request_id)
    print("cancelled" if response.found else "not in flight")  # noqa: T201
    if response.num_unreachable_gateways:
        print(  # noqa: T201
            f"{response.num_unreachable_gateways} gateways did not answer, where it may go on: cancel again",
            file=sys.stderr,
        )
        return 1
    return 0 if response.found else 1


def show_models(settings: CallSettings, *, as_json: bool) -> int:
    """Print a table, one row per model, or one JSON object a line."""
    with connect(settings) as client:
        models = client.models()
    if as_json:
        for model in models:
            print(json.dumps(numeric_fields(model)))  # noqa: T201
        return 0
    table = Table()
    longest = max((len(model.name) for model in models), default=0)
    table.add_column("model", overflow="fold", no_wrap=longest <= 16)  # names and fingerprints are copied
    for title in ("dtype", "cache", "max tokens", "workers", "KV tokens"):
        table.add_column(title, overflow="fold")
    table.add_column("fingerprint", no_wrap=True, min_width=12)
    for model in models:
        table.add_row(
            escape(model.name),
            model.dtype,
            model.kv_cache_dtype or "-",
            f"{model.max_model_len:,}",
            str(model.num_workers),
            f"{model.kv_capacity_tokens:,}",
            model.fingerprint[:12],
        )
    Console().print(table)
    return 0


def gateway_health(settings: HealthSettings, *, service: str) -> int:
    """Print the state. Returns 0 if it is SERVING. service: a gRPC service, or "" for the process as such."""
    state = _ask(settings, service)
    print(state)  # noqa: T201
    return 0 if state == "SERVING" else 1


def worker_health(settings: HealthSettings) -> int:
    """Print what the worker reports, or UNREACHABLE, as while it loads. Returns 0 if it is ready."""
    address = join_address(reachable(settings.metrics_host), settings.worker_metrics_port)
    try:
        with _OPENER.open(f"http://{address}/ready", timeout=TIMEOUT_S) as answer:
            print(answer.read().decode().strip())  # noqa: T201
            return 0
    except urllib.error.HTTPError as error:
        print(error.read().decode(errors="replace").strip())  # noqa: T201
    except (OSError, http.client.HTTPException):
        print("UNREACHABLE")  # noqa: T201
    return 1


def _ask(settings: HealthSettings, service: str) -> str:
    """SERVING, NOT_SERVING, SERVICE_UNKNOWN, REFUSED (no key, or the wrong one) or UNREACHABLE."""
    options, metadata = channel_options_of(settings), metadata_of(settings)
    with open_channel(join_address(settings.host, settings.port), credentials_of(settings), options) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            answer = stub.Check(request, timeout=TIMEOUT_S, metadata=metadata)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                return "SERVICE_UNKNOWN"
            return "REFUSED" if error.code() in _REFUSALS else "UNREACHABLE"
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
