"""Tokens to text as they come, without ever splitting a character.

Must not know stop strings, streams or requests.
"""

import codecs
from collections.abc import Iterable, Sequence

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """One output. The concatenation of all `feed` and the final `flush` equals decoding all tokens at once, however
    the tokens are cut; bytes of an unfinished character are kept until it ends or proves invalid (then U+FFFD, by the
    Unicode practice of maximal subparts, as `tokenizers` does)."""

    __slots__ = ("_bytes", "_decode")

    def __init__(self, bytes_by_id: Sequence[bytes]) -> None:
        """bytes_by_id: a column of `ByteTable`."""
        self._bytes = bytes_by_id
        self._decode = _Utf8Decoder("replace").decode

    def feed(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete. Raises IndexError for an id outside the table."""
        table = self._bytes
        return self._decode(b"".join([table[token_id] for token_id in token_ids]))

    def flush(self) -> str:
        """The end: what is left of an unfinished character, as U+FFFD."""
        return self._decode(b"", True)
