"""The sockets that workers dial: who may open them, and what happens when they vanish."""

import os
from pathlib import Path

import pytest

from octavo.gateway.workers.pool import WorkerPool
from octavo.wire.endpoints import EndpointError
from octavo.wire.messages import GatewayLeaving, Refused
from octavo.wire.run_dir import RunDirError
from tests.support.gateway.workers import Dial, FakeWorker, finished, open_one, open_pool, pool_config
from tests.support.waiting import until


async def test_an_open_run_directory_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o755)
    with pytest.raises(RunDirError, match="chmod 700"):
        await WorkerPool(pool_config(tmp_path)).start()


async def test_a_second_gateway_on_the_same_socket_is_refused(pool: WorkerPool, tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match="in use"):
        await WorkerPool(pool_config(tmp_path)).start()
    assert pool.bound_endpoints


async def test_tcp_beyond_loopback_needs_keys(tmp_path: Path) -> None:
    with pytest.raises(EndpointError, match="CURVE"):
        await WorkerPool(pool_config(tmp_path, endpoints=("tcp://0.0.0.0:0",), registration_token="word")).start()


async def test_tcp_on_loopback_needs_keys_or_a_token(tmp_path: Path) -> None:
    """Any process of the host could register, and would be given prompts."""
    with pytest.raises(EndpointError, match=r"open to every process of this host.*--registration-token"):
        await WorkerPool(pool_config(tmp_path, endpoints=("tcp://127.0.0.1:0",))).start()


async def test_over_tcp_with_a_token_only_who_shows_it_gets_in(tmp_path: Path) -> None:
    changes: dict[str, object] = {"endpoints": ("tcp://127.0.0.1:0",), "registration_token": "word"}
    async with open_pool(tmp_path, **changes) as (pool, _):
        stranger, worker = (
            FakeWorker(pool.bound_endpoints[0], name, token=token) for name, token in (("s", "guess"), ("w", "word"))
        )
        try:
            await stranger.send(stranger.register)
            assert "token" in (await stranger.expect(Refused)).reason
            await worker.join(pool)
            assert [view.worker_id for view in pool.workers()] == ["w"]
        finally:
            stranger.close()
            worker.close()


async def test_a_socket_that_vanished_is_bound_again_and_running_streams_do_not_notice(
    pool: WorkerPool, dial: Dial
) -> None:
    worker = dial()
    await worker.join(pool)
    handle, sink = open_one(pool)
    os.unlink(pool.bound_endpoints[0].removeprefix("ipc://"))
    await until(lambda: pool.stats.rebinds == 1)
    await dial("w1").join(pool)
    await worker.step([(handle, 1)], finished=(finished(handle, 1),))
    assert (await sink.end())[0] == "finished"
    assert len(pool.workers()) == 2


async def test_closing_removes_the_socket(pool: WorkerPool, tmp_path: Path) -> None:
    assert os.listdir(tmp_path / "run") == ["gateway-0.sock"]
    await pool.close()
    assert os.listdir(tmp_path / "run") == []


async def test_workers_are_told_that_the_gateway_ends(pool: WorkerPool, dial: Dial) -> None:
    worker = dial()
    await worker.join(pool)
    pool.take_leave()
    assert await worker.expect(GatewayLeaving) == GatewayLeaving()
