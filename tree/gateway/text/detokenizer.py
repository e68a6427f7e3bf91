"""Tokens to text as they come, without ever splitting a character.

Must not know stop strings, streams or requests.
"""

from codecs import utf_8_decode
from collections.abc import Iterable, Sequence


class Detokenizer:
    """One output. The concatenation of all `feed` and the final `flush` equals decoding all tokens at once, however
    the tokens are cut; bytes of an unfinished character are kept until it ends or proves invalid (then U+FFFD, by the
    Unicode practice of maximal subparts, as `tokenizers` does)."""

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
