"""The grammar of a request's output, from its constraint or the tools it must call, checked before it goes to a worker.

Checks run in processes with limits: some constraints keep the library busy for minutes, and it cannot be interrupted.
The processes are started with the first constraint; constraints that passed are not checked again.
"""

import json
import re
from collections import OrderedDict
from dataclasses import asdict, dataclass

import msgspec
import structlog

from octavo.gateway.config import ProcessLimits
from octavo.gateway.errors import InvalidRequest
from octavo.gateway.text.process_child import REFUSED
from octavo.gateway.text.process_pool import ProcessPool, Stopped
from octavo.gateway.text.service import Share
from octavo.grammar.errors import GrammarRefused, Refusal
from octavo.grammar.limits import GrammarLimits
from octavo.v1 import inference_pb2 as pb
from octavo.wire.messages import Grammar, GrammarKind

log = structlog.get_logger(__name__)
CHECK_PROCESSES = 3  # one tenant gets at most two of them
_TURNS = 5  # the longest wait for a process, in checks that each take all of their time
_MAX_KNOWN = 256  # valid grammars are not checked again
_IN_TOOL = re.compile(r"tools\[(?P<index>\d+)\]\.(?P<part>name|parameters)\.?(?P<inner>.*)", re.DOTALL)
_TOOL_FIELDS = {"name": "name", "parameters": "parameters_json"}


@dataclass(frozen=True, slots=True, eq=False)
class _Check:
    """A constraint to check, as `process_pool.Work`. key: its tenant."""

    grammar: Grammar
    limits: GrammarLimits
    key: str

    @property
    def num_bytes(self) -> int:
        return len(self.grammar.source)

    def frame(self, known: dict[str, None]) -> bytes:
        fields = msgspec.structs.asdict(self.grammar) | {"limits": asdict(self.limits)}
        return json.dumps(fields).encode()


class ConstraintChecker:
    """Checks a request's constraint before anything else is done with the request. One per gateway; every method on its
    event loop."""

    def __init__(self, limits: GrammarLimits, bounds: ProcessLimits) -> None:
        """bounds: limits on one check."""
        self._limits = limits
        self._max_wait_s = _TURNS * bounds.cpu_s
        self._processes = ProcessPool(
            "octavo.gateway.requests.check_child",
            bounds,
            task="check constraints",
            max_processes=CHECK_PROCESSES,
            max_per_key=CHECK_PROCESSES - 1,
        )
        self._known: OrderedDict[Grammar, None] = OrderedDict()

    async def check(self, request: pb.GenerateRequest, *, prefix: str, share: Share) -> Grammar | None:
        """The grammar that the request's output must match; None if it is unconstrained. Raises InvalidRequest,
        TextError."""
        grammar = grammar_of(request)
        if grammar is None:
            return None
        if grammar in self._known:
            self._known.move_to_end(grammar)
            return grammar
        work = _Check(grammar, self._limits, share.tenant)
        try:
            kind, text = await self._processes.run(work, share=share, max_wait_s=self._max_wait_s)
        except Stopped as stopped:
            if stopped.exit_code is not None and stopped.exit_code >= 0:  # an unexpected error
                raise RuntimeError(f"the check of a constraint {stopped.reason}") from None
            log.warning("constraint_stopped", kind=grammar.kind.name, reason=stopped.reason)
            refused = GrammarRefused(Refusal.LIMIT, f"{stopped.reason} to check, which was stopped")
            raise _invalid(request, refused, prefix) from None
        if kind == REFUSED:
            refusal, description, path = json.loads(text)
            raise _invalid(request, GrammarRefused(Refusal(refusal), description, path=path), prefix)
        self._known[grammar] = None
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)
        return grammar

    async def close(self) -> None:
        """Stop checking. Idempotent."""
        await self._processes.close()


def grammar_of(request: pb.GenerateRequest) -> Grammar | None:
    """The unchecked grammar, from `constraint`, or from the tools of a chat that must call one; None if there is
    none."""
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
    """REQUIRED: calls of any tool. NAMED: one call of that tool."""
    chat = request.chat
    if chat.tool_choice == pb.TOOL_CHOICE_REQUIRED:
        tools, max_calls = list(chat.tools), None
    elif chat.tool_choice == pb.TOOL_CHOICE_NAMED:
        tools, max_calls = [tool for tool in chat.tools if tool.name == chat.tool_name], 1
    else:
        return None
    # Schemas exactly as written: parsing and serializing again might change a number.
    listed = ", ".join(
        f'{{"name": {json.dumps(tool.name)}, "parameters": {tool.parameters_json or "null"}}}' for tool in tools
    )
    source = f'{{"tools": [{listed}], "max_calls": {json.dumps(max_calls)}}}'
    return Grammar(kind=GrammarKind.TOOL_CALLS, source=source, format_as_annotation=request.format_as_annotation)


def _invalid(request: pb.GenerateRequest, refused: GrammarRefused, prefix: str) -> InvalidRequest:
    kind = request.constraint.WhichOneof("kind")
    if kind is None:
        return _invalid_tool(request.chat, refused, f"{prefix}chat.tools")
    if kind == "choice":
        return InvalidRequest.of(f"{prefix}constraint.choice.options{refused.path}", refused.description)
    return InvalidRequest.of(f"{prefix}constraint.{kind}", str(refused))


def _invalid_tool(chat: pb.Chat, refused: GrammarRefused, path: str) -> InvalidRequest:
    """The refusal, with the tool's place among all tools of the chat: the grammar of a named tool only contains that
    one."""
    found = _IN_TOOL.fullmatch(refused.path)
    if found is None:
        return InvalidRequest.of(path, str(refused))
    is_named = chat.tool_choice == pb.TOOL_CHOICE_NAMED
    index = [tool.name for tool in chat.tools].index(chat.tool_name) if is_named else int(found["index"])
    field = f"{path}[{index}].{_TOOL_FIELDS[found['part']]}"
    inner = found["inner"]
    return InvalidRequest.of(field, f"{inner}: {refused.description}" if inner else refused.description)
