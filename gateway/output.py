"""One output: tokens in, pieces for the caller out.

Pure: no clock, no loop, no RPC. Where there are no stop strings the tokens are detokenized only when a piece is taken,
so that a burst costs one pass; with stop strings every token is looked at as it comes, so that the end is noticed even
while the caller does not read.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.text.detokenizer import Detokenizer
from gateway.text.stop_matcher import StopMatcher, StopStrings
from wire.messages import TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFormat:
    """What the caller asked for. bytes_by_id: a column of ByteTable, None for no text. stop_ids: tokens that end the
    output, whose text is left out. min_tokens: stop strings are looked for after so many tokens."""

    bytes_by_id: Sequence[bytes] | None
    wants_ids: bool
    stop_strings: StopStrings | None = None
    stop_ids: frozenset[int] = frozenset()
    min_tokens: int = 0


@dataclass(slots=True, eq=False)
class Piece:
    """What goes into one Delta. logprobs: (the chosen token, its position). num_tokens: since the last piece."""

    text: str
    token_ids: list[int]
    logprobs: list[tuple[int, TokenLogprobs]]
    num_tokens: int


class OutputAssembler:
    """feed, take, feed, take … finish, take."""

    __slots__ = (
        "_detokenizer",
        "_format",
        "_logprobs",
        "_matcher",
        "_num_taken",
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
        self._text = ""  # ready to send
        self._to_detokenize: list[int] = []
        self._to_send: list[int] = []
        self._logprobs: list[tuple[int, TokenLogprobs]] = []
        self._num_taken = 0
        self.num_tokens = 0  # of the output; those after a stop string do not count

    @property
    def match(self) -> str | None:
        """The stop string that ended the output."""
        return self._matcher.match if self._matcher is not None else None

    @property
    def gives_text(self) -> bool:
        """Whether pieces have text at all."""
        return self._detokenizer is not None

    @property
    def num_pending(self) -> int:
        """Tokens that no piece has carried yet."""
        return self.num_tokens - self._num_taken

    def feed(self, token_ids: list[int], logprobs: list[TokenLogprobs] | None) -> None:
        """New tokens, in order; after a stop string they are dropped."""
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
        """Detokenize one by one; the tokens up to the one that completed a stop string."""
        if matcher.match is not None:
            return []
        for index, token_id in enumerate(token_ids):
            self._to_detokenize.append(token_id)
            text = self._detokenize()
            if self.num_tokens + index < self._format.min_tokens:
                self._text += text
                continue
            self._text += matcher.feed(text)
            if matcher.match is not None:
                return token_ids[: index + 1]
        return token_ids

    def _detokenize(self) -> str:
        """The text of what came, but for a last token that may prove to be the end."""
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
        if self._detokenizer is None or self.match is not None:
            return
        ids = self._to_detokenize
        if ids and ids[-1] == stop_token_id:
            ids = ids[:-1]
        text = self._detokenizer.feed(ids) + self._detokenizer.flush()
        self._to_detokenize = []
        if self._matcher is not None:
            text = self._matcher.feed(text)
            text += self._matcher.flush()
        self._text += text

    def take(self) -> Piece | None:
        """What can be sent now; None where that is nothing."""
        if self._matcher is None and self._to_detokenize:
            self._text += self._detokenize()
        if not (self._text or self._to_send or self._logprobs):
            return None
        piece = Piece(self._text, self._to_send, self._logprobs, self.num_tokens - self._num_taken)
        self._text, self._num_taken = "", self.num_tokens
        self._to_send, self._logprobs = [], []
        return piece
