"""A thousand callers that change their minds, beside one that does not."""

import asyncio
import random
from contextlib import suppress
from pathlib import Path

from octavo import AsyncClient, OctavoError
from octavo.wire.messages import SamplingParams
from octavo.worker.runners.oracle.model import OracleModel, oracle_tokens
from tests.support.services.service import serve

NUM_CANCELS = 1000
BYSTANDER_TOKENS = 1500


async def cancel_somewhere(client: AsyncClient, generator: random.Random, gate: asyncio.Semaphore) -> None:
    """One request that is cancelled at a random moment of its life: before, during or after its first token."""
    prompt = [generator.randrange(200) for _ in range(generator.randrange(1, 64))]
    async with gate:
        stream = client.stream(token_ids=prompt, max_tokens=200, ignore_eos=True, output="token_ids")

        async def read() -> None:
            async for _ in stream.deltas():
                pass

        reader = asyncio.create_task(read())
        await asyncio.sleep(generator.uniform(0, 0.05))
        stream.cancel()
        with suppress(OctavoError, asyncio.CancelledError):
            await reader


async def test_a_thousand_cancels_leak_nothing_and_disturb_nobody(tmp_path: Path, oracle_checkpoint: Path) -> None:
    generator, gate = random.Random(1), asyncio.Semaphore(64)
    arguments = ("--runner=oracle", "--oracle-step-delay-s=0.002", "--num-blocks=256", "--audit-every-steps=1")
    with serve(tmp_path, f"--model={oracle_checkpoint}", "--max-model-len=2048", *arguments) as service:
        async with AsyncClient(service.target) as client:
            bystander = asyncio.create_task(
                client.complete(
                    token_ids=[7, 8, 9],
                    max_tokens=BYSTANDER_TOKENS,
                    ignore_eos=True,
                    seed=3,
                    temperature=0,
                    output="token_ids",
                )
            )
            await asyncio.gather(*[cancel_somewhere(client, generator, gate) for _ in range(NUM_CANCELS)])
            answer = await bystander
            (served,) = await client.models()
        sampling = SamplingParams(seed=3, max_tokens=BYSTANDER_TOKENS, ignore_eos=True)
        model = OracleModel(vocab_size=served.vocab_size, eos_token_ids=tuple(served.eos_token_ids))
        assert list(answer.token_ids) == oracle_tokens([7, 8, 9], sampling, model=model, max_total_tokens=2048)
        service.wait_until_idle()
        assert [list(audit.violations) for audit in service.audit()] == [[]]
