"""The sampler, one row at a time in plain Python and float64: the obvious reference of `model.sampling.sampler`."""

import math
from collections import Counter

import numpy as np

from octavo.wire.messages import SamplingParams

_WORD = 0xFFFF_FFFF
_LONG = 0xFFFF_FFFF_FFFF_FFFF
_GOLDEN = 0x9E37_79B9_7F4A_7C15


def mix64(z: int) -> int:
    """splitmix64's finaliser."""
    z = ((z ^ (z >> 30)) * 0xBF58_476D_1CE4_E5B9) & _LONG
    z = ((z ^ (z >> 27)) * 0x94D0_49BB_1331_11EB) & _LONG
    return z ^ (z >> 31)


def hash_bits(seed: int, index: int, token_id: int) -> int:
    """uint32 hash of one candidate token of a draw."""
    key = mix64((mix64((seed + _GOLDEN) & _LONG) + index * _GOLDEN) & _LONG)
    h = (token_id * 0x9E37_79B9 + (key & _WORD)) & _WORD
    h ^= h >> 16
    h = (h * 0x7FEB_352D) & _WORD
    h ^= key >> 32
    h ^= h >> 15
    h = (h * 0x846C_A68B) & _WORD
    return h ^ (h >> 16)


def log_exponential(seed: int, index: int, token_id: int) -> float:
    """Logarithm of an Exponential(1) random number."""
    u = min(((hash_bits(seed, index, token_id) & 0x7FFF_FFFF) + 0.5) * 2.0**-31, 1.0 - 2.0**-24)
    return math.log(-math.log1p(-u))


def penalised(logits_V: np.ndarray, prompt: list[int], output: list[int], params: SamplingParams) -> np.ndarray:
    """The logits after bias, penalties and masks."""
    out = logits_V.astype(np.float64).copy()
    for token, bias in params.logit_bias.items():
        out[token] += bias
    for token in set(prompt) | set(output):
        factor = params.repetition_penalty
        out[token] = out[token] * factor if out[token] < 0 else out[token] / factor
    for token, count in Counter(output).items():
        out[token] -= params.frequency_penalty * count + params.presence_penalty
    if len(output) < params.min_tokens:
        out[list(params.stop_token_ids)] = -np.inf
    for token in range(len(out)):
        if params.allowed_token_ids and token not in params.allowed_token_ids:
            out[token] = -np.inf
    for word in params.bad_words:
        if len(output) >= len(word) - 1 and output[len(output) - len(word) + 1 :] == list(word[:-1]):
            out[word[-1]] = -np.inf
    return out


def survivors(x_V: np.ndarray, params: SamplingParams) -> list[int]:
    """The ids that top-n-sigma, min-p, top-k and top-p leave, most likely first."""
    if params.top_n_sigma > 0:
        left = [float(x) for x in x_V if x > -math.inf]
        mean = sum(left) / len(left)
        sigma = math.sqrt(sum((x - mean) ** 2 for x in left) / len(left))
        x_V = np.where(x_V >= x_V.max() - params.top_n_sigma * sigma, x_V, -math.inf)
    weights = np.exp(x_V - x_V.max())
    order = sorted(range(len(x_V)), key=lambda i: -x_V[i])
    kept = [i for i in order if weights[i] >= params.min_p and x_V[i] > -math.inf]
    if 0 < params.top_k < len(kept):
        kept = [i for i in kept if x_V[i] >= x_V[kept[params.top_k - 1]]]
    if params.top_p < 1:
        nucleus: list[int] = []
        total, before = sum(weights[i] for i in kept), 0.0
        for i in kept:
            if nucleus and before >= params.top_p * total:
                break
            nucleus.append(i)
            before += weights[i]
        kept = [i for i in kept if x_V[i] >= x_V[nucleus[-1]]]
    return typical(x_V, kept, params.typical_p) if params.typical_p < 1 else kept


def typical(x_V: np.ndarray, kept: list[int], typical_p: float) -> list[int]:
    """The kept ids whose information content is nearest to the expected one."""
    total = sum(math.exp(x_V[i] - x_V.max()) for i in kept)
    logprobs = {i: x_V[i] - x_V.max() - math.log(total) for i in kept if x_V[i] > -math.inf}
    entropy = -sum(math.exp(logprob) * logprob for logprob in logprobs.values())
    order = sorted(logprobs, key=lambda i: abs(-logprobs[i] - entropy))
    mass, last = 0.0, order[0]
    for last in order:
        mass += math.exp(logprobs[last])
        if mass >= typical_p:
            break
    return [i for i in order if abs(-logprobs[i] - entropy) <= abs(-logprobs[last] - entropy)]


def sample(logits_V: np.ndarray, prompt: list[int], output: list[int], params: SamplingParams) -> int:
    """The next token."""
    logits_V = penalised(logits_V, prompt, output, params)
    if params.temperature == 0:
        return int(np.argmax(logits_V))
    x_V = (logits_V - logits_V.max()) / params.temperature
    scores = {i: x_V[i] - log_exponential(params.seed, len(output), i) for i in survivors(x_V, params)}
    return max(scores, key=lambda i: (scores[i], -i))
