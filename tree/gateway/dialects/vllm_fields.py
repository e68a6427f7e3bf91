"""Which fields of a VllmEngine request are served; every other one that is set is refused by its path.

What the served ones may hold is checked after translation, by the rules of octavo.v1.
"""

from collections.abc import Iterator

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet
from smg_grpc_proto import vllm_engine_pb2 as vllm  # type: ignore[import-untyped]

from gateway.errors import Violation
from gateway.validation.fields import first_violations, raise_if_any

# Without a meaning here, so that any value is as good as none: `original_text` is for reference; text leaves no server
# of this dialect, so nothing says how to write it (`skip_special_tokens` still decides where stop strings are seen);
# `grammar_from_first_token` is how constraints work here anyway.
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
    """Raises InvalidRequest with the paths of what is not served."""
    raise_if_any(first_violations(_violations(request)))


def check_embed_served(request: vllm.EmbedRequest) -> None:
    """The same for an EmbedRequest."""
    raise_if_any(first_violations(_unserved(request, "")))


def _violations(request: vllm.GenerateRequest) -> Iterator[Violation]:
    yield from _unserved(request, "")
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
