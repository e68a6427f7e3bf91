"""What it costs rank 0 of a tensor-parallel group to tell the others a step: encoding, publishing, and until each of
them has decoded it.

    python -m bench.worker.orders [--ranks 2 4 8] [--rounds 300] [--json out/orders.json]

Orders: a steady decode of 1 and 256 rows, a prompt of 8,192 tokens, masks of 256 rows over 151,936 ids. Ways: `ring` is
the group's own (worker/runners/orders.py), `pipe` writes the whole frame into a pipe for each rank. Microseconds,
median: `encode`; `publish`, for which rank 0 is busy; `take`, from the beginning of publishing until the last rank has
decoded the order and said so through a pipe of its own (as a step's first sum would).
"""

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import BinaryIO

import numpy as np

from bench.figures import write_json
from octavo.wire.messages import SamplingParams
from octavo.worker.runners.group import Constrain, Launch, Order, decode, encode
from octavo.worker.runners.orders import OrderReader, OrderRing
from octavo.worker.scheduler.plan import Chunk, NewRequest, Slot, StepMasks, StepPlan

VOCABULARY = 151_936
WAYS = ("ring", "pipe")
_LENGTH_BYTES = 4
_TIMEOUT_S = 60.0


def orders() -> dict[str, Order]:
    """The orders by name."""
    ids_T = np.arange(8192, dtype=np.int32)
    new = NewRequest(
        slot=Slot(0), request_id="prompt", token_ids_T=ids_T, num_prompt_tokens=8192, sampling=SamplingParams()
    )
    updates_U3 = np.stack([np.zeros(512, np.int32), np.arange(512), np.arange(512)], axis=1).astype(np.int32)
    chunk = Chunk(slot=Slot(0), start=0, num_tokens=8192, is_last=True)
    bits_NW = np.full((256, -(-VOCABULARY // 32)), -1, np.int32)
    return {
        "decode 1": Launch(_decodes(1)),
        "decode 256": Launch(_decodes(256)),
        "prompt 8192": Launch(StepPlan(step=1, new_requests=(new,), block_updates_U3=updates_U3, prefill=(chunk,))),
        "masks 256": Constrain(StepMasks(index_N=np.arange(256), bits_NW=bits_NW)),
    }


def _decodes(rows: int) -> StepPlan:
    slots_S = np.arange(rows, dtype=np.int32)
    return StepPlan(step=1, decode_slots_S=slots_S, decode_positions_S=slots_S + 100)


class Readers:
    """The other ranks, as processes that decode what arrives and answer with a byte."""

    def __init__(self, way: str, count: int) -> None:
        context = multiprocessing.get_context("fork")  # safe: they use nothing that threads of this process hold
        self._ring = OrderRing(count)
        self._bells, self._answers = list[int](), list[int]()
        self._processes = list[BaseProcess]()
        for number in range(count):
            bell_out, bell_in = os.pipe()
            answer_out, answer_in = os.pipe()
            mine = (bell_in, answer_out, *self._bells, *self._answers)
            arguments = (way, self._ring.descriptor, number, bell_out, answer_in, mine)
            process = context.Process(target=_read, args=arguments, daemon=True)
            process.start()
            os.close(bell_out)
            os.close(answer_in)
            self._bells.append(bell_in)
            self._answers.append(answer_out)
            self._processes.append(process)
        self.publish: Callable[[bytes], None] = self._by_ring if way == "ring" else self._by_pipe

    def _by_ring(self, frame: bytes) -> None:
        for bell in self._ring.put(frame, wait=lambda: time.sleep(0)):
            for descriptor in self._bells:
                os.write(descriptor, bell)

    def _by_pipe(self, frame: bytes) -> None:
        whole = memoryview(len(frame).to_bytes(_LENGTH_BYTES, "little") + frame)
        for descriptor in self._bells:
            rest = whole
            while rest:
                rest = rest[os.write(descriptor, rest) :]

    def wait(self) -> None:
        """Wait until all have answered."""
        for descriptor in self._answers:
            os.read(descriptor, 1)

    def close(self) -> None:
        """End the processes."""
        for descriptor in (*self._bells, *self._answers):
            os.close(descriptor)
        for process in self._processes:
            process.join(_TIMEOUT_S)
        self._ring.close()


def _read(way: str, ring: int, number: int, bells: int, answers: int, others: tuple[int, ...]) -> None:
    for descriptor in others:  # so that a pipe closes with its only writer
        os.close(descriptor)
    with os.fdopen(bells, "rb") as stream:
        reader = OrderReader(ring, number, stream)
        while (frame := reader.take() if way == "ring" else _take_frame(stream)) is not None:
            decode(frame)
            os.write(answers, b".")


def _take_frame(stream: BinaryIO) -> bytes | None:
    length = stream.read(_LENGTH_BYTES)
    return stream.read(int.from_bytes(length, "little")) if length else None


@contextmanager
def readers(way: str, count: int) -> Iterator[Readers]:
    """This many readers, until the end of the block."""
    found = Readers(way, count)
    try:
        yield found
    finally:
        found.close()


def measure(others: Readers, order: Order, *, rounds: int) -> dict[str, float]:
    """Microseconds by phase, and the bytes of the frame."""
    phases: dict[str, list[float]] = {"encode": [], "publish": [], "take": []}
    for _ in range(rounds):
        begin_s = time.perf_counter()
        frame = encode(order)
        encoded_s = time.perf_counter()
        others.publish(frame)
        published_s = time.perf_counter()
        others.wait()
        ends_s = {"encode": encoded_s - begin_s, "publish": published_s - encoded_s}
        for name, seconds in (ends_s | {"take": time.perf_counter() - encoded_s}).items():
            phases[name].append(seconds)
    medians = {name: round(1e6 * statistics.median(seconds), 1) for name, seconds in phases.items()}
    return medians | {"bytes": len(frame)}


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows: list[dict[str, object]] = []
    print(f"{'ranks':>5}  {'order':<12}{'bytes':>9}  {'way':<5}{'encode':>9}{'publish':>9}{'take':>9}  µs")
    for size in arguments.ranks:
        for name, order in orders().items():
            for way in WAYS:
                with readers(way, size - 1) as others:
                    found = measure(others, order, rounds=arguments.rounds)
                rows.append({"ranks": size, "order": name, "way": way, **found})
                times = "".join(f"{found[phase]:>9.1f}" for phase in ("encode", "publish", "take"))
                print(f"{size:>5}  {name:<12}{found['bytes']:>9.0f}  {way:<5}{times}", flush=True)
    write_json(arguments.json, rows)


if __name__ == "__main__":
    main()
