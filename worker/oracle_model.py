"""The model of the oracle: the next token is a hash of every token before it, its position, and the seed.

`oracle_tokens` is the slow obvious twin of the whole worker: no blocks, no batches, no preemption. Whatever the real
scheduler, block manager and `worker.oracle_runner` do together must give exactly its tokens. This file knows no
blocks and no numpy: Python integers only.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from wire.messages import Pooling, Sampling

EMBEDDING_WIDTH = 8
MASK_64 = (1 << 64) - 1
TOKEN_FACTOR = 0x9E3779B97F4A7C15
POSITION_FACTOR = 0xD1B54A32D192ED03


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleModel:
    """What there is to know of it.

    eos_every: about one token in so many is an end token; None: never one.
    """

    vocab_size: int = 1000
    eos_token_ids: tuple[int, ...] = (2,)
    eos_every: int | None = None


def mix(value: int) -> int:
    """The finalizer of splitmix64 (Steele, Lea, Flood, 2014) on one 64-bit integer."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK_64
    return value ^ (value >> 31)


def mix_token(token: int, position: int) -> int:
    """What one token at one position adds to the state."""
    return mix((token * TOKEN_FACTOR + position * POSITION_FACTOR) & MASK_64)


def choose_token(model: OracleModel, state: int, sampling: Sampling, output_index: int) -> int:
    """The token that follows a context of this state: not before ``min_tokens`` one that would end the output."""
    noise = mix((state ^ mix((sampling.seed + output_index * TOKEN_FACTOR) & MASK_64)) & MASK_64)
    enders = set(model.eos_token_ids)
    may_end = output_index >= sampling.min_tokens
    if model.eos_every and enders and may_end and (noise >> 32) % model.eos_every == 0:
        return model.eos_token_ids[noise % len(model.eos_token_ids)]
    if not may_end:
        enders.update(sampling.stop_token_ids)
    token = noise % model.vocab_size
    while token in enders:
        token = (token + 1) % model.vocab_size
    return token


def oracle_embedding(prompt_ids: Sequence[int], pooling: Pooling) -> list[float]:
    """The whole expected vector: of the state after the last token, or the mean over the states after each."""
    state, states = 0, list[int]()
    for position, token in enumerate(prompt_ids):
        state = (state + mix_token(int(token), position)) & MASK_64
        states.append(state)
    chosen = states[-1:] if pooling is Pooling.LAST_TOKEN else states
    vectors = [state_vector(each) for each in chosen]
    return [sum(column) / len(chosen) for column in zip(*vectors, strict=True)]


def state_vector(state: int) -> list[float]:
    """What stands for the hidden state: multiples of 2^-8 in [-1, 1), whose sums are exact in float32."""
    return [((state >> (8 * index)) & 0xFF) / 128.0 - 1.0 for index in range(EMBEDDING_WIDTH)]


def oracle_tokens(
    prompt_ids: Sequence[int], sampling: Sampling, *, model: OracleModel, max_total_tokens: int
) -> list[int]:
    """The whole expected output, the token that stops it included.

    max_total_tokens: prompt and output together: the least of max_model_len and (block_size * num_blocks + 1); the
    last token needs no place in the KV cache.
    """
    state = 0
    for position, token in enumerate(prompt_ids):
        state = (state + mix_token(int(token), position)) & MASK_64
    enders = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(model.eos_token_ids))
    room = min(sampling.max_tokens, max_total_tokens - len(prompt_ids))
    output: list[int] = []
    while len(output) < room:
        token = choose_token(model, state, sampling, len(output))
        state = (state + mix_token(token, len(prompt_ids) + len(output))) & MASK_64
        output.append(token)
        if token in enders and len(output) > sampling.min_tokens:
            break
    return output
