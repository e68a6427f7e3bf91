"""The fields that callers may set: OpenAI's, and those of octavo.v1 that OpenAI has no name for. Checks them and turns
them into the fields of a request. What is not supported is refused by name, never ignored; labels are accepted.

Must not know: HTTP, gRPC.
"""

import json
import re
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from octavo.client.requests import MESSAGE_FIELDS, GenerateFields
from octavo.gateway.front.errors import ApiError
from octavo.v1 import inference_pb2

DEFAULT_COMPLETION_TOKENS = 16  # of /v1/completions, OpenAI's default
MAX_PROMPTS = 2048  # of one request; each becomes a separate request to the service
MAX_OUTPUTS = 128  # of a prompt; the service's limit, repeated here since outputs are gathered here
_RENAMED = {"n": "num_outputs", "grammar": "ebnf", "guided_choice": "choice", "guided_regex": "regex"}
_RENAMED |= {"guided_grammar": "ebnf", "guided_json": "json_schema", "include_stop_str_in_output": "include_stop"}


def _number(given: object) -> object:
    if isinstance(given, bool):
        raise ValueError("input should be a valid integer")
    return given


def _token_key(given: object) -> int:
    if not isinstance(given, str) or not re.fullmatch("0|[1-9][0-9]{0,9}", given):
        raise ValueError("keys should be token ids, as text")
    return int(given)


# To Python, True is an int. Lists may be long, so their elements are checked by pydantic's own strict mode.
Whole = Annotated[int, BeforeValidator(_number)]
TokenId = Annotated[int, Field(strict=True)]
TokenKey = Annotated[int, BeforeValidator(_token_key)]  # written in one way, so that no two keys are one id
Flag = Annotated[bool, Field(strict=True)]  # not 1, nor "no"


class Body(BaseModel):
    """Fields of any request. null means unset, for unknown fields too: clients send every field that they have."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    model: str = ""
    user: str | None = None  # this and the next three are labels, which change nothing
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


B = TypeVar("B", bound=Body)


class StreamOptions(BaseModel):
    """OpenAI's `stream_options`."""

    model_config = ConfigDict(extra="forbid")

    include_usage: Flag | None = None
    include_obfuscation: Flag | None = None  # padding: nothing here is padded


class GenerateBody(Body):
    """Fields that chats and completions share. They have the names of octavo.v1 except for those in `_RENAMED`. Numeric
    fields of SamplingParams are accepted by name without being listed here."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    seed: Whole | None = None
    n: Whole | None = None
    stop: str | list[str] | None = None
    max_tokens: Whole | None = None
    logit_bias: dict[TokenKey, Annotated[float, Field(strict=True)]] | None = None
    stream: Flag = False
    stream_options: StreamOptions | None = None
    # Beyond OpenAI's fields, under the names of vLLM or octavo.v1.
    min_tokens: Whole | None = None
    ignore_eos: Flag | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: Flag | None = None
    skip_special_tokens: Flag | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[TokenId] | None = None
    truncate_prompt_tokens: Whole | None = None
    priority: Whole | None = None
    cache_salt: str | None = None
    regex: str | None = None
    guided_regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    guided_grammar: str | None = None
    choice: list[str] | None = None
    guided_choice: list[str] | None = None
    guided_json: dict[str, Any] | str | None = None
    response_format: dict[str, Any] | None = None

    def request_fields(self) -> dict[str, Any]:
        """The fields of the octavo.v1 request, without input and logprobs. Raises ApiError."""
        given = self.model_dump(exclude_none=True, include=set(_PLAIN) | set(_RENAMED))
        _check_words(given, self.response_format)
        fields = {_RENAMED.get(name, name): value for name, value in given.items()}
        fields |= self.model_extra or {}
        if fields.get("top_k") == -1:  # vLLM's "all"
            fields["top_k"] = 0
        if self.n is not None and not 1 <= self.n <= MAX_OUTPUTS:
            raise _refused("n", f"must be in [1, {MAX_OUTPUTS}], not {self.n}")
        if self.stop is not None:
            fields["stop"] = [self.stop] if isinstance(self.stop, str) else self.stop
        if self.allowed_token_ids == []:
            raise _refused("allowed_token_ids", "needs at least 1 element")
        if self.stream_options is not None and not self.stream:
            raise _refused("stream_options", "it belongs to stream true")
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise _refused("seed", "is no 64-bit integer")
        if self.seed is not None:
            fields["seed"] = self.seed % 2**64  # callers' seeds may be negative
        if self.model:
            fields["model"] = self.model
        return fields | _constraint(self.response_format)


_PLAIN = (
    *("max_tokens", "logit_bias", "min_tokens", "ignore_eos", "stop_token_ids", "skip_special_tokens", "bad_words"),
    *("allowed_token_ids", "truncate_prompt_tokens", "priority", "cache_salt", "regex", "ebnf", "choice"),
)
_SAMPLING = {
    field.name: int if field.cpp_type in (field.CPPTYPE_UINT32, field.CPPTYPE_UINT64) else float
    for field in inference_pb2.SamplingParams.DESCRIPTOR.fields
    if not field.is_repeated
}


class ChatBody(GenerateBody):
    """/v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: Whole | None = None
    logprobs: Flag | None = None
    top_logprobs: Whole | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: Flag | None = None
    modalities: list[Literal["text"]] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None

    def fields(self) -> GenerateFields:
        """The fields of the request. Raises ApiError."""
        fields = self.request_fields()
        if self.max_completion_tokens is not None:
            fields["max_tokens"] = min(self.max_completion_tokens, fields.get("max_tokens", self.max_completion_tokens))
        if self.logprobs:
            fields["logprobs"] = self.top_logprobs or 0
        elif self.top_logprobs:
            raise _refused("top_logprobs", "it belongs to logprobs true")
        fields["messages"] = [_message(index, message) for index, message in enumerate(self.messages)]
        if self.tools:
            fields["tools"] = [_tool(index, tool) for index, tool in enumerate(self.tools)]
            fields["tool_choice"] = choice = _tool_choice(self.tool_choice)
            if self.parallel_tool_calls is False and choice in ("", "auto", "required"):
                why = "false is not supported but for a tool_choice that names a tool, or none"
                raise _refused("parallel_tool_calls", why)
        elif self.tool_choice not in (None, "none", "auto"):
            raise _refused("tool_choice", "it belongs to tools, and there are none")
        return cast("GenerateFields", fields)


Ids = list[Annotated[TokenId, Field(ge=0)]]
Prompt = str | Ids | list[str] | list[Ids]


class CompletionBody(GenerateBody):
    """/v1/completions."""

    prompt: Prompt = "<|endoftext|>"
    logprobs: Whole | None = None
    echo: Flag | None = None
    best_of: Whole | None = None
    suffix: Literal[""] | None = None

    def fields(self) -> list[GenerateFields]:
        """The fields of one request for each prompt. Raises ApiError."""
        if self.best_of not in (None, self.n or 1):
            raise _refused("best_of", "other than n is not supported")
        if self.max_tokens == 0 and self.min_tokens:
            raise _refused("min_tokens", f"{self.min_tokens} is above the 0 that may come")
        fields = {"max_tokens": DEFAULT_COMPLETION_TOKENS} | self.request_fields()
        if self.logprobs is not None:
            fields["logprobs"] = self.logprobs
        if self.echo:
            fields["echo"] = True
        if self.echo and self.logprobs is not None:
            fields |= {"prompt_logprobs": self.logprobs, "return_prompt": True}
        prompts = [{"text": each} if isinstance(each, str) else {"token_ids": each} for each in inputs_of(self.prompt)]
        if len(prompts) > MAX_PROMPTS:
            raise _refused("prompt", f"has {len(prompts):,} entries, at most {MAX_PROMPTS:,} are allowed")
        return [cast("GenerateFields", fields | prompt) for prompt in prompts]


class EmbeddingBody(Body):
    """/v1/embeddings."""

    input: Prompt
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Whole | None = None
    truncate_prompt_tokens: Whole | None = None
    priority: Whole | None = None
    cache_salt: str | None = None


def inputs_of(given: Prompt) -> list[str | list[int]]:
    """One entry for each text or list of ids."""
    if isinstance(given, str):
        return [given]
    if given and all(isinstance(each, int) for each in given):
        return [given]  # type: ignore[list-item]
    return list(given)  # type: ignore[arg-type]


_FORMS = {
    "prompt": "a text, a list of ids, or a list of either",
    "input": "a text, a list of ids, or a list of either",
    "stop": "a text or a list of texts",
    "tool_choice": "auto, none, required, or an object that names a function",
    "guided_json": "an object, or the text of one",
}
"""What a field may be that has several forms."""


def parse(kind: type[B], body: bytes) -> B:
    """The body of a request. Raises ApiError that names the field."""
    given = _json_object(body)
    try:
        parsed = kind.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        place = [part for part in first["loc"] if str(part) in kind.model_fields or isinstance(part, int)]
        name = "".join(f"[{part}]" if isinstance(part, int) else part for part in place) or str(first["loc"][0])
        if first["type"] == "extra_forbidden":
            raise _unknown(".".join(map(str, first["loc"]))) from None
        forms = _FORMS.get(str(first["loc"][0]))
        if forms is not None and first["type"] != "missing":  # pydantic complains of each form by itself
            raise _refused(str(first["loc"][0]), f"must be {forms}") from None
        raise _refused(name, first["msg"].removeprefix("Value error, ").lower()) from None
    for name, value in (parsed.model_extra or {}).items():
        if name not in _SAMPLING:
            raise _unknown(name)
        if not isinstance(value, int | _SAMPLING[name]) or isinstance(value, bool):
            raise _refused(name, "input should be a valid number")
    return parsed


def _json_object(body: bytes) -> dict[str, Any]:
    """The fields of the body that are not null. Raises ApiError."""
    try:
        given = json.loads(body.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        raise ApiError(400, "the body is not JSON in UTF-8") from None
    if not isinstance(given, dict):
        raise ApiError(400, "the body must be a JSON object")
    if _HALF_A_PAIR.search(body):
        for name, value in given.items():
            if not (_is_unicode(name) and _is_unicode(value)):
                shown = name.encode(errors="backslashreplace").decode()
                raise _refused(shown, "has half a surrogate pair, which no text can have")
    return {name: value for name, value in given.items() if value is not None}


_HALF_A_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")  # or a whole one


def _is_unicode(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _unknown(name: str) -> ApiError:
    return ApiError(400, f"unknown or unsupported field: {name}", param=name, code="unknown_parameter")


def _refuse_others(where: str, given: Mapping[str, Any], known: Collection[str]) -> None:
    """Raises ApiError for unknown fields unless they are empty: clients send back what they got, with every field."""
    for name, value in given.items():
        if name not in known and value not in (None, "", [], {}):
            raise _unknown(f"{where}.{name}")


def _refused(where: str, why: str) -> ApiError:
    return ApiError(400, f"{where}: {why}", param=where)


# Fields that constrain the output.
_CONSTRAINTS = ("regex", "guided_regex", "ebnf", "grammar", "guided_grammar", "choice", "guided_choice", "guided_json")


def _check_words(given: Collection[str], response_format: Mapping[str, Any] | None) -> None:
    """Raises ApiError if more than one field constrains the output."""
    names = [name for name in _CONSTRAINTS if name in given]
    if (response_format or {}).get("type", "text") != "text":
        names.append("response_format")
    if len(names) > 1:
        raise _refused(names[1], f"an output has one form at most, and {names[0]} asks for another")


_MESSAGE = (*MESSAGE_FIELDS, "name")  # a name changes nothing: no template uses it


def _message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    where, role = f"messages[{index}]", message.get("role")
    if role not in ("system", "developer", "user", "assistant", "tool"):
        raise _refused(f"{where}.role", f"{role!r} is none of system, developer, user, assistant, tool")
    _refuse_others(where, message, _MESSAGE)
    turn = {"role": "system" if role == "developer" else role, "content": _content(where, message.get("content"))}
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list):
            raise _refused(f"{where}.tool_calls", "not a list of calls")
        turn["tool_calls"] = [_call(f"{where}.tool_calls[{number}]", call) for number, call in enumerate(calls)]
    if message.get("tool_call_id"):
        turn["tool_call_id"] = str(message["tool_call_id"])
    return turn


def _call(where: str, call: Any) -> dict[str, Any]:
    """A tool call that the model made in an earlier turn."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise _refused(where, "only calls of functions with a name are supported")
    _refuse_others(where, call, ("id", "type", "function", "index"))
    _refuse_others(f"{where}.function", function, ("name", "arguments"))
    arguments = function.get("arguments") or "{}"  # some servers send empty arguments
    if not isinstance(arguments, str | dict):
        raise _refused(f"{where}.function.arguments", "not the text of a JSON object")
    return {"id": str(call.get("id") or ""), "function": {"name": function["name"], "arguments": arguments}}


def _content(where: str, content: Any) -> str:
    """The text of a message, which may come in parts; all must be text."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise _refused(f"{where}.content", "not a text, nor a list of parts that are text")
    for number, part in enumerate(content):
        param = f"{where}.content[{number}]"
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise _refused(param, "only text is supported")
        _refuse_others(param, part, ("type", "text"))
    return "".join(part["text"] for part in content)


def _tool(index: int, tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """A tool, checked. `strict` is accepted and changes nothing: forced calls always follow the schema; calls that the
    model chooses to make are not constrained."""
    function, where = tool.get("function"), f"tools[{index}]"
    if tool.get("type") != "function" or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _refused(where, "only functions with a name are supported")
    _refuse_others(where, tool, ("type", "function"))
    _refuse_others(f"{where}.function", function, ("name", "description", "parameters", "strict"))
    if not function["name"]:
        raise _refused(f"{where}.function.name", "must not be empty")
    description, parameters = function.get("description") or "", function.get("parameters")
    if not isinstance(description, str):
        raise _refused(f"{where}.function.description", "not a text")
    if not isinstance(parameters, dict | None):
        raise _refused(f"{where}.function.parameters", "not a JSON schema")
    return {"name": function["name"], "description": description, "parameters": parameters}


def _tool_choice(choice: str | Mapping[str, Any] | None) -> str:
    if choice is None or choice in ("auto", "none", "required"):
        return str(choice or "")
    named: Any = choice if isinstance(choice, Mapping) and choice.get("type") in (None, "function") else {}
    function = named.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise _refused("tool_choice", "it is auto, none, required, or names a function")
    _refuse_others("tool_choice", named, ("type", "function"))
    _refuse_others("tool_choice.function", function, ("name",))
    if name in ("auto", "none", "required"):
        raise _refused("tool_choice", f"a function that is called {name} cannot be asked for by its name")
    return name


def _constraint(wanted: Mapping[str, Any] | None) -> dict[str, Any]:
    """The constraint that response_format asks for, if any."""
    if wanted is None:
        return {}
    kind = wanted.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise _refused("response_format", "its type is text, json_object, or json_schema with json_schema.schema")
    _refuse_others("response_format", wanted, ("type", "json_schema") if kind == "json_schema" else ("type",))
    if kind != "json_schema":
        return {"json_object": True} if kind == "json_object" else {}
    given: Any = wanted.get("json_schema")
    schema = given.get("schema") if isinstance(given, Mapping) else None
    if not isinstance(schema, Mapping):
        raise _refused("response_format", "its type is json_schema, and json_schema.schema is no object")
    _refuse_others("response_format.json_schema", given, ("name", "description", "schema", "strict"))
    return {"json_schema": schema}
