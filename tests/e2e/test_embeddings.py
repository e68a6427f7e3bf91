"""Vectors over gRPC are the last hidden states of transformers on the same weights, whatever else is in the batch."""

import asyncio
from pathlib import Path

import pytest
import torch

from octavo import AsyncClient
from tests.support.services.service import serve

INPUTS = [[(7 * index + position * position) % 300 for position in range(3 + 9 * index)] for index in range(12)]
LIMIT = 1e-5


def their_vectors(folder: Path, pooling: str) -> list[torch.Tensor]:
    from transformers import AutoModel  # takes seconds, in each process that shares the suite

    model = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    vectors = []
    with torch.inference_mode():
        for ids in INPUTS:
            hidden_TD = model(torch.tensor([ids])).last_hidden_state[0]
            vectors.append(hidden_TD.mean(dim=0) if pooling == "mean" else hidden_TD[-1])
    return vectors


async def generate_beside(client: AsyncClient, index: int) -> None:
    await client.complete(token_ids=INPUTS[index], max_tokens=40, ignore_eos=True, output="token_ids")


async def test_vectors_equal_transformers_among_decodes_chunks_and_preemptions(
    tmp_path: Path, tiny_checkpoint: Path, one_thread: None
) -> None:
    arguments = ("--dtype=float32", "--num-blocks=60", "--block-size=4", "--max-batch-tokens=32", "--max-num-seqs=6")
    with serve(
        tmp_path, f"--model={tiny_checkpoint}", "--max-model-len=200", "--audit-every-steps=1", *arguments
    ) as service:
        async with AsyncClient(service.target) as client:
            for pooling in ("last_token", "mean", "last_token", "mean"):
                beside = [asyncio.create_task(generate_beside(client, index)) for index in range(6)]
                raw = await client.embed(INPUTS, pooling=pooling, normalize=False)
                scaled = await client.embed(INPUTS, pooling=pooling)
                await asyncio.gather(*beside)
                for ours, unit, theirs_D in zip(
                    raw.embeddings, scaled.embeddings, their_vectors(tiny_checkpoint, pooling), strict=True
                ):
                    assert (torch.tensor(ours.values) - theirs_D).abs().max() < LIMIT
                    assert (torch.tensor(unit.values) - theirs_D / theirs_D.norm()).abs().max() < LIMIT
                lengths = [each.usage.prompt_tokens for each in raw.embeddings]
                assert lengths == [len(ids) for ids in INPUTS]
                if pooling == "mean":
                    assert [each.usage.cached_tokens for each in raw.embeddings] == [0] * len(INPUTS)
            assert sum(each.usage.cached_tokens for each in raw.embeddings) == 0
            again = await client.embed(INPUTS, pooling="last_token")
            assert sum(each.usage.cached_tokens for each in again.embeddings) > 0
            texts = await client.embed(["the quick brown fox", [("user", "hello")]], truncate_prompt_tokens=3)
            assert [each.usage.prompt_tokens for each in texts.embeddings] == [3, 3]
            assert texts.embeddings[0].receipt.block_seconds > 0
        service.wait_until_idle()
        assert [list(audit.violations) for audit in service.audit()] == [[]]


async def test_calls_that_end_early_leave_nothing(tmp_path: Path, oracle_checkpoint: Path) -> None:
    arguments = ("--runner=oracle", "--oracle-step-delay-s=0.005", "--num-blocks=256", "--max-batch-tokens=64")
    many = [[index % 200 + 1] * 300 for index in range(200)]
    with serve(
        tmp_path, f"--model={oracle_checkpoint}", "--max-model-len=2048", *arguments, "--max-num-seqs=32"
    ) as service:
        async with AsyncClient(service.target) as client:
            from octavo import DeadlineExceeded

            with pytest.raises(DeadlineExceeded):
                await client.embed(many, timeout_s=0.5)
            task = asyncio.create_task(client.embed(many))
            await asyncio.sleep(0.3)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            service.wait_until_idle()
            assert len((await client.embed([[1, 2, 3]])).embeddings[0].values) == 8
        assert [list(audit.violations) for audit in service.audit()] == [[]]
