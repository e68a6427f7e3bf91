"""Deadlines and priorities through the whole service: who computes, who waits, what is free afterwards."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from octavo import AsyncClient, DeadlineExceeded
from octavo.client.requests import generate_request
from octavo.v1 import inference_pb2 as pb
from octavo.wire.messages import SamplingParams
from octavo.worker.runners.oracle.model import OracleModel, oracle_tokens
from tests.support.services.service import REPOSITORY, Service, serve

INJECTED = REPOSITORY / "tests/faults/injected"
STEP_S = 0.01
LONG = 2000  # tokens, 20 s of steps: longer than any pause of the machine
ONE_AT_A_TIME = (
    "--runner=oracle", f"--oracle-step-delay-s={STEP_S}", "--num-blocks=64", "--max-num-seqs=1",
    "--max-batch-tokens=64", "--max-model-len=2048", "--audit-every-steps=1",
)  # fmt: skip


def request(first_token: int, num_tokens: int, **fields: object) -> pb.GenerateRequest:
    return generate_request(
        token_ids=[first_token, 2, 3], max_tokens=num_tokens, ignore_eos=True, output="token_ids", **fields
    )


def held_blocks(service: Service) -> int:
    return sum(audit.num_active_blocks for audit in service.audit())


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, oracle_checkpoint: Path) -> Iterator[Service]:
    """Partial answers have three seconds of way, not 50 ms: on a busy machine they may be long under way."""
    folder, margin = tmp_path_factory.mktemp("service"), {"partial_margin_s": 3.0}
    model = f"--model={oracle_checkpoint}"
    with serve(folder, model, *ONE_AT_A_TIME, injector=INJECTED, injected=margin) as running:
        yield running


async def until_free(service: Service, limit_s: float = 10.0) -> None:
    """No block is held, long before the 20 s are over that two thousand tokens take."""
    async with asyncio.timeout(limit_s):
        while await asyncio.to_thread(held_blocks, service):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_time_that_is_over_in_the_queue_costs_no_prefill(service: Service) -> None:
    async with AsyncClient(service.target) as client:
        running = client.stream(request(1, LONG))
        await anext(running.deltas())
        for own_s, wire_s in ((0.2, None), (None, 0.2)):
            waiting = request(5, 50)
            if own_s is not None:
                waiting.timeout_s = own_s
            start_s = time.monotonic()
            with pytest.raises(DeadlineExceeded):
                await client.complete(waiting, timeout_s=wire_s)
            assert time.monotonic() - start_s > 0.15
        with pytest.raises(DeadlineExceeded):
            await client.embed([[1, 2, 3]], timeout_s=0.2)
        partial = request(5, 50, return_partial_on_deadline=True)
        answer = await client.complete(partial, timeout_s=6)
        assert (list(answer.token_ids), answer.finished.reason) == ([], pb.FINISH_REASON_DEADLINE)
        assert answer.finished.receipt.computed_tokens == 0
        running.cancel()
    await until_free(service)


async def test_at_the_deadline_decoding_stops_and_the_blocks_are_free(service: Service) -> None:
    async with AsyncClient(service.target) as client:
        asked = request(1, LONG, return_partial_on_deadline=True)
        asked.timeout_s = 1.2
        answer = await client.complete(asked, timeout_s=60)
        await until_free(service)
        assert answer.finished.reason == pb.FINISH_REASON_DEADLINE
        assert 1 <= len(answer.token_ids) <= LONG / 2
        assert answer.finished.receipt.total_s < LONG * STEP_S / 2
        whole = await client.complete(request(1, len(answer.token_ids), seed=answer.finished.receipt.seed))
        assert whole.token_ids == answer.token_ids
        with pytest.raises(DeadlineExceeded):
            async for _ in client.stream(request(1, LONG), timeout_s=0.3).deltas():
                pass
    await until_free(service)


async def test_a_partial_answer_is_ok_and_comes_before_the_wires_deadline(service: Service) -> None:
    async with AsyncClient(service.target) as client:
        for _ in range(2):
            stream = client.stream(request(1, LONG, return_partial_on_deadline=True), timeout_s=6.2)
            async for _ in stream.deltas():
                pass
            assert stream.finished is not None
            assert stream.finished.reason == pb.FINISH_REASON_DEADLINE
            assert len(stream.token_ids) == stream.finished.usage.completion_tokens > 0
    await until_free(service)


async def test_a_higher_priority_preempts_and_the_lower_one_goes_on_unharmed(service: Service) -> None:
    async with AsyncClient(service.target) as client:
        low = client.stream(request(1, 400, seed=1, priority=-5))
        deltas = low.deltas()
        await anext(deltas)
        high = await client.complete(request(5, 10, seed=2, priority=5))
        late = asyncio.create_task(client.complete(request(6, 10, seed=3, priority=-5)))
        async for _ in deltas:
            pass
        assert low.finished is not None
        receipts = [high.finished.receipt, low.finished.receipt, (await late).finished.receipt]
        assert [receipt.preemptions for receipt in receipts] == [0, 1, 0]
        assert receipts[1].computed_tokens > 3
        (served,) = await client.models()
        model = OracleModel(vocab_size=served.vocab_size, eos_token_ids=tuple(served.eos_token_ids))
        sampling = SamplingParams(seed=1, max_tokens=400, ignore_eos=True)
        assert low.token_ids == oracle_tokens([1, 2, 3], sampling, model=model, max_total_tokens=2048)
        assert receipts[1].inter_token_p99_s >= receipts[1].inter_token_p50_s > 0
        assert receipts[1].block_seconds > 0


async def test_a_stream_of_urgent_requests_starves_nobody(tmp_path: Path, oracle_checkpoint: Path) -> None:
    with serve(tmp_path, f"--model={oracle_checkpoint}", *ONE_AT_A_TIME, "--aging-s=1") as service:
        async with AsyncClient(service.target) as client:
            humble = asyncio.create_task(client.complete(request(1, 20, priority=-100)))

            async def urgent(index: int) -> None:
                while not humble.done():
                    await client.complete(request(5 + index, 5, priority=100))

            async with asyncio.timeout(90):
                await asyncio.gather(*[urgent(index) for index in range(3)])
            assert (await humble).finished.usage.completion_tokens == 20


async def test_a_deadline_that_is_no_number_in_range_is_refused(service: Service) -> None:
    async with AsyncClient(service.target) as client:
        asked = request(1, 5)
        asked.timeout_s = -1
        with pytest.raises(Exception, match="timeout_s") as caught:
            await client.complete(asked)
        assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]
