"""The checkpoint's own chat template, rendered by transformers' sandboxed Jinja code (which needs no torch)."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from gateway.text.errors import TemplateError

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatInput:
    """A conversation in the form that templates expect (that of OpenAI's API): plain JSON values.

    messages: role, content, and where given tool_calls and tool_call_id. tools: None where there are none.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True


class ChatTemplate:
    """One template with the special tokens that it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._source = source
        self._special_tokens = dict(special_tokens)

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> "ChatTemplate | None":
        """From chat_template.jinja, else from tokenizer_config.json; None where the checkpoint has none."""
        config = _tokenizer_config(files)
        source = _template_source(files, config)
        if source is None:
            return None
        tokens = {name: _token_text(config[name]) for name in _SPECIAL_NAMES if config.get(name)}
        return cls(source, tokens)

    def render(self, chat: ChatInput) -> str:
        """The prompt. Raises TemplateError with the template's own words where it refuses."""
        try:
            rendered, _ = render_jinja_template(
                conversations=[chat.messages],
                tools=chat.tools,
                chat_template=self._source,
                add_generation_prompt=chat.add_generation_prompt,
                **self._special_tokens,
            )
        except jinja2.TemplateError as error:
            raise TemplateError(error.message or "the chat template refused the messages") from error
        except Exception as error:  # a template is foreign code: it can raise anything, on some messages only
            raise TemplateError(f"the chat template failed on these messages ({type(error).__name__})") from error
        return rendered[0]


def _tokenizer_config(files: Mapping[str, bytes]) -> dict[str, Any]:
    try:
        config = json.loads(files.get("tokenizer_config.json", b"{}"))
    except ValueError:
        return {}
    return config if isinstance(config, dict) else {}


def _template_source(files: Mapping[str, bytes], config: Mapping[str, Any]) -> str | None:
    if "chat_template.jinja" in files:
        return files["chat_template.jinja"].decode("utf-8", "replace")
    source = config.get("chat_template")
    if isinstance(source, list):  # several by name, in older checkpoints
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    return source if isinstance(source, str) else None


def _token_text(token: str | dict[str, Any]) -> str:
    return str(token.get("content", "")) if isinstance(token, dict) else token
