"""A worker that is a tensor-parallel group is told as one, in every contract that has a place for it."""

from typing import Any

import pytest

from octavo.cli.client.receipt import receipt_rows
from octavo.cli.tools.ps import _of_snapshot, rows_of
from octavo.cli.tools.top_screen import View, plain
from octavo.openengine import openengine_pb2 as oe
from octavo.openengine import openengine_pb2_grpc as oe_grpc
from octavo.v1 import inference_pb2 as pb
from octavo.v1 import load_pb2, model_pb2
from octavo.vllm import vllm_pb2 as vllm
from octavo.vllm import vllm_pb2_grpc as vllm_grpc
from tests.support.gateway.fake_pool import FakePool, FakeRun, model_card, worker_view


def group_of(size: int) -> FakePool:
    """Two workers of so many ranks each; the oldest wire knew no ranks."""

    def speak(run: FakeRun) -> None:
        run.tokens([70])
        run.finish()

    card = model_card(**{} if size == 1 else {"tensor_parallel_size": size})
    return FakePool(views=[worker_view("w1", card=card), worker_view("w2", card=card)], on_run=speak)


@pytest.mark.parametrize("size", [1, 4])
async def test_every_contract_tells_how_many_ranks_a_worker_has(serve: Any, size: int) -> None:
    async with serve(group_of(size)) as served:
        listed = (await served.models.ListModels(model_pb2.ListModelsRequest())).models[0]
        model = (await served.models.GetModel(model_pb2.GetModelRequest(model="tiny"))).model
        open_stub, vllm_stub = oe_grpc.ControlStub(served.channel), vllm_grpc.ControlStub(served.channel)
        opened = await open_stub.GetServerInfo(oe.GetServerInfoRequest())
        described = await open_stub.GetModelInfo(oe.GetModelInfoRequest(model="tiny"))
        native = await vllm_stub.GetServerInfo(vllm.GetServerInfoRequest())
        request = pb.CompleteRequest(generate=pb.GenerateRequest(text="a", stop=pb.StopConditions(max_tokens=1)))
        answer = await served.inference.Complete(request)
        watch = served.load.WatchLoad(load_pb2.WatchLoadRequest())
        snapshot = await watch.read()
        watch.cancel()
    assert (listed.tensor_parallel_size, model.tensor_parallel_size) == (size, size)
    assert opened.parallelism.tensor_parallel_size == size
    assert (opened.parallelism.data_parallel_size, opened.parallelism.pipeline_parallel_size) == (1, 1)
    assert dict(described.extra)["tensor_parallel_size"] == size
    assert (native.parallelism.tensor_parallel_size, native.parallelism.world_size) == (size, size)
    finished = answer.finished
    assert finished.receipt.tensor_parallel_size == size
    assert (f" of {size} ranks, model" in dict(receipt_rows(finished))["worker"]) == (size > 1)
    assert [worker.tensor_parallel_size for worker in snapshot.workers] == [size, size]
    rows = rows_of(_of_snapshot("here", snapshot))
    assert [row[5] for row in rows] == ["-", "-", str(size), str(size)]
    heads = next(line for line in plain(snapshot, View(address="here")).splitlines() if line.startswith("WORKER"))
    assert heads.split()[:4] == ["WORKER", "MODEL", "RANKS", "STATE"]


async def test_of_workers_of_different_sizes_the_largest_is_told(serve: Any) -> None:
    one, four = model_card(), model_card("large", tensor_parallel_size=4)
    async with serve(FakePool(views=[worker_view("w1", card=one), worker_view("w2", card=four)])) as served:
        opened = await oe_grpc.ControlStub(served.channel).GetServerInfo(oe.GetServerInfoRequest())
        models = (await served.models.ListModels(model_pb2.ListModelsRequest())).models
    assert opened.parallelism.tensor_parallel_size == 4
    assert {model.name: model.tensor_parallel_size for model in models} == {"tiny": 1, "large": 4}
