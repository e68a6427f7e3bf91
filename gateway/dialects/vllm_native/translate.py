"""Translates a vllm.Inference request into the equivalent octavo.v1 request; violations have the caller's names.

In this contract zero means unset. An unset temperature means greedy; other unset sampling fields take the model's
default.
"""

import re
import secrets
from collections.abc import Iterable, Iterator
from typing import Any

from google.protobuf.message import Message

from octavo.gateway.dialects.unserved import path_by, unserved
from octavo.gateway.errors import InvalidRequest, NamesFields, Violation
from octavo.gateway.validation.fields import raise_if_any, unset_choice
from octavo.gateway.validation.generate import check_generate
from octavo.gateway.validation.limits import MAX_PRIORITY, MIN_PRIORITY
from octavo.v1 import common_pb2
from octavo.v1 import inference_pb2 as pb
from octavo.vllm import vllm_pb2 as vllm

TARGET_RANK = "x-data-parallel-rank"  # metadata: the data-parallel rank that a router has chosen
_UINT64 = (1 << 64) - 1
_NO_SEED = -1  # vLLM's "draw one"

# octavo.v1 -> here; the first prefix that matches.
_PATHS = (
    ("token_ids.ids", "token_ids.ids"),
    ("input", "prompt"),
    ("cache_salt", "kv.cache_salt"),
    ("num_outputs", "sampling.num_sequences"),
    ("sampling.temperature", "temperature"),
    *((f"sampling.{name}", f"decoding.{name}") for name in ("presence_penalty", "frequency_penalty")),
    *((f"sampling.{name}", f"decoding.{name}") for name in ("repetition_penalty", "logit_bias", "allowed_token_ids")),
    ("stop.strings", "stopping.stop_strings"),
    ("stop.token_ids", "stopping.stop_token_ids"),
    ("stop.include_stop", "stopping.include_stop_strings"),
    ("stop.max_tokens", "stopping.max_new_tokens"),
    ("stop.min_tokens", "stopping.min_new_tokens"),
    ("stop.", "stopping."),
    ("output.prompt_logprobs", "response.prompt_candidates.top_n"),
    ("output.logprobs", "response.output_candidates.top_n"),
    ("output.", "response."),
    ("constraint.json_schema", "decoding.json"),
    ("constraint.ebnf", "decoding.grammar"),
    ("constraint.choice.options", "decoding.choice.choices"),
    ("constraint", "decoding"),
)
_REFUSED = {
    "GenerateRequest": {"media": "this model takes text only", "lora_name": "there are no adapters here"},
    "DecodingParameters": {"structural_tag": "is not supported"},
    "KVCacheParameters": {
        "kv_transfer_params": "caches do not come from other engines here",
        "ec_transfer_params": "caches do not come from other engines here",
    },
    "CandidateTokens": {"token_ids": "is not supported: top_n is", "all": "is not supported: top_n is"},
}


def translate(request: vllm.GenerateRequest) -> pb.GenerateRequest:
    """The checked octavo.v1 request. Raises InvalidRequest that names the caller's fields."""
    raise_if_any(_violations(request))
    kv, response = request.kv, request.response
    translated = pb.GenerateRequest(
        request_id=request.request_id,
        model=request.model,
        sampling=_sampling(request),
        stop=_stop(request.stopping),
        output=_output(request),
        cache_salt=secrets.token_hex(16) if kv.bypass_prefix_cache else kv.cache_salt,
        constraint=_constraint(request.decoding),
        # vLLM runs lower numbers first.
        priority=min(MAX_PRIORITY, max(MIN_PRIORITY, -request.priority)),
        num_outputs=request.sampling.num_sequences or None,
        truncate_prompt_tokens=request.truncate_prompt_tokens or None,
    )
    match request.WhichOneof("prompt"):
        case "text":
            translated.text = request.text
        case "token_ids":
            translated.token_ids.CopyFrom(common_pb2.TokenIds(ids=request.token_ids.ids))
    translated.output.return_prompt = response.prompt_token_ids or response.prompt_logprobs
    try:
        check_generate(translated)
    except InvalidRequest as error:
        raise in_callers_names(error) from None
    return translated


def check_known(message: Message) -> None:
    """Raises InvalidRequest for fields that this version of the contract does not have or that are not supported."""
    raise_if_any(unserved(message, _REFUSED))


def check_rank(metadata: Iterable[tuple[str, Any]]) -> None:
    """Raises InvalidRequest if the metadata name a rank that is malformed or does not exist."""
    for name, value in metadata:
        if name != TARGET_RANK:
            continue
        text = str(value).strip()
        if re.fullmatch("[0-9]{1,10}", text) is None or int(text) >= 1 << 32:
            raise InvalidRequest.of(TARGET_RANK, "must be a decimal uint32")
        if int(text):
            raise InvalidRequest.of(TARGET_RANK, "there is only rank 0")


def check_one_output(request: vllm.GenerateRequest) -> None:
    """Raises InvalidRequest for several outputs, which the one response of Generate cannot hold."""
    if request.sampling.num_sequences > 1:
        raise InvalidRequest.of("sampling.num_sequences", "must be 1 here: GenerateStream tells several")


def in_callers_names(error: NamesFields) -> NamesFields:
    """The error with the field paths of this dialect."""
    return error.with_paths(lambda path: path_by(_PATHS, path))


def _violations(request: vllm.GenerateRequest) -> Iterator[Violation]:
    yield from unserved(request, _REFUSED)
    if request.WhichOneof("prompt") is None:
        yield unset_choice(request, "prompt")
    response = request.response
    for what in ("prompt", "output"):
        if response.HasField(f"{what}_candidates") and not getattr(response, f"{what}_logprobs"):  # type: ignore[arg-type]
            yield Violation(field=f"response.{what}_candidates", description=f"needs {what}_logprobs")


def _sampling(request: vllm.GenerateRequest) -> pb.SamplingParams:
    drawn, decoding = request.sampling, request.decoding
    sampling = pb.SamplingParams(
        temperature=request.temperature,  # unset is greedy
        logit_bias=dict(decoding.logit_bias),
        allowed_token_ids=decoding.allowed_token_ids,
        **_not_zero(drawn, "top_k", "top_p", "min_p"),
        **_not_zero(decoding, "presence_penalty", "frequency_penalty", "repetition_penalty"),
    )
    if drawn.HasField("seed") and drawn.seed != _NO_SEED:
        sampling.seed = drawn.seed & _UINT64
    return sampling


def _stop(stopping: vllm.StoppingCriteria) -> pb.StopConditions:
    return pb.StopConditions(
        max_tokens=stopping.max_new_tokens or None,
        min_tokens=stopping.min_new_tokens or None,
        strings=stopping.stop_strings,
        token_ids=stopping.stop_token_ids,
        ignore_eos=stopping.ignore_eos,
        include_stop=stopping.include_stop_strings,
    )


def _output(request: vllm.GenerateRequest) -> pb.OutputOptions:
    response = request.response
    wants_text = response.output_text if response.HasField("output_text") else True
    needs_text = wants_text or bool(request.stopping.stop_strings)
    output = pb.OutputOptions(
        format=pb.OUTPUT_FORMAT_TEXT_AND_TOKEN_IDS if needs_text else pb.OUTPUT_FORMAT_TOKEN_IDS,
    )
    if needs_text and response.HasField("skip_special_tokens"):
        output.skip_special_tokens = response.skip_special_tokens
    if response.output_logprobs:
        output.logprobs = response.output_candidates.top_n
    if response.prompt_logprobs:
        output.prompt_logprobs = response.prompt_candidates.top_n
    return output


def _constraint(decoding: vllm.DecodingParameters) -> pb.Constraint | None:
    match decoding.WhichOneof("structured_output"):
        case None:
            return None
        case "json":
            return pb.Constraint(json_schema=decoding.json)
        case "regex":
            return pb.Constraint(regex=decoding.regex)
        case "choice":
            return pb.Constraint(choice=pb.Choice(options=decoding.choice.choices))
        case "grammar":
            return pb.Constraint(ebnf=decoding.grammar)
        case _:
            return pb.Constraint(json_object=True) if decoding.json_object else None


def _not_zero(message: Any, *names: str) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(message, name))}
