"""What a worker's cache is made of, and how often it is hit, is told in every contract that has a place for it."""

from typing import Any

import msgspec

from octavo.cli.tools.ps import _of_snapshot, rows_of
from octavo.openengine import openengine_pb2 as oe
from octavo.openengine import openengine_pb2_grpc as oe_grpc
from octavo.v1 import load_pb2, model_pb2
from octavo.wire.codec import decode_to_gateway, encode
from octavo.wire.messages import Register
from tests.support.gateway.fake_pool import FakePool, model_card, worker_view
from tests.support.gateway.workers import register


async def test_every_contract_tells_what_the_cache_is_made_of_and_how_often_it_is_hit(serve: Any) -> None:
    card = model_card(kv_cache_dtype="fp8")
    busy = worker_view("w1", card=card, num_queried_tokens=400, num_hit_tokens=100)
    async with serve(FakePool(views=[busy, worker_view("w2", card=card)])) as served:
        (listed,) = (await served.models.ListModels(model_pb2.ListModelsRequest())).models
        described = await oe_grpc.ControlStub(served.channel).GetModelInfo(oe.GetModelInfoRequest(model="tiny"))
        watch = served.load.WatchLoad(load_pb2.WatchLoadRequest())
        snapshot = await watch.read()
        watch.cancel()
    assert listed.kv_cache_dtype == "fp8"
    assert dict(described.extra)["kv_cache_dtype"] == "fp8"
    told = [(each.kv_cache_dtype, each.num_queried_tokens, each.num_hit_tokens) for each in snapshot.workers]
    assert told == [("fp8", 400, 100), ("fp8", 0, 0)]
    assert [row[9] for row in rows_of(_of_snapshot("here", snapshot))] == ["-", "-", "25%", "-"]


def test_a_card_without_a_type_of_the_cache_is_of_the_models_own_and_is_as_it_was() -> None:
    """Workers of before told none, and gateways of before take no field that they do not know."""
    message = register("w0", "1" * 32, card=model_card())
    assert b"kv_cache_dtype" not in encode(message)
    back = decode_to_gateway(encode(message))
    assert isinstance(back, Register)
    assert back.card.kv_cache_dtype == "auto"
    other = msgspec.structs.replace(message, card=model_card(kv_cache_dtype="fp8"))
    assert decode_to_gateway(encode(other)) == other
