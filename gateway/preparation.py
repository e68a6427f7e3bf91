"""From a validated request to everything that a worker needs: prompt ids, the form of the output.

What takes long runs in the text threads. Must not know admission, workers or streams.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from octavo.v1 import inference_pb2 as pb

from gateway.config import RequestLimits
from gateway.constraints import ConstraintChecker
from gateway.deadline import Deadline
from gateway.errors import InvalidRequest, Violation
from gateway.models import ServedModels
from gateway.output import Echo, OutputFormat, StopText
from gateway.prompts import Prompts
from gateway.text.fair_queue import Share
from gateway.text.model_text import Bounds, Encoded, ModelText
from gateway.text.service import TextService
from gateway.text.stop_matcher import StopStrings
from gateway.validation.chat import may_call_tools
from gateway.validation.generate import check_choice, check_context, check_ids
from wire.messages import Grammar, ModelCard

_QUICK_STOP_CHARACTERS = 512  # building the largest automaton takes milliseconds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prepared:
    """prompt_ids_T: int32, at least one. prompt_text: what it was made of; empty where the caller gave ids. outputs:
    the form of each output. grammar: what they must look like. bad_words: as tokens."""

    request: pb.GenerateRequest
    card: ModelCard
    prompt_ids_T: np.ndarray
    prompt_text: str
    outputs: tuple[OutputFormat, ...]
    deadline: Deadline
    grammar: Grammar | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()

    @property
    def num_prompt_tokens(self) -> int:
        """At least one."""
        return len(self.prompt_ids_T)


class Preparer:
    """One per gateway; every method on its event loop."""

    def __init__(self, models: ServedModels, text: TextService, prompts: Prompts, limits: RequestLimits) -> None:
        self._models = models
        self._text = text
        self._prompts = prompts
        self._limits = limits
        self._constraints = ConstraintChecker(text, limits.grammar, timeout_s=limits.constraint_timeout_s)

    async def prepare(
        self, request: pb.GenerateRequest, card: ModelCard, *, prefix: str, deadline: Deadline, share: Share
    ) -> Prepared:
        """prefix: the request's path in the message that carries it. share: whose it is. Raises RequestError,
        TextError."""
        grammar = await self._constraints.check(request, prefix=prefix, share=share)
        prompt = await self._prompt(request, card, prefix, share)
        prompt_ids_T = prompt.ids_T
        if len(prompt_ids_T) == 0:
            raise InvalidRequest((Violation(field=f"{prefix}input", description="gives no tokens"),))
        stop_ids = check_ids(request.stop.token_ids, card.vocab_size, f"{prefix}stop.token_ids")
        ends = frozenset(stop_ids.tolist()) | frozenset(() if request.stop.ignore_eos else card.eos_token_ids)
        bad_words = await self._bad_words(request.sampling.bad_words, card, f"{prefix}sampling.", share)
        check_choice(
            request.sampling,
            card,
            path=f"{prefix}sampling.",
            stop_ids=ends,
            bad_words=bad_words,
            min_tokens=request.stop.min_tokens,
        )
        stops = await self._stop_strings(list(request.stop.strings), share)
        first = self._output_format(request, card, prompt, ends, stops)
        others = (request.num_outputs or 1) - 1
        return Prepared(
            request=request,
            card=card,
            prompt_ids_T=prompt_ids_T,
            prompt_text="" if request.WhichOneof("input") == "token_ids" else prompt.text,
            outputs=(first, *[replace(first, prompt_ids=())] * others),
            deadline=deadline,
            grammar=grammar,
            bad_words=bad_words,
        )

    async def _prompt(self, request: pb.GenerateRequest, card: ModelCard, prefix: str, share: Share) -> Encoded:
        """As many last tokens as the caller keeps, and their text where an output repeats it or something was cut."""
        keep = request.truncate_prompt_tokens
        if request.WhichOneof("input") == "token_ids":
            ids = request.token_ids.ids[-keep:] if keep else request.token_ids.ids
            check_context(len(ids), 1, card)  # before looking at millions of them
            ids_T = check_ids(ids, card.vocab_size, f"{prefix}token_ids.ids")
            if not request.output.echo or request.output.format == pb.OUTPUT_FORMAT_TOKEN_IDS:
                return Encoded(text="", ids_T=ids_T)
            return await self._spelled(request, card, ids_T, share)
        bounds = Bounds(max_bytes=self._limits.max_prompt_bytes, max_tokens=card.max_model_len - 1, keep=keep)
        encoded = await self._prompts.encode(request, self._models.text_of(card), bounds, share)
        if not keep or len(encoded.ids_T) <= keep:
            return encoded
        return await self._spelled(request, card, encoded.ids_T[-keep:], share)

    async def _spelled(self, request: pb.GenerateRequest, card: ModelCard, ids_T: np.ndarray, share: Share) -> Encoded:
        text, max_bytes = self._models.text_of(card), self._limits.max_prompt_bytes
        decode = (
            text.decode_visible if request.WhichOneof("input") == "token_ids" and _skips(request) else text.decode_all
        )
        work = self._text.run(lambda: decode(ids_T, max_bytes=max_bytes), num_bytes=len(ids_T), share=share)
        return Encoded(text=await work, ids_T=ids_T)

    async def _bad_words(
        self, words: Sequence[str], card: ModelCard, path: str, share: Share
    ) -> tuple[tuple[int, ...], ...]:
        if not words:
            return ()
        text = self._models.text_of(card)
        try:
            num_bytes = sum(map(len, words))
            return await self._text.run(lambda: text.encode_bad_words(words), num_bytes=num_bytes, share=share)
        except ValueError as error:
            problem = Violation(field=f"{path}bad_words[{error.args[0]}]", description="gives no tokens")
            raise InvalidRequest((problem,)) from None

    async def _stop_strings(self, strings: list[str], share: Share) -> StopStrings | None:
        if not strings:
            return None
        if (num_bytes := sum(map(len, strings))) > _QUICK_STOP_CHARACTERS:
            return await self._text.run(lambda: StopStrings(strings), num_bytes=num_bytes, share=share)
        return StopStrings(strings)

    def _output_format(
        self,
        request: pb.GenerateRequest,
        card: ModelCard,
        prompt: Encoded,
        stop_ids: frozenset[int],
        stops: StopStrings | None,
    ) -> OutputFormat:
        output, ids = request.output, list[int]()
        if output.echo or output.HasField("prompt_logprobs"):
            ids = prompt.ids_T.tolist()
        wants_text = request.output.format != pb.OUTPUT_FORMAT_TOKEN_IDS
        parses_calls = wants_text and _parses_calls(request)
        return OutputFormat(
            bytes_by_id=_bytes_by_id(request, self._models.text_of(card)) if wants_text else None,
            wants_ids=request.output.format in (pb.OUTPUT_FORMAT_TOKEN_IDS, pb.OUTPUT_FORMAT_TEXT_AND_TOKEN_IDS),
            stop_strings=stops,
            stop_ids=stop_ids,
            min_tokens=request.stop.min_tokens,
            make_call_id=_new_call_id if parses_calls else None,
            stop_text=StopText.INCLUDED if request.stop.include_stop else StopText.LEFT_OUT,
            echo=Echo(text=prompt.text, token_ids=ids) if output.echo else None,
            prompt_ids=ids if output.HasField("prompt_logprobs") else (),
        )


def _bytes_by_id(request: pb.GenerateRequest, text: ModelText) -> tuple[bytes, ...]:
    if not _skips(request):
        return text.table.all_bytes
    return text.bytes_with_call_tags if _parses_calls(request) else text.table.visible_bytes


def _skips(request: pb.GenerateRequest) -> bool:
    output = request.output
    return output.skip_special_tokens if output.HasField("skip_special_tokens") else True


def _parses_calls(request: pb.GenerateRequest) -> bool:
    output = request.output
    is_wanted = output.parse_tool_calls if output.HasField("parse_tool_calls") else True
    return is_wanted and may_call_tools(request.chat)


def _new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"
