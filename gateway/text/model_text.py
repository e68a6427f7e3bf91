"""Text of one tokenizer bundle: encode, render, decode.

Thread-safe; its methods take long for long texts, so callers on an event loop go through `gateway.text.service`.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from tokenizers import Tokenizer

from gateway.text.byte_table import ByteTable, check_byte_level
from gateway.text.chat_template import ChatInput, ChatTemplate
from gateway.text.control_tokens import ControlTokens
from gateway.text.errors import PromptTooLong, TemplateError, UnsupportedTokenizer
from gateway.text.tool_calls import CLOSE, OPEN

MAX_DECODED_BYTES = 1 << 30
_PIECE_IDS = 1 << 15


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Encoded:
    """text: what was tokenized. ids_T: int32."""

    text: str
    ids_T: np.ndarray


def _check_size(text: str, max_bytes: int) -> None:
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError as error:  # a lone surrogate out of a JSON escape
        raise TemplateError("the rendered chat is no valid Unicode") from error
    if num_bytes > max_bytes:
        raise PromptTooLong(num_bytes=num_bytes, max_bytes=max_bytes)


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    # The batch call is the one that releases the interpreter lock; "fast" leaves the offsets out.
    encoding: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return encoding


class ModelText:
    """One tokenizer with its chat template."""

    def __init__(self, files: Mapping[str, bytes], *, num_ids: int) -> None:
        """files: a TokenizerBundle's. num_ids: ids that the model may send. Raises UnsupportedTokenizer."""
        try:
            self._source = files["tokenizer.json"]
        except KeyError:
            raise UnsupportedTokenizer("the checkpoint has no tokenizer.json") from None
        check_byte_level(self._source)
        self._tokenizer = self._load()
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = {token.content: token_id for token_id, token in added.items() if token.special}
        special_ids = frozenset(self._special_ids.values())
        self.table = ByteTable.build(self._tokenizer.get_vocab(), special_ids, num_ids=num_ids)
        self._control = ControlTokens(self._special_ids)
        self._template = ChatTemplate.from_files(files)
        self._plain: Tokenizer | None = None
        self._plain_lock = threading.Lock()

    @cached_property
    def bytes_with_call_tags(self) -> tuple[bytes, ...]:
        """The column of visible tokens with the tags of tool calls, where those are special tokens."""
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
            raise UnsupportedTokenizer("tokenizer.json is not readable") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    def _plain_tokenizer(self) -> Tokenizer:
        """A second instance that takes special tokens for text; made when first needed."""
        with self._plain_lock:
            if self._plain is None:
                self._plain = self._load()
                self._plain.encode_special_tokens = True
            return self._plain

    def encode(self, text: str, *, max_bytes: int) -> Encoded:
        """Plain text as it is: special tokens in it are recognised, and those that the tokenizer's post-processor
        adds are added. Raises PromptTooLong."""
        _check_size(text, max_bytes)
        ids = self._tokenizer.encode_batch_fast([text], add_special_tokens=True)[0].ids
        return Encoded(text=text, ids_T=np.array(ids, np.int32))

    def encode_chat(self, chat: ChatInput, *, max_bytes: int) -> Encoded:
        """A rendered chat; control tokens in callers' strings stay text. Raises TemplateError, PromptTooLong."""
        if self._template is None:
            raise TemplateError("this model has no chat template: send text or token ids")
        values = [chat.messages, chat.tools or []]
        if not self._control.occur_in(values):
            text = self._template.render(chat)
            _check_size(text, max_bytes)
            return Encoded(text=text, ids_T=np.array(_ids(self._tokenizer, text), np.int32))
        mark = self._control.mark_for(values)
        messages, tools = self._control.marked(values, mark)
        rendered = self._template.render(replace(chat, messages=messages, tools=tools or None))
        return self._encode_marked(rendered, mark, max_bytes)

    def _encode_marked(self, rendered: str, mark: str, max_bytes: int) -> Encoded:
        pieces = list(self._control.pieces(rendered, mark))
        text = "".join(part for piece in pieces for part in piece)
        _check_size(text, max_bytes)
        plain, ids = self._plain_tokenizer(), list[int]()
        for piece, control in pieces:
            if piece:
                ids += _ids(plain, piece)
            if control:
                ids.append(self._special_ids[control])
        return Encoded(text=text, ids_T=np.array(ids, np.int32))

    def encode_bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Token sequences that spell the words, at the begin of a text and behind a space, as vLLM has them; without
        doubles and without those that end in another one. Raises ValueError with the index of a word without tokens."""
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
        """Every token, special ones too. Raises PromptTooLong."""
        return _decode(token_ids, self.table.all_bytes, max_bytes)

    def decode_visible(self, token_ids: Sequence[int] | np.ndarray, *, max_bytes: int = MAX_DECODED_BYTES) -> str:
        """Without special tokens. Raises PromptTooLong."""
        return _decode(token_ids, self.table.visible_bytes, max_bytes)


def _decode(token_ids: Sequence[int] | np.ndarray, bytes_by_id: Sequence[bytes], max_bytes: int) -> str:
    """In pieces: one call of the interpreter's own for millions of ids would keep every other thread from going on."""
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
