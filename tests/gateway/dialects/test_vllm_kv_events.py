"""VllmEngine's SubscribeKvEvents over a real channel."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest

pytest.importorskip("smg_grpc_proto")
from smg_grpc_proto.generated import common_pb2 as common  # type: ignore[import-untyped]

from octavo.gateway.workers import events
from octavo.wire.messages import KvEvent, KvEventKind, KvEvents
from tests.support.gateway.fake_pool import FakePool, worker_view
from tests.support.gateway.rpc_errors import Refusal, refusal_of, refused

Stub = Callable[[Any], Any]
BLOCK = 16


def stored(name: str, first: int, parent: str = "", salt: str = "") -> KvEvent:
    ids = np.arange(first, first + BLOCK, dtype="<i4").tobytes()
    return KvEvent(
        kind=KvEventKind.STORED, block_hash=name.encode(), parent_hash=parent.encode(), token_ids=ids, salt=salt
    )


def removed(name: str) -> KvEvent:
    return KvEvent(kind=KvEventKind.REMOVED, block_hash=name.encode())


def tell(pool: FakePool, *events: KvEvent, worker: int = 1) -> None:
    """As a message of a worker."""
    record = SimpleNamespace(card=worker_view().card, capacity=worker_view().capacity, incarnation=worker)
    pool.prefixes.apply(record, KvEvents(epoch="e", events=events))  # type: ignore[arg-type]


def told(batch: common.KvEventBatch) -> list[Any]:
    """The events in few words: ids of blocks by their first token."""
    words: list[Any] = []
    for event in batch.events:
        match event.WhichOneof("data"):
            case "stored":
                assert all(len(block.token_ids) == block.block_size == BLOCK for block in event.stored.blocks)
                words.append(("stored", event.stored.HasField("parent_block_hash"), [
                    block.token_ids[0] for block in event.stored.blocks
                ]))  # fmt: skip
            case "removed":
                words.append(("removed", len(event.removed.block_hashes)))
            case other:
                words.append(other)
    return words


async def read_on(call: Any) -> Refusal:
    """To the end, which has to be an error."""
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return refusal_of(error)
    raise AssertionError("the call did not fail")


async def test_a_subscriber_gets_the_state_and_then_what_changes(serve: Any, vllm_stub: Stub) -> None:
    async with serve() as served:
        tell(served.pool, stored("a", 100), stored("b", 200, "a"), stored("c", 300), stored("x", 1, salt="other"))
        call = vllm_stub(served.channel).SubscribeKvEvents(common.SubscribeKvEventsRequest())
        first = await call.read()
        tell(served.pool, stored("d", 400, "b"), removed("c"), removed("b"), stored("y", 1, salt="other"))
        second = await call.read()
        call.cancel()
        await served.until(lambda: not served.pool.prefixes._feed("tiny").is_followed)
    assert told(first) == ["cleared", ("stored", False, [100]), ("stored", False, [300]), ("stored", True, [200])]
    assert first.snapshot == common.KvSnapshotChunk(index=0, count=1, blocks=3)
    assert told(second) == [("stored", True, [400]), ("removed", 2)]
    assert [event.event_id for event in second.events] == [1, 2]
    assert (first.sequence_number, second.sequence_number) == (1000, 1001)
    parent_of_d = second.events[0].stored.parent_block_hash
    assert parent_of_d == first.events[3].stored.blocks[0].block_hash
    assert parent_of_d in second.events[1].removed.block_hashes


async def test_the_blocks_of_one_prompt_are_one_event(serve: Any, vllm_stub: Stub) -> None:
    async with serve() as served:
        call = vllm_stub(served.channel).SubscribeKvEvents(common.SubscribeKvEventsRequest(start_sequence_number=77))
        assert told(await call.read()) == ["cleared"]
        tell(served.pool, stored("a", 100), stored("b", 200, "a"), stored("c", 300, "b"))
        assert told(await call.read()) == [("stored", False, [100, 200, 300])]
        call.cancel()


async def test_a_lost_worker_takes_its_blocks_with_it(serve: Any, vllm_stub: Stub) -> None:
    async with serve() as served:
        call = vllm_stub(served.channel).SubscribeKvEvents(common.SubscribeKvEventsRequest())
        await call.read()
        tell(served.pool, stored("a", 100), stored("b", 200, "a"))
        tell(served.pool, stored("a", 100), worker=2)
        served.pool.prefixes.forget(1)
        assert [told(await call.read()) for _ in range(2)] == [[("stored", False, [100, 200])], [("removed", 1)]]
        call.cancel()


async def test_a_subscriber_that_does_not_read_is_cut(
    serve: Any, vllm_stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "MAX_WAITING_CHANGES", 3)
    async with serve() as served:
        call = vllm_stub(served.channel).SubscribeKvEvents(common.SubscribeKvEventsRequest())
        await call.read()
        tell(served.pool, *(stored(f"n{index}", 100 * index) for index in range(4)))
        refusal = await read_on(call)
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "SLOW_CONSUMER")
        await served.until(lambda: not served.pool.prefixes._feed("tiny").is_followed)


async def test_a_gateway_that_ends_tells_its_subscribers_why(serve: Any, vllm_stub: Stub) -> None:
    async with serve() as served:
        call = vllm_stub(served.channel).SubscribeKvEvents(common.SubscribeKvEventsRequest())
        await call.read()
        await served.gateway.stop()
        refusal = await read_on(call)
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")


async def test_a_write_that_nobody_takes_ends_the_subscription(serve: Any, vllm_stub: Stub) -> None:
    async with serve() as served:
        call = vllm_stub(served.channel).SubscribeKvEvents(common.SubscribeKvEventsRequest())
        await call.read()
        served.gateway.tracker.write_stall_s = 0.2  # what was read above had all its time
        feed = served.pool.prefixes._feed("tiny")
        async with asyncio.timeout(60):
            count = 0
            while feed.is_followed:  # until HTTP/2's windows are full and nothing is taken any more
                tell(served.pool, *(stored(f"n{count}-{index}", 16 * (count * 500 + index)) for index in range(500)))
                count += 1
                await asyncio.sleep(0.02)
        assert (await read_on(call)).reason == "SLOW_CONSUMER"


async def test_without_a_worker_there_is_nothing_to_follow_yet(serve: Any, vllm_stub: Stub) -> None:
    async with serve() as served:
        served.pool.set_views()
        refusal = await refused(vllm_stub(served.channel).SubscribeKvEvents(common.SubscribeKvEventsRequest()))
    assert refusal.code is grpc.StatusCode.UNAVAILABLE


async def test_tiers_are_told_in_the_contracts_words() -> None:
    from octavo.gateway.dialects.vllm.messages import KvBatches
    from octavo.gateway.workers.events import BlockBatch, BlockChange, ChangeKind
    from octavo.wire.messages import KvTier

    ids = np.arange(BLOCK, dtype="<i4").tobytes()
    changes = (
        BlockChange(kind=ChangeKind.STORED, block_id=1, token_ids=ids),
        BlockChange(kind=ChangeKind.STORED, block_id=2, parent_id=1, token_ids=ids, tier=KvTier.HOST),
        BlockChange(kind=ChangeKind.REMOVED, block_id=2),
        BlockChange(kind=ChangeKind.REMOVED, block_id=1, tier=KvTier.HOST),
    )
    message = KvBatches().of(BlockBatch(sequence=1, changes=changes))
    parts = [getattr(event, event.WhichOneof("data")) for event in message.events]
    device, host = common.KV_CACHE_TIER_DEVICE, common.KV_CACHE_TIER_HOST
    assert [(part.tier, part.medium) for part in parts] == [
        (device, "GPU"), (host, "CPU"), (device, "GPU"), (host, "CPU"),
    ]  # fmt: skip
