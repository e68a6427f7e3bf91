"""Translates an openengine.v1 request into the equivalent octavo.v1 request; violations have the caller's names."""

import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from google.protobuf.message import Message

from octavo.gateway.dialects.unserved import path_by, unserved
from octavo.gateway.errors import InvalidRequest, NamesFields, Violation
from octavo.gateway.validation.fields import REQUEST_ID, raise_if_any, unset_choice
from octavo.gateway.validation.generate import check_generate
from octavo.gateway.validation.limits import MAX_PRIORITY, MIN_PRIORITY
from octavo.openengine import openengine_pb2 as oe
from octavo.v1 import common_pb2
from octavo.v1 import inference_pb2 as pb

RESERVED = "openengine-"
ROUTING_KEY, TARGET_RANK, PRIORITY = (RESERVED + name for name in ("routing-key", "target-dp-rank", "priority"))
BACKEND = "llguidance"  # the only backend for constraints here

# octavo.v1 -> here; the first prefix that matches.
_PATHS = (
    ("text", "prompt"),
    ("input", "prompt"),
    ("cache_salt", "kv.cache_salt"),
    ("num_outputs", "sampling.num_sequences"),
    ("stop.strings", "stopping.conditions"),
    ("stop.token_ids", "stopping.conditions"),
    ("stop.include_stop", "stopping.include_stop_in_output"),
    ("stop.", "stopping."),
    ("output.prompt_logprobs", "response.prompt_candidates.top_n"),
    ("output.logprobs", "response.output_candidates.top_n"),
    ("constraint.ebnf", "guided.ebnf_grammar"),
    ("constraint.choice.options", "guided.choice.choices"),
    ("constraint", "guided"),
    ("priority", PRIORITY),
)
# Fields for features that an aggregated server of text models does not have. The contract lets a server ignore `extra`.
_REFUSED = {
    "GenerateRequest": {"media": "this model takes text only", "lora_name": "there are no adapters here"},
    "KvOptions": {"session": "caches do not come from other engines here"},
    "GuidedDecoding": {"structural_tag": "is not supported"},
    "CandidateTokenSelection": {
        "token_ids": "is not supported: top_n is",
        "all": "is not supported: top_n is",
    },
}
_WHOLE = ("extra",)  # contents are not checked


def translate(request: oe.GenerateRequest, metadata: Mapping[str, str]) -> pb.GenerateRequest:
    """The checked octavo.v1 request. metadata: from `read_metadata`. Raises InvalidRequest that names the caller's
    fields."""
    raise_if_any(_violations(request))
    sampling, stopping, response, kv = request.sampling, request.stopping, request.response, request.kv
    translated = pb.GenerateRequest(
        request_id=request.request_id,
        model=request.model,
        sampling=_present(
            pb.SamplingParams,
            sampling,
            ("temperature", "top_p", "min_p", "seed"),
            ("frequency_penalty", "presence_penalty", "repetition_penalty"),
        ),
        stop=_present(pb.StopConditions, stopping, ("max_tokens", "min_tokens", "ignore_eos")),
        output=pb.OutputOptions(format=pb.OUTPUT_FORMAT_TEXT_AND_TOKEN_IDS),
        cache_salt=secrets.token_hex(16) if kv.bypass_prefix_cache else kv.cache_salt,
        constraint=_constraint(request.guided),
    )
    match request.WhichOneof("input"):
        case "prompt":
            translated.text = request.prompt
        case "token_ids":
            translated.token_ids.CopyFrom(common_pb2.TokenIds(ids=request.token_ids.ids))
    if sampling.HasField("top_k"):
        translated.sampling.top_k = max(0, sampling.top_k)  # -1 also means all
    if sampling.HasField("num_sequences"):
        translated.num_outputs = sampling.num_sequences
    if stopping.HasField("include_stop_in_output"):
        translated.stop.include_stop = stopping.include_stop_in_output
    for condition in stopping.conditions:
        if condition.WhichOneof("condition") == "stop_text":
            translated.stop.strings.append(condition.stop_text)
        else:
            translated.stop.token_ids.append(condition.stop_token_id)
    if response.return_output_logprobs:
        translated.output.logprobs = response.output_candidates.top_n
    if response.return_prompt_logprobs:
        translated.output.prompt_logprobs = response.prompt_candidates.top_n
        translated.output.return_prompt = True
    if PRIORITY in metadata:
        translated.priority = min(MAX_PRIORITY, max(MIN_PRIORITY, int(metadata[PRIORITY])))
    try:
        check_generate(translated)
    except InvalidRequest as error:
        raise in_callers_names(error, request) from None
    return translated


def read_metadata(metadata: Iterable[tuple[str, Any]]) -> dict[str, str]:
    """The contract's own metadata, by key. Raises InvalidRequest for a key that is repeated, malformed or unknown."""
    found: dict[str, str] = {}
    for name, value in metadata:
        if name.startswith(RESERVED):
            if name in found:
                raise InvalidRequest.of(name, "is given twice")
            found[name] = str(value)
    for name, value in found.items():
        match name:
            case _ if name == ROUTING_KEY:
                if not value:
                    raise InvalidRequest.of(name, "must not be empty")
            case _ if name == TARGET_RANK:
                if not _is_integer(value, 0, 2**32 - 1):
                    raise InvalidRequest.of(name, "must be a decimal uint32")
                if int(value):
                    raise InvalidRequest.of(name, "there is only rank 0")
            case _ if name == PRIORITY:
                if not _is_integer(value, -(2**31), 2**31 - 1):
                    raise InvalidRequest.of(name, "must be a decimal int32")
            case _:
                raise InvalidRequest.of(name, "is not known in revision 1 of openengine.v1, which is served here")
    return found


def check_known(message: Message) -> None:
    """Raises InvalidRequest for fields that revision 1 does not have or that are not supported here."""
    raise_if_any(unserved(message, _REFUSED, opaque=_WHOLE))


def check_ranks(ranks: Iterable[int]) -> None:
    """Raises InvalidRequest for a rank that does not exist."""
    found = (
        Violation(field=f"data_parallel_ranks[{index}]", description="there is only rank 0")
        for index, rank in enumerate(ranks)
        if rank
    )
    raise_if_any(found)


def check_abort(request: oe.AbortRequest) -> None:
    """Raises InvalidRequest if there is no target, or if its id cannot be that of a request."""
    check_known(request)
    match request.WhichOneof("target"):
        case None:
            raise InvalidRequest((unset_choice(request, "target"),))
        case "request_id" if (wrong := REQUEST_ID(request.request_id)) is not None:
            raise InvalidRequest.of("request_id", wrong)


def in_callers_names(error: NamesFields, request: oe.GenerateRequest) -> NamesFields:
    """The error with the field paths of this dialect."""
    return error.with_paths(lambda path: _path(path, request))


def _path(path: str, request: oe.GenerateRequest) -> str:
    if (match := re.match(r"stop\.(?:(strings)|token_ids)\[(\d+)\]", path)) is not None:
        kind = "stop_text" if match[1] else "stop_token_id"
        conditions = enumerate(request.stopping.conditions)
        places = [index for index, each in conditions if each.WhichOneof("condition") == kind]
        return f"stopping.conditions[{places[int(match[2])]}]"
    return path_by(_PATHS, path)


def _is_integer(text: str, low: int, high: int) -> bool:
    sign = "-?" if low < 0 else ""
    return re.fullmatch(sign + "[0-9]{1,10}", text) is not None and low <= int(text) <= high


def _violations(request: oe.GenerateRequest) -> Iterator[Violation]:
    yield from unserved(request, _REFUSED, opaque=_WHOLE)
    if request.WhichOneof("input") is None:
        yield unset_choice(request, "input")
    sampling, response, guided = request.sampling, request.response, request.guided
    if sampling.HasField("top_k") and sampling.top_k < -1:
        yield Violation(field="sampling.top_k", description=f"must be -1 or more, not {sampling.top_k}")
    for index, condition in enumerate(request.stopping.conditions):
        if condition.WhichOneof("condition") is None:
            yield Violation(field=f"stopping.conditions[{index}]", description="must have a text or a token id")
    for what in ("prompt", "output"):
        asks = getattr(response, f"return_{what}_logprobs")
        if response.HasField(f"{what}_candidates") and not asks:  # type: ignore[arg-type]
            yield Violation(field=f"response.{what}_candidates", description=f"needs return_{what}_logprobs")
    if response.prompt_logprob_start:
        yield Violation(field="response.prompt_logprob_start", description="is not supported: scores are of all tokens")
    if guided.backend not in ("", BACKEND):
        yield Violation(field="guided.backend", description=f"is not supported: constraints are followed by {BACKEND}")


def _present(kind: Any, source: Any, *groups: tuple[str, ...]) -> Any:
    """A message of this kind with the fields that are set in the source; the others stay unset."""
    return kind(**{name: getattr(source, name) for group in groups for name in group if source.HasField(name)})


def _constraint(guided: oe.GuidedDecoding) -> pb.Constraint | None:
    match guided.WhichOneof("guide"):
        case None:
            return None
        case "ebnf_grammar":
            return pb.Constraint(ebnf=guided.ebnf_grammar)
        case "choice":
            return pb.Constraint(choice=pb.Choice(options=guided.choice.choices))
        case "json_object":
            return pb.Constraint(json_object=True)
        case kind:
            return pb.Constraint(**{kind: getattr(guided, kind)})
