"""Translates a VllmEngine request into the equivalent octavo.v1 request; violations have the caller's names."""

from collections.abc import Iterator
from typing import Any

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet
from smg_grpc_proto import vllm_engine_pb2 as vllm

from octavo.gateway.dialects.unserved import path_by
from octavo.gateway.errors import InvalidRequest, NamesFields, Violation
from octavo.gateway.validation.fields import raise_if_any, unset_choice
from octavo.gateway.validation.generate import check_embed, check_generate
from octavo.v1 import common_pb2
from octavo.v1 import inference_pb2 as pb

_UINT64 = (1 << 64) - 1
_NO_SEED = -1  # vLLM's "draw one"

# octavo.v1 -> here; the first prefix that matches.
_PATHS = (
    ("model", "x-model"),
    ("token_ids.ids", "tokenized.input_ids"),
    ("inputs[0].token_ids.ids", "tokenized.input_ids"),
    ("inputs[0]", "tokenized"),
    ("inputs", "tokenized"),
    ("sampling.", "sampling_params."),
    ("constraint.ebnf", "sampling_params.grammar"),
    ("constraint.choice.options", "sampling_params.choice.choices"),
    ("constraint.", "sampling_params."),
    ("truncate_prompt_tokens", "sampling_params.truncate_prompt_tokens"),
    ("num_outputs", "sampling_params.n"),
    ("stop.strings", "sampling_params.stop"),
    ("stop.token_ids", "sampling_params.stop_token_ids"),
    ("stop.", "sampling_params."),
    ("output.", "sampling_params."),
)


# Fields that are served; any other field that is set is refused by its path. Values are checked after translation, by
# the rules of octavo.v1. Some have no effect here: `original_text` is for reference; this dialect sends no text, so
# options for writing it do nothing (but `skip_special_tokens` decides where stop strings are found); constraints always
# begin with the first token (`grammar_from_first_token`).
SERVED: dict[str, frozenset[str]] = {
    "GenerateRequest": frozenset(
        {"request_id", "tokenized", "text", "sampling_params", "stream", "data_parallel_rank"}
    ),
    "EmbedRequest": frozenset({"request_id", "tokenized"}),
    "TokenizedInput": frozenset({"original_text", "input_ids"}),
    "SamplingParams": frozenset(
        {
            *("temperature", "top_p", "top_k", "min_p", "seed", "n"),
            *("frequency_penalty", "presence_penalty", "repetition_penalty"),
            *("max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "logprobs"),
            *("skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output"),
            *("logit_bias", "truncate_prompt_tokens", "prompt_logprobs"),
            *("json_schema", "json_object", "regex", "grammar", "choice", "grammar_from_first_token"),
        }
    ),
    "ChoiceConstraint": frozenset({"choices"}),
}


def check_served(request: vllm.GenerateRequest) -> None:
    """Raises InvalidRequest with the paths of fields that are not served."""
    raise_if_any(_violations(request))


def check_embed_served(request: vllm.EmbedRequest) -> None:
    """The same for an EmbedRequest."""
    raise_if_any(_unserved(request, ""))


def check_loads(request: vllm.GetLoadsRequest) -> None:
    """Raises InvalidRequest for the load of a rank that does not exist. Sections other than `core` may be asked for;
    servers may leave them out."""
    if request.dp_rank:
        raise InvalidRequest.of("dp_rank", "there is only rank 0")


def _violations(request: vllm.GenerateRequest) -> Iterator[Violation]:
    yield from _unserved(request, "")
    if request.WhichOneof("input") is None:
        yield unset_choice(request, "input")
    if request.data_parallel_rank:
        yield Violation(field="data_parallel_rank", description="there is only rank 0")
    params = request.sampling_params
    for name in ("logprobs", "prompt_logprobs", "truncate_prompt_tokens"):
        if (value := getattr(params, name)) < 0:
            yield Violation(field=f"sampling_params.{name}", description=f"must not be negative, not {value}")
    for token_id in params.logit_bias:
        if token_id < 0:
            yield Violation(field="sampling_params.logit_bias", description=f"{token_id} is no token id")
    if params.WhichOneof("constraint") == "json_object" and not params.json_object:
        yield Violation(field="sampling_params.json_object", description="must be true where it is set")


def _unserved(message: Message, prefix: str) -> Iterator[Violation]:
    served = SERVED[message.DESCRIPTOR.name]
    for unknown in UnknownFieldSet(message):  # type: ignore[attr-defined]
        yield Violation(field=f"{prefix}#{unknown.field_number}", description="unknown field")
    for field, value in message.ListFields():
        if field.name not in served:
            yield Violation(field=prefix + field.name, description="is not supported")
        elif isinstance(value, Message):
            yield from _unserved(value, f"{prefix}{field.name}.")


def translate(request: vllm.GenerateRequest) -> pb.GenerateRequest:
    """The checked octavo.v1 request. Raises InvalidRequest that names the caller's fields."""
    check_served(request)
    translated = pb.GenerateRequest(
        request_id=request.request_id,
        sampling=_sampling(request.sampling_params),
        stop=_stop(request.sampling_params),
        output=_output(request.sampling_params),
        constraint=_constraint(request.sampling_params),
        **_input(request),
    )
    if request.sampling_params.HasField("truncate_prompt_tokens"):
        translated.truncate_prompt_tokens = request.sampling_params.truncate_prompt_tokens
    if request.sampling_params.n > 1:
        translated.num_outputs = request.sampling_params.n
    try:
        check_generate(translated)
    except InvalidRequest as error:
        raise in_callers_names(error) from None
    return translated


def translate_embed(request: vllm.EmbedRequest) -> pb.EmbedRequest:
    """The checked octavo.v1 request, for the last token's vector of length 1. Raises InvalidRequest that names the
    caller's fields."""
    check_embed_served(request)
    token_ids = common_pb2.TokenIds(ids=request.tokenized.input_ids)
    translated = pb.EmbedRequest(request_id=request.request_id, inputs=[pb.EmbedInput(token_ids=token_ids)])
    try:
        check_embed(translated)
    except InvalidRequest as error:
        raise in_callers_names(error) from None
    return translated


def in_callers_names(error: NamesFields) -> NamesFields:
    """The error with the field paths of this dialect."""
    return error.with_paths(lambda path: path_by(_PATHS, path))


def _input(request: vllm.GenerateRequest) -> dict[str, Any]:
    kind = request.WhichOneof("input")
    if kind == "text":
        return {"text": request.text}
    return {"token_ids": common_pb2.TokenIds(ids=request.tokenized.input_ids)} if kind else {}


def _sampling(params: vllm.SamplingParams) -> pb.SamplingParams:
    """In proto3, zero is unset; unset means the neutral value here, never the model's default."""
    sampling = pb.SamplingParams(
        temperature=params.temperature if params.HasField("temperature") else 1.0,
        top_p=params.top_p or 1.0,
        top_k=params.top_k,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty or 1.0,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=dict(params.logit_bias),  # a copy, since the key types differ
    )
    if params.HasField("seed") and params.seed != _NO_SEED:
        sampling.seed = params.seed & _UINT64
    return sampling


def _constraint(params: vllm.SamplingParams) -> pb.Constraint | None:
    match params.WhichOneof("constraint"):
        case None:
            return None
        case "grammar":
            return pb.Constraint(ebnf=params.grammar)
        case "choice":
            return pb.Constraint(choice=pb.Choice(options=params.choice.choices))
        case kind:
            return pb.Constraint(**{kind: getattr(params, kind)})


def _stop(params: vllm.SamplingParams) -> pb.StopConditions:
    return pb.StopConditions(
        max_tokens=params.max_tokens if params.HasField("max_tokens") else None,
        min_tokens=params.min_tokens or None,
        strings=params.stop,
        token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
    )


def _output(params: vllm.SamplingParams) -> pb.OutputOptions:
    """Ids only. If there are stop strings, text is made to find them in, but not sent."""
    output = pb.OutputOptions(format=pb.OUTPUT_FORMAT_TOKEN_IDS)
    if params.HasField("logprobs"):
        output.logprobs = params.logprobs
    if params.HasField("prompt_logprobs"):
        output.prompt_logprobs = params.prompt_logprobs
        output.return_prompt = True  # log-probabilities are sent together with their tokens
    if params.stop:
        output.format = pb.OUTPUT_FORMAT_TEXT_AND_TOKEN_IDS
        output.skip_special_tokens = params.skip_special_tokens
    return output
