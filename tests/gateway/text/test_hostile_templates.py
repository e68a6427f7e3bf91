"""One model's template loops for ever; the others of the same gateway go on, and the gateway says that it serves."""

import asyncio
import json
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.gateway.text.process_pool import RenderPool
from octavo.v1 import inference_pb2 as pb
from tests.gateway.text.test_render_pool import HOSTILE, only
from tests.support.gateway.fake_pool import FakePool, model_card, worker_view
from tests.support.gateway.rpc_errors import refused
from tests.support.gateway.tokenizers_tiny import tiny_files

CHAT = pb.Chat(messages=[pb.ChatMessage(role=pb.CHAT_ROLE_USER, content="hi")])


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_template_harms_its_own_model_only(serve: Any, name: str) -> None:
    source, why = HOSTILE[name]
    bad = model_card("bad", tokenizer_digest="e" * 64)
    pool = FakePool(views=[worker_view(), worker_view(worker_id="w1", card=bad)], on_run=lambda run: run.finish())
    async with serve(pool, renderer=RenderPool(only(why))) as served:
        models = served.gateway.models
        models._texts.clear()
        config = json.dumps({"chat_template": source})
        models.on_model(model_card(), tiny_files())
        models.on_model(bad, tiny_files() | {"tokenizer_config.json": config.encode()})
        await models.close()
        attacks = [
            asyncio.ensure_future(refused(served.inference.Generate(pb.GenerateRequest(chat=CHAT, model="bad"))))
            for _ in range(3)
        ]
        for _ in range(5):
            asked = await served.inference.Tokenize(pb.TokenizeRequest(chat=CHAT, model="tiny"))
            assert asked.text.startswith("<|im_start|>user\nhi")
        health = await health_pb2_grpc.HealthStub(served.channel).Check(health_pb2.HealthCheckRequest())
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        for refusal in await asyncio.gather(*attacks):
            assert refusal.code is grpc.StatusCode.INVALID_ARGUMENT
            assert why in refusal.message
            assert refusal.reason == ("EXCEEDS_CAPACITY" if why.startswith("limit is") else "TEMPLATE")
        text = pb.GenerateRequest(text="hi", model="bad")  # what needs no template is served
        assert [event.WhichOneof("event") async for event in served.inference.Generate(text)][-1] == "finished"
