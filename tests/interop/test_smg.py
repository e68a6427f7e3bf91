"""The `smg` gateway of the field in front of `octavo serve`, driven by the `openai` client: real processes all."""

import json
import re
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2 as vllm  # type: ignore[import-untyped]

from octavo import Client
from tests.support.services.interop import PINS, leave_a_stream, run_inside
from tests.support.services.scrape import scrape
from tests.support.services.service import Service
from tests.support.services.smg import smg

STORY = "The fox and the crow lived in the old wood by the river, and number {} of them had a tale to tell. "
TAILS = ("Who speaks?", "What happens then?", "Why?", "Where do they live?")
BLOCK = 16


@pytest.fixture(scope="module")
def endpoint(smg_python: Path, service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An OpenAI-compatible base URL."""
    folder = tmp_path_factory.mktemp("smg")
    with smg(smg_python, folder, [service.target], "--policy=round_robin", "--tool-call-parser=qwen") as url:
        yield f"{url}/v1"


def test_the_openai_client_gets_what_it_asks_for(smg_python: Path, endpoint: str, service: Service) -> None:
    for driver in ("openai_client", "openai_smg"):
        run_inside(smg_python, driver, timeout_s=240, OPENAI_BASE_URL=endpoint)
    service.wait_until_idle()
    assert [list(audit.violations) for audit in service.audit()] == [[]]


def generated_tokens(service: Service) -> float:
    """That its gateway has passed on; the summary tells where its metrics are."""
    (port,) = re.findall(r":(\d+)/metrics  \(gateway-", service.log.read_text())
    return scrape(int(port)).total("octavo_gateway_generation_tokens_total")


def test_a_caller_that_leaves_frees_its_blocks(smg_python: Path, endpoint: str, service: Service) -> None:
    generated = generated_tokens(service)
    leave_a_stream(smg_python, service, OPENAI_BASE_URL=endpoint)
    assert generated_tokens(service) - generated < 1500  # not the 1,900 that it asked for


# ---------------------------------------------------------------- what it sends


class Recorder(grpc.GenericRpcHandler):
    """Passes every call on to a service as it is, and keeps the requests by method."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.requests: dict[str, list[bytes]] = {}
        self._channel = channel

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        name = details.method.rpartition("/")[2]

        def kept(request: bytes) -> bytes:
            self.requests.setdefault(name, []).append(request)
            return request

        def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
            try:
                return bytes(self._channel.unary_unary(details.method)(kept(request), timeout=60))
            except grpc.RpcError as error:
                context.abort(error.code(), error.details())

        def answers(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
            call = self._channel.unary_stream(details.method)(kept(request), timeout=60)
            context.add_callback(call.cancel)
            try:
                yield from call
            except grpc.RpcError as error:
                context.abort(error.code(), error.details())

        if name in ("Generate", "GetTokenizer", "SubscribeKvEvents"):
            return grpc.unary_stream_rpc_method_handler(answers)
        return grpc.unary_unary_rpc_method_handler(answer)


@pytest.fixture
def recorder(service: Service) -> Iterator[tuple[Recorder, str]]:
    """What stands between smg and the service, and its address."""
    with grpc.insecure_channel(service.target) as channel:
        recorder, server = Recorder(channel), grpc.server(ThreadPoolExecutor(8))
        server.add_generic_rpc_handlers((recorder,))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield recorder, f"127.0.0.1:{port}"
        server.stop(grace=1).wait(5)


def embeddings(url: str, given: object) -> list[list[float]]:
    body = json.dumps({"model": "folio-chat", "input": given}).encode()
    request = urllib.request.Request(f"{url}/v1/embeddings", data=body, headers={"content-type": "application/json"})
    for is_last in (False, False, False, False, True):
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return [each["embedding"] for each in json.load(response)["data"]]
        except urllib.error.HTTPError as error:
            # On a busy machine smg holds a service that answered its look late for gone, until it looks again.
            if error.code != 503 or is_last:
                raise
            time.sleep(2)
    raise AssertionError("the last try returns or raises")


def test_a_list_of_texts_reaches_us_as_one_prompt(
    smg_python: Path, service: Service, recorder: tuple[Recorder, str], tmp_path: Path
) -> None:
    """The list is lost before us: one call, one text. What we say to that text is right."""
    recorded, target = recorder
    with smg(smg_python, tmp_path, [target], "--policy=round_robin") as url:
        listed = embeddings(url, ["A fox.", "A crow."])
    asked = [vllm.EmbedRequest.FromString(each) for each in recorded.requests["Embed"]]
    assert [each.tokenized.original_text for each in asked] == ["A fox. A crow."]
    with Client(service.target) as client:
        ours = client.embed([[*asked[0].tokenized.input_ids], "A fox. A crow.", "A fox.", "A crow."]).embeddings
    assert len(ours) == 4  # a vector for each, where the list reaches us
    assert listed == [pytest.approx(list(vector.values), abs=1e-5) for vector in ours[:1]]
    assert list(ours[0].values) == pytest.approx(list(ours[1].values), abs=1e-5)


# ---------------------------------------------------------------- two services


def prompts_of(first: int) -> list[str]:
    """Four long beginnings, ten blocks and more each."""
    return ["".join(STORY.format(8 * index + line) for line in range(8)) for index in range(first, first + 4)]


def seed(service: Service, beginnings: list[str]) -> list[int]:
    """Ask a service itself, behind the back of the gateway in front; the tokens of each prompt."""
    with Client(service.target) as client:
        streams = [client.stream(messages=[("user", text + TAILS[0])], max_tokens=2) for text in beginnings]
        for stream in streams:
            list(stream)
    return [stream.finished.usage.prompt_tokens for stream in streams]


def cached_tokens(python: Path, url: str, prompts: list[str]) -> list[int]:
    done = subprocess.run(
        [str(python), str(PINS / "drivers" / "cached_tokens.py")],
        env={"OPENAI_BASE_URL": f"{url}/v1"},
        input=json.dumps(prompts),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [int(each) for each in json.loads(done.stdout)]


def num_cached(service: Service) -> int:
    service.wait_until_idle()
    (audit,) = service.audit()
    return audit.num_cached_blocks


ALWAYS_BY_CACHE = ("--policy=cache_aware", "--worker-warmup-secs=0", "--worker-warmup-divert-every=0")


def test_prompts_go_where_their_prefix_is_as_our_events_tell(
    smg_python: Path, service: Service, second_service: Service, tmp_path: Path
) -> None:
    """What a service has is told by events alone: it was asked directly. Prefixes from before the gateway's start come
    with the state that it is told first, later ones with the changes."""
    early_at_second = prompts_of(0)
    early_tokens = seed(second_service, early_at_second)
    with smg(smg_python, tmp_path, [service.target, second_service.target], *ALWAYS_BY_CACHE) as url:
        late_at_first, late_at_second = prompts_of(10), prompts_of(20)
        late_tokens = seed(service, late_at_first) + seed(second_service, late_at_second)
        time.sleep(3.0)  # for the events to arrive
        before = num_cached(service), num_cached(second_service)
        beginnings = early_at_second + late_at_first + late_at_second
        asked = [text + tail for tail in TAILS for text in beginnings]
        cached = cached_tokens(smg_python, url, asked)
        after = num_cached(service), num_cached(second_service)
    shared = [num_tokens - 2 * BLOCK for num_tokens in early_tokens + late_tokens] * len(TAILS)
    assert min(shared) >= 8 * BLOCK
    assert [index for index, (found, wanted) in enumerate(zip(cached, shared, strict=True)) if found < wanted] == []
    # Nobody computed a prefix that the other has: each new block is one of a tail.
    assert (after[0] - before[0], after[1] - before[1]) <= (4 * 4 * 2, 8 * 4 * 2)
