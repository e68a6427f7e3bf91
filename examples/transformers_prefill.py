"""transformers reads the prompt; its cache is written into our blocks; our paged attention goes on.

    python -m examples.transformers_prefill                                  # a random model, no network
    python -m examples.transformers_prefill --model Qwen/Qwen2.5-0.5B-Instruct --prompt "The capital of France is"

At every step both sides get the same token, and the difference of their logits is printed. Exit code 0 where both would
have chosen the same tokens.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from octavo.model import BACKENDS, CausalLM, get_backend, load_model, resolve_checkpoint, write_kv
from octavo.model.attention.paged import PagedSequences


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or hub id; without it, a small random model")
    parser.add_argument("--prompt", default="The capital of France is", help="text, where the model has a tokenizer")
    parser.add_argument("--backend", choices=BACKENDS, default="sdpa")
    parser.add_argument("--tokens", type=int, default=16, help="decode steps")
    return parser.parse_args(arguments)


def write_random_checkpoint(folder: Path) -> Path:
    """Write a random Qwen2 made by transformers, with 14 query heads and 2 KV heads as in the 0.5B model. Returns the
    folder."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2, "num_hidden_layers": 2}
    config = Qwen2Config(vocab_size=1000, intermediate_size=1024, initializer_range=0.05, **shape)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def prompt_ids(folder: Path, text: str, vocab_size: int) -> list[int]:
    """The text's ids by the checkpoint's tokenizer; without one, 37 random ids: two full blocks and part of a third."""
    if not (folder / "tokenizer.json").is_file():
        return torch.randint(vocab_size, (37,), generator=torch.Generator().manual_seed(1)).tolist()
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids


def adopt_cache(sequences: PagedSequences, cache: Any, num_tokens: int) -> None:
    """Write the keys and values of transformers' cache, [1, K, T, H] per layer, into the blocks of sequence 0."""
    block_size = sequences.kv.block_size
    slot_mapping_T = torch.tensor(
        [
            sequences.tables[0][position // block_size] * block_size + position % block_size
            for position in range(num_tokens)
        ]
    )
    pools = zip(cache.layers, sequences.kv.k_pools, sequences.kv.v_pools, strict=True)
    for layer, k_pool_PKBH, v_pool_PKBH in pools:
        k_TKH, v_TKH = layer.keys[0].transpose(0, 1), layer.values[0].transpose(0, 1)
        write_kv(k_TKH, v_TKH, k_pool_PKBH, v_pool_PKBH, slot_mapping_T)
    sequences.lengths[0] = num_tokens


def decode_together(ours: CausalLM, theirs: Any, ids: list[int], flags: argparse.Namespace) -> bool:
    """Feed both models the token that transformers finds most likely. Returns whether ours chose the same at every
    step."""
    from transformers import DynamicCache

    sequences = PagedSequences(ours, get_backend(flags.backend), num_sequences=1, max_tokens=len(ids) + flags.tokens)
    cache = DynamicCache(config=theirs.config)  # passed by position: its keyword differs between releases
    output = theirs(torch.tensor([ids]), None, None, cache, use_cache=True)
    adopt_cache(sequences, cache, len(ids))
    token = int(output.logits[0, -1].argmax())
    is_equal = True
    print(f"{'step':>4} {'fed':>7} {'theirs':>7} {'ours':>7} {'max |logits difference|':>24} {'relative':>10}")
    for step in range(flags.tokens):
        output = theirs(torch.tensor([[token]]), None, None, cache, use_cache=True)
        their_logits_V = output.logits[0, -1].float()
        our_logits_V = ours.logits(sequences.step({0: [token]})[0])[0]
        difference_V = our_logits_V - their_logits_V
        fed, token, chosen = token, int(their_logits_V.argmax()), int(our_logits_V.argmax())
        relative = float(difference_V.norm() / their_logits_V.norm())
        print(f"{step:4d} {fed:7d} {token:7d} {chosen:7d} {float(difference_V.abs().max()):24.3e} {relative:10.2e}")
        is_equal &= token == chosen
    return is_equal


def main(arguments: Sequence[str] | None = None) -> int:
    """Load the model twice and decode with both. Returns 0 if the tokens are equal, else 1."""
    from transformers import Qwen2ForCausalLM as TransformersQwen2

    flags = parse(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        folder = resolve_checkpoint(flags.model) if flags.model else write_random_checkpoint(Path(scratch))
        ours = load_model(folder, dtype=torch.float32)
        theirs = TransformersQwen2.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
        ids = prompt_ids(folder, flags.prompt, ours.config.vocab_size)
        with torch.inference_mode():
            is_equal = decode_together(ours, theirs, ids, flags)
    print(
        f"prefill by transformers, decode by '{flags.backend}': the tokens are {'equal' if is_equal else 'different'}"
    )
    return 0 if is_equal else 1


if __name__ == "__main__":
    raise SystemExit(main())
