"""The model of the oracle: the next token is a hash of every token before it, its position, and the seed.

`oracle_tokens` is the slow obvious reference of the whole worker: no blocks, no batches, no preemption. Whatever the
real scheduler, block manager and `worker.runners.oracle.runner` do together must give exactly its tokens. This file
knows no blocks and no numpy: Python integers only.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.wire.messages import Pooling, SamplingParams

EMBEDDING_WIDTH = 8
MASK_64 = (1 << 64) - 1
TOKEN_FACTOR = 0x9E3779B97F4A7C15
ALLOWED_EOS_EVERY = 8  # outputs with a grammar end soon, once they may
POSITION_FACTOR = 0xD1B54A32D192ED03


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleModel:
    """The model's parameters.

    eos_every: about one token in this many is an end token; None: never.
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


def choose_token(
    model: OracleModel, state: int, sampling: SamplingParams, output_index: int, output: Sequence[int] = ()
) -> int | None:
    """The token that follows a context with this state; None if the sampling forbids all. No token that ends the output
    before ``min_tokens``. output: tokens so far, only needed for bad words. A bias of 100 forces a token, -100 bans it;
    others are ignored."""
    noise = mix((state ^ mix((sampling.seed + output_index * TOKEN_FACTOR) & MASK_64)) & MASK_64)
    may_end = output_index >= sampling.min_tokens
    if not (sampling.logit_bias or sampling.bad_words or sampling.allowed_token_ids):
        return _choose_from_all(model, noise, sampling, may_end)
    banned = _banned(sampling, output)
    wanted = {token for token, bias in sampling.logit_bias.items() if bias >= 100.0} or set(range(model.vocab_size))
    if sampling.allowed_token_ids:
        wanted &= set(sampling.allowed_token_ids)
    enders = set(model.eos_token_ids) & wanted - banned
    if model.eos_every and enders and may_end and (noise >> 32) % model.eos_every == 0:
        return sorted(enders)[noise % len(enders)]
    banned.update(model.eos_token_ids)
    if not may_end:
        banned.update(sampling.stop_token_ids)
    if len(wanted) == model.vocab_size:
        return _next_free(noise % model.vocab_size, model.vocab_size, banned)
    choices = sorted(wanted - banned) or (sorted(enders) if may_end else [])
    return choices[noise % len(choices)] if choices else None


def _choose_from_all(model: OracleModel, noise: int, sampling: SamplingParams, may_end: bool) -> int | None:
    """`choose_token` without forced or forbidden tokens: simulations spend their time here."""
    enders = model.eos_token_ids
    if model.eos_every and enders and may_end and (noise >> 32) % model.eos_every == 0:
        return sorted(enders)[noise % len(enders)]
    token = noise % model.vocab_size
    if token not in enders and (may_end or token not in sampling.stop_token_ids):
        return token
    return _next_free(token, model.vocab_size, {*enders, *(() if may_end else sampling.stop_token_ids)})


def choose_allowed(
    model: OracleModel,
    state: int,
    sampling: SamplingParams,
    output_index: int,
    allowed: Sequence[int],
    output: Sequence[int] = (),
) -> int | None:
    """`choose_token` for an output whose grammar allows these tokens, in rising order. Chooses an end token now and
    then if there is one, and always if there is nothing else."""
    noise = mix((state ^ mix((sampling.seed + output_index * TOKEN_FACTOR) & MASK_64)) & MASK_64)
    wanted = {token for token, bias in sampling.logit_bias.items() if bias >= 100.0}
    choices = [token for token in allowed if token not in _banned(sampling, output)]
    choices = [token for token in choices if token in wanted] or choices
    if sampling.allowed_token_ids:
        choices = [token for token in choices if token in sampling.allowed_token_ids]
    ends = [token for token in choices if token in model.eos_token_ids]
    others = [token for token in choices if token not in model.eos_token_ids]
    if ends and (not others or (noise >> 32) % ALLOWED_EOS_EVERY == 0):
        return ends[noise % len(ends)]
    return others[noise % len(others)] if others else None


def _banned(sampling: SamplingParams, output: Sequence[int]) -> set[int]:
    banned = {token for token, bias in sampling.logit_bias.items() if bias <= -100.0}
    for word in sampling.bad_words:
        begin = list(word[:-1])
        if list(output[len(output) - len(begin) :]) == begin:
            banned.add(word[-1])
    return banned


def _next_free(token: int, vocab_size: int, banned: set[int]) -> int | None:
    for offset in range(vocab_size):
        if (token + offset) % vocab_size not in banned:
            return (token + offset) % vocab_size
    return None


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
    """Stands in for the hidden state: multiples of 2^-8 in [-1, 1), whose sums are exact in float32."""
    return [((state >> (8 * index)) & 0xFF) / 128.0 - 1.0 for index in range(EMBEDDING_WIDTH)]


def oracle_tokens(
    prompt_ids: Sequence[int], sampling: SamplingParams, *, model: OracleModel, max_total_tokens: int
) -> list[int]:
    """The whole expected output, the token that stops it included.

    max_total_tokens: prompt and output together: the least of max_model_len and (block_size * num_blocks + 1); the
    last token needs no place in the KV cache.
    """
    state = 0
    for position, prompt_id in enumerate(prompt_ids):
        state = (state + mix_token(int(prompt_id), position)) & MASK_64
    enders = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(model.eos_token_ids))
    room = min(sampling.max_tokens, max_total_tokens - len(prompt_ids))
    output: list[int] = []
    while len(output) < room:
        if (token := choose_token(model, state, sampling, len(output), output)) is None:
            break
        state = (state + mix_token(token, len(prompt_ids) + len(output))) & MASK_64
        output.append(token)
        if token in enders and len(output) > sampling.min_tokens:
            break
    return output
