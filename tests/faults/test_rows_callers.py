"""Rows 20 and 27 to 31 of the fault matrix: callers that vanish, do not read, wait too long or are too many."""

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import grpc
import psutil

from octavo import AsyncClient
from octavo.v1 import inference_pb2 as pb
from octavo.v1 import inference_pb2_grpc
from octavo.wire.messages import SamplingParams
from octavo.worker.runners.oracle.model import oracle_tokens
from tests.support.faults.bench import NO_RETRIES, FaultBench
from tests.support.faults.callers import Call, calls, golden, request, run
from tests.support.faults.figures import percentile, record
from tests.support.http2.unread_caller import UnreadingCaller
from tests.support.services.service import environment

STREAM = """
import asyncio, sys
from octavo import AsyncClient
async def main():
    async with AsyncClient(sys.argv[1]) as client:
        stream = client.stream(token_ids=[5, 6], max_tokens=4000, ignore_eos=True, output="token_ids")
        async for delta in stream.deltas():
            print(len(delta.token_ids), flush=True)
asyncio.run(main())
"""
ONE = "--workers=1"


def held_blocks(faults: FaultBench) -> int:
    return sum(audit.num_active_blocks for audit in faults.service.audit())


async def until_free(faults: FaultBench, limit_s: float) -> float:
    """Seconds until no block is held."""
    start_s = time.monotonic()
    while await asyncio.to_thread(held_blocks, faults):
        assert time.monotonic() - start_s < limit_s
        await asyncio.sleep(0.02)
    return time.monotonic() - start_s


async def test_row_20_alone_at_the_ceiling_of_the_pool_an_output_ends_by_length(bench: Any) -> None:
    async with bench(ONE, "--num-blocks=12") as faults:
        async with AsyncClient(faults.service.target) as client:
            answer = await client.complete(request(Call(prompt=[5, 6, 7], max_tokens=4000)))
        sampling = SamplingParams(seed=0, max_tokens=4000, ignore_eos=True)
        expected = oracle_tokens([5, 6, 7], sampling, model=faults.model, max_total_tokens=12 * 16 + 1)
        assert list(answer.token_ids) == expected
        assert answer.finished.receipt.preemptions == 0
        await faults.check([], limit_s=1)
        record("20", output_tokens=len(expected), preemptions=0)


async def test_row_27_the_blocks_of_a_caller_that_vanished_without_a_word_are_free_soon(bench: Any) -> None:
    async with bench(ONE, "--keepalive-time-s=1", "--keepalive-timeout-s=1", "--oracle-step-delay-s=0.02") as faults:
        command = [sys.executable, "-c", STREAM, faults.service.target]
        caller = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment())  # noqa: ASYNC220
        assert caller.stdout is not None
        try:
            assert await asyncio.to_thread(caller.stdout.readline)
            assert held_blocks(faults) > 0
            psutil.Process(caller.pid).send_signal(signal.SIGSTOP)  # its kernel goes on acknowledging bytes
            free_s = await until_free(faults, 20)  # 4000 steps take 80 s, a write that stalls 30
        finally:
            caller.kill()
            caller.wait()
            caller.stdout.close()
        faults.num_rpcs += 1
        await faults.check([], limit_s=1)
        record("27", keepalive_s="1 + 1", blocks_free_after_s=round(free_s, 2))


async def unread(faults: FaultBench, num_streams: int) -> tuple[float, set[tuple[str, str]]]:
    """Open streams that nobody reads until their blocks are free, then read: seconds until they were, and the ends."""
    caller = await UnreadingCaller.connect(faults.service.port)
    streams = [caller.open(wide(n).SerializeToString()) for n in range(num_streams)]
    faults.num_rpcs += num_streams
    while await asyncio.to_thread(held_blocks, faults) == 0:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    free_s = await until_free(faults, 60)
    assert caller.trailers == {}  # a status comes after what was sent before it
    for stream in streams:
        caller.take(stream, 1 << 20)
    async with asyncio.timeout(60):
        while len(caller.trailers) < num_streams:
            await caller.receive(for_s=0.1)
    ends = [caller.trailers[stream] for stream in streams]
    await caller.close()
    return free_s, {(end["grpc-status"], end["x-error-reason"]) for end in ends}


async def test_row_28_a_caller_that_does_not_read_is_ended_costs_little_and_disturbs_nobody(bench: Any) -> None:
    async with bench(ONE, "--write-stall-s=2", "--num-blocks=16384", "--max-num-seqs=256") as faults:
        (gateway,) = faults.service.children("gateway")
        baseline, bystanders = calls(4, max_tokens=300), calls(4, max_tokens=300)
        await faults.run(baseline)
        rss_before = gateway.memory_info().rss
        num_streams = 100
        await unread(faults, num_streams)
        grown = (gateway.memory_info().rss - rss_before) // num_streams
        await faults.note_gateways()  # what the first ones made grow, the next ones use again, or as much besides
        faults.rss_slack_bytes += 2 * num_streams * grown
        running = asyncio.create_task(faults.run(bystanders))
        for _ in range(4):  # whose memory is twice of what is allowed, were it not given back
            free_s, ends = await unread(faults, num_streams)
            assert ends == {(str(grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]), "SLOW_CONSUMER")}
        await running
        await faults.check([*baseline, *bystanders], limit_s=60)
        assert grown < 1 << 20
        ratio = gap_s(bystanders, 50) / gap_s(baseline, 50)
        record(
            "28",
            streams=num_streams,
            write_stall_s=2,
            blocks_free_after_s=round(free_s, 2),
            rss_kib_per_stream=grown >> 10,
            bystander_gap_ratio=round(ratio, 2),
        )


async def until_paused(faults: FaultBench, num_streams: int) -> None:
    """So many outputs have been paused since the service began."""
    async with asyncio.timeout(60):
        while (await faults.metrics()).total("octavo_gateway_pauses_total") < num_streams:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def token_ids(messages: list[bytes]) -> list[int]:
    """Of all deltas of a stream."""
    return [token for each in messages for token in pb.GenerateResponse.FromString(each).delta.token_ids]


async def test_row_28_a_caller_that_stops_reading_and_reads_on_gets_every_token_and_holds_nobody_up(bench: Any) -> None:
    num_streams = 8  # they have every slot
    async with bench(ONE, "--pause-pending-tokens=64", f"--max-num-seqs={num_streams}") as faults:
        caller = await UnreadingCaller.connect(faults.service.port)
        streams = [caller.open(wide(n, max_tokens=READ_ON_TOKENS).SerializeToString()) for n in range(num_streams)]
        faults.num_rpcs += num_streams
        for stream in streams:
            caller.take(stream, 20_000)  # some deltas, and then no more
        await until_paused(faults, num_streams)
        while await caller.receive(for_s=0.3):
            pass
        num_read = sum(len(token_ids(caller.messages(stream))) for stream in streams)
        bystanders = calls(num_streams, max_tokens=50)
        start_s = time.monotonic()
        await faults.run(bystanders)
        bystanders_s = time.monotonic() - start_s
        for stream in streams:
            caller.take(stream, 1 << 30)
        async with asyncio.timeout(60):
            while len(caller.trailers) < num_streams:
                await caller.receive(for_s=0.1)
        assert {caller.trailers[stream]["grpc-status"] for stream in streams} == {"0"}
        for index, stream in enumerate(streams):
            call = Call(prompt=[9, 10 + index], max_tokens=READ_ON_TOKENS, seed=index)
            assert token_ids(caller.messages(stream)) == golden(call, faults.model)
        assert num_read < num_streams * READ_ON_TOKENS / 4
        pauses = round((await faults.metrics()).total("octavo_gateway_pauses_total"))
        await caller.close()
        await faults.check(bystanders, limit_s=60)
        record(
            "28 reads on",
            streams=num_streams,
            slots=num_streams,
            tokens_each=READ_ON_TOKENS,
            read_before_the_stop=num_read // num_streams,
            pauses=pauses,
            bystanders_meanwhile=len(bystanders),
            bystanders_s=round(bystanders_s, 2),
            wrong_tokens=0,
        )


READ_ON_TOKENS = 1000


def wide(index: int, *, max_tokens: int = 3000) -> pb.GenerateRequest:
    """An output that does not fit into the transport's buffers: 64 KiB of a stream never meet any back-pressure."""
    asked = request(Call(prompt=[9, 10 + index], max_tokens=max_tokens, seed=index))
    asked.output.logprobs = 20
    return asked


def gap_s(done: Sequence[Call], percent: float) -> float:
    """A percentile of the time between tokens."""
    gaps = [
        later - earlier for call in done for earlier, later in zip(call.arrivals_s, call.arrivals_s[1:], strict=False)
    ]
    return percentile(gaps, percent)


async def test_row_29_short_requests_do_not_wait_for_a_long_prompt(bench: Any) -> None:
    """Each has its first token before the long one, whose prompt takes 70 steps and so 1.4 s; nobody waits for it."""
    settings = (ONE, "--max-batch-tokens=256", "--max-chunk-tokens=48", "--prefix-cache=off")
    async with bench(*settings, "--oracle-step-delay-s=0.02") as faults:
        first_s = {}
        for name, long_prompts in (("alone", 0), ("beside", 1)):
            long = [Call(prompt=[n, *range(3, 900)] * 4, max_tokens=2) for n in range(5, 5 + long_prompts)]
            short = calls(50, max_tokens=3, first=100)
            await faults.run([*long, *short])
            faults.check_calls([*long, *short], limit_s=60)
            first_s[name] = percentile([call.arrivals_s[0] - call.sent_s for call in short], 99)
            assert all(call.arrivals_s[0] < each.arrivals_s[0] for call in short for each in long)
        await faults.check([], limit_s=1)
        ratio = first_s["beside"] / first_s["alone"]
        record("29", ttft_p99_ms_alone=round(1000 * first_s["alone"]), ttft_ratio_beside=round(ratio, 2))


async def status(stub: Any, asked: Any, timeout_s: float) -> grpc.StatusCode:
    """How a call ends whose messages are read."""
    call = stub.Generate(asked, timeout=timeout_s)
    with suppress(grpc.RpcError):
        async for _ in call:
            pass
    return await call.code()


async def overshoots(faults: FaultBench) -> list[float]:
    """Milliseconds that calls went on after deadlines of all kinds."""
    over_ms = list[float]()
    async with grpc.aio.insecure_channel(faults.service.target) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        for timeout_s in (-1.0, 0.0, 0.001, 0.02, 0.3):
            asked = [request(Call(prompt=[5, n], max_tokens=4000)) for n in range(10, 22)]
            start_s = time.monotonic()
            codes = await asyncio.gather(*(status(stub, each, timeout_s) for each in asked))
            assert set(codes) == {grpc.StatusCode.DEADLINE_EXCEEDED}
            over_ms.append(1000 * (time.monotonic() - start_s - max(0.0, timeout_s)))
        short = request(Call(prompt=[5, 6], max_tokens=3))
        assert await status(stub, short, 10 * 365 * 86400.0) is grpc.StatusCode.OK
    return over_ms


async def test_row_30_any_deadline_is_kept_and_what_is_late_costs_nothing_more(bench: Any) -> None:
    async with bench(ONE, "--max-num-seqs=4") as faults:
        over_ms = await overshoots(faults)
        free_s = await until_free(faults, 15)  # 4000 steps take 20 s
        seen = (await faults.metrics()).total("octavo_requests_total", method="/octavo.v1.InferenceService/Generate")
        faults.num_rpcs = round(seen)  # some of these calls never left their client
        await faults.check([], limit_s=1)
        record("30", overshoot_ms_max=round(max(over_ms)), blocks_free_after_s=round(free_s, 2))


async def test_row_31_what_is_too_much_is_refused_at_once_and_the_rest_is_served_as_fast_as_ever(bench: Any) -> None:
    settings = (ONE, "--max-num-seqs=8", "--max-waiting=8", "--oracle-step-delay-s=0.01")
    async with bench(*settings) as faults:
        async with AsyncClient(faults.service.target, options=NO_RETRIES) as client:
            capacity = await closed_loop(client, num_callers=8, for_s=3.0)
            faults.num_rpcs += round(capacity * 3.0)
            offered = await open_loop(client, per_s=5 * capacity, for_s=4.0)
        complete = [call for call in offered if call.error is None]
        refused = [call for call in offered if call.error is not None]
        assert {(call.code, call.reason) for call in refused} == {("RESOURCE_EXHAUSTED", "QUEUE_FULL")}
        goodput = len(complete) / (max(call.ended_s for call in complete) - min(call.sent_s for call in offered))
        refusal_ms = [1000 * (call.ended_s - call.sent_s) for call in refused]
        seen = (await faults.metrics()).total("octavo_requests_total", method="/octavo.v1.InferenceService/Generate")
        faults.num_rpcs = round(seen)
        await faults.check(offered, limit_s=60, victims=["QUEUE_FULL"])
        assert percentile(refusal_ms, 50) < 150  # who waits in the queue waits 300 ms and more
        assert goodput >= 0.5 * capacity  # 1.0 on a quiet machine; 0.2 where what is refused costs as much as the rest
        record(
            "31",
            capacity_per_s=round(capacity, 1),
            offered_per_s=round(len(offered) / 4.0, 1),
            goodput_per_s=round(goodput, 1),
            refusal_ms_p50=round(percentile(refusal_ms, 50), 1),
            refusal_ms_p99=round(percentile(refusal_ms, 99), 1),
        )


OUTPUT_TOKENS = 30


async def closed_loop(client: AsyncClient, *, num_callers: int, for_s: float) -> float:
    """Complete requests per second of callers that each send the next one when the last is done."""
    end_s, done = time.monotonic() + for_s, 0

    async def ask(caller: int) -> None:
        nonlocal done
        while time.monotonic() < end_s:
            await run(client, Call(prompt=[5, 10 + caller], max_tokens=OUTPUT_TOKENS))
            done += time.monotonic() < end_s

    await asyncio.gather(*(ask(caller) for caller in range(num_callers)))
    return done / for_s


async def open_loop(client: AsyncClient, *, per_s: float, for_s: float) -> list[Call]:
    """Requests at a fixed rate, whatever becomes of them."""
    offered = [Call(prompt=[6, 10 + n % 900], max_tokens=OUTPUT_TOKENS, seed=n) for n in range(round(per_s * for_s))]
    start_s, tasks = time.monotonic(), []
    for index, call in enumerate(offered):
        await asyncio.sleep(max(0.0, start_s + index / per_s - time.monotonic()))
        tasks.append(asyncio.create_task(run(client, call)))
    await asyncio.gather(*tasks)
    return offered
