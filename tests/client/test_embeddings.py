"""Embed of both clients."""

import re

import numpy as np
import pytest

from octavo import AsyncClient, Client
from octavo.client.embeddings import embed_request
from octavo.client.errors import InvalidRequest
from octavo.v1 import common_pb2
from octavo.v1 import inference_pb2 as pb
from tests.support.gateway.scripted_server import Script


def test_bytes_are_no_ids() -> None:
    with pytest.raises(TypeError, match=r"^inputs: a text is str, not b'fox'$"):
        embed_request([b"fox"])


def test_inputs_are_texts_ids_and_conversations() -> None:
    ready = pb.EmbedInput(text="d")
    request = embed_request(
        ["a", [1, 2], [("user", "c")], ready], pooling="mean", normalize=False, model="m", request_id="r",
        truncate_prompt_tokens=3, priority=2, cache_salt="s",
    )  # fmt: skip
    chat = pb.Chat(messages=[pb.ChatMessage(role=pb.CHAT_ROLE_USER, content="c")])
    inputs = [
        pb.EmbedInput(text="a"),
        pb.EmbedInput(token_ids=common_pb2.TokenIds(ids=[1, 2])),
        pb.EmbedInput(chat=chat),
        ready,
    ]
    assert request == pb.EmbedRequest(
        inputs=inputs, pooling=pb.POOLING_MEAN, normalize=False, model="m", request_id="r", truncate_prompt_tokens=3,
        priority=2, cache_salt="s",
    )  # fmt: skip
    assert embed_request(["a"]) == pb.EmbedRequest(inputs=inputs[:1])


def test_ids_may_be_an_array() -> None:
    expected = pb.EmbedInput(token_ids=common_pb2.TokenIds(ids=[4, 5]))
    assert embed_request([np.array([4, 5])]).inputs[0] == expected  # type: ignore[list-item]


def test_mistakes_are_told() -> None:
    with pytest.raises(TypeError, match="not one text"):
        embed_request("a")
    with pytest.raises(TypeError, match="no field dimensions"):
        embed_request(["a"], dimensions=3)
    for pooling in ("cls", ["mean"]):
        with pytest.raises(ValueError, match=f"pooling {re.escape(repr(pooling))} is none of"):
            embed_request(["a"], pooling=pooling)


def test_a_vector_for_each_input(script: Script, target: str, refusal: tuple) -> None:
    with Client(target) as client:
        response = client.embed(["a", "b"], pooling="last_token", timeout_s=30)
        assert [list(each.values) for each in response.embeddings] == [[0, 0.5], [1, 0.5]]
        script.failures.append(refusal)
        with pytest.raises(InvalidRequest):
            client.embed(["a"])
    assert script.embed_requests[0].pooling == pb.POOLING_LAST_TOKEN


async def test_the_same_for_asyncio(script: Script, target: str, refusal: tuple) -> None:
    async with AsyncClient(target) as client:
        assert len((await client.embed(["a", "b"])).embeddings) == 2
        script.failures.append(refusal)
        with pytest.raises(InvalidRequest):
            await client.embed(["a"])
