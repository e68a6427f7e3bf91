"""WatchLoad of a whole service: four gateways and eight workers in one snapshot, blocks as the workers tell them."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from octavo import Client
from octavo.v1 import common_pb2, load_pb2
from octavo.v1 import inference_pb2 as pb
from tests.support.services.service import Service, serve

NUM_REQUESTS = 24
PATIENCE_S = 60.0
OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]


@contextmanager
def in_flight(service: Service) -> Iterator[None]:
    """Requests with a prompt in common, over connections that the system spreads over the gateways."""
    clients = [Client(service.target, options=OWN_CONNECTION) for _ in range(NUM_REQUESTS)]
    request = pb.GenerateRequest(
        token_ids=common_pb2.TokenIds(ids=[7] * 64), stop=pb.StopConditions(max_tokens=3000, ignore_eos=True)
    )
    streams = [client.stream(request) for client in clients]
    try:
        for stream in streams:
            next(stream.deltas())
        readers = [
            threading.Thread(target=lambda each=each: [None for _ in _until_cancelled(each)]) for each in streams
        ]
        for reader in readers:
            reader.start()
        yield
    finally:
        for stream in streams:
            stream.cancel()
        for client in clients:
            client.close()
        for reader in readers:
            reader.join(PATIENCE_S)


def _until_cancelled(stream: object) -> Iterator[object]:
    from octavo import OctavoError

    try:
        yield from stream.deltas()  # type: ignore[attr-defined]
    except OctavoError:
        return


def is_complete(snapshot: load_pb2.WatchLoadResponse) -> bool:
    """Everything has been told once."""
    return (
        len(snapshot.workers) == 8
        and all(each.HasField("block_map") for each in snapshot.workers)
        and len(snapshot.requests) == NUM_REQUESTS
        and all(each.num_blocks >= 4 and each.phase == load_pb2.REQUEST_PHASE_DECODE for each in snapshot.requests)
        and sum(each.generation_tokens_per_s for each in snapshot.workers) > 0
    )


def test_a_snapshot_has_every_gateway_worker_and_request(tmp_path: Path, oracle_checkpoint: Path) -> None:
    arguments = ["--model", str(oracle_checkpoint), "--runner", "oracle", "--oracle-step-delay-s", "0.02"]
    arguments += ["--gateways", "4", "--workers", "8", "--num-blocks", "2048", "--oracle-vocab-size", "300"]
    with serve(tmp_path, *arguments, "--page", "off") as service:
        service.wait_until_supervised()
        with in_flight(service), Client(service.target) as client:
            deadline_s = time.monotonic() + PATIENCE_S
            watch = client.watch_load(interval_s=0.2, max_requests=100, max_block_cells=512)
            for snapshot in watch:
                if is_complete(snapshot):
                    break
                assert time.monotonic() < deadline_s, snapshot
            assert snapshot.total.num_in_flight == snapshot.total.num_running == NUM_REQUESTS
            assert sorted(each.gateway for each in snapshot.gateways) == [f"gateway-{n}" for n in range(4)]
            assert len({each.gateway for each in snapshot.requests}) > 1
            assert list(snapshot.unreachable_gateways) == []
            (model,) = snapshot.models
            blocks = model.blocks
            assert blocks.num_blocks == blocks.num_free + blocks.num_cached + blocks.num_active == 8 * 2048
            for worker in snapshot.workers:
                assert sum(worker.block_map.lengths) == 512
                held = [each for each in snapshot.requests if each.worker_id == worker.worker_id]
                assert bool(held) == (load_pb2.BLOCK_STATE_ACTIVE in worker.block_map.states)
            assert any(each.blocks.num_shared for each in snapshot.workers)  # the prompt in common

            victim = service.children("worker")[0]
            killed_s = time.monotonic()
            victim.send_signal(signal.SIGKILL)
            for snapshot in watch:
                if any(each.condition == load_pb2.WORKER_CONDITION_LOST for each in snapshot.workers):
                    break
                assert time.monotonic() < killed_s + 2.0
            watch.close()
