"""A request's sampling and stop fields, completed with the model's defaults, as the worker takes them."""

import secrets
from typing import Any

from octavo.v1 import inference_pb2 as pb

from wire.messages import Grammar, ModelCard, Sampling

# What an unset field means where generation_config.json says nothing.
_NEUTRAL: dict[str, float] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


def default_sampling(card: ModelCard) -> dict[str, float]:
    """What unset fields become for this model."""
    known = {name: value for name, value in card.default_sampling.items() if name in _NEUTRAL}
    return _NEUTRAL | known


def complete_sampling(
    request: pb.GenerateRequest,
    card: ModelCard,
    *,
    num_prompt_tokens: int,
    grammar: Grammar | None = None,
    bad_words: tuple[tuple[int, ...], ...] = (),
) -> Sampling:
    """A validated request's parameters. max_tokens is cut at the end of the context. grammar: its constraint.
    bad_words: as tokens."""
    params, stop, output = request.sampling, request.stop, request.output
    values: dict[str, Any] = {
        name: getattr(params, name) if params.HasField(name) else default  # type: ignore[arg-type]
        for name, default in default_sampling(card).items()
    }
    values["top_k"] = int(values["top_k"])
    room = card.max_model_len - num_prompt_tokens
    return Sampling(
        **values,
        seed=params.seed if params.HasField("seed") else secrets.randbits(64),
        max_tokens=min(stop.max_tokens, room) if stop.HasField("max_tokens") else room,
        min_tokens=stop.min_tokens,
        stop_token_ids=tuple(stop.token_ids),
        ignore_eos=stop.ignore_eos,
        num_logprobs=output.logprobs if output.HasField("logprobs") else None,
        num_prompt_logprobs=output.prompt_logprobs if output.HasField("prompt_logprobs") else None,
        typical_p=params.typical_p if params.HasField("typical_p") else 1.0,
        logit_bias=dict(params.logit_bias),
        allowed_token_ids=tuple(params.allowed_token_ids),
        bad_words=bad_words,
        grammar=grammar,
    )
