"""A tokenizer's files as one zip archive, for clients that tokenize themselves."""

import hashlib
import io
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

CHUNK_BYTES = 1024 * 1024  # clients take 4 MiB a message by default
_DAWN = (1980, 1, 1, 0, 0, 0)  # of zip archives: the same files give the same bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """sha256: hex, of all bytes."""

    data: bytes
    sha256: str

    def chunks(self) -> Iterator[tuple[bytes, str]]:
        """(bytes, sha256); the digest is with the last, empty before."""
        for begin in range(0, len(self.data), CHUNK_BYTES):
            end = begin + CHUNK_BYTES
            yield self.data[begin:end], self.sha256 if end >= len(self.data) else ""


def archive_of(files: Mapping[str, bytes]) -> Archive:
    """Deflated; takes a good part of a second for a large vocabulary."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in sorted(files):
            entry = zipfile.ZipInfo(name, _DAWN)
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, files[name], zipfile.ZIP_DEFLATED, compresslevel=1)
    data = buffer.getvalue()
    return Archive(data=data, sha256=hashlib.sha256(data).hexdigest())
