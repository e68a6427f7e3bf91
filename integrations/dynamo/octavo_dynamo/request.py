"""Translates a Dynamo request (tokens and options) into the equivalent octavo.v1 request. Pure; imports no Dynamo.

Every option is either served or refused under Dynamo's name for it; options that only routers read are ignored.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from octavo.v1 import common_pb2
from octavo.v1 import inference_pb2 as pb

MAX_REQUEST_ID = 128
PRIORITIES = (-100, 100)

# Dynamo -> octavo.v1, where the values are the same.
_SAMPLING = {
    name: name
    for name in (
        *("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
        "allowed_token_ids",
    )
}
_STOP = {"max_tokens": "max_tokens", "min_tokens": "min_tokens", "ignore_eos": "ignore_eos"}
_OUTPUT = {name: name for name in ("logprobs", "prompt_logprobs", "skip_special_tokens")}

# Options that are accepted, by the part of the request that they are in.
_OPTIONS = {
    "sampling_options": {*_SAMPLING, "n", "best_of", "top_k", "seed", "use_beam_search", "length_penalty"}
    | {"include_stop_str_in_output", "guided_decoding", "detokenize"},
    "stop_conditions": {*_STOP, "stop", "stop_token_ids", "stop_token_ids_visible", "stop_token_ids_hidden"},
    "output_options": {*_OUTPUT, "formatted_prompt", "no_stop_trim", "return_tokens_as_token_ids"},
}
_GUIDES = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "ebnf"}
# Fields that may be absent or empty; a value asks for something that no Octavo service does.
_REFUSED = {
    "multi_modal_data": "the model takes text only",
    "mm_processor_kwargs": "the model takes text only",
    "prompt_embeds": "prompts are tokens here",
    "generate_request": "only chat and completions are served",
    "encoder_result": "a service does whole requests: it has no encoder",
    "prefill_result": "a service does whole requests: prefill and decode are not separated",
    "bootstrap_info": "a service does whole requests: prefill and decode are not separated",
}
# octavo.v1 -> Dynamo, for errors; the first prefix that matches.
_PATHS = (
    ("token_ids", "token_ids"),
    ("input", "token_ids"),
    ("sampling.", "sampling_options."),
    ("stop.strings", "stop_conditions.stop"),
    ("stop.token_ids", "stop_conditions.stop_token_ids"),
    ("stop.include_stop", "sampling_options.include_stop_str_in_output"),
    ("stop.", "stop_conditions."),
    ("output.", "output_options."),
    *((f"constraint.{ours}", f"sampling_options.guided_decoding.{theirs}") for theirs, ours in _GUIDES.items()),
    ("cache_salt", "routing.cache_salt"),
)


class RefusedError(ValueError):
    """An option is not served by this backend; the message names it."""


def generate_request(request: Mapping[str, Any], *, request_id: str, model: str) -> pb.GenerateRequest:
    """The octavo.v1 request. model: the service's name for it. Raises RefusedError for options that are not served,
    TypeError or ValueError for values that a field cannot hold. Ranges are checked by the service."""
    for refusal in _refusals(request):
        raise RefusedError(refusal)
    sampling, stop = _part(request, "sampling_options"), _part(request, "stop_conditions")
    output, routing = _part(request, "output_options"), _part(request, "routing")
    translated = pb.GenerateRequest(
        request_id=request_id if is_request_id(request_id) else "",
        model=model,
        token_ids=common_pb2.TokenIds(ids=request["token_ids"]),
        sampling=pb.SamplingParams(**_renamed(sampling, _SAMPLING)),
        stop=_stop(stop, eos_token_ids=request.get("eos_token_ids") or ()),
        output=pb.OutputOptions(**_renamed(output, _OUTPUT)),
        cache_salt=routing.get("cache_salt") or "",
        constraint=_constraint(sampling.get("guided_decoding") or {}),
    )
    if (top_k := sampling.get("top_k")) is not None:
        translated.sampling.top_k = max(0, top_k)  # -1 also means all
    if sampling.get("seed") is not None:
        translated.sampling.seed = sampling["seed"]
    if sampling.get("include_stop_str_in_output") is not None:
        translated.stop.include_stop = sampling["include_stop_str_in_output"]
    if routing.get("priority") is not None:
        low, high = PRIORITIES
        translated.priority = min(high, max(low, routing["priority"]))
    # The frontend makes the output's text. Text is needed here only for stop strings and log-probabilities.
    needs_text = bool(translated.stop.strings) or translated.output.HasField("logprobs")
    translated.output.format = pb.OUTPUT_FORMAT_TEXT_AND_TOKEN_IDS if needs_text else pb.OUTPUT_FORMAT_TOKEN_IDS
    return translated


def is_request_id(text: str) -> bool:
    """Whether the service accepts this id; a request with any other gets one from the service."""
    return 0 < len(text) <= MAX_REQUEST_ID and all("!" <= letter <= "~" for letter in text)


def name_here(path: str) -> str:
    """Dynamo's name for a field path of octavo.v1."""
    for ours, theirs in _PATHS:
        if path.startswith(ours):
            return theirs + path.removeprefix(ours)
    return path


def _part(request: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return request.get(name) or {}


def _renamed(part: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {ours: part[theirs] for theirs, ours in names.items() if part.get(theirs) is not None}


def _stop(stop: Mapping[str, Any], *, eos_token_ids: Sequence[int]) -> pb.StopConditions:
    """Hidden ids are the model's own end tokens: a request with ignore_eos does not stop at them."""
    ends = {*eos_token_ids, *(stop.get("stop_token_ids_hidden") or ())}
    wanted = [each for name in ("stop_token_ids", "stop_token_ids_visible") for each in stop.get(name) or ()]
    if stop.get("ignore_eos"):
        wanted = [each for each in wanted if each not in ends]
    else:
        wanted += stop.get("stop_token_ids_hidden") or ()
    return pb.StopConditions(strings=stop.get("stop") or (), token_ids=dict.fromkeys(wanted), **_renamed(stop, _STOP))


def _constraint(guided: Mapping[str, Any]) -> pb.Constraint | None:
    match [name for name in _GUIDES if guided.get(name) is not None]:
        case []:
            return None
        case ["choice"]:
            return pb.Constraint(choice=pb.Choice(options=guided["choice"]))
        case ["json"]:
            schema = guided["json"]
            return pb.Constraint(json_schema=schema if isinstance(schema, str) else json.dumps(schema))
        case [name]:
            return pb.Constraint(**{_GUIDES[name]: guided[name]})
        case several:
            raise RefusedError(f"sampling_options.guided_decoding: only one of {', '.join(several)} may be set")


def _refusals(request: Mapping[str, Any]) -> Iterator[str]:
    for name, why in _REFUSED.items():
        if request.get(name):
            yield f"{name}: {why}"
    for part, known in _OPTIONS.items():
        for name, value in _part(request, part).items():
            if value is not None and name not in known:
                yield f"{part}.{name} is not supported"
    sampling, output = _part(request, "sampling_options"), _part(request, "output_options")
    if sampling.get("use_beam_search"):
        yield "sampling_options.use_beam_search is not supported"
    if sampling.get("length_penalty") not in (None, 1):
        yield "sampling_options.length_penalty belongs to beam search, which is not supported"
    for name in ("n", "best_of"):
        if sampling.get(name) not in (None, 1):  # the frontend ends a request when its first output ends
            yield f"sampling_options.{name} must be 1, not {sampling[name]}"
    if (sampling.get("top_k") or 0) < -1:
        yield f"sampling_options.top_k must be -1 or more, not {sampling['top_k']}"
    if (sampling.get("seed") or 0) < 0:
        yield f"sampling_options.seed must not be negative, not {sampling['seed']}"
    if output.get("no_stop_trim"):
        yield "output_options.no_stop_trim is not supported: include_stop_str_in_output is"
    guided = sampling.get("guided_decoding") or {}
    for name in ("whitespace_pattern", "structural_tag"):
        if guided.get(name) is not None:
            yield f"sampling_options.guided_decoding.{name} is not supported"
    if guided.get("backend") not in (None, "", "llguidance"):
        yield "sampling_options.guided_decoding.backend: constraints are followed by llguidance"
    if request.get("require_reasoning") and guided:
        yield "require_reasoning: a constraint begins with the output"
    routing = _part(request, "routing")
    if routing.get("lora_name"):
        yield "routing.lora_name: there are no adapters here"
    if routing.get("dp_rank"):
        yield f"routing.dp_rank: there is only rank 0, not {routing['dp_rank']}"
