"""From a validated request to everything that a worker needs: prompt ids, the form of the output.

    chat: mark (thread) -> render (a process with limits) -> tokenize (threads, step by step)

What takes long runs in the text threads. Must not know admission, workers or streams.
"""

import asyncio
import math
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace

import numpy as np

from octavo.gateway.config import ProcessLimits, RequestLimits
from octavo.gateway.errors import DeadlinePassed, InvalidRequest
from octavo.gateway.models import ServedModels
from octavo.gateway.requests.constraints import ConstraintChecker
from octavo.gateway.rpc.interceptor import RpcScope
from octavo.gateway.streams.output_processor import Echo, OutputFormat, StopText
from octavo.gateway.streams.stream import AtDeadline
from octavo.gateway.text.model_text import Bounds, Encoded, MarkedChat, ModelText
from octavo.gateway.text.process_pool import Renderer, chat_json
from octavo.gateway.text.service import Share, TextService
from octavo.gateway.text.stop_matcher import StopStrings
from octavo.gateway.validation.generate import (
    chat_input,
    check_choice,
    check_context,
    check_ids,
    is_constrained,
    may_call_tools,
)
from octavo.v1 import inference_pb2 as pb
from octavo.wire.messages import Grammar, ModelCard

_QUICK_STOP_CHARACTERS = 512  # building the largest automaton takes milliseconds
_MAX_MARK_GROWTH = 13  # a text with a JSON-escaped mark in every control token has at most this many times its bytes
PARTIAL_MARGIN_S = 0.05
"""A partial output is sent so long before the wire's deadline: for its way through the loop, the network and the
caller's library. Callers that are further away set `timeout_s` themselves."""
BACKSTOP_S = 0.03
"""So long after the worker should have ended the output, the gateway does: a step of the model may be long."""
FIGURES_S = 0.2
"""So long after that a partial answer waits for the worker's figures, where the wire's deadline is further away: its
text is with the caller by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """When a request must have ended.

    end_s: monotonic seconds at which the worker stops; None: never.
    needs_backstop: the gateway must end the request if the worker is late. (At the call's own deadline gRPC ends it.)
    figures_s: how long the end of a partial answer then waits for the worker's figures.
    """

    end_s: float | None = None
    at_end: AtDeadline = AtDeadline.STATUS
    needs_backstop: bool = False
    figures_s: float = 0.0


def deadline_of(
    *, arrived_s: float, wire_timeout_s: float | None, timeout_s: float | None, at_end: AtDeadline
) -> Deadline:
    """The earlier of the call's deadline and the request's. Both are seconds from arrival; None: not given."""
    if wire_timeout_s is None and timeout_s is None:
        return Deadline(at_end=at_end)
    is_partial = at_end is AtDeadline.PARTIAL
    ends = []
    if wire_timeout_s is not None:
        ends.append(arrived_s + wire_timeout_s - (min(PARTIAL_MARGIN_S, wire_timeout_s / 2) if is_partial else 0.0))
    wire_s = ends[0] if ends else math.inf
    if timeout_s is not None:
        ends.append(arrived_s + timeout_s)
    end_s = min(ends)
    return Deadline(
        end_s=end_s,
        at_end=at_end,
        needs_backstop=timeout_s is not None or is_partial,
        figures_s=max(0.0, min(FIGURES_S, wire_s - end_s - BACKSTOP_S)) if is_partial else 0.0,
    )


def until(end_s: float | None) -> AbstractAsyncContextManager[None]:
    """Run the block until end_s (monotonic; None: no limit). Raises DeadlinePassed if it has not ended by then."""
    return nullcontext() if end_s is None else _until(end_s)


@asynccontextmanager
async def _until(end_s: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(max(0.0, end_s - time.monotonic())):
            yield
    except TimeoutError:
        raise deadline_before_sending() from None


def deadline_before_sending() -> DeadlinePassed:
    """The error for a deadline that passed before a worker had the request."""
    return DeadlinePassed("the deadline passed before the request was sent to a worker")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prepared:
    """Everything a worker needs, and the form of the answer.

    prompt_ids_T: int32, at least one.
    prompt_text: of the ids that are kept; empty if the caller gave ids.
    outputs: the format of each output.
    grammar: what every output must match; None: anything.
    bad_words: as token sequences.
    """

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


def share_of(scope: RpcScope) -> Share:
    """The share of the text threads that the call's tenant has."""
    return Share(tenant=scope.caller.tenant or "", weight=scope.caller.weight)


class InputProcessor:
    """One per gateway; every method on its event loop."""

    def __init__(self, models: ServedModels, text: TextService, renderer: Renderer, limits: RequestLimits) -> None:
        self._models = models
        self._text = text
        self._renderer = renderer
        self._limits = limits
        bounds = ProcessLimits(cpu_s=limits.constraint_timeout_s, max_waiting=limits.max_tokenizing)
        self._constraints = ConstraintChecker(limits.grammar, bounds)

    async def close(self) -> None:
        """Stop checking constraints. Idempotent."""
        await self._constraints.close()

    async def process(
        self, request: pb.GenerateRequest, card: ModelCard, *, prefix: str, deadline: Deadline, share: Share
    ) -> Prepared:
        """Prepare a validated request. prefix: the request's path in the message that carries it. share: its tenant's.
        Raises RequestError, TextError."""
        grammar = None
        if is_constrained(request):
            grammar = await self._constraints.check(request, prefix=prefix, share=share)
        prompt = await self._prompt(request, card, prefix, share)
        prompt_ids_T = prompt.ids_T
        if len(prompt_ids_T) == 0:
            raise InvalidRequest.of(f"{prefix}input", "gives no tokens")
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

    async def encode(
        self,
        asked: pb.GenerateRequest | pb.EmbedInput | pb.TokenizeRequest,
        text: ModelText,
        bounds: Bounds,
        share: Share,
    ) -> Encoded:
        """The one way from text or chat to ids. asked: validated, has `text` or `chat`. text: of its model. Raises
        TextError."""
        if asked.WhichOneof("input") == "text":
            words = asked.text
            return await self._text.run_steps(text.encoding(words, bounds), num_bytes=len(words), share=share)
        chat, num_bytes = asked.chat, asked.chat.ByteSize()

        def mark() -> tuple[bytes, MarkedChat]:
            marked = text.marked(chat_input(chat))
            return chat_json(marked.chat), marked

        written, marked = await self._text.run_by_size(mark, num_bytes=num_bytes, share=share)
        max_bytes = bounds.max_bytes * (_MAX_MARK_GROWTH if marked.mark else 1)
        template = text.template_of(marked.chat)
        rendered = await self._renderer.render(template, written, max_bytes=max_bytes, share=share)
        steps = text.rendered_encoding(rendered, marked.mark, bounds)
        return await self._text.run_steps(steps, num_bytes=len(rendered), share=share)

    async def _prompt(self, request: pb.GenerateRequest, card: ModelCard, prefix: str, share: Share) -> Encoded:
        """The prompt's ids, only as many last ones as the caller keeps; and its text if an output repeats it or
        something was cut off."""
        keep = request.truncate_prompt_tokens
        if request.WhichOneof("input") == "token_ids":
            given = request.token_ids.ids
            ids = given[-keep:] if keep else given
            check_context(len(ids), 1, card)  # before looking at millions of them
            ids_T = check_ids(ids, card.vocab_size, f"{prefix}token_ids.ids", first=len(given) - len(ids))
            if not request.output.echo or request.output.format == pb.OUTPUT_FORMAT_TOKEN_IDS:
                return Encoded(text="", ids_T=ids_T)
            return await self._decoded(request, card, ids_T, share)
        bounds = Bounds(max_bytes=self._limits.max_prompt_bytes, max_tokens=card.max_model_len - 1, keep=keep)
        encoded = await self.encode(request, self._models.text_of(card), bounds, share)
        if not keep or len(encoded.ids_T) <= keep:
            return encoded
        return await self._decoded(request, card, encoded.ids_T[-keep:], share)

    async def _decoded(self, request: pb.GenerateRequest, card: ModelCard, ids_T: np.ndarray, share: Share) -> Encoded:
        text, max_bytes = self._models.text_of(card), self._limits.max_prompt_bytes
        is_visible = request.WhichOneof("input") == "token_ids" and _skips_special_tokens(request)
        decode = text.decode_visible if is_visible else text.decode_all
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
            raise InvalidRequest.of(f"{path}bad_words[{error.args[0]}]", "gives no tokens") from None

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
    if not _skips_special_tokens(request):
        return text.table.all_bytes
    return text.bytes_with_call_tags if _parses_calls(request) else text.table.visible_bytes


def _skips_special_tokens(request: pb.GenerateRequest) -> bool:
    output = request.output
    return output.skip_special_tokens if output.HasField("skip_special_tokens") else True


def _parses_calls(request: pb.GenerateRequest) -> bool:
    output = request.output
    is_wanted = output.parse_tool_calls if output.HasField("parse_tool_calls") else True
    return is_wanted and may_call_tools(request.chat)


def _new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"
