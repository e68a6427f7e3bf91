"""Ranks of a group on CUDA devices: two on one device, whose sums go by way of the host, and two with a device each,
over NCCL inside of recorded steps, up to a request through the whole service."""

import asyncio
import faulthandler
import multiprocessing
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from octavo import AsyncClient
from octavo.model.gpu.divided_sums import SumsByShares, with_divided_sums
from octavo.model.gpu.peer_joins import with_peer_joins
from octavo.model.gpu.peer_sums import CANDIDATES, Way, ways_to_sum, with_peer_sums
from octavo.model.parallel import Ranks
from octavo.wire.messages import SamplingParams
from octavo.worker.config import WorkerConfig
from octavo.worker.loading.group import load_group
from octavo.worker.loading.loaded import Loaded
from octavo.worker.loading.loader import load_torch
from octavo.worker.runners.cuda.graph_runner import Launching
from octavo.worker.scheduler.plan import Chunk, NewRequest, Slot, StepPlan
from tests.support.children import live_children
from tests.support.model.ranks import Place, alone, on_ranks
from tests.support.services.service import Service, serve
from tests.support.worker.rank_steps import steps_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.alone,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
RANK = "octavo.worker.loading.group"
RANKS_TIMEOUT_S, TIMEOUT_S = 80.0, 120.0
"""For ranks that have met, as they have for meeting; for a service."""
STANDING_S = 240.0
"""After so long a test has come to no end: less than the mark above, which tells nothing of other processes."""
on_gpus = partial(on_ranks, 2, meet_s=RANKS_TIMEOUT_S, timeout_s=RANKS_TIMEOUT_S)


@pytest.fixture(autouse=True)
def _tell_where_ranks_stand(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of a test that hangs, every rank writes what it does: a sum that waits for a peer cannot be interrupted."""
    monkeypatch.setenv("PYTHONFAULTHANDLER", "1")
    watch = threading.Timer(STANDING_S, show_ranks, (request.config, request.node.name))
    watch.daemon = True
    watch.start()
    yield
    watch.cancel()


def show_ranks(config: pytest.Config, name: str) -> None:
    """Ends the followers, with which this process may end."""
    for child in live_children(RANK):
        child.send_signal(signal.SIGABRT)
        psutil.wait_procs([child], timeout=2)  # one after the other: they write to one file
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.suspend_global_capture(in_=True)
    _, said = capture.read_global_capture()
    print(f"{name} has come to no end after {STANDING_S:g} s\n{said}", file=sys.__stderr__, flush=True)
    faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)


def compare(found: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    """Of every rank: tokens, and numbers as near as other kernels' are."""
    for rank in found:
        assert rank["tokens"] == expected["tokens"]
        for name in ("chosen", "prompt"):
            np.testing.assert_allclose(rank[name], expected[name], atol=2e-3, rtol=1e-3)
        assert np.array_equal(rank["logits"], found[0]["logits"])


@pytest.mark.parametrize("way", ["cublas", "small_batch", "deterministic"])
@pytest.mark.parametrize("shape", ["qwen2", "qwen3"])
def test_two_ranks_on_one_device_give_what_one_rank_gives(shape: str, way: str, tmp_path: Path) -> None:
    expected = alone(steps_of, shape, way, "bf16", "auto")
    compare(
        on_gpus(steps_of, tmp_path, shape, way, "bf16", "auto", place=Place.ONE_GPU),
        expected,
    )


@needs_two
@pytest.mark.parametrize("launching", [Launching.EAGER, Launching.GRAPHS])
@pytest.mark.parametrize("way", ["cublas", "small_batch", "deterministic"])
def test_two_devices_give_what_one_gives(way: str, launching: Launching, tmp_path: Path) -> None:
    expected = alone(steps_of, "qwen2", way, "bf16", "auto", launching)
    words = ("qwen2", way, "bf16", "auto", launching)
    found = on_gpus(steps_of, tmp_path, *words, place=Place.GPUS)
    compare(found, expected)


def summed(ranks: Ranks) -> dict[str, Any]:
    """Of numbers that both ranks know, by every way that there is: pairs of sums added to what there is, captured."""
    told: list[str] = []
    device = torch.device("cuda", torch.cuda.current_device())
    what: dict[str, Any] = {
        "hidden_size": 512,
        "max_rows": 4096,
        "dtype": torch.bfloat16,
        "device": device,
        "note": told.append,
    }
    ways = {"library": ranks, **ways_to_sum(ranks, CANDIDATES[Way.FASTEST], **what)}
    found: dict[str, Any] = {"told": told}
    ways["fastest"] = with_peer_sums(ranks, **what)
    generator = torch.Generator("cpu").manual_seed(5)
    for rows in (1, 4, 40, 3000):
        parts = [torch.randn(rows, 512, generator=generator).bfloat16() for _ in range(2)]
        found[f"wanted {rows}"] = 4 * (parts[0].float() + parts[1].float())
        for way, chosen in ways.items():
            if chosen.peers is not None and not chosen.peers.takes(parts[0]):
                continue
            mine, out = parts[ranks.rank].to(device), torch.empty(rows, 512, dtype=torch.bfloat16, device=device)
            work, graph = partial(four_sums, chosen, mine, out), torch.cuda.CUDAGraph()
            work()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                work()
            for _ in range(20):  # ranks come apart where rooms are free too early
                graph.replay()
            torch.cuda.synchronize()
            found[f"{way} {rows}"] = out
    return found


def four_sums(ranks: Ranks, mine: torch.Tensor, out: torch.Tensor) -> None:
    first = ranks.room(mine, plain=torch.empty_like(mine))
    first.copy_(mine)
    ranks.sum(first, out=out)
    ranks.add_sum(ranks.room(mine).copy_(mine), out)
    ranks.add_sum(ranks.room(mine).copy_(2 * mine), out)


@needs_two
def test_sums_by_every_way_are_right_and_the_same_on_both(tmp_path: Path) -> None:
    first, second = on_gpus(summed, tmp_path, place=Place.GPUS)
    assert first["told"]
    ways = [name for name in first if name.split()[0] in ("library", "one_shot", "fused", "pushed", "fastest")]
    assert {name.split()[1] for name in ways if name.startswith("library")} == {"1", "4", "40", "3000"}, first["told"]
    assert sorted(ways) == sorted(name for name in second if name in ways), (first["told"], second["told"])
    for name in ways:
        np.testing.assert_allclose(first[name], first[f"wanted {name.split()[1]}"], atol=1e-1, rtol=2e-2, err_msg=name)
        assert np.array_equal(first[name], second[name]), name


def summed_by_shares(ranks: Ranks) -> dict[str, Any]:
    """Two products of both ranks, added to a stream by shares, captured; and what the start says of such sums."""
    device, told = torch.device("cuda", torch.cuda.current_device()), list[str]()
    what: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
    with_divided_sums(ranks, hidden_size=512, num_inputs=256, max_rows=4096, note=told.append, **what)
    sums, found = SumsByShares(ranks, (4096, 512), **what), dict[str, Any](told=told)
    stream = sums.stream((4096, 512), torch.bfloat16)
    assert stream is not None
    generator = torch.Generator("cpu").manual_seed(6)
    for rows in (4096, 1023, 2):
        parts = [(torch.randn(rows, 256, generator=generator).bfloat16() / 16).to(device) for _ in range(2)]
        weights = [torch.randn(512, 256, generator=generator).bfloat16().to(device) for _ in range(2)]
        x, seen = stream[:rows], torch.empty(rows, 512, dtype=torch.bfloat16, device=device)

        def work() -> None:
            x.zero_()  # noqa: B023
            for _ in range(2):
                for each, out in sums.parts(x):  # noqa: B023
                    torch.mm(parts[ranks.rank][each], weights[ranks.rank].T, out=out)  # noqa: B023
                sums.add(x)  # noqa: B023
                for each in sums.arrivals(x):  # noqa: B023
                    seen[each].copy_(x[each])  # noqa: B023

        work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            work()
        for _ in range(20):  # ranks come apart where a room is free too early
            graph.replay()
        torch.cuda.synchronize()
        found[f"sum {rows}"], found[f"seen {rows}"] = x.clone(), seen
        found[f"wanted {rows}"] = 2 * sum(
            each.float() @ weight.float().T for each, weight in zip(parts, weights, strict=True)
        )
    return found


@needs_two
def test_shares_of_sums_are_right_and_the_same_on_both(tmp_path: Path) -> None:
    first, second = on_gpus(summed_by_shares, tmp_path, place=Place.GPUS)
    assert first["told"]
    for name in (name for name in first if name.startswith("sum ")):
        np.testing.assert_allclose(first[name], first[f"wanted {name.split()[1]}"], atol=1e-1, rtol=2e-2)
        for each in (first["seen " + name.split()[1]], second[name], second["seen " + name.split()[1]]):
            assert np.array_equal(first[name], each), name


def joined(ranks: Ranks) -> dict[str, Any]:
    """Candidates and logits of both ranks, by NCCL and by ours, captured, with a sum between any two."""
    device, shape, told = torch.device("cuda", torch.cuda.current_device()), (40, 512), list[str]()
    widths = {torch.int64: 1, torch.bfloat16: shape[1]}
    ours = with_peer_joins(ranks, widths, max_rows=shape[0], device=device, note=told.append)
    found: dict[str, Any] = {"told": told, "ours": ours.joins is not None}
    if ours.joins is None:
        return found
    ours.joins.is_taken.update(dict.fromkeys(widths, True))  # type: ignore[attr-defined]
    between = torch.zeros(1, device=device)
    for dtype, width in widths.items():
        room = ours.room_of_columns((shape[0], width), dtype, device)
        for rows in (1, 7, shape[0]):
            numbers = torch.arange(rows * width, device=device).view(rows, width) % 250 + 1000 * ranks.rank
            outs = {name: torch.zeros(rows, 2 * width, dtype=dtype, device=device) for name in ("library", "ours")}

            def work() -> None:
                room[:rows].copy_(numbers)  # noqa: B023
                for name, way in (("ours", ours), ("library", ranks)):
                    way.concatenate(room[:rows], out=outs[name])  # noqa: B023
                ranks.sum(between)

            work()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                work()
            for _ in range(20):
                graph.replay()
            torch.cuda.synchronize()
            found |= {f"{name} {dtype} {rows}": out.double() for name, out in outs.items()}
    return found


@needs_two
def test_columns_joined_through_peers_memory_are_those_of_all_ranks(tmp_path: Path) -> None:
    first, second = on_gpus(joined, tmp_path, place=Place.GPUS)
    assert first["ours"] == second["ours"]
    if not first["ours"]:
        pytest.skip(f"peers' memory cannot be read: {first['told']}")
    for name in (name for name in first if name.startswith("ours ")):
        assert np.array_equal(first[name], first[name.replace("ours", "library")]), name
        assert np.array_equal(first[name], second[name]), name


def load(size: int, **settings: object) -> Loaded:
    config = WorkerConfig(
        **{
            "model": "folio-chat", "gateway_endpoints": (), "device": "cuda", "dtype": "float32", "max_num_seqs": 8,
            "max_batch_tokens": 128, "max_model_len": 256, "tensor_parallel_size": size, "num_blocks": 256,
            "host_kv_gib": 0, **settings,
        }  # type: ignore[arg-type]
    )  # fmt: skip
    start = load_torch if size == 1 else load_group
    return start(config, lambda _stage, _done, _total: None)


def followers() -> list[psutil.Process]:
    return live_children(RANK)


def outputs(loaded: Loaded, num_steps: int = 12) -> list[int]:
    """A prompt of 40 tokens in two chunks, then decodes."""
    ids_T, blocks = np.arange(40, dtype=np.int32), np.arange(4, dtype=np.int32)
    join = NewRequest(
        slot=Slot(0), request_id="x", token_ids_T=ids_T, num_prompt_tokens=40, sampling=SamplingParams(temperature=0.0)
    )
    updates_U3 = np.stack([np.zeros_like(blocks), blocks, blocks], axis=1)
    chunks = [Chunk(slot=Slot(0), start=start, num_tokens=20, is_last=start > 0) for start in (0, 20)]
    plans = [
        StepPlan(step=1, new_requests=(join,), block_updates_U3=updates_U3, prefill=(chunks[0],)),
        StepPlan(step=2, prefill=(chunks[1],)),
    ]
    for step in range(num_steps):
        slots_S, positions_S = np.zeros(1, np.int32), np.full(1, 40 + step, np.int32)
        plans.append(StepPlan(step=3 + step, decode_slots_S=slots_S, decode_positions_S=positions_S))
    tokens = []
    for plan in plans:
        loaded.runner.launch(plan)
        tokens += loaded.runner.collect().tokens_S.tolist()
    return tokens


@needs_two
@pytest.mark.parametrize(
    "settings",
    [{}, {"dtype": "bfloat16", "quantization": "int8"}, {"kv_cache_dtype": "fp8"}],
    ids=["plain", "int8", "fp8 cache"],
)
def test_a_worker_of_two_devices_gives_the_tokens_of_one_and_ends_whole(settings: dict[str, Any]) -> None:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as worker:
        device, found, again, left = worker.submit(of_two_devices, settings).result()
    assert device.endswith("2 ranks")
    assert found == again
    assert left == 0
    if not settings:
        one = load(1)
        assert found == outputs(one)
        one.runner.close()


def of_two_devices(settings: dict[str, Any]) -> tuple[str, list[int], list[int], int]:
    """By a process of its own, as a worker is: torch numbers its meetings over peers' memory by process, so that one
    that has led a group waits in vain for the followers of the next. Its device, its tokens twice, and how many
    followers it leaves behind."""
    group = load(2, **settings)
    try:
        found, again = outputs(group), outputs(group)
    finally:
        group.runner.close()
    return group.device, found, again, len(followers())


async def answer(service: Service, num_tokens: int) -> list[int]:
    """Greedy tokens of one request."""
    got: list[int] = []
    async with AsyncClient(service.target) as client, asyncio.timeout(TIMEOUT_S):
        stream = client.stream(
            messages=[("user", "Hello.")], temperature=0, max_tokens=num_tokens, ignore_eos=True, output="token_ids"
        )
        async for delta in stream.deltas():
            got += delta.token_ids
    return got


@needs_two
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "stands still"])
async def test_a_service_over_two_devices_answers_and_comes_back_when_a_rank_is_lost(
    tmp_path: Path, number: signal.Signals
) -> None:
    flags = ("--device=cuda", "--tensor-parallel-size=2", "--max-num-seqs=8", "--max-model-len=512")
    flags += ("--num-blocks=256", "--host-kv-gib=0")  # other tests have a share of the same devices
    with serve(tmp_path, *flags, "--stall-timeout-s=4", "--stall-exit-s=8") as service:
        service.wait_until_supervised()
        before = await answer(service, 16)
        assert len(before) == 16
        (follower,) = service.children(RANK)
        task = asyncio.create_task(answer(service, 400))
        follower.send_signal(number)
        async with asyncio.timeout(TIMEOUT_S):
            while not service.load() or service.children(RANK) in ([], [follower]):  # noqa: ASYNC110
                await asyncio.sleep(0.2)
        await asyncio.wait([task], timeout=TIMEOUT_S)
        assert task.done()
        task.exception()  # it may have waited for the worker, or have been told
        assert await answer(service, 16) == before
