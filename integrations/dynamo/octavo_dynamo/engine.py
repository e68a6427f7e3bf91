"""Implements Dynamo's `LLMEngine` with an Octavo service: one backend instance is one service, with all its workers."""

import argparse
import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import grpc
from dynamo._core import Context
from dynamo.common.backend import EngineConfig, LLMEngine, LlmRegistration, WorkerConfig
from dynamo.common.backend.health_check import build_health_check_payload
from dynamo.common.backend.publisher import ComponentSnapshot, KvEventSource, PushSource
from dynamo.common.configuration.groups.runtime_args import DynamoRuntimeArgGroup, DynamoRuntimeConfig
from dynamo.common.constants import DisaggregationMode
from dynamo.common.utils.runtime import parse_endpoint
from dynamo.common.utils.token_ids import normalize_request_token_ids
from dynamo.llm import KvEventPublisher
from dynamo.llm import exceptions as dynamo_errors

from octavo.client.errors import (
    Cancelled,
    InvalidRequest,
    NotFound,
    OctavoError,
    Overloaded,
    Unavailable,
    error_from,
)
from octavo.client.options import tls_credentials
from octavo_dynamo.cache import CacheMirror, Stored
from octavo_dynamo.chunks import Chunks
from octavo_dynamo.request import RefusedError, generate_request, name_here
from octavo_dynamo.service import Limits, Load, OctavoService

KEY_VARIABLE = "OCTAVO_API_KEY"
LOAD_INTERVAL_S = 0.5
END_S = 5.0  # how long to wait until cancelled streams have ended
PASS_ON_S = 1.0  # time for their last messages to be sent; Dynamo does not say when that is done
MISSES = 2  # in a row: a gateway that restarts at once should stay listed

logger = logging.getLogger("octavo_dynamo")


class OctavoEngine(LLMEngine):
    """Created by `from_args`. `connect` and later methods acquire its resources; `cleanup` releases them."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._service: OctavoService | None = None
        self._limits: Limits | None = None
        self._calls: dict[str, Any] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._snapshots: Any = None
        self._num_prompt_tokens = self._num_cached_tokens = 0
        self._is_closed = False
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._num_missed = 0
        self._load_came = asyncio.Event()

    # ---------------------------------------------------------------- lifecycle

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple["OctavoEngine", WorkerConfig]:
        """The engine and its configuration from the command line: our own flags and those of all Dynamo backends."""
        parser = argparse.ArgumentParser(
            prog="python -m octavo_dynamo",
            usage="%(prog)s --target HOST:PORT --model-path FOLDER [flags; --help tells them]",
            description="An Octavo service as a backend of NVIDIA Dynamo.",
        )
        _add_flags(parser)
        DynamoRuntimeArgGroup().add_arguments(parser)
        arguments = parser.parse_args(argv)
        if (wrong := _wrong(arguments)) is not None:
            parser.error(wrong)
        runtime = DynamoRuntimeConfig.from_cli_args(arguments)
        runtime.validate()
        endpoint = runtime.endpoint or f"dyn://{runtime.namespace}.backend.generate"
        runtime.namespace, runtime.component, runtime.endpoint = parse_endpoint(endpoint)
        config = WorkerConfig.from_runtime_config(
            runtime,
            model_name=arguments.model_path,
            served_model_name=arguments.served_model_name or arguments.octavo_model or None,
            disaggregation_mode=DisaggregationMode.AGGREGATED,
            enable_kv_routing=not arguments.disable_kv_routing,
        )
        return cls(arguments), config

    async def start(self, worker_id: int) -> EngineConfig:
        """The configuration that `connect` found. Raises StartError."""
        arguments, limits = self._arguments, await self.connect()
        return EngineConfig(
            model=arguments.model_path,
            served_model_name=arguments.served_model_name or limits.model,
            llm=LlmRegistration(
                context_length=limits.context_length,
                kv_cache_block_size=limits.block_size,
                total_kv_blocks=limits.total_blocks,
                max_num_seqs=limits.max_num_seqs,
                max_num_batched_tokens=limits.max_batched_tokens,
            ),
        )

    async def connect(self) -> Limits:
        """Wait until the service has the model; returns its limits. Idempotent. Best called before Dynamo's runtime
        exists, which handles no signals until `start` has returned. Raises StartError."""
        if self._limits is not None:
            return self._limits
        arguments = self._arguments
        tls = {name: getattr(arguments, f"tls_{name}") for name in ("ca_file", "cert_file", "key_file")}
        self._service = OctavoService(
            arguments.target,
            credentials=tls_credentials(**tls) if any(tls.values()) else None,
            api_key=os.environ.get(KEY_VARIABLE),
        )
        self._limits = await self._service.limits(arguments.octavo_model, timeout_s=arguments.start_timeout)
        return self._limits

    async def cleanup(self) -> None:
        """Wait for requests in flight, up to the drain grace, then release everything. The service itself keeps
        running. Idempotent."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._arguments.drain_grace):
                await self._is_idle.wait()
        self._is_closed = True
        await self._send_elsewhere()
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        service, self._service = self._service, None
        if service is not None:
            await service.close()

    async def _send_elsewhere(self) -> None:
        """End requests that still run, and give Dynamo time to pass that on. After cleanup Dynamo shuts down its
        runtime; a request whose end the frontend has not been told by then looks as if its caller had disconnected."""
        if not self._calls:
            return
        for call in [*self._calls.values()]:
            call.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await self._is_idle.wait()
        await asyncio.sleep(PASS_ON_S)

    async def health_check_payload(self) -> dict[str, Any] | None:
        """A request for one token from a one-token prompt."""
        return build_health_check_payload(bos_token_id=next(iter(self._limits.ends), 0) if self._limits else 0)

    # ---------------------------------------------------------------- requests

    async def generate(self, request: Any, context: Context) -> AsyncGenerator[dict[str, Any], None]:
        """The service's tokens as they arrive. Raises Dynamo's errors, by which its frontend chooses a status or
        migrates the request."""
        if self._service is None or self._limits is None:
            raise dynamo_errors.EngineShutdown("this backend is not connected to an Octavo service")
        normalize_request_token_ids(request)
        request_id = context.id() or ""
        try:
            translated = generate_request(request, request_id=request_id, model=self._limits.model)
        except RefusedError as error:
            raise dynamo_errors.InvalidArgument(str(error)) from None
        except (TypeError, ValueError) as error:
            raise dynamo_errors.InvalidArgument(f"the request cannot be told to Octavo: {error}") from None
        options = request.get("output_options") or {}
        ends = {*translated.stop.token_ids, *(() if translated.stop.ignore_eos else self._limits.ends)}
        chunks = Chunks(ends=ends, names_by_id=bool(options.get("return_tokens_as_token_ids")))
        if context.is_stopped():
            yield chunks.cancelled()
            return
        call = self._calls[request_id] = self._service.generate(translated)
        self._is_idle.clear()
        has_started = False
        try:
            async for response in call:
                has_started = True
                ready = chunks.of(response)
                self._count(chunks)
                for chunk in ready:
                    yield chunk
        except grpc.aio.AioRpcError as error:
            raise _dynamo_error(error_from(error), has_started=has_started) from None
        except asyncio.CancelledError:
            if not call.cancelled() or (task := asyncio.current_task()) is None or task.cancelling():
                raise
            if self._is_closed:  # another backend may continue the request
                raise dynamo_errors.EngineShutdown("this backend is shutting down") from None
            yield chunks.cancelled()
        finally:
            self._end(request_id, call)

    async def abort(self, context: Context) -> None:
        """End a request whose caller has left. It ends at its next step, even if nobody reads its chunks any more."""
        request_id = context.id() or ""
        if (call := self._calls.get(request_id)) is not None:
            self._end(request_id, call)

    def _end(self, request_id: str, call: Any) -> None:
        call.cancel()
        if self._calls.get(request_id) is call:
            del self._calls[request_id]
        if not self._calls:
            self._is_idle.set()

    def _count(self, chunks: Chunks) -> None:
        if chunks.usage is not None:
            self._num_prompt_tokens += chunks.usage.prompt_tokens
            self._num_cached_tokens += chunks.usage.cached_tokens

    # ---------------------------------------------------------------- what the router reads

    async def kv_event_sources(self) -> list[KvEventSource]:
        """One source: a service is one rank, whichever worker has a block."""
        loop = asyncio.get_running_loop()
        return [PushSource(on_ready=lambda publisher: _call_in(loop, self._follow_cache, publisher), dp_rank=0)]

    def component_metrics_dp_ranks(self) -> list[int]:
        """The only rank."""
        return [0]

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        """Set the publisher of the load."""
        self._snapshots = publisher

    async def on_endpoint_ready(self, endpoint: Any) -> None:
        """Start to follow the load."""
        if self._service is not None and self._limits is not None:
            follow = self._service.follow_load(self._limits.model, LOAD_INTERVAL_S, self._take_load)
            self._tasks += [asyncio.create_task(follow), asyncio.create_task(self._keep_listed(endpoint))]

    async def _keep_listed(self, endpoint: Any) -> None:
        """Keep this backend listed at the router, except while the service takes no requests."""
        is_listed = True
        while True:
            await self._load_came.wait()
            self._load_came.clear()
            is_wanted = self._num_missed < MISSES
            if is_wanted != is_listed:
                change = endpoint.register_endpoint_instance if is_wanted else endpoint.unregister_endpoint_instance
                try:
                    await change()
                except Exception as error:  # from Dynamo's discovery; retried with the next load
                    logger.error("the list of backends cannot be changed: %s", error)
                    continue
                is_listed = is_wanted
                logger.warning("the Octavo service %s", "is back: listed again" if is_listed else "is gone: not listed")

    def _follow_cache(self, publisher: KvEventPublisher) -> None:
        if self._service is None or self._limits is None:
            return
        mirror = CacheMirror(self._limits.block_size)
        size = self._limits.block_size

        def take(batch: Any) -> None:
            had_alien = bool(mirror.num_alien)
            for news in mirror.forget() if batch is None else mirror.take(batch):
                if isinstance(news, Stored):
                    publisher.publish_stored(news.token_ids, [size] * len(news.hashes), news.hashes, news.parent)
                else:
                    publisher.publish_removed(news.hashes)
            if mirror.num_alien and not had_alien:
                logger.error("blocks of the service are no longer %d tokens: restart this backend", size)

        self._tasks.append(asyncio.create_task(self._service.follow_cache(self._limits.model, take)))

    def _take_load(self, load: Load | None) -> None:
        self._num_missed = 0 if load is not None else self._num_missed + 1
        self._load_came.set()
        if self._snapshots is None or load is None:
            return
        prompt = self._num_prompt_tokens
        self._snapshots.publish(
            0,
            ComponentSnapshot(
                kv_used_blocks=load.used_blocks,
                kv_total_blocks=load.total_blocks,
                gpu_cache_usage=load.used_blocks / load.total_blocks if load.total_blocks else 0.0,
                kv_cache_hit_rate=self._num_cached_tokens / prompt if prompt else None,
                dp_rank=0,
            ),
        )


def _call_in(loop: asyncio.AbstractEventLoop, function: Any, argument: Any) -> None:
    """Call the function in the loop's thread, from any thread."""
    loop.call_soon_threadsafe(function, argument)


def _dynamo_error(error: OctavoError, *, has_started: bool) -> Exception:
    """Dynamo's error for ours. Only those for a lost service make the frontend try another backend."""
    match error:
        case InvalidRequest():
            fields = "; ".join(f"{name_here(each.field)}: {each.description}" for each in error.violations)
            return dynamo_errors.InvalidArgument(fields or str(error))
        case Unavailable() if error.reason:
            return dynamo_errors.EngineShutdown(str(error))
        case Unavailable():
            kind = dynamo_errors.Disconnected if has_started else dynamo_errors.CannotConnect
            return kind(f"the Octavo service is gone: {error}")
        case NotFound():
            return dynamo_errors.EngineShutdown(str(error))
        case Overloaded():
            return dynamo_errors.HttpError(429, str(error))
        case Cancelled():
            return dynamo_errors.Cancelled(str(error))
    return dynamo_errors.Unknown(str(error))


def _add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "The Octavo service", f"Its API key, where it asks for one, is read from {KEY_VARIABLE}."
    )
    group.add_argument("--target", default="127.0.0.1:50051", help="address of a gateway (default %(default)s)")
    group.add_argument(
        "--model-path",
        required=True,
        help="folder with config.json and the tokenizer's files, or the model's name on Hugging Face, for the frontend",
    )
    group.add_argument("--octavo-model", default="", help="name of the model at the service; unset: the only one")
    group.add_argument("--served-model-name", default="", help="name that callers use; unset: the service's")
    group.add_argument(
        "--start-timeout", type=float, default=300.0, help="seconds to wait for the service (%(default)s)"
    )
    group.add_argument(
        "--drain-grace", type=float, default=20.0, help="seconds for requests in flight after SIGTERM (%(default)s)"
    )
    group.add_argument("--disable-kv-routing", action="store_true", help="tell the router neither cache nor load")
    for name, what in (
        ("ca", "authority to trust"),
        ("cert", "certificate of this backend"),
        ("key", "its private key"),
    ):
        group.add_argument(f"--tls-{name}-file", help=f"PEM file of the {what}, for a service with TLS")


def _wrong(arguments: argparse.Namespace) -> str | None:
    """What is wrong with the arguments, in one sentence; None if nothing is."""
    path = Path(arguments.model_path)
    if path.is_dir() and not (path / "config.json").is_file():
        return f"--model-path: there is no config.json in {path}"
    if not path.is_dir() and (path.is_absolute() or arguments.model_path.startswith(".")):
        return f"--model-path: there is no folder {path}"
    if (arguments.tls_cert_file is None) != (arguments.tls_key_file is None):
        return "--tls-cert-file and --tls-key-file belong together"
    for name in ("ca", "cert", "key"):
        file = getattr(arguments, f"tls_{name}_file")
        if file is not None and not Path(file).is_file():
            return f"--tls-{name}-file: there is no file {file}"
    return None
