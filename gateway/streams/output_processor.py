"""One output: tokens in, pieces for the caller out.

    tokens --Detokenizer--> text --StopMatcher--> text --ToolCallParser--> text and tool calls

Where there are no stop strings the tokens are detokenized only when a piece is taken, so that a burst costs one pass;
with stop strings every token is detokenized as it comes, so that the end is noticed even while the caller does not
read. Pure: no clock, no loop, no RPC.
"""

from codecs import utf_8_decode
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain

from octavo.gateway.text.stop_matcher import StopMatcher, StopStrings
from octavo.gateway.text.tool_calls import CallPiece, ToolCallParser
from octavo.wire.messages import TokenLogprobs

_PROMPT_POSITIONS = 256  # in one piece: a message has a size


class Detokenizer:
    """Tokens of one output to text as they come, without ever splitting a character.

    The concatenation of all `feed` and the final `flush` equals decoding all tokens at once, however the tokens are
    cut; bytes of an unfinished character are kept until it ends or proves invalid (then U+FFFD, by the
    Unicode practice of maximal subparts, as `tokenizers` does).
    """

    __slots__ = ("_bytes", "_unfinished")

    def __init__(self, bytes_by_id: Sequence[bytes]) -> None:
        """bytes_by_id: a column of `ByteTable`."""
        self._bytes = bytes_by_id
        self._unfinished = b""  # the first bytes of a character

    def feed(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete. Raises IndexError for an id outside the table."""
        table = self._bytes
        data = self._unfinished + b"".join([table[token_id] for token_id in token_ids])
        text, num_used = utf_8_decode(data, "replace", False)  # not final: keeps what may still become a character
        self._unfinished = data[num_used:]
        return text

    def flush(self) -> str:
        """The end: what is left of an unfinished character, as U+FFFD."""
        text, _ = utf_8_decode(self._unfinished, "replace", True)
        self._unfinished = b""
        return text


class StopText(Enum):
    """Whether the stop string, or the text of the stop token, is part of the text."""

    LEFT_OUT = "left out"
    INCLUDED = "included"


@dataclass(frozen=True, slots=True, kw_only=True)
class Echo:
    """The prompt, to be repeated before the output."""

    text: str
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFormat:
    """What the caller asked for.

    bytes_by_id: a column of ByteTable; None for no text.
    stop_ids: tokens that end the output; their text is left out unless stop_text says otherwise.
    min_tokens: stop strings only count after this many tokens.
    make_call_id: draws ids of tool calls, which are parsed out of the text; None: they stay text.
    stop_text: what becomes of the text that ended the output.
    echo: precedes the output; None: nothing does.
    prompt_ids: the prompt's, if its log-probabilities are wanted.
    """

    bytes_by_id: Sequence[bytes] | None
    wants_ids: bool
    stop_strings: StopStrings | None = None
    stop_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    make_call_id: Callable[[], str] | None = None
    stop_text: StopText = StopText.LEFT_OUT
    echo: Echo | None = None
    prompt_ids: Sequence[int] = ()


@dataclass(slots=True, eq=False)
class Piece:
    """The content of one Delta.

    logprobs: (chosen token, its position's log-probabilities).
    num_tokens: tokens since the last piece.
    tool_calls: not part of `text`.
    prompt_logprobs: for the prompt's tokens from the second one on; at most a few hundred per piece.
    """

    text: str
    token_ids: list[int]
    logprobs: list[tuple[int, TokenLogprobs]]
    num_tokens: int
    tool_calls: list[CallPiece] = field(default_factory=list)
    prompt_logprobs: list[tuple[int, TokenLogprobs]] = field(default_factory=list)


class OutputProcessor:
    """One output's tokens in, pieces out. Call order: feed, take, feed, take … finish, take."""

    __slots__ = (
        "_detokenizer",
        "_echo",
        "_format",
        "_is_over",
        "_logprobs",
        "_matcher",
        "_num_scored",
        "_num_seen",
        "_num_taken",
        "_parser",
        "_prompt_logprobs",
        "_text",
        "_to_detokenize",
        "_to_send",
        "num_tokens",
    )

    def __init__(self, output_format: OutputFormat) -> None:
        self._format = output_format
        table = output_format.bytes_by_id
        self._detokenizer = Detokenizer(table) if table is not None else None
        self._matcher = StopMatcher(output_format.stop_strings) if output_format.stop_strings else None
        make_call_id = output_format.make_call_id
        self._parser = ToolCallParser(make_call_id) if make_call_id is not None else None
        self._text = ""  # ready to send, or to be parsed
        self._to_detokenize: list[int] = []
        self._to_send: list[int] = []
        self._logprobs: list[tuple[int, TokenLogprobs]] = []
        self._num_taken = 0
        self._num_seen = 0
        self._echo = output_format.echo  # until it was sent
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._num_scored = 0
        self._is_over = False
        self.num_tokens = 0  # of the output; those after a stop string do not count

    @property
    def match(self) -> str | None:
        """The stop string that ended the output."""
        return self._matcher.match if self._matcher is not None else None

    @property
    def gives_text(self) -> bool:
        """Whether pieces have text."""
        return self._detokenizer is not None

    @property
    def num_tool_calls(self) -> int:
        """Complete tool calls parsed so far."""
        return self._parser.num_calls if self._parser is not None else 0

    @property
    def num_pending(self) -> int:
        """Tokens that have come since the last `take`. (Tokens held back by that `take` do not count.)"""
        return self.num_tokens - self._num_seen

    @property
    def num_undelivered(self) -> int:
        """Tokens that no piece has carried, because their text is hidden or held back."""
        return self.num_tokens - self._num_taken

    @property
    def has_undelivered_prompt(self) -> bool:
        """Whether log-probabilities of the prompt are wanted and the piece with the last of them was not taken."""
        return bool(self._format.prompt_ids) and not self._num_taken

    def feed_prompt(self, logprobs: list[TokenLogprobs]) -> None:
        """The next log-probabilities of the prompt; before any token."""
        self._prompt_logprobs += logprobs

    def feed(self, token_ids: list[int], logprobs: list[TokenLogprobs] | None) -> None:
        """New tokens, in order. After a stop string they are dropped."""
        if self._matcher is not None:
            token_ids = self._match(token_ids, self._matcher)
        elif self._detokenizer is not None:
            self._to_detokenize += token_ids
        self.num_tokens += len(token_ids)
        if self._format.wants_ids:
            self._to_send += token_ids
        if logprobs is not None:
            self._logprobs += zip(token_ids, logprobs, strict=False)  # shorter where a stop string cut the ids

    def _match(self, token_ids: list[int], matcher: StopMatcher) -> list[int]:
        """Detokenize one by one. Returns the tokens up to the one that completed a stop string."""
        if matcher.match is not None:
            return []
        for index, token_id in enumerate(token_ids):
            self._to_detokenize.append(token_id)
            text = self._detokenize()
            if self.num_tokens + index < self._format.min_tokens:
                self._text += text
                continue
            self._text += self._until_stop(text, matcher)
            if matcher.match is not None:
                self._end_calls()
                return token_ids[: index + 1]
        return token_ids

    def _until_stop(self, text: str, matcher: StopMatcher) -> str:
        """The part of this text that may be sent: up to a stop string that ends in it, or including that."""
        sent = matcher.feed(text)
        is_included = self._format.stop_text is StopText.INCLUDED
        return sent + matcher.match if is_included and matcher.match is not None else sent

    def _detokenize(self) -> str:
        """The text of the new tokens, without a last one that may prove to be the stop token."""
        ids, detokenizer = self._to_detokenize, self._detokenizer
        if not ids or detokenizer is None:
            return ""
        if ids[-1] in self._format.stop_ids:
            text, self._to_detokenize = detokenizer.feed(ids[:-1]), ids[-1:]
        else:
            text, self._to_detokenize = detokenizer.feed(ids), []
        return text

    def finish(self, stop_token_id: int | None) -> None:
        """No more tokens. stop_token_id: the token that ended the output, if one did."""
        self._is_over = True
        if self._detokenizer is None or self.match is not None:
            return
        is_left_out = self._format.stop_text is StopText.LEFT_OUT
        if is_left_out and self._to_detokenize and self._to_detokenize[-1] == stop_token_id:
            self._to_detokenize.pop()
        self._end_text(self._detokenizer.feed(self._to_detokenize) + self._detokenizer.flush())

    def cut_short(self) -> None:
        """No more tokens, though the output has not ended: flush what was held back, except for half a character."""
        self._is_over = True
        if self._detokenizer is not None and self.match is None:
            self._end_text(self._detokenizer.feed(self._to_detokenize))

    def _end_text(self, text: str) -> None:
        """text: what the matcher has not seen yet."""
        self._to_detokenize = []
        if self._matcher is not None:
            text = self._until_stop(text, self._matcher) + self._matcher.flush()
        self._text += text
        self._end_calls()

    def _end_calls(self) -> None:
        """Nothing follows: parse the rest, including an unfinished call."""
        if self._parser is not None:
            self._parser.feed(self._text)
            self._parser.finish()
            self._text = ""

    def take(self) -> Piece | None:
        """What can be sent now; None if nothing."""
        if self._matcher is None and self._to_detokenize:
            self._text += self._detokenize()
        calls: list[CallPiece] = []
        if self._parser is not None:
            self._parser.feed(self._text)
            self._text, calls = self._parser.take_text(), self._parser.take_calls()
        if (self._prompt_logprobs or self._echo) and (self.num_tokens or self._is_over):
            return self._take_prompt(calls)
        self._num_seen = self.num_tokens
        if not (self._text or self._to_send or self._logprobs or calls):
            return None
        piece = Piece(self._text, self._to_send, self._logprobs, self.num_tokens - self._num_taken, calls)
        self._text, self._num_taken = "", self.num_tokens
        self._to_send, self._logprobs = [], []
        return piece

    def _take_prompt(self, calls: list[CallPiece]) -> Piece:
        """A piece with what precedes the output. Its last part goes together with the first part of the output."""
        start = self._num_scored
        scores, self._prompt_logprobs = (
            self._prompt_logprobs[:_PROMPT_POSITIONS],
            self._prompt_logprobs[_PROMPT_POSITIONS:],
        )
        self._num_scored += len(scores)
        positions = list(zip(self._format.prompt_ids[start + 1 : start + 1 + len(scores)], scores, strict=True))
        if self._prompt_logprobs:
            return Piece("", [], [], 0, calls, positions)
        self._num_seen = self.num_tokens
        echo, self._echo = self._echo, None
        text, ids = (echo.text, echo.token_ids) if echo is not None else ("", ())
        piece = Piece(
            text * self.gives_text + self._text,
            list(chain(ids if self._format.wants_ids else (), self._to_send)),
            self._logprobs,
            self.num_tokens - self._num_taken,
            calls,
            positions,
        )
        self._text, self._num_taken, self._to_send, self._logprobs = "", self.num_tokens, [], []
        return piece
