"""Sixteen callers with two megabytes each, on every path that tokenizes, and a canary among them.

What is counted is characters that the tokenizer was given, not seconds.
"""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto import vllm_engine_pb2_grpc as vllm_grpc

from octavo.gateway.text.service import STEP_BYTES
from octavo.v1 import inference_pb2 as pb
from tests.support.gateway.fake_pool import FakePool, FakeRun, model_card, worker_view
from tests.support.gateway.kserve_calls import request as kserve_request
from tests.support.gateway.kserve_calls import stub_of as kserve_stub
from tests.support.gateway.rpc_errors import refused

MIB = 1 << 20
CONTEXT = 1000
TEXT = ("Hello world, how are you today? 12 " * (2 * MIB // 35 + 1))[: 2 * MIB - 100]


class Counting:
    """In place of a tokenizer: how many characters it was given, and what each time."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.given: list[str] = []
        self.gate = threading.Event()
        self.gate.set()

    @property
    def num_characters(self) -> int:
        return sum(map(len, self.given))

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        self.given += texts
        assert self.gate.wait(30)
        return self._tokenizer.encode_batch_fast(texts, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def speaking(run: FakeRun) -> None:
    run.finish()


def pool() -> FakePool:
    return FakePool(views=[worker_view(card=model_card(max_model_len=CONTEXT))], on_run=speaking)


def counting(served: Any) -> Counting:
    model = served.gateway.models.text_of(next(iter(served.pool.cards().values())))
    model._tokenizer = Counting(model._tokenizer)
    return model._tokenizer  # type: ignore[no-any-return]


def calls(served: Any) -> dict[str, Callable[[], Any]]:
    chat = pb.Chat(messages=[pb.ChatMessage(role=pb.CHAT_ROLE_USER, content=TEXT)])
    vllm_stub = vllm_grpc.VllmEngineStub(served.channel)
    sampling = vllm.SamplingParams(temperature=0.0)
    return {
        "generate": lambda: served.inference.Generate(pb.GenerateRequest(text=TEXT)),
        "chat": lambda: served.inference.Generate(pb.GenerateRequest(chat=chat)),
        "complete": lambda: served.inference.Complete(pb.CompleteRequest(generate=pb.GenerateRequest(text=TEXT))),
        "embed": lambda: served.inference.Embed(pb.EmbedRequest(inputs=[pb.EmbedInput(text=TEXT)])),
        "embed chat": lambda: served.inference.Embed(pb.EmbedRequest(inputs=[pb.EmbedInput(chat=chat)])),
        "vllm": lambda: vllm_stub.Generate(
            vllm.GenerateRequest(request_id="v", text=TEXT, sampling_params=sampling, stream=True)
        ),
        "kserve": lambda: kserve_stub(served).ModelInfer(kserve_request(TEXT)),
    }


@pytest.mark.parametrize("path", ["generate", "chat", "complete", "embed", "embed chat", "vllm", "kserve"])
async def test_two_megabytes_are_refused_by_what_the_context_holds(serve: Any, path: str) -> None:
    async with serve(pool()) as served:
        counted = counting(served)
        refusal = await refused(calls(served)[path]())
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "EXCEEDS_CAPACITY")
        assert f"context of {CONTEXT} tokens" in refusal.message
        assert counted.num_characters == 0  # two megabytes are more than any thousand tokens
        assert served.pool.runs == []


@pytest.mark.parametrize("path", ["generate", "embed"])
async def test_tokenizing_stops_where_the_context_is_full(serve: Any, path: str) -> None:
    """Where bytes alone do not tell."""
    text = TEXT[:16_000]
    async with serve(pool()) as served:
        counted = counting(served)
        request = pb.GenerateRequest(text=text)
        call = served.inference.Generate(request) if path == "generate" else None
        call = call or served.inference.Embed(
            pb.EmbedRequest(inputs=[pb.EmbedInput(text="ok"), pb.EmbedInput(text=text)])
        )
        refusal = await refused(call)
        assert refusal.reason == "EXCEEDS_CAPACITY"
        assert f"more than {CONTEXT - 1} prompt tokens" in refusal.message
        assert refusal.message.startswith("inputs[1]: ") == (path == "embed")
        assert counted.num_characters < 2 * STEP_BYTES


async def test_of_a_text_whose_last_tokens_are_wanted_only_the_end_is_tokenized(serve: Any) -> None:
    async with serve(pool()) as served:
        whole = (await served.inference.Tokenize(pb.TokenizeRequest(text=TEXT))).token_ids
        counted = counting(served)
        async for _ in served.inference.Generate(pb.GenerateRequest(text=TEXT, truncate_prompt_tokens=500)):
            pass
        assert served.pool.runs[0].prompt_ids.tolist() == list(whole[-500:])
        assert counted.num_characters <= 2 * STEP_BYTES
        too_many = pb.GenerateRequest(text=TEXT, truncate_prompt_tokens=CONTEXT)
        assert (await refused(served.inference.Generate(too_many))).reason == "EXCEEDS_CAPACITY"


async def test_a_canary_is_served_before_what_sixteen_hostile_callers_have(serve: Any) -> None:
    """They ask for the ids of two megabytes each, which is allowed; both threads are held until the canary is there."""

    async def at_once(work: Callable[[], Any], **_: Any) -> Any:
        return work()

    async with serve(pool()) as served:
        counted, text = counting(served), served.gateway.text
        text.run_by_size = (
            at_once  # so that all of them are checked, and wait for the tokenizer, before the canary comes
        )
        counted.gate.clear()
        hostile = [
            asyncio.ensure_future(served.inference.Tokenize(pb.TokenizeRequest(text=TEXT + str(number))))
            for number in range(16)
        ]
        await served.until(lambda: text.num_waiting == 16 and len(counted.given) == 2)
        canary = asyncio.ensure_future(served.inference.Tokenize(pb.TokenizeRequest(text="canary")))
        await served.until(lambda: text.num_waiting == 17)
        counted.gate.set()
        assert len((await canary).token_ids) > 0
        ahead = sum(map(len, counted.given[: counted.given.index("canary")]))
        assert not any(each.done() for each in hostile)
        for each in hostile:
            each.cancel()
        await asyncio.gather(*hostile, return_exceptions=True)
        await served.until(lambda: not text.num_waiting)
        assert ahead <= 4 * STEP_BYTES  # of 32 MiB: a step of each thread, and hardly more
        assert counted.num_characters < 16 * MIB  # and nobody tokenizes for those who left
