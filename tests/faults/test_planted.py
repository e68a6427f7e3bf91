"""The mutants of the list that no other test plants, each noticed by a check that passes without it."""

import asyncio
import errno
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import zmq

from octavo.gateway.errors import SlowConsumer
from octavo.gateway.streams.output_processor import Detokenizer, OutputFormat, OutputProcessor
from octavo.gateway.streams.stream import OutputStream
from octavo.gateway.text.stop_matcher import StopMatcher, StopStrings
from octavo.gateway.workers.decisions import Lose, Peer
from octavo.gateway.workers.outputs import Output, Outputs
from octavo.gateway.workers.registry import Registry, RegistryLimits
from octavo.gateway.workers.stats import PoolStats
from octavo.wire import options
from octavo.wire.bundle import bundle_digest
from octavo.wire.messages import Heartbeat, TokenizerBundle
from octavo.worker.scheduler import scheduler as scheduler_module
from tests.support.gateway.workers import FILES, RecordingSink, finished, register, request, step_output
from tests.support.worker.scheduling import World, WorldConfig

Plant = Callable[[pytest.MonkeyPatch], None]
EPOCH = "1" * 32

# ---------------------------------------------------------------- checks


async def a_prompt_above_the_pool_is_refused() -> None:
    world = World(WorldConfig(num_blocks=4, block_size=2))
    world.add(1, [3] * 9)
    world.add(2, [3, 4], max_tokens=1)
    world.run(max_steps=50)
    assert world.reasons() == {1: "EXCEEDS_CAPACITY", 2: "LENGTH"}


async def a_late_end_is_counted() -> None:
    stats = PoolStats()
    outputs = Outputs(stats)
    plain = {"name": 1, "handle": outputs.draw_handles(1)[0], "fingerprint": "f1", "run": request(), "incarnation": 1}
    limits: dict[str, Any] = {"vocab_size": 1000, "max_tokens": 4, "wants_logprobs": False, "sink": RecordingSink()}
    outputs.add(Output(**plain, **limits))  # type: ignore[arg-type]
    for _ in range(2):
        outputs.take(1, step_output("e", 1, finished=(finished(1, 0),)))
    assert stats.late_outputs == 1


async def nothing_of_a_stop_string_gets_out_whatever_its_bytes() -> None:
    matcher = StopMatcher(StopStrings(["ééé!"]))
    assert [matcher.feed(each) for each in ("aé", "éé", "!b")] == ["a", "", ""]
    assert matcher.match == "ééé!"


async def an_output_begins_with_its_own_text() -> None:
    processor = OutputProcessor(OutputFormat(bytes_by_id=[b"\xc3", b"\xa9", b"x"], wants_ids=False))
    processor.feed([0], None)
    assert processor.take() is None
    processor.feed([1, 2], None)
    processor.finish(None)
    piece = processor.take()
    assert piece is not None
    assert piece.text == "éx"


async def steps_that_stand_still_end_a_worker_that_lives() -> None:
    registry = Registry(RegistryLimits(heartbeat_timeout_s=5.0, stall_timeout_s=3.0))
    peer = Peer(0, b"w")
    registry.on_register(peer, register("w0", EPOCH), 0.0)
    registry.on_bundle(peer, TokenizerBundle(epoch=EPOCH, digest=bundle_digest(FILES), files=FILES))
    decisions: list[Any] = []
    for second in range(8):
        registry.on_heartbeat(Heartbeat(epoch=EPOCH, num_steps=1, has_work=True), float(second))
        decisions += registry.on_tick(float(second))
    assert [type(each) for each in decisions] == [Lose]


async def a_message_for_nobody_is_an_error() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        with options.new_router(context) as router:
            with pytest.raises(zmq.ZMQError) as raised:
                router.send_multipart((b"nobody", b"x"), zmq.NOBLOCK)
            assert raised.value.errno == errno.EHOSTUNREACH
    except pytest.fail.Exception as error:
        raise AssertionError("a drop in silence") from error
    finally:
        context.destroy(linger=0)


async def a_clock_that_is_set_ends_nothing() -> None:
    """The clocks of the gateway's deadlines, while the machine's is set an hour ahead."""
    from octavo.gateway.requests import input_processor as deadline

    start_s, wall_s = deadline.time.monotonic(), time.time
    time.time = lambda: wall_s() + 3600  # type: ignore[assignment]
    try:
        async with deadline.until(start_s + 5):
            await asyncio.sleep(0.01)
    except Exception as error:
        raise AssertionError("a deadline that was not over") from error
    finally:
        time.time = wall_s  # type: ignore[assignment]


async def a_stream_that_nobody_reads_is_bounded() -> None:
    processor = OutputProcessor(OutputFormat(bytes_by_id=[b"a"], wants_ids=False))
    stream = OutputStream(processor, max_pending_tokens=3, on_match=lambda _: None)
    stream.on_tokens([0, 0, 0, 0], None)
    await asyncio.sleep(0)
    assert isinstance(stream.error, SlowConsumer)


# ---------------------------------------------------------------- mutants


def m2_a_block_too_many_is_usable(patch: pytest.MonkeyPatch) -> None:
    refusal = scheduler_module.refusal

    def generous(asked: Any, config: Any, *, pool_tokens: int) -> Any:
        return refusal(asked, config, pool_tokens=pool_tokens + 2)

    patch.setattr(scheduler_module, "refusal", generous)


def m9_a_late_end_is_an_assertion(patch: pytest.MonkeyPatch) -> None:
    def strict(self: Outputs, handle: int, incarnation: int, ended: Any) -> Output:
        output = self._live.get(handle)
        assert output is not None, "the worker ended what does not live"
        return output

    patch.setattr(Outputs, "_claim", strict)


def m14_what_is_held_back_is_measured_in_bytes(patch: pytest.MonkeyPatch) -> None:
    feed = StopMatcher.feed

    def by_bytes(self: StopMatcher, text: str) -> str:
        before = self._held
        out = feed(self, text)
        held = self._held.encode()
        if self.match is None and len(held) > 1 and len(self._held) < len(held):
            lost, self._held = self._held[:1], self._held[1:]
            return out + lost
        return out if before is not None else ""

    patch.setattr(StopMatcher, "feed", by_bytes)


def m15_the_prompt_is_echoed_while_a_character_is_cut(patch: pytest.MonkeyPatch) -> None:
    feed = Detokenizer.feed

    def echoing(self: Detokenizer, token_ids: Any) -> str:
        text = feed(self, token_ids)
        return "prompt" if not text and self._unfinished else text

    patch.setattr(Detokenizer, "feed", echoing)


def m17_alive_is_healthy(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Registry, "_check", lambda self, record, now_s: [])


def m19_a_router_drops_in_silence(patch: pytest.MonkeyPatch) -> None:
    new_router = options.new_router

    def silent(context: Any) -> Any:
        router = new_router(context)
        router.setsockopt(zmq.ROUTER_MANDATORY, 0)
        return router

    patch.setattr(options, "new_router", silent)


def m20_deadlines_by_the_wall_clock(patch: pytest.MonkeyPatch) -> None:
    offset_s = time.monotonic() - time.time()

    class WallClock:
        @staticmethod
        def monotonic() -> float:
            return time.time() + offset_s

    patch.setattr("octavo.gateway.requests.input_processor.time", WallClock)


def m21_a_queue_without_a_bound(patch: pytest.MonkeyPatch) -> None:
    init = OutputStream.__init__

    def unbounded(self: OutputStream, processor: Any, **named: Any) -> None:
        init(self, processor, **(named | {"max_pending_tokens": 1 << 60}))

    patch.setattr(OutputStream, "__init__", unbounded)


PLANTED: list[tuple[Plant, Callable[[], Awaitable[None]]]] = [
    (m2_a_block_too_many_is_usable, a_prompt_above_the_pool_is_refused),
    (m9_a_late_end_is_an_assertion, a_late_end_is_counted),
    (m14_what_is_held_back_is_measured_in_bytes, nothing_of_a_stop_string_gets_out_whatever_its_bytes),
    (m15_the_prompt_is_echoed_while_a_character_is_cut, an_output_begins_with_its_own_text),
    (m17_alive_is_healthy, steps_that_stand_still_end_a_worker_that_lives),
    (m19_a_router_drops_in_silence, a_message_for_nobody_is_an_error),
    (m20_deadlines_by_the_wall_clock, a_clock_that_is_set_ends_nothing),
    (m21_a_queue_without_a_bound, a_stream_that_nobody_reads_is_bounded),
]


@pytest.mark.parametrize(("plant", "check"), PLANTED)
async def test_a_planted_bug_is_noticed(
    plant: Plant, check: Callable[[], Awaitable[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    await check()
    plant(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        await check()
