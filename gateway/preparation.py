"""From a validated request to everything that a worker needs: prompt ids, the form of the output.

What takes long runs in the text threads. Must not know admission, workers or streams.
"""

import secrets
from dataclasses import dataclass

import numpy as np
from octavo.v1 import inference_pb2 as pb

from gateway.config import RequestLimits
from gateway.constraints import ConstraintChecker
from gateway.deadline import Deadline
from gateway.errors import InvalidRequest, Violation
from gateway.models import ServedModels
from gateway.output import OutputFormat
from gateway.text.model_text import ModelText
from gateway.text.service import TextService
from gateway.text.stop_matcher import StopStrings
from gateway.validation.chat import chat_input, may_call_tools
from gateway.validation.generate import check_context, check_ids
from wire.messages import Grammar, ModelCard

_QUICK_STOP_CHARACTERS = 512  # building the largest automaton takes milliseconds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prepared:
    """prompt_ids_T: int32, at least one. grammar: what the output must look like."""

    request: pb.GenerateRequest
    card: ModelCard
    prompt_ids_T: np.ndarray
    output: OutputFormat
    deadline: Deadline
    grammar: Grammar | None = None


class Preparer:
    """One per gateway; every method on its event loop."""

    def __init__(self, models: ServedModels, text: TextService, limits: RequestLimits) -> None:
        self._models = models
        self._text = text
        self._limits = limits
        self._constraints = ConstraintChecker(text, limits.grammar, timeout_s=limits.constraint_timeout_s)

    async def prepare(
        self, request: pb.GenerateRequest, card: ModelCard, *, prefix: str, deadline: Deadline
    ) -> Prepared:
        """prefix: the request's path in the message that carries it. Raises RequestError, TextError."""
        grammar = await self._constraints.check(request, prefix=prefix)
        prompt_ids_T = await self._prompt_ids(request, card, prefix)
        if len(prompt_ids_T) == 0:
            raise InvalidRequest((Violation(field=f"{prefix}input", description="gives no tokens"),))
        stop_ids = check_ids(request.stop.token_ids, card.vocab_size, f"{prefix}stop.token_ids")
        output = self._output_format(
            request, card, frozenset(stop_ids.tolist()), await self._stop_strings(list(request.stop.strings))
        )
        return Prepared(
            request=request, card=card, prompt_ids_T=prompt_ids_T, output=output, deadline=deadline, grammar=grammar
        )

    async def _prompt_ids(self, request: pb.GenerateRequest, card: ModelCard, prefix: str) -> np.ndarray:
        kind = request.WhichOneof("input")
        if kind == "token_ids":
            ids = request.token_ids.ids
            check_context(len(ids), 1, card)  # before looking at millions of them
            return check_ids(ids, card.vocab_size, f"{prefix}token_ids.ids")
        text, max_bytes = self._models.text_of(card), self._limits.max_prompt_bytes
        if kind == "text":
            encoded = await self._text.run(lambda: text.encode(request.text, max_bytes=max_bytes))
        else:
            encoded = await self._text.run(lambda: text.encode_chat(chat_input(request.chat), max_bytes=max_bytes))
        return encoded.ids_T

    async def _stop_strings(self, strings: list[str]) -> StopStrings | None:
        if not strings:
            return None
        if sum(map(len, strings)) > _QUICK_STOP_CHARACTERS:
            return await self._text.run(lambda: StopStrings(strings))
        return StopStrings(strings)

    def _output_format(
        self, request: pb.GenerateRequest, card: ModelCard, stop_ids: frozenset[int], stops: StopStrings | None
    ) -> OutputFormat:
        wants_text = request.output.format != pb.OUTPUT_FORMAT_TOKEN_IDS
        parses_calls = wants_text and _parses_calls(request)
        return OutputFormat(
            bytes_by_id=_bytes_by_id(request, self._models.text_of(card)) if wants_text else None,
            wants_ids=request.output.format in (pb.OUTPUT_FORMAT_TOKEN_IDS, pb.OUTPUT_FORMAT_TEXT_AND_TOKEN_IDS),
            stop_strings=stops,
            stop_ids=stop_ids if request.stop.ignore_eos else stop_ids | frozenset(card.eos_token_ids),
            min_tokens=request.stop.min_tokens,
            make_call_id=_new_call_id if parses_calls else None,
        )


def _bytes_by_id(request: pb.GenerateRequest, text: ModelText) -> tuple[bytes, ...]:
    output = request.output
    if output.HasField("skip_special_tokens") and not output.skip_special_tokens:
        return text.table.all_bytes
    return text.bytes_with_call_tags if _parses_calls(request) else text.table.visible_bytes


def _parses_calls(request: pb.GenerateRequest) -> bool:
    output = request.output
    is_wanted = output.parse_tool_calls if output.HasField("parse_tool_calls") else True
    return is_wanted and may_call_tools(request.chat)


def _new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"
