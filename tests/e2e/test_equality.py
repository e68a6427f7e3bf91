"""Whatever happens on the way, a greedy stream is what the model says: many callers, tiny pools, cached prefixes."""

import asyncio
import random
from pathlib import Path

import pytest

from octavo import AsyncClient
from octavo.model import CausalLM, generate, load_model
from octavo.v1 import inference_pb2, inference_pb2_grpc
from tests.support.services.service import serve

NUM_STREAMS = 64
BLOCK_SIZE = 4


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Path, one_thread: None) -> CausalLM:
    return load_model(tiny_checkpoint)


def make_prompts(seed: int) -> list[list[int]]:
    """Prompts of 4 to 40 tokens, most of them beginning like another one."""
    generator = random.Random(seed)
    stems = [[generator.randrange(300) for _ in range(24)] for _ in range(4)]
    return [
        generator.choice(stems)[: generator.randrange(25)]
        + [generator.randrange(300) for _ in range(generator.randrange(4, 17))]
        for _ in range(NUM_STREAMS)
    ]


PROMPTS = make_prompts(1)
LENGTHS = [200, *(random.Random(n).randrange(40, 70) for n in range(1, NUM_STREAMS))]
"""The first is there from the beginning: who runs alone is not preempted."""


async def ask(
    client: AsyncClient, prompt: list[int], max_tokens: int, delay_s: float
) -> tuple[str, list[int], inference_pb2.Finished]:
    """One caller, after a while: text, ids and how it ended."""
    await asyncio.sleep(delay_s)
    stream = client.stream(
        token_ids=prompt,
        temperature=0,
        repetition_penalty=1,
        max_tokens=max_tokens,
        ignore_eos=True,
        output="text_and_token_ids",
    )
    text = "".join([piece async for piece in stream])
    assert stream.finished is not None
    return text, stream.token_ids, stream.finished


async def whole_text(client: AsyncClient, ids: list[int]) -> str:
    """The text of all ids at once; end tokens have none."""
    stub = inference_pb2_grpc.InferenceServiceStub(client._channel)
    request = inference_pb2.DetokenizeRequest(token_ids=ids, skip_special_tokens=True)
    return (await stub.Detokenize(request, timeout=60)).text


@pytest.fixture(scope="module")
def expected(model: CausalLM) -> list[list[int]]:
    """The outputs of all prompts, as the model alone gives them: for every service the same."""
    return [generate(model, prompt, max_new_tokens=length) for prompt, length in zip(PROMPTS, LENGTHS, strict=True)]


@pytest.mark.parametrize(("gateways", "host_kv_gib"), [(1, 0.0), (2, 0.0), (1, 0.005)])
async def test_every_output_equals_the_oracle_although_every_request_was_preempted(
    tmp_path: Path, tiny_checkpoint: Path, expected: list[list[int]], gateways: int, host_kv_gib: float
) -> None:
    generator = random.Random(gateways)
    arguments = (f"--model={tiny_checkpoint}", "--num-blocks=128", f"--block-size={BLOCK_SIZE}", "--max-num-seqs=12")
    arguments += ("--max-batch-tokens=64", "--audit-every-steps=1", "--preempt-every-steps=2", f"--gateways={gateways}")
    arguments += (f"--host-kv-gib={host_kv_gib}",)
    with serve(tmp_path, *arguments) as service:
        async with AsyncClient(service.target) as one, AsyncClient(service.target) as two:
            answers = await asyncio.gather(
                *[
                    ask(one if index % 2 else two, prompt, length, generator.uniform(0, 0.2) if index else 0.0)
                    for index, (prompt, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True))
                ]
            )
            texts = [await whole_text(one, ids) for _, ids, _ in answers]
        await asyncio.to_thread(service.wait_until_idle)
        audits = await asyncio.to_thread(service.audit)
    assert [ids for _, ids, _ in answers] == expected
    assert texts == [text for text, _, _ in answers]
    assert min(finished.receipt.preemptions for _, _, finished in answers) >= 1
    assert (sum(finished.receipt.swaps for _, _, finished in answers) > 0) == (host_kv_gib > 0)
    assert sum(finished.usage.cached_tokens for _, _, finished in answers) > 0
    assert [(list(audit.violations), audit.num_active_blocks) for audit in audits] == [([], 0)]
