"""Waits until every process of a service answers, and reads what the summary shows."""

import asyncio
import contextlib
import http.client
import ssl
import urllib.request
from collections.abc import Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from octavo import AsyncClient
from octavo.cli.serve.launch import ProcessPlan, Role
from octavo.cli.serve.summary import ModelSummary, ServiceSummary
from octavo.cli.settings.addresses import join_address
from octavo.cli.settings.groups import ServeSettings
from octavo.client.errors import OctavoError
from octavo.client.options import NO_PROXY
from octavo.v1 import model_pb2

POLL_S = 0.1
IMPATIENT = (("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 100), NO_PROXY)
"""gRPC options for a client that waits for a server on this host to start."""

Samples = dict[str, list[tuple[dict[str, str], float]]]


async def wait_until_ready(
    address: str, plans: Sequence[ProcessPlan], *, metrics_host: str
) -> list[model_pb2.ModelInfo]:
    """The served models, as soon as every gateway and front end answers and every worker is registered. No timeout."""
    num_workers = sum(each.role is Role.WORKER for each in plans)
    gateways = [each for each in plans if each.role is Role.GATEWAY]
    await _wait_until_serving(address)
    async with AsyncClient(address, options=IMPATIENT) as client:
        while True:
            models = await _models(client)
            pages = [join_address(metrics_host, each.metrics_port) for each in gateways if each.metrics_port]
            if sum(each.num_workers for each in models) >= num_workers and await _all_know(pages, num_workers):
                break
            await asyncio.sleep(5 * POLL_S)  # less often, since the gateway logs each of these calls
    urls = [each.url for each in plans if each.url is not None]
    while not all([await asyncio.to_thread(answers_http, url) for url in urls]):  # noqa: ASYNC110  (another process)
        await asyncio.sleep(POLL_S)
    return models


async def _wait_until_serving(address: str) -> None:
    """Wait until the health service reports SERVING."""
    request = health_pb2.HealthCheckRequest(service="octavo.v1.InferenceService")
    async with grpc.aio.insecure_channel(address, options=list(IMPATIENT)) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while True:
            with contextlib.suppress(grpc.RpcError):
                answer = await stub.Check(request, timeout=2.0)
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            await asyncio.sleep(POLL_S)


def answers_http(url: str) -> bool:
    """Whether an OpenAI front end answers. Its certificate is not verified, since it is ours, on this machine."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with _opener(context).open(f"{url}/health", timeout=2.0) as response:
            return bool(response.status == 200)
    except (OSError, http.client.HTTPException):
        return False


def _opener(context: ssl.SSLContext | None = None) -> urllib.request.OpenerDirector:
    """For pages on this host; ignores proxies that the environment names."""
    return urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))


def read_metrics(url: str) -> Samples:
    """The samples of a /metrics page on this host, by name. Empty if there is no answer, or not a complete page of this
    kind: the process may have ended, and another program may have taken its port."""
    samples: Samples = {}
    try:
        with _opener().open(url, timeout=2.0) as response:
            families = list(text_string_to_metric_families(response.read().decode()))
    except (OSError, http.client.HTTPException, ValueError):
        return {}
    for family in families:
        for sample in family.samples:
            samples.setdefault(sample.name, []).append((dict(sample.labels), sample.value))
    return samples


async def _models(client: AsyncClient) -> list[model_pb2.ModelInfo]:
    try:
        return await client.models(timeout_s=2.0)
    except OctavoError:
        return []


async def _all_know(addresses: Sequence[str], num_workers: int) -> bool:
    """Whether each of several gateways has all workers. Asks their /metrics, since a call to the port that they share
    cannot choose its gateway."""
    if len(addresses) == 1:
        return True
    pages = await asyncio.gather(*(asyncio.to_thread(read_metrics, f"http://{each}/metrics") for each in addresses))
    return all(sum(value for _, value in page.get("octavo_worker_up", ())) >= num_workers for page in pages)


def service_summary(
    settings: ServeSettings,
    address: str,
    plans: Sequence[ProcessPlan],
    models: Sequence[ModelSummary],
    *,
    page: str | None,
    ready_after_s: float,
) -> ServiceSummary:
    """What the summary shows. page: address of the live page, as its gateway reported it."""
    host = settings.metrics_host
    return ServiceSummary(
        address=address,
        admin_address=join_address(settings.host, settings.admin_port) if settings.admin_port else None,
        page=page,
        metrics=[(each.name, join_address(host, each.metrics_port)) for each in plans if each.metrics_port],
        openai_url=next((f"{each.url}/v1" for each in plans if each.url is not None), None),
        models=models,
        ready_after_s=ready_after_s,
        access=_access(settings),
    )


def _access(settings: ServeSettings) -> tuple[str, ...]:
    """What callers need to get access, in words."""
    parts = [("TLS", settings.tls_cert_file), ("client certificate", settings.tls_client_ca_file)]
    return tuple(name for name, file in [*parts, ("API key", settings.api_keys_file)] if file is not None)


def model_summaries(served: Sequence[model_pb2.ModelInfo], loaded: Sequence[dict[str, Any]]) -> list[ModelSummary]:
    """A summary of each served model. loaded: fields of the "loaded" log lines of its workers."""
    return [_model_summary(info, [each for each in loaded if each.get("model") == info.name]) for info in served]


def _model_summary(info: model_pb2.ModelInfo, loaded: Sequence[dict[str, Any]]) -> ModelSummary:
    first = loaded[0] if loaded else {}
    block_size = int(first.get("block_size", 1))
    return ModelSummary(
        name=info.name,
        device=str(first.get("device", "unknown device")),
        products=str(first.get("products", "")),
        dtype=info.dtype,
        num_workers=info.num_workers,
        num_blocks=info.kv_capacity_tokens // block_size,
        block_size=block_size,
        max_model_len=info.max_model_len,
        num_host_blocks=int(first.get("num_host_blocks", 0)),
        host_bytes=int(first.get("host_bytes", 0)),
        notes=tuple(str(note) for note in first.get("notes") or ()),
    )
