"""What callers of the soak ask for, drawn from a seed, and whether what came of it is right."""

import asyncio
import random
import re
import time
from dataclasses import dataclass, field
from typing import Any

from octavo import AsyncClient, OctavoError
from octavo.client.requests import generate_request
from octavo.v1 import inference_pb2 as pb
from octavo.wire.messages import SamplingParams
from octavo.worker.runners.oracle.model import OracleModel, oracle_tokens
from tests.support.faults.callers import Ending, without_call

MODEL_LEN = 1024
PATTERN = r"[ab]{3,6}-[0-9]{2,4}"
CHOICES = ("yes", "no", "perhaps")
KINDS = {
    "stream": 50, "unary": 18, "several outputs": 6, "structured": 5, "long prompt": 4, "deadline": 6, "slow reader": 2,
    "cancel": 6, "late": 3,
}  # fmt: skip
PATIENCE_S = 40.0  # a deadline that nobody should meet
IMPATIENT = ("cancel", "late")  # who end their calls themselves


@dataclass(slots=True, kw_only=True)
class Asked(Ending):
    """One request, and what came of it. Times are monotonic seconds. outputs: token ids by output."""

    kind: str
    request: pb.GenerateRequest
    timeout_s: float | None = None
    cancel_after_s: float | None = None
    pause_s: float = 0.0  # a slow reader waits so long before each message
    outputs: list[list[int]] = field(default_factory=list)
    text: str = ""
    sent_s: float = 0.0
    ended_s: float = 0.0

    @property
    def outcome(self) -> str:
        """For counts."""
        return "complete" if self.error is None else f"{self.code} {self.reason}"

    @property
    def is_patient(self) -> bool:
        """Whether nothing but the service could end it early."""
        return self.kind not in IMPATIENT and not self.kind.startswith("culprit")


def draw(drawn: random.Random, kind: str | None = None) -> Asked:
    """The next request. Prompts share beginnings, so that the prefix cache has hits."""
    kind = kind or drawn.choices(list(KINDS), list(KINDS.values()))[0]
    prompt = [7, 8, drawn.randrange(20), *(drawn.randrange(10, 900) for _ in range(drawn.randrange(1, 40)))]
    if kind == "long prompt":
        prompt += [drawn.randrange(10, 900) for _ in range(500)]
    fields: dict[str, Any] = {"max_tokens": drawn.randrange(4, 64), "output": "token_ids", "ignore_eos": True}
    if kind == "several outputs":
        fields["num_outputs"] = drawn.randrange(2, 5)
    if kind == "structured":
        constraint = {"regex": PATTERN} if drawn.random() < 0.5 else {"choice": CHOICES}
        fields = {"max_tokens": 40, "output": "text_and_token_ids", **constraint}
    request = generate_request(
        token_ids=prompt, temperature=drawn.choice((0.0, 0.8)), seed=drawn.getrandbits(62), **fields
    )
    return Asked(
        kind=kind,
        request=request,
        timeout_s={"deadline": PATIENCE_S, "late": drawn.uniform(0.02, 0.4)}.get(kind),
        cancel_after_s=drawn.uniform(0, 0.6) if kind == "cancel" else None,
        pause_s=drawn.uniform(0.05, 0.2) if kind == "slow reader" else 0.0,
    )


async def ask(client: AsyncClient, asked: Asked) -> Asked:
    """To its end, whatever that is."""
    asked.sent_s = time.monotonic()
    asked.outputs = [[] for _ in range(asked.request.num_outputs or 1)]
    try:
        await (_complete(client, asked) if asked.kind == "unary" else _stream(client, asked))
    except (OctavoError, asyncio.CancelledError) as error:
        asked.error = without_call(error)
    asked.ended_s = time.monotonic()
    return asked


async def _complete(client: AsyncClient, asked: Asked) -> None:
    answer = await client.complete(asked.request, timeout_s=asked.timeout_s)
    asked.outputs[0] += answer.token_ids


async def _stream(client: AsyncClient, asked: Asked) -> None:
    stream = client.stream(asked.request, timeout_s=asked.timeout_s)
    leave = None
    if asked.cancel_after_s is not None:
        leave = asyncio.get_running_loop().call_later(asked.cancel_after_s, stream.cancel)
    try:
        async for delta in stream.deltas():
            asked.outputs[delta.output_index] += delta.token_ids
            asked.text += delta.text
            if asked.pause_s:
                await asyncio.sleep(asked.pause_s)
    finally:
        if leave is not None:
            leave.cancel()


def golden(asked: Asked, model: OracleModel, output: int) -> list[int]:
    """Every token of the fault-free run. Output n draws with seed + n."""
    seed, stop = asked.request.sampling.seed + output, asked.request.stop
    sampling = SamplingParams(temperature=0.0, seed=seed, max_tokens=stop.max_tokens, ignore_eos=True)
    return oracle_tokens(asked.request.token_ids.ids, sampling, model=model, max_total_tokens=MODEL_LEN)


def complaint(asked: Asked, model: OracleModel) -> str | None:
    """What is wrong with the bytes that came (I, T); None for nothing."""
    if asked.kind == "structured":
        is_right = re.fullmatch(PATTERN, asked.text) or asked.text in CHOICES
        return None if asked.error is not None or is_right else f"I: structured {asked.text!r}"
    for index, output in enumerate(asked.outputs):
        expected = golden(asked, model, index)
        if output != (expected if asked.error is None else expected[: len(output)]):
            return f"{'I' if asked.error is None else 'T'}: {asked.kind}, output {index} of {_shown(asked)}"
    return None


def _shown(asked: Asked) -> str:
    return f"prompt {list(asked.request.token_ids.ids)[:8]}… seed {asked.request.sampling.seed}: {asked.outcome}"
