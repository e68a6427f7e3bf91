"""The worker of the wire's bench, in a process of its own: it waits for requests and sends their tokens as fast as the
socket takes them.

Must not know: the gateway's side, what is measured.
"""

import os
import secrets

import numpy as np

from octavo.wire.bundle import bundle_digest
from octavo.wire.messages import Capacity, Finished, ModelCard, Register, Run, StepOutput, WireFinishReason
from octavo.worker.engine.interfaces import GatewayIndex
from octavo.worker.transport.link import WorkerLink

FILES = {"tokenizer.json": b"{}"}
MODEL = "bench"


def register(epoch: str, rows: int) -> Register:
    """A worker of one large model."""
    card = ModelCard(
        name=MODEL,
        fingerprint="f",
        architecture="Bench",
        dtype="none",
        max_model_len=1 << 30,
        vocab_size=151_665,
        eos_token_ids=(),
        default_sampling={},
        tokenizer_digest=bundle_digest(FILES),
    )
    capacity = Capacity(num_blocks=1 << 20, block_size=16, max_num_seqs=rows, max_waiting=rows, max_batch_tokens=8192)
    return Register(worker_id="bench", epoch=epoch, card=card, capacity=capacity, pid=os.getpid(), pid_namespace="")


def step_message(epoch: str, seq: int, handles_N: np.ndarray, finished: tuple[Finished, ...] = ()) -> StepOutput:
    """One token per handle."""
    tokens_N = np.full(len(handles_N), seq % 151_665, np.int32)
    return StepOutput(
        epoch=epoch, seq=seq, step=seq, handles=handles_N.tobytes(), tokens=tokens_N.tobytes(), finished=finished
    )


def play_worker(address: str, rows: int, steps: int) -> None:
    """Wait for ``rows`` requests, then send ``steps`` tokens for each as fast as the socket takes them; again and
    again."""
    epoch = secrets.token_hex(16)
    link = WorkerLink([address], register(epoch, rows), FILES)
    seq = 0
    handles: list[int] = []
    while True:
        link.wait(0.2)
        handles += [message.handle for _, message in link.drain() if isinstance(message, Run)]
        if len(handles) == rows:
            seq = flood(link, epoch, seq, np.array(handles, np.int64), steps)
            handles.clear()


def flood(link: WorkerLink, epoch: str, seq: int, handles_N: np.ndarray, steps: int) -> int:
    """Steps as fast as they go out, the last with every end."""
    ends = tuple(
        Finished(handle=handle, reason=WireFinishReason.LENGTH, completion_tokens=steps)
        for handle in handles_N.tolist()
    )
    for step in range(steps):
        seq += 1
        link.put(GatewayIndex(0), step_message(epoch, seq, handles_N, ends if step == steps - 1 else ()))
        while any(each.socket.has_backlog for each in link._gateways):
            link.wait(0.001)
            link.drain()
    return seq
