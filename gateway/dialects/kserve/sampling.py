"""Sets sampling parameters, named as in vLLM's SamplingParams and given as JSON values, in an octavo.v1 request.

Unset and null mean the same as in vLLM: the neutral value, never the model's default; unset `max_tokens` is 16. Ranges
are checked afterwards, by the rules of octavo.v1; names that are not in the table are refused.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from octavo.gateway.dialects.unserved import path_by
from octavo.gateway.errors import InvalidRequest, Violation
from octavo.v1 import inference_pb2 as pb

DEFAULT_MAX_TOKENS = 16
_UINT64 = (1 << 64) - 1
Setter = Callable[[pb.GenerateRequest, Any], None]


class _Unfit(Exception):
    """The value does not have the type that its name requires."""


def apply_sampling(request: pb.GenerateRequest, values: Mapping[str, Any], *, prefix: str) -> None:
    """Set the values in the request. prefix: of the paths in errors. Raises InvalidRequest that names each value that
    is unknown, has the wrong type, or does not fit its field."""
    _set_neutral(request)
    violations = [each for name, value in values.items() if (each := _apply_one(request, name, value, prefix))]
    if violations:
        raise InvalidRequest(tuple(violations))


def in_vllm_names(path: str) -> str:
    """This dialect's name for a field path of octavo.v1."""
    return path_by(_PATHS, path)


# octavo.v1 -> here; the first prefix that matches.
_PATHS = (
    ("sampling.", ""),
    ("stop.strings", "stop"),
    ("stop.token_ids", "stop_token_ids"),
    ("stop.include_stop", "include_stop_str_in_output"),
    ("stop.", ""),
    ("output.", ""),
    ("num_outputs", "n"),
    ("constraint.json_schema", "structured_outputs.json"),
    ("constraint.ebnf", "structured_outputs.grammar"),
    ("constraint.choice.options", "structured_outputs.choice"),
    ("constraint", "structured_outputs"),
)


def _set_neutral(request: pb.GenerateRequest) -> None:
    sampling = request.sampling
    sampling.temperature = sampling.top_p = sampling.repetition_penalty = 1.0
    sampling.top_k, sampling.min_p, sampling.presence_penalty, sampling.frequency_penalty = 0, 0.0, 0.0, 0.0
    request.stop.max_tokens = DEFAULT_MAX_TOKENS


def _apply_one(request: pb.GenerateRequest, name: str, value: Any, prefix: str) -> Violation | None:
    setter = _SETTERS.get(name)
    if setter is None:
        return Violation(field=prefix + name, description="is not supported")
    if value is None:
        return None
    try:
        setter(request, value)
    except (_Unfit, InvalidRequest) as error:
        return Violation(field=prefix + name, description=str(error))
    except (TypeError, ValueError, OverflowError):
        return Violation(field=prefix + name, description="is out of range")
    except RecursionError:  # JSON's reader accepts deeper nesting than its writer
        return Violation(field=prefix + name, description="is nested too deeply")
    return None


# ---------------------------------------------------------------- types of values


def _number(value: Any) -> float:
    """A number, also given as text: request parameters had no fractions for a long time, so Triton's own examples send
    only text."""
    if isinstance(value, str):
        value = _read(value, float, "must be a number")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _Unfit("must be a number")
    return float(value)


def _whole(value: Any) -> int:
    if isinstance(value, str):
        value = _read(value, int, "must be an integer")
    if isinstance(value, bool) or not isinstance(value, int):
        raise _Unfit("must be an integer")
    return value


def _read(text: str, kind: Callable[[str], float], why: str) -> float:
    try:
        return kind(text)
    except ValueError:
        raise _Unfit(why) from None


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _Unfit("must be true or false")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _Unfit("must be a text")
    return value


def _list(value: Any, of: Callable[[Any], Any]) -> list[Any]:
    if not isinstance(value, list):
        raise _Unfit("must be a list")
    return [of(each) for each in value]


# ---------------------------------------------------------------- one name each


def _in_sampling(field: str, convert: Callable[[Any], Any]) -> Setter:
    return lambda request, value: setattr(request.sampling, field, convert(value))


def _in_stop(field: str, convert: Callable[[Any], Any]) -> Setter:
    return lambda request, value: setattr(request.stop, field, convert(value))


def _in_output(field: str, convert: Callable[[Any], Any]) -> Setter:
    return lambda request, value: setattr(request.output, field, convert(value))


def _top_k(request: pb.GenerateRequest, value: Any) -> None:
    request.sampling.top_k = 0 if (top_k := _whole(value)) == -1 else top_k  # vLLM's "all" is -1


def _seed(request: pb.GenerateRequest, value: Any) -> None:
    if not -(2**63) <= (seed := _whole(value)) < 2**64:
        raise _Unfit("is no 64-bit integer")
    if seed != -1:  # vLLM's "draw one"
        request.sampling.seed = seed & _UINT64


def _stop(request: pb.GenerateRequest, value: Any) -> None:
    request.stop.strings.extend([value] if isinstance(value, str) else _list(value, _text))


def _stop_token_ids(request: pb.GenerateRequest, value: Any) -> None:
    request.stop.token_ids.extend(_list(value, _whole))


def _bad_words(request: pb.GenerateRequest, value: Any) -> None:
    request.sampling.bad_words.extend(_list(value, _text))


def _allowed(request: pb.GenerateRequest, value: Any) -> None:
    if not (token_ids := _list(value, _whole)):
        raise _Unfit("needs at least 1 element")
    request.sampling.allowed_token_ids.extend(token_ids)


def _logit_bias(request: pb.GenerateRequest, value: Any) -> None:
    if not isinstance(value, dict):
        raise _Unfit("must be an object of token id and bias")
    for token_id, bias in value.items():
        request.sampling.logit_bias[int(token_id)] = _number(bias)


def _num_outputs(request: pb.GenerateRequest, value: Any) -> None:
    if (num_outputs := _whole(value)) != 1:
        request.num_outputs = num_outputs


def _truncate(request: pb.GenerateRequest, value: Any) -> None:
    request.truncate_prompt_tokens = _whole(value)


def _structured(request: pb.GenerateRequest, value: Any) -> None:
    """Exactly one of json, json_object, regex, grammar and choice; and our own format_as_annotation for schemas."""
    given = {name: each for name, each in _object(value).items() if each is not None and each is not False}
    if "format_as_annotation" in given:
        request.format_as_annotation = _truth(given.pop("format_as_annotation"))
    if len(given) != 1:
        raise _Unfit("needs exactly one of json, json_object, regex, grammar, choice")
    ((name, each),) = given.items()
    match name:
        case "json":
            request.constraint.json_schema = each if isinstance(each, str) else json.dumps(each)
        case "json_object":
            request.constraint.json_object = _truth(each)
        case "regex":
            request.constraint.regex = _text(each)
        case "grammar":
            request.constraint.ebnf = _text(each)
        case "choice":
            request.constraint.choice.options.extend(_list(each, _text))
        case _:
            raise _Unfit(f"{name} is not supported")


def _object(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise _Unfit("must be a JSON object") from None
    if not isinstance(value, dict):
        raise _Unfit("must be a JSON object")
    return value


_SETTERS: dict[str, Setter] = {
    **{
        field.name: _in_sampling(field.name, _number)
        for field in pb.SamplingParams.DESCRIPTOR.fields
        if field.type == field.TYPE_FLOAT
    },
    "top_k": _top_k,
    "seed": _seed,
    "logit_bias": _logit_bias,
    "allowed_token_ids": _allowed,
    "bad_words": _bad_words,
    "max_tokens": _in_stop("max_tokens", _whole),
    "min_tokens": _in_stop("min_tokens", _whole),
    "stop": _stop,
    "stop_token_ids": _stop_token_ids,
    "ignore_eos": _in_stop("ignore_eos", _truth),
    "include_stop_str_in_output": _in_stop("include_stop", _truth),
    "skip_special_tokens": _in_output("skip_special_tokens", _truth),
    "logprobs": _in_output("logprobs", _whole),
    "n": _num_outputs,
    "truncate_prompt_tokens": _truncate,
    "structured_outputs": _structured,
    "guided_decoding": _structured,
}
