"""What `verify` feeds to both models: text where the checkpoint has a tokenizer, else random ids; always the same.

Must not know: models.
"""

from itertools import cycle, islice
from pathlib import Path

import torch

from octavo.model.config import ModelConfig
from octavo.model.errors import CheckpointError
from octavo.wire.checkpoint_files import find_file

TEXTS = (
    "The bakery on the corner opens at six, and by seven the first trays are",
    'def fibonacci(n: int) -> int:\n    """The n-th Fibonacci number."""\n    if n < 2:\n',
    "<|im_start|>user\nName three rivers in Europe.<|im_end|>\n<|im_start|>assistant\n",
    "春天的早晨，小镇上的人们",
    "Les trois plus grandes villes de France sont",
    "1, 1, 2, 3, 5, 8, 13, 21,",
    "<|im_start|>system\nYou answer in one sentence.<|im_end|>\n<|im_start|>user\nWhy is the sky blue?<|im_end|>\n"
    "<|im_start|>assistant\n",
    "Once upon a time, in a village between two mountains, there lived an old clockmaker who",
)
MIN_RANDOM, MAX_RANDOM = 5, 80


def make_prompts(folder: Path, config: ModelConfig, num_prompts: int) -> list[list[int]]:
    """Token ids of that many prompts, all shorter than half of the context."""
    prompts = text_prompts(folder, num_prompts) or random_prompts(config, num_prompts)
    longest = max(config.max_position_embeddings // 2, 1)
    return [[token % config.vocab_size for token in prompt[:longest]] for prompt in prompts]


def text_prompts(folder: Path, num_prompts: int) -> list[list[int]]:
    """The texts above, from the second round on with a number in front; empty without a tokenizer. Raises
    CheckpointError."""
    file = find_file(folder, "tokenizer.json")
    if file is None:
        return []
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"tokenizer.json: cannot be read: {error}") from None
    numbered = enumerate(islice(cycle(TEXTS), num_prompts))
    texts = [text if index < len(TEXTS) else f"{index}. {text}" for index, text in numbered]
    return [tokenizer.encode(text).ids or [0] for text in texts]


def random_prompts(config: ModelConfig, num_prompts: int) -> list[list[int]]:
    """Uniform ids, MIN_RANDOM to MAX_RANDOM of them."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(MIN_RANDOM, MAX_RANDOM + 1, (num_prompts,), generator=generator).tolist()
    return [torch.randint(config.vocab_size, (length,), generator=generator).tolist() for length in lengths]
