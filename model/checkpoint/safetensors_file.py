"""Reading safetensors files without trusting them.

Format (https://github.com/huggingface/safetensors, README "Format"): 8 bytes little-endian header length, a JSON object
{name: {dtype, shape, data_offsets}}, then the data; the tensors cover the data without overlap or hole.
The header is checked whole before anything is read, and data is read into the tensor where it ends up: no pickle, no
memory map that a truncated file could turn into SIGBUS.

Must not know: what the tensors mean.
"""

import json
import math
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from octavo.model.config_fields import shown
from octavo.model.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000
MAX_DIMENSIONS = 8
MAX_ENTRIES = 100_000
"""Of one file; the largest of Qwen2.5's packed checkpoints have some two thousand in all."""

LFS_POINTER = b"version "
"""How the text begins that a clone without git-lfs has in the place of a large file."""

ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2,
    "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
"""Every dtype whose size we know; which of them a model takes is for the caller to say."""

TORCH_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""What a plain weight may be."""

READABLE = TORCH_DTYPES | {"I32": torch.int32}
"""What `SafetensorsFile.read` can read: plain weights, and the words of packed ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor of the header. start, end: bytes from the start of the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class SafetensorsFile:
    """An open file whose header has been checked. Raises CheckpointError naming the file, and the tensor if any.

    entries: by tensor name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise CheckpointError(f"{path.name}: cannot be opened: {error.strerror}") from error
        try:
            self._read_header()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> "SafetensorsFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def read(self, name: str, destination: torch.Tensor, part: tuple[slice, ...] | None = None) -> None:
        """Fill a tensor of the entry's shape, converting to its dtype; with `part`, only that slice of rows (and of
        columns, if there are two dimensions) is read. The entry's dtype must be one of READABLE."""
        entry = self.entries[name]
        dtype = READABLE[entry.dtype]
        is_direct = destination.is_contiguous() and destination.dtype == dtype and destination.device.type == "cpu"
        target = destination if is_direct else torch.empty(destination.shape, dtype=dtype)
        view = target.reshape(-1).view(torch.uint8).numpy().data
        runs = [(0, entry.end - entry.start)] if part is None else byte_runs(entry, part)
        filled = 0
        for start, end in runs:
            self._read_into(view[filled : filled + end - start], self._data_start + entry.start + start, name)
            filled += end - start
        assert filled == len(view), f"{name}: the destination is not of the part's shape"
        if not is_direct:
            destination.copy_(target)

    def _read_into(self, view: memoryview, start: int, tensor: str) -> None:
        """Read exactly these bytes, in as many calls as the system needs."""
        filled = 0
        while filled < len(view):
            num_bytes = os.preadv(self._file.fileno(), [view[filled:]], start + filled)
            if not num_bytes:
                raise self._error("the file ended while it was read", tensor=tensor)
            filled += num_bytes

    def _read_header(self) -> None:
        size = self._file.seek(0, 2)
        self._file.seek(0)
        if size < 8:
            raise self._error(f"truncated: {size} bytes do not even hold the header's length")
        first = self._file.read(8)
        if first == LFS_POINTER:
            raise self._error("is only git-lfs's pointer to the file: fetch it with `git lfs pull`")
        length = int.from_bytes(first, "little")
        if not 2 <= length <= MAX_HEADER_BYTES:
            raise self._error(f"header length {length} is not between 2 and {MAX_HEADER_BYTES}")
        self._data_start = 8 + length
        if self._data_start > size:
            raise self._error(f"truncated in the header: it needs {self._data_start} bytes, the file has {size}")
        header = self._parse_json(self._read_text(length))
        self.entries = {name: self._parse_entry(name, raw) for name, raw in header.items() if name != "__metadata__"}
        self._check_layout(size - self._data_start)

    def _read_text(self, length: int) -> bytes:
        text = self._file.read(length)
        if (num_entries := text.count(b'"data_offsets"')) > MAX_ENTRIES:  # counted first: to parse them takes a minute
            raise self._error(f"the header names {num_entries} tensors, {MAX_ENTRIES} are allowed")
        return text

    def _parse_json(self, text: bytes) -> dict[str, Any]:
        try:
            header = json.loads(text.decode("utf-8"), object_pairs_hook=unique_names)
        except RecursionError:
            raise self._error("the header is not JSON: objects and lists are nested too deeply") from None
        except ValueError as error:
            raise self._error(f"the header is not JSON: {error}") from error
        if not isinstance(header, dict):
            raise self._error(f"the header holds {type(header).__name__}, not an object")
        return header

    def _parse_entry(self, name: str, raw: object) -> TensorEntry:
        if not name.isprintable():  # errors say it, and a terminal would obey it
            raise self._error(f"the header has {shown(name)}, which is no name of a tensor: it cannot be printed")
        if not isinstance(raw, dict) or raw.keys() != {"dtype", "shape", "data_offsets"}:
            raise self._error("the header does not give exactly dtype, shape and data_offsets", tensor=name)
        dtype, shape, offsets = raw["dtype"], raw["shape"], raw["data_offsets"]
        if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
            raise self._error(f"dtype {shown(dtype)} is not known", tensor=name)
        if not is_sizes(shape) or len(shape) > MAX_DIMENSIONS:
            raise self._error(f"shape {shown(shape)} is not a list of at most {MAX_DIMENSIONS} sizes", tensor=name)
        if not is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            raise self._error(f"data_offsets {shown(offsets)} are not a start and an end", tensor=name)
        wanted = math.prod(shape) * ITEM_BYTES[dtype]
        if wanted != offsets[1] - offsets[0]:
            raise self._error(f"{dtype} {shape} takes {wanted} bytes, data_offsets are {offsets}", tensor=name)
        return TensorEntry(name=name, dtype=dtype, shape=tuple(shape), start=offsets[0], end=offsets[1])

    def _check_layout(self, data_bytes: int) -> None:
        expected_start = 0
        for entry in sorted(self.entries.values(), key=lambda entry: (entry.start, entry.end)):
            if entry.end > data_bytes:
                raise self._error(f"truncated: it ends at byte {entry.end} of {data_bytes} bytes of data", entry.name)
            if entry.start < expected_start:
                raise self._error(f"overlaps the tensor before it, at byte {entry.start} of the data", entry.name)
            if entry.start > expected_start:
                raise self._error(f"bytes {expected_start} to {entry.start} before it belong to no tensor", entry.name)
            expected_start = entry.end
        if expected_start != data_bytes:
            raise self._error(f"{data_bytes - expected_start} bytes behind the last tensor belong to no tensor")

    def _error(self, reason: str, tensor: str | None = None) -> CheckpointError:
        where = self.path.name if tensor is None else f"{self.path.name}: {tensor[:200]}"
        return CheckpointError(f"{where}: {reason}")


def part_bytes(entry: TensorEntry, part: tuple[slice, ...]) -> int:
    """Size of a part of the tensor."""
    return math.prod(each.stop - each.start for each in part) * ITEM_BYTES[entry.dtype]


def byte_runs(entry: TensorEntry, part: tuple[slice, ...]) -> list[tuple[int, int]]:
    """Where a part of a tensor of one or two dimensions lies, relative to its first byte: one run, or one per row."""
    rows, row_bytes = part[0], math.prod(entry.shape[1:]) * ITEM_BYTES[entry.dtype]
    if len(part) == 1 or part[1] == slice(0, entry.shape[1]):
        return [(rows.start * row_bytes, rows.stop * row_bytes)]
    first, end = (column * ITEM_BYTES[entry.dtype] for column in (part[1].start, part[1].stop))
    return [(row * row_bytes + first, row * row_bytes + end) for row in range(rows.start, rows.stop)]


def is_sizes(value: object) -> bool:
    """Whether a JSON value is a list of non-negative integers."""
    if not isinstance(value, list):
        return False
    return all(isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 2**63 for item in value)


def unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For json.loads: rejects objects with duplicate names. Raises ValueError."""
    result = dict(pairs)
    if len(result) != len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"{shown(twice)} is there twice")
    return result
