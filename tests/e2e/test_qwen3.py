"""A Qwen3 checkpoint as transformers writes it, through the whole service on a CPU: its greedy tokens are
transformers'."""

from pathlib import Path

import pytest
import torch

from octavo import Client
from tests.support.model.qwen3 import make_qwen3, write_qwen3
from tests.support.services.service import serve

PROMPTS = [
    torch.randint(300, (length,), generator=torch.Generator().manual_seed(length)).tolist() for length in (5, 41)
]


@pytest.mark.parametrize(
    "flags",
    [(), ("--deterministic",), ("--tensor-parallel-size=2",)],
    ids=["as it is", "deterministic", "two ranks"],
)
def test_a_service_generates_what_transformers_does(tmp_path: Path, flags: tuple[str, ...]) -> None:
    folder = write_qwen3(tmp_path / "qwen3", vocab_size=320)
    theirs = make_qwen3(vocab_size=320)
    arguments = (f"--model={folder}", "--num-blocks=64", "--block-size=16", "--max-num-seqs=4", "--max-batch-tokens=16")
    with serve(tmp_path, *arguments, *flags) as service, Client(service.target) as client:
        for prompt in PROMPTS:
            stream = client.stream(
                token_ids=prompt, temperature=0, repetition_penalty=1, max_tokens=20, ignore_eos=True,
                output="text_and_token_ids",
            )  # fmt: skip
            assert list(stream)
            with torch.inference_mode():
                logits_TV = theirs(torch.tensor([prompt + stream.token_ids])).logits[0]
            assert stream.token_ids == logits_TV[len(prompt) - 1 : -1].argmax(-1).tolist()
            assert len(stream.token_ids) == 20
