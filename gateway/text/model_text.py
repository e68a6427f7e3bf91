"""Text of one tokenizer bundle: encode, render, decode.

Control tokens in what callers write are plain text. A chat template concatenates strings, so `<|im_end|>` inside a
message would end the turn once the result is tokenized: the author of a message could write as the system. Here the
tokens in callers' strings are marked with a private character before the template gets them, and the rendered text is
cut at the tokens without a mark, which the template wrote. See docs/decisions/0001-chat-control-tokens.md.

Thread-safe; its methods take long for long texts, so callers on an event loop go through `gateway.text.service`.
"""

import json
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, TypeVar

import numpy as np
from tokenizers import Tokenizer

from octavo.gateway.text.chat_template import DEFAULT, TOOL_USE, ChatInput, ChatTemplate, templates_of
from octavo.gateway.text.errors import PromptTooLong, TemplateError, TooManyTokens, UnsupportedTokenizer
from octavo.gateway.text.pieces import ByteTable, TextPieces, byte_level_config
from octavo.gateway.text.service import STEP_BYTES, Steps
from octavo.gateway.text.tool_calls import CLOSE, OPEN

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
"""Texts are tokenized one by one in our own threads; a pool of the library, a thread for each core, would idle."""

T = TypeVar("T")
MAX_DECODED_BYTES = 1 << 30
PIECE_CHARACTERS = STEP_BYTES // 2
_PIECE_IDS = 1 << 15


_PRIVATE_USE = range(0xF0000, 0xFFFFE)
_PAIR = re.compile(r"\\ud[89ab][0-9a-f]{2}\\ud[c-f][0-9a-f]{2}")  # as JSON escapes one of these


def strings_in(value: Any) -> Iterator[str]:
    """Every string of a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value
        for item in value.values():
            yield from strings_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings_in(item)


class ControlTokens:
    """The special tokens of one tokenizer."""

    def __init__(self, tokens: Iterable[str]) -> None:
        longest_first = sorted((token for token in tokens if token), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def occur_in(self, value: Any) -> bool:
        """Whether a string of this JSON value contains one."""
        return any(self._pattern.search(text) for text in strings_in(value))

    def mark_for(self, value: Any) -> str:
        """A character that occurs in no string of this JSON value, neither as such nor JSON-escaped."""
        used = {*chain.from_iterable(strings_in(value)), *chain.from_iterable(map(_PAIR.findall, strings_in(value)))}
        for code in _PRIVATE_USE:
            if chr(code) not in used and _escaped(chr(code)) not in used:
                return chr(code)
        raise TemplateError("the messages use every private-use character")

    def marked(self, value: Any, mark: str) -> Any:
        """The JSON value with the mark inserted after the first character of every control token."""
        if isinstance(value, str):
            return self._pattern.sub(lambda match: match[0][0] + mark + match[0][1:], value)
        if isinstance(value, dict):
            return {self.marked(key, mark): self.marked(item, mark) for key, item in value.items()}
        if isinstance(value, list):
            return [self.marked(item, mark) for item in value]
        return value

    def pieces(self, rendered: str, mark: str) -> Iterator[tuple[str, str]]:
        """The rendered text as (text without marks, following control token or ""), in order."""
        start = 0
        for match in self._pattern.finditer(rendered):
            yield unmarked(rendered[start : match.start()], mark), match[0]
            start = match.end()
        yield unmarked(rendered[start:], mark), ""


def unmarked(text: str, mark: str) -> str:
    """The text without marks, including those that a template JSON-escaped."""
    return text.replace(mark, "").replace(_escaped(mark), "") if mark else text


def _escaped(mark: str) -> str:
    return json.dumps(mark)[1:-1]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Encoded:
    """text: what was tokenized. ids_T: int32."""

    text: str
    ids_T: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Limits of a prompt. max_bytes: of its text. max_tokens: more are refused; None: no limit. keep: only this many
    last tokens are wanted; 0: all."""

    max_bytes: int
    max_tokens: int | None = None
    keep: int = 0

    def has_enough(self, num_tokens: int) -> bool:
        """Whether further tokens would be cut off anyway."""
        return 0 < self.keep < num_tokens

    def check(self, num_tokens: int) -> None:
        """Raises TooManyTokens if too many would remain after cutting."""
        left = min(num_tokens, self.keep) if self.keep else num_tokens
        if self.max_tokens is not None and left > self.max_tokens:
            raise TooManyTokens(max_tokens=self.max_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedChat:
    """mark: inserted into control tokens in the caller's strings; "" if there are none."""

    chat: ChatInput
    mark: str


def _ids(tokenizer: Tokenizer, text: str, *, adds_special: bool = False) -> list[int]:
    # The batch call is the one that releases the interpreter lock; "fast" leaves the offsets out.
    encoding: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=adds_special)[0].ids
    return encoding


def _ids_T(tokenizer: Tokenizer, piece: str | int, *, adds_special: bool) -> np.ndarray:
    ids = [piece] if isinstance(piece, int) else _ids(tokenizer, piece, adds_special=adds_special)
    return np.array(ids, np.int32)


def _in_order(text: str, cuts: TextPieces | None, bounds: Bounds) -> Iterable[str]:
    """The text's pieces; last first if only last tokens are kept."""
    if cuts is None or len(text) <= PIECE_CHARACTERS:
        return [text]
    pieces = cuts.split(text, size=PIECE_CHARACTERS)
    return reversed(list(pieces)) if bounds.keep else pieces


def finish(steps: Steps[T]) -> T:
    """Run the steps to the end, here and now. Returns their result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


class ModelText:
    """One tokenizer with its chat templates."""

    def __init__(self, files: Mapping[str, bytes], *, num_ids: int) -> None:
        """files: from a TokenizerBundle. num_ids: ids that the model may send. Raises UnsupportedTokenizer."""
        try:
            self._source = files["tokenizer.json"]
        except KeyError:
            raise UnsupportedTokenizer("the checkpoint has no tokenizer.json") from None
        config = byte_level_config(self._source)
        self._tokenizer = self._load()
        self._pieces, self._plain_pieces = TextPieces.of(config), TextPieces.of_plain(config)
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = {token.content: token_id for token_id, token in added.items() if token.special}
        special_ids = frozenset(self._special_ids.values())
        self.table = ByteTable.build(self._tokenizer.get_vocab(), special_ids, num_ids=num_ids)
        self._control = ControlTokens(self._special_ids)
        self._templates = templates_of(files)
        self._plain: Tokenizer | None = None
        self._plain_lock = threading.Lock()

    @cached_property
    def bytes_with_call_tags(self) -> tuple[bytes, ...]:
        """Column of visible bytes by id, including the tags of tool calls if those are special tokens."""
        table, rows = self.table, None
        for tag in (OPEN, CLOSE):
            if (token_id := self._special_ids.get(tag)) is not None:
                rows = list(table.visible_bytes) if rows is None else rows
                rows[token_id] = table.all_bytes[token_id]
        return table.visible_bytes if rows is None else tuple(rows)

    def _load(self) -> Tokenizer:
        try:
            tokenizer = Tokenizer.from_buffer(self._source)
        except Exception as error:  # the library raises bare Exception
            raise UnsupportedTokenizer(f"tokenizer.json cannot be loaded: {str(error)[:200]}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    def _plain_tokenizer(self) -> Tokenizer:
        """A second instance, made on first use, that treats special tokens as plain text."""
        with self._plain_lock:
            if self._plain is None:
                self._plain = self._load()
                self._plain.encode_special_tokens = True
            return self._plain

    def encode(self, text: str, *, max_bytes: int) -> Encoded:
        """`encoding` without steps."""
        return finish(self.encoding(text, Bounds(max_bytes=max_bytes)))

    def encoding(self, text: str, bounds: Bounds) -> Steps[Encoded]:
        """Encode plain text: special tokens in it are recognised, and those that the tokenizer's post-processor adds
        are added. Raises PromptTooLong, TooManyTokens; what the byte length alone shows, before the first step."""
        self._check_size(text, bounds)
        return self._encoding([text], text, self._tokenizer, self._pieces, bounds)

    def template_of(self, chat: ChatInput) -> ChatTemplate:
        """The template for this chat. Raises TemplateError if there is none."""
        if chat.tools and TOOL_USE in self._templates:
            return self._templates[TOOL_USE]
        if DEFAULT not in self._templates:
            has = f", only {', '.join(map(repr, self._templates))}" if self._templates else ""
            raise TemplateError(f"this model has no chat template{has}: send text or token ids")
        return self._templates[DEFAULT]

    def marked(self, chat: ChatInput) -> MarkedChat:
        """The chat for the template, with control tokens in the caller's strings marked. Raises TemplateError."""
        values = [chat.messages, chat.tools or []]
        try:
            if not self._control.occur_in(values):
                return MarkedChat(chat=chat, mark="")
            mark = self._control.mark_for(values)
            messages, tools = self._control.marked(values, mark)
        except RecursionError:  # of arguments, or a schema, that JSON's own reader took
            raise TemplateError("the messages are nested too deeply") from None
        return MarkedChat(chat=replace(chat, messages=messages, tools=tools or None), mark=mark)

    def rendered_encoding(self, rendered: str, mark: str, bounds: Bounds) -> Steps[Encoded]:
        """Encode the template's output for a marked chat; callers' control tokens stay text. Raises as `encoding`."""
        if not mark:
            self._check_size(rendered, bounds)
            return self._encoding([rendered], rendered, self._tokenizer, self._pieces, bounds, adds_special=False)
        return self._encoding_marked(rendered, mark, bounds)

    def _encoding_marked(self, rendered: str, mark: str, bounds: Bounds) -> Steps[Encoded]:
        if len(rendered) > STEP_BYTES:
            yield len(rendered)  # to be cut
        pieces = list(self._control.pieces(rendered, mark))
        text = "".join(part for piece in pieces for part in piece)
        self._check_size(text, bounds)
        parts: list[str | int] = []
        for piece, control in pieces:
            if piece:
                parts.append(piece)
            if control:
                parts.append(self._special_ids[control])
        plain, cuts = self._plain_tokenizer(), self._plain_pieces
        return (yield from self._encoding(parts, text, plain, cuts, bounds, adds_special=False))

    def _encoding(
        self,
        parts: list[str | int],
        text: str,
        tokenizer: Tokenizer,
        cuts: TextPieces | None,
        bounds: Bounds,
        *,
        adds_special: bool = True,
    ) -> Steps[Encoded]:
        """parts: strings to tokenize, and ids to copy. Works from the end if only last tokens are kept, and stops as
        soon as there are too many."""
        adds_special = adds_special and tokenizer.num_special_tokens_to_add(is_pair=False) > 0
        rows, num_tokens, num_pending = list[np.ndarray](), 0, 0
        for part in reversed(parts) if bounds.keep else parts:
            for piece in [part] if isinstance(part, int) else _in_order(part, None if adds_special else cuts, bounds):
                if bounds.has_enough(num_tokens):
                    break
                size = 8 if isinstance(piece, int) else len(piece)
                num_pending += size
                if num_pending > STEP_BYTES:
                    yield size
                    num_pending = size
                rows.append(_ids_T(tokenizer, piece, adds_special=adds_special))
                num_tokens += len(rows[-1])
                bounds.check(num_tokens)
        ids_T = np.concatenate(rows[::-1] if bounds.keep else rows) if rows else np.zeros(0, np.int32)
        return Encoded(text=text, ids_T=ids_T)

    def _check_size(self, text: str, bounds: Bounds) -> None:
        try:
            num_bytes = len(text.encode())
        except UnicodeEncodeError as error:  # a lone surrogate out of a JSON escape
            raise TemplateError("the rendered chat is no valid Unicode") from error
        if num_bytes > bounds.max_bytes:
            raise PromptTooLong(num_bytes=num_bytes, max_bytes=bounds.max_bytes)
        if bounds.max_tokens is None or bounds.keep or self._pieces is None:
            return
        if num_bytes > bounds.max_tokens * self._pieces.max_token_bytes:
            raise TooManyTokens(max_tokens=bounds.max_tokens)

    def encode_bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Token sequences that spell the words, both at the beginning of a text and after a space, as vLLM does;
        without duplicates, and without sequences that end in another one. Raises ValueError with the index of a word
        that has no tokens."""
        found: dict[tuple[int, ...], None] = {}
        for index, word in enumerate(words):
            bare = tuple(_ids(self._tokenizer, word.lstrip()))
            if not bare:
                raise ValueError(index)
            spaced = tuple(_ids(self._tokenizer, f" {word.lstrip()}"))
            found[bare] = None
            if spaced[-len(bare) :] != bare:
                found[spaced] = None
        return tuple(found)

    def decode_all(self, token_ids: Sequence[int] | np.ndarray, *, max_bytes: int = MAX_DECODED_BYTES) -> str:
        """All tokens, including special ones. Raises PromptTooLong."""
        return _decode(token_ids, self.table.all_bytes, max_bytes)

    def decode_visible(self, token_ids: Sequence[int] | np.ndarray, *, max_bytes: int = MAX_DECODED_BYTES) -> str:
        """All tokens except special ones. Raises PromptTooLong."""
        return _decode(token_ids, self.table.visible_bytes, max_bytes)


def _decode(token_ids: Sequence[int] | np.ndarray, bytes_by_id: Sequence[bytes], max_bytes: int) -> str:
    """Decodes in pieces: one call for millions of ids would hold the interpreter lock too long."""
    rows, num_bytes = list[bytes](), 0
    for start in range(0, len(token_ids), _PIECE_IDS):
        piece = token_ids[start : start + _PIECE_IDS]
        ids = piece.tolist() if isinstance(piece, np.ndarray) else piece
        new = [bytes_by_id[token_id] for token_id in ids]
        num_bytes += sum(map(len, new))
        if num_bytes <= max_bytes:
            rows += new
    if num_bytes > max_bytes:
        raise PromptTooLong(num_bytes=num_bytes, max_bytes=max_bytes)
    return b"".join(rows).decode("utf-8", "replace")
