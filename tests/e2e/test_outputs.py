"""Several outputs, scores of prompts and bans through the whole service, with everybody preempted on the way."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from octavo import AsyncClient
from tests.support.services.service import serve

PROMPT = [7, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62]
WISHES: list[dict[str, Any]] = [
    {"temperature": 1.0, "seed": 2**64 - 2},
    {"temperature": 0.8, "seed": 3, "typical_p": 0.9, "repetition_penalty": 1.2},
    {"temperature": 1.0, "seed": 4, "allowed_token_ids": range(20, 90), "logit_bias": {33: 5.0, 34: -100.0}},
    {"temperature": 1.0, "seed": 5, "bad_words": ["a", "b", "th"], "frequency_penalty": 0.5},
    {"temperature": 2.0, "seed": 4, "top_n_sigma": 1.0},
]


async def alone(client: AsyncClient, wishes: dict[str, Any], output: int) -> list[int]:
    seed = (wishes["seed"] + output) % 2**64
    answer = await client.complete(
        token_ids=PROMPT, max_tokens=24, ignore_eos=True, output="token_ids", **wishes | {"seed": seed}
    )
    return list(answer.token_ids)


async def together(client: AsyncClient, wishes: dict[str, Any]) -> list[list[int]]:
    stream = client.stream(
        token_ids=PROMPT, max_tokens=24, ignore_eos=True, output="token_ids", num_outputs=5, **wishes
    )
    async for _ in stream.deltas():
        pass
    return [output.token_ids for output in stream.outputs]


@pytest.mark.parametrize("cache", ["--prefix-cache=on", "--prefix-cache=off"])
async def test_each_output_is_what_a_request_with_its_seed_gives(
    tmp_path: Path, tiny_checkpoint: Path, cache: str
) -> None:
    arguments = (f"--model={tiny_checkpoint}", "--num-blocks=64", "--block-size=4")
    arguments += ("--max-model-len=256", "--max-num-seqs=4", cache)
    arguments += ("--max-batch-tokens=64", "--audit-every-steps=1", "--preempt-every-steps=3")
    with serve(tmp_path, *arguments) as service:
        async with AsyncClient(service.target) as client:
            several = await asyncio.gather(*[together(client, wishes) for wishes in WISHES])
            single = [[await alone(client, wishes, output) for output in range(5)] for wishes in WISHES]
            scored = await client.complete(token_ids=PROMPT, max_tokens=1, prompt_logprobs=2, echo=True)
        await asyncio.to_thread(service.wait_until_idle)
        audits = await asyncio.to_thread(service.audit)
    assert several == single
    assert {token for ids in several[2] for token in ids} <= set(range(20, 90)) - {34}
    assert [each.chosen.token_id for each in scored.prompt_logprobs] == PROMPT[1:]
    assert scored.finished.usage.cached_tokens == 0
    assert [(list(audit.violations), audit.num_active_blocks) for audit in audits] == [([], 0)]
