"""Round trips of a frame between two processes over ZeroMQ: read as the worker pool reads, and by zmq.asyncio.

Must not know: messages.
"""

import asyncio
import multiprocessing
import tempfile
import time
from collections.abc import Callable

import zmq
import zmq.asyncio

from octavo.wire.options import new_router


def echo(address: str) -> None:
    """A DEALER that sends back what it gets."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(address)
        socket.send(b"here")
        while True:
            socket.send(socket.recv())


async def round_trips(frame: bytes, count: int, kind: str) -> float:
    """Microseconds of one round trip: `reader` as the pool reads, `asyncio` with zmq.asyncio."""
    address = f"ipc://{tempfile.mkdtemp()}/echo.sock"
    process = multiprocessing.get_context("spawn").Process(target=echo, args=(address,), daemon=True)
    run = through_reader if kind == "reader" else through_asyncio
    try:
        return await run(address, process.start, frame, count)
    finally:
        process.terminate()
        process.join()


async def through_reader(address: str, start: Callable[[], None], frame: bytes, count: int) -> float:
    """add_reader on the socket's descriptor, as `gateway.workers.link` does it."""
    loop, done = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = new_router(context)
    router.bind(address)
    left, started_s = count, 0.0

    def drain() -> None:
        nonlocal left, started_s
        try:
            while True:
                routing_id = router.recv(zmq.NOBLOCK)
                router.recv(zmq.NOBLOCK)
                started_s = started_s or time.perf_counter()
                left -= 1
                if left < 0 and not done.done():
                    done.set_result(time.perf_counter() - started_s)
                router.send_multipart((routing_id, frame), zmq.NOBLOCK)
        except zmq.Again:
            pass

    loop.add_reader(int(router.getsockopt(zmq.FD)), drain)
    start()
    while not done.done():  # the descriptor is edge-triggered: look now and then
        await asyncio.sleep(0.05)
        drain()
    loop.remove_reader(int(router.getsockopt(zmq.FD)))
    router.close(linger=0)
    context.destroy(linger=0)
    return float(done.result() / count * 1e6)


async def through_asyncio(address: str, start: Callable[[], None], frame: bytes, count: int) -> float:
    """The same with zmq.asyncio's futures."""
    context = zmq.asyncio.Context()
    router = context.socket(zmq.ROUTER)
    router.bind(address)
    start()
    routing_id, _ = await router.recv_multipart()
    started_s = time.perf_counter()
    for _ in range(count):
        await router.send_multipart((routing_id, frame))
        await router.recv_multipart()
    elapsed_s = time.perf_counter() - started_s
    context.destroy(linger=0)
    return elapsed_s / count * 1e6
