"""The constraint of a request as the worker takes it, checked before anything else is done with the request.

Checking takes milliseconds; it runs in the text threads all the same, and nobody waits for it longer than the time
limit. Must not know workers or streams.
"""

import asyncio
import json
from collections import OrderedDict

from octavo.v1 import inference_pb2 as pb

from gateway.errors import InvalidRequest, Violation
from gateway.text.fair_queue import Share
from gateway.text.service import TextService
from grammar.check import check_grammar
from grammar.errors import GrammarRefused, Refusal
from grammar.limits import GrammarLimits
from wire.messages import Grammar, GrammarKind

_MAX_KNOWN = 256  # grammars that were found good are not checked again


class ConstraintChecker:
    """One per gateway; every method on its event loop."""

    def __init__(self, text: TextService, limits: GrammarLimits, *, timeout_s: float) -> None:
        self._text = text
        self._limits = limits
        self._timeout_s = timeout_s
        self._known: OrderedDict[Grammar, None] = OrderedDict()

    async def check(self, request: pb.GenerateRequest, *, prefix: str, share: Share) -> Grammar | None:
        """What the request's output must look like; None for anything. Raises InvalidRequest, TextError."""
        grammar = grammar_of(request)
        if grammar is None or self._is_known(grammar):
            return grammar
        try:
            num_bytes = len(grammar.source)
            work = self._text.run(lambda: check_grammar(grammar, self._limits), num_bytes=num_bytes, share=share)
            await asyncio.wait_for(work, self._timeout_s)
        except GrammarRefused as refused:
            raise InvalidRequest((_violation(request, refused, prefix),)) from None
        except TimeoutError:
            late = GrammarRefused(Refusal.TIMEOUT, f"took longer than {self._timeout_s:g} s to check")
            raise InvalidRequest((_violation(request, late, prefix),)) from None
        self._remember(grammar)
        return grammar

    def _is_known(self, grammar: Grammar) -> bool:
        if grammar not in self._known:
            return False
        self._known.move_to_end(grammar)
        return True

    def _remember(self, grammar: Grammar) -> None:
        self._known[grammar] = None
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)


def grammar_of(request: pb.GenerateRequest) -> Grammar | None:
    """From `constraint`, or from the tools of a chat that has to call one; unchecked."""
    constraint = request.constraint
    match constraint.WhichOneof("kind"):
        case "json_schema":
            return Grammar(
                kind=GrammarKind.JSON_SCHEMA,
                source=constraint.json_schema,
                format_as_annotation=request.format_as_annotation,
            )
        case "json_object":
            return Grammar(kind=GrammarKind.JSON_OBJECT)
        case "regex":
            return Grammar(kind=GrammarKind.REGEX, source=constraint.regex)
        case "ebnf":
            return Grammar(kind=GrammarKind.EBNF, source=constraint.ebnf)
        case "choice":
            options = json.dumps(list(constraint.choice.options), ensure_ascii=False)
            return Grammar(kind=GrammarKind.CHOICE, source=options)
    return _of_tools(request)


def _of_tools(request: pb.GenerateRequest) -> Grammar | None:
    """REQUIRED: calls of any tool; NAMED: one call of that tool."""
    chat = request.chat
    if chat.tool_choice == pb.TOOL_CHOICE_REQUIRED:
        tools, max_calls = list(chat.tools), None
    elif chat.tool_choice == pb.TOOL_CHOICE_NAMED:
        tools, max_calls = [tool for tool in chat.tools if tool.name == chat.tool_name], 1
    else:
        return None
    # Schemas as they were written: read and written anew, a number may be another one.
    listed = ", ".join(
        f'{{"name": {json.dumps(tool.name)}, "parameters": {tool.parameters_json or "null"}}}' for tool in tools
    )
    source = f'{{"tools": [{listed}], "max_calls": {json.dumps(max_calls)}}}'
    return Grammar(kind=GrammarKind.TOOL_CALLS, source=source, format_as_annotation=request.format_as_annotation)


def _violation(request: pb.GenerateRequest, refused: GrammarRefused, prefix: str) -> Violation:
    kind = request.constraint.WhichOneof("kind")
    if kind is None:
        return Violation(field=f"{prefix}chat.tools", description=str(refused))
    if kind == "choice":
        return Violation(field=f"{prefix}constraint.choice.options{refused.path}", description=refused.description)
    return Violation(field=f"{prefix}constraint.{kind}", description=str(refused))
