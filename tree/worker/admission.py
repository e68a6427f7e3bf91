"""Whether a request can be served here at all, decided at once and without looking at what else runs.

What fails here is refused before it waits, so that nothing behind it waits for it. Knows no queue and no blocks,
only how many tokens the pool holds.
"""

from worker.config import SchedulerConfig
from worker.request import AddRequest, Ending, failure


def max_total_tokens(asked: AddRequest, config: SchedulerConfig, *, pool_tokens: int) -> int:
    """Prompt and output tokens after which the output ends. The last one needs no place in the pool."""
    wanted = len(asked.prompt_ids_T) + asked.sampling.max_tokens
    return min(wanted, config.max_model_len, pool_tokens + 1)


def refusal(asked: AddRequest, config: SchedulerConfig, *, pool_tokens: int) -> Ending | None:
    """Why this request can never be served; None where it can."""
    if not len(asked.prompt_ids_T):
        return failure("INVALID_FIELD", "prompt_ids: the prompt is empty")
    token_ids_T = asked.token_ids_T
    if int(token_ids_T.min()) < 0 or int(token_ids_T.max()) >= config.vocab_size:
        wrong = token_ids_T[(token_ids_T < 0) | (token_ids_T >= config.vocab_size)]
        return failure("INVALID_FIELD", f"prompt_ids: {int(wrong[0])} is not in [0, {config.vocab_size})")
    if asked.sampling.max_tokens < 1:
        return failure("INVALID_FIELD", f"sampling.max_tokens: {asked.sampling.max_tokens} is below 1")
    if len(asked.resumed_ids_T) >= asked.sampling.max_tokens:
        return failure(
            "INVALID_FIELD", f"num_resumed_tokens: {len(asked.resumed_ids_T)} of {asked.sampling.max_tokens}"
        )
    # The last token of an output needs no place in the pool; of a prompt one free place is asked for all the same.
    return _too_long(len(token_ids_T), config, pool_tokens + 1 if len(asked.resumed_ids_T) else pool_tokens)


def _too_long(num_prompt_tokens: int, config: SchedulerConfig, pool_tokens: int) -> Ending | None:
    needed = num_prompt_tokens + 1
    for limit, name in ((config.max_model_len, "the context"), (pool_tokens, "the KV pool")):
        if needed > limit:
            detail = f"{num_prompt_tokens} prompt tokens and one to generate exceed {name} of {limit} tokens"
            return failure("EXCEEDS_CAPACITY", detail)
    return None
