"""A tiny Qwen2.5 of any GQA shape, from a config and a seed: generates by recomputing everything, then from blocks.

    python -m examples.tiny_from_config --heads 14 --kv-heads 2 --head-dim 64

Needs no checkpoint and no network; takes a second on a CPU. Exit code 0 where all ways give the same tokens.
"""

import argparse
from collections.abc import Sequence

import torch

from octavo.model import BACKENDS, CausalLM, ModelConfig, generate, get_backend
from octavo.model.attention.paged import paged_generate
from octavo.model.errors import ConfigError


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse and check the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=_count, default=6, help="query heads")
    parser.add_argument("--kv-heads", type=_count, default=2, help="key and value heads; must divide --heads")
    parser.add_argument("--head-dim", type=_count, default=16, help="an even number")
    parser.add_argument("--layers", type=_count, default=2)
    parser.add_argument("--vocab", type=_count, default=512)
    parser.add_argument("--prompts", type=_count, default=3)
    parser.add_argument("--tokens", type=_count, default=20, help="new tokens for each prompt")
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args(arguments)
    try:
        tiny_config(flags)
    except ConfigError as error:
        parser.error(str(error))
    return flags


def _count(word: str) -> int:
    if not word.isdecimal() or not 1 <= int(word) < 10**6:
        raise argparse.ArgumentTypeError(f"{word!r} is no number from 1 to 999,999")
    return int(word)


def tiny_config(flags: argparse.Namespace) -> ModelConfig:
    """The configuration that a config.json with these numbers would give."""
    hidden_size = flags.heads * flags.head_dim
    return ModelConfig.from_dict(
        {
            "model_type": "qwen2",
            "vocab_size": flags.vocab,
            "hidden_size": hidden_size,
            "intermediate_size": 3 * hidden_size,
            "num_hidden_layers": flags.layers,
            "num_attention_heads": flags.heads,
            "num_key_value_heads": flags.kv_heads,
            "tie_word_embeddings": True,
        }
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what each way generates. Returns 0 if all give the same tokens, else 1."""
    flags = parse(arguments)
    config = tiny_config(flags)
    model = CausalLM.random(config, seed=flags.seed)
    generator = torch.Generator().manual_seed(flags.seed)
    prompts = [torch.randint(flags.vocab, (5 + 14 * i,), generator=generator).tolist() for i in range(flags.prompts)]
    print(f"{flags.heads} query heads on {flags.kv_heads} KV heads, {config.group_size} on each")

    expected = [generate(model, prompt, max_new_tokens=flags.tokens) for prompt in prompts]
    for prompt, output in zip(prompts, expected, strict=True):
        print(f"{len(prompt):4d} prompt tokens -> {output}")
    is_equal = True
    for name in BACKENDS:
        paged = paged_generate(model, get_backend(name), prompts, max_new_tokens=flags.tokens)
        is_equal &= paged == expected
        print(f"{name + ', one batch from paged blocks:':45s} {'the same tokens' if paged == expected else paged}")
    return 0 if is_equal else 1


if __name__ == "__main__":
    raise SystemExit(main())
