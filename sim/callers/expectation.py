"""What a caller must get, by a slow reference: no blocks, no batches, no streams.

A complete output equals the oracle's, an interrupted one is a beginning of it; a prefix hit comes from the caller's own
tenant; a stop string and what follows it are never seen.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from octavo.v1 import inference_pb2 as pb
from octavo.wire.messages import SamplingParams
from octavo.worker.runners.oracle.model import oracle_tokens
from sim.processes.runner import NAN_OUTPUT_INDEX, NAN_TOKEN, POISON_TOKEN, oracle_model
from sim.scenario import RequestSpec, SimConfig

END_TOKEN = 2


def outputs_of(spec: RequestSpec) -> list[RequestSpec]:
    """Each output of a request, as a request with that one output."""
    return [
        msgspec.structs.replace(spec, seed=(spec.seed + index) % (1 << 64), num_outputs=1)
        for index in range(spec.num_outputs)
    ]


class Expectation:
    """Shared by all callers: counts how often each tenant had which first block."""

    def __init__(self, config: SimConfig, bytes_by_id: Sequence[bytes]) -> None:
        self._model = oracle_model(config)
        self._max_total_tokens = min(config.max_model_len, config.num_blocks * config.block_size + 1)
        self._block_size = config.block_size
        self._max_model_len = config.max_model_len
        self._bytes_by_id = bytes_by_id
        self._first_blocks: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self._tokens: dict[tuple[int, int], list[int]] = {}  # by request and seed, which differs between its outputs

    def tokens(self, spec: RequestSpec) -> list[int]:
        """The whole expected output, including the token that ends it."""
        key = (spec.index, spec.seed)
        if (known := self._tokens.get(key)) is None:
            known = self._tokens[key] = self._computed_tokens(spec)
        return known

    def _computed_tokens(self, spec: RequestSpec) -> list[int]:
        sampling = SamplingParams(
            seed=spec.seed,
            max_tokens=min(spec.max_tokens, self._max_model_len - len(spec.prompt)),
            min_tokens=spec.min_tokens,
            stop_token_ids=spec.stop_token_ids,
            ignore_eos=spec.ignore_eos,
        )
        return oracle_tokens(spec.prompt, sampling, model=self._model, max_total_tokens=self._max_total_tokens)

    def remember(self, spec: RequestSpec) -> None:
        """From now on this prefix may be cached for its tenant."""
        for each in outputs_of(spec):
            ids = spec.prompt
            if len(ids) < self._block_size:
                ids = (*ids, *self.tokens(each))
            self._first_blocks[(spec.tenant, tuple(ids[: self._block_size]))] += 1 + bool(spec.retries)

    def problems(
        self, spec: RequestSpec, text: str, ids: list[int], num_logprobs: int, finished: Any, *, is_ok: bool
    ) -> list[str]:
        """What is wrong with what a caller received. finished: pb.Finished or None."""
        if not (ids or text or is_ok):
            return []
        expected = self.tokens(spec)
        found = self._wrong_ids(spec, ids, expected, is_ok) + self._wrong_text(spec, text, expected, is_ok)
        if num_logprobs != (len(ids) if spec.logprobs is not None and spec.output != "text" else num_logprobs):
            found.append(f"{num_logprobs} log-probabilities for {len(ids)} tokens")
        if finished is not None and is_ok:
            found += self._wrong_figures(spec, finished, expected)
        return found

    def _wrong_ids(self, spec: RequestSpec, ids: list[int], expected: list[int], is_ok: bool) -> list[str]:
        if spec.output == "text":
            return [f"ids {ids} though none were asked for"] if ids else []
        is_whole = is_ok and not spec.stop_strings
        wanted = expected if is_whole else expected[: len(ids)]
        return [] if ids == wanted else [f"ids {ids}, expected {expected}"]

    def _wrong_text(self, spec: RequestSpec, text: str, expected: list[int], is_ok: bool) -> list[str]:
        if spec.output == "ids":
            return [f"text {text!r} though none was asked for"] if text else []
        enders = {*spec.stop_token_ids, *(() if spec.ignore_eos else (END_TOKEN,))}
        shown = expected[:-1] if expected and expected[-1] in enders and len(expected) > spec.min_tokens else expected
        whole = b"".join(self._bytes_by_id[token] for token in shown).decode("utf-8", "replace")
        for stop in spec.stop_strings:
            whole = whole[: whole.find(stop)] if stop in whole else whole
        is_right = text == whole if is_ok else whole.startswith(text)
        return [] if is_right else [f"text {text!r}, expected {whole!r}"]

    def _wrong_figures(self, spec: RequestSpec, finished: Any, expected: list[int]) -> list[str]:
        usage, found = finished.usage, []
        if usage.prompt_tokens != len(spec.prompt):
            found.append(f"{usage.prompt_tokens} prompt tokens, sent were {len(spec.prompt)}")
        if not spec.stop_strings:
            if usage.completion_tokens != len(expected):
                found.append(f"{usage.completion_tokens} completion tokens, expected {len(expected)}")
            reason = pb.FINISH_REASON_STOP if self._is_stopped(spec, expected) else pb.FINISH_REASON_LENGTH
            if finished.reason != reason:
                found.append(f"reason {finished.reason}, expected {reason}")
        if not finished.receipt.migrations:  # an output that moved finds what it left behind itself
            found += self._wrong_hits(spec, usage)
        is_late = NAN_TOKEN in spec.prompt and usage.completion_tokens > NAN_OUTPUT_INDEX
        if is_late or POISON_TOKEN in spec.prompt:
            found.append("it ended well though it cannot")
        return found

    def _wrong_hits(self, spec: RequestSpec, usage: Any) -> list[str]:
        found = []
        num_holders = self._first_blocks[(spec.tenant, spec.prompt[: self._block_size])]
        if usage.cached_tokens and num_holders < 2:  # nobody but itself
            found.append(f"{usage.cached_tokens} tokens cached that its tenant never had")
        if usage.cached_tokens >= len(spec.prompt):
            found.append(f"{usage.cached_tokens} of {len(spec.prompt)} prompt tokens cached: none was computed")
        return found

    def _is_stopped(self, spec: RequestSpec, expected: list[int]) -> bool:
        enders = {*spec.stop_token_ids, *(() if spec.ignore_eos else (END_TOKEN,))}
        return expected[-1] in enders and len(expected) > spec.min_tokens
