"""The checkpoint's own chat template, rendered in Jinja's sandbox as transformers does it. Imports little."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
import jinja2.ext
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from octavo.gateway.text.errors import PromptTooLong, TemplateError
from octavo.wire.bundle import special_tokens

DEFAULT, TOOL_USE = "default", "tool_use"
"""The names of templates that are rendered: the second for chats with tools, where there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatInput:
    """A conversation in the form that templates expect (that of OpenAI's API): plain JSON values.

    messages: role, content, and, if given, tool_calls and tool_call_id. tools: None if there are none.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True


class ChatTemplate:
    """One template with the special tokens that it may name. Templates are foreign code: render them in a process with
    limits (`gateway.text.process_pool`)."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, name: str = "chat template") -> None:
        """name: the file that it comes from."""
        self.source = source
        self.special_tokens = dict(special_tokens)
        self.name = name

    @cached_property
    def digest(self) -> str:
        """Hex digest of everything that the template consists of."""
        everything = json.dumps([self.source, self.special_tokens, self.name])
        return hashlib.sha256(everything.encode()).hexdigest()

    @cached_property
    def _compiled(self) -> jinja2.Template:
        return _environment().from_string(self.source)

    def render(self, chat: ChatInput, *, max_bytes: int) -> str:
        """The prompt. Raises TemplateError, with the template's own message if it refuses; PromptTooLong once the text
        exceeds max_bytes; MemoryError."""
        rendered, num_bytes = list[str](), 0
        try:
            for part in self._compiled.generate(
                messages=chat.messages,
                tools=chat.tools,
                documents=None,
                add_generation_prompt=chat.add_generation_prompt,
                **self.special_tokens,
            ):
                rendered.append(part)
                num_bytes += len(part.encode("utf-8", "surrogatepass"))
                if num_bytes > max_bytes:
                    raise PromptTooLong(num_bytes=num_bytes, max_bytes=max_bytes)
        except (PromptTooLong, MemoryError):
            raise
        except jinja2.TemplateSyntaxError as error:  # no messages would do
            raise TemplateError(f"the model's chat template is broken, line {error.lineno}: {error.message}") from error
        except jinja2.TemplateError as error:
            raise TemplateError(error.message or "the chat template refused the messages") from error
        except Exception as error:  # a template is foreign code: it can raise anything, on some messages only
            raise TemplateError(f"the chat template failed on these messages ({type(error).__name__})") from error
        return "".join(rendered)


# ---------------------------------------------------------------- the environment


def _environment() -> ImmutableSandboxedEnvironment:
    """As in `transformers.utils.chat_template_utils`. Importing that one would load megabytes of modules before a
    process renders its first chat."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment


class _GenerationTag(Extension):
    """``{% generation %}`` marks the model's turns for training; here it renders its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """The content between the tags, in its own scope."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

    def _said(self, caller: Callable[[], str]) -> str:
        return caller()


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without HTML escapes, unlike Jinja's own."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class _Dict:
    """`dict` without its attributes, some of which lead out of the sandbox."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        """See `dict.fromkeys`."""
        return dict.fromkeys(*args, **kwargs)


class _Namespace(jinja2.utils.Namespace):
    """Without names that begin with an underscore, which lead out of the sandbox."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, args = args[0], args[1:]
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        jinja2.utils.Namespace.__setitem__(self, name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a chat template cannot store {name!r} on a namespace")


# ---------------------------------------------------------------- files


def templates_of(files: Mapping[str, bytes]) -> dict[str, ChatTemplate]:
    """Templates by name, found as transformers does: chat_template.jinja is `DEFAULT`; otherwise one or several from
    tokenizer_config.json. Empty if the checkpoint has none."""
    config, tokens_map = (_json_object(files, name) for name in ("tokenizer_config.json", "special_tokens_map.json"))
    tokens = special_tokens(config, tokens_map)
    if "chat_template.jinja" in files:
        source = files["chat_template.jinja"].decode("utf-8", "replace")
        return {DEFAULT: ChatTemplate(source, tokens, name="chat_template.jinja")}
    sources = _named_sources(config.get("chat_template"))
    return {name: ChatTemplate(source, tokens, name="tokenizer_config.json") for name, source in sources.items()}


def _json_object(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    try:
        content = json.loads(files.get(name, b"{}"))
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _named_sources(given: object) -> dict[str, str]:
    """Several templates are a list of objects, or an object."""
    if isinstance(given, list):
        named = [(each.get("name"), each.get("template")) for each in given if isinstance(each, dict)]
    else:
        named = list((given if isinstance(given, dict) else {DEFAULT: given}).items())
    return {name: source for name, source in named if isinstance(name, str) and isinstance(source, str)}
