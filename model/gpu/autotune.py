"""Chooses the path of a decode step for each batch size: for a few rows, some dozens or many, and how kernels are cut.

What is fastest depends on the shape, the batch and the device, and only whole steps show it (timing a kernel alone is
misleading: it does not overlap with its neighbours). So whole steps are timed before serving, once per shape, device
and set of versions, and the result is kept on disk. Without one, a rule from measurements on an H100 decides.

Must not know: requests, who calls.
"""

import hashlib
import json
import os
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import triton

from octavo.model.cache_folder import cache_folder
from octavo.model.config import ModelConfig
from octavo.model.gpu.overlapping_layers import (
    CLUSTERED_SIZES,
    OVERLAPPING_SIZES,
    OverlappingCuts,
    fits_overlapping,
    overlapping_cuts_of,
)
from octavo.model.gpu.small_batch_layers import SmallBatchCuts, cuts_of
from octavo.model.gpu.split_k_layers import SPLIT_K_SIZES, SplitKCuts, split_k_cuts_of
from octavo.model.kernels.products.clustered import fits_clustered
from octavo.model.parallel import ALONE, Ranks

DEFAULT_SMALL_BATCH = 2
STEP_SIZES = tuple(sorted({*OVERLAPPING_SIZES, *CLUSTERED_SIZES}))
TIMED_SIZES = (1, 2, *STEP_SIZES)
"""Each stands for smaller sizes, down to the previous one; a size with a single path is skipped, and its sizes go with
the next. Beyond 2 rows the kernels for a small batch have always been slower (each row adds its own latency to each of
them); beyond the last size there is only cuBLAS (bench/RESULTS.md)."""
WARM_UP_STEPS, TIMINGS, STEPS = 3, 3, 20
LEAST_STEPS = 4
ENOUGH_WEIGHTS = 8_000_000_000
"""Weights in the layers: 5 ms per step. With more, a timing has fewer steps."""
KERNELS = 11
"""Increased whenever a kernel of a step is replaced or a size gets another path, so that timings are repeated. 2:
Hopper GPUs have attention by a ring of tiles, and overlapping products by default. 3: two rows may use those too. 4:
those of gate and up no longer wait for each other within a tile. 5: the kernels for a small batch are cut differently,
and one row may use the overlapping ones. 6: rows have a context when they are timed; programs without a part of a
context end at once. 7: gate and up of few rows sum the norm's squares first. 8: a small batch's attention keeps longer
tiles in registers; a size is timed in the middle of those it stands for. 9: gate, up and down of more than 64 rows are
cut for clusters. 10: so are the other products, and programs send one another their sums. 11: sums over ranks overlap
with their neighbours."""
CAPTURE = "thread_local"
"""Capture mode of graphs: only calls by this thread can invalidate the capture, not those of NCCL's watchdog thread."""


@dataclass(frozen=True, slots=True)
class Cublas:
    """Products by cuBLAS, attention over a balanced work list."""


@dataclass(frozen=True, slots=True)
class SmallBatch:
    """The overlapping kernels for a few rows, cut this way."""

    cuts: SmallBatchCuts


@dataclass(frozen=True, slots=True)
class SplitK:
    """As cuBLAS, but some products by our own kernel, cut this way."""

    cuts: SplitKCuts


@dataclass(frozen=True, slots=True)
class Overlapping:
    """As cuBLAS, but all kernels of a layer overlap, with products of our own cut this way."""

    cuts: OverlappingCuts


StepPath = Cublas | SmallBatch | SplitK | Overlapping


def candidates(config: ModelConfig, *, number_bytes: int = 2, has_clusters: bool = False) -> dict[str, StepPath]:
    """Every path for the shape, by its name in the cache. number_bytes: bytes of a weight. has_clusters: whether
    products may be cut for clusters of programs."""
    small_batch = SmallBatch(cuts_of(config, number_bytes=number_bytes))
    ways: dict[str, StepPath] = {"cublas": Cublas(), "small_batch": small_batch}
    ways |= {f"split_k-{size}": SplitK(split_k_cuts_of(config, size)) for size in SPLIT_K_SIZES}
    overlapping = {size: overlapping_cuts_of(config, size, has_clusters=has_clusters) for size in STEP_SIZES}
    return ways | {f"overlapping-{size}": Overlapping(cuts) for size, cuts in overlapping.items()}


def timed_names(size: int) -> tuple[str, ...]:
    """Names of the paths to choose from for one of TIMED_SIZES."""
    if size not in STEP_SIZES:
        return "cublas", "small_batch", f"overlapping-{OVERLAPPING_SIZES[0]}"
    return "cublas", *([f"split_k-{size}"] if size in SPLIT_K_SIZES else []), f"overlapping-{size}"


def fits_split_k_tiles(weight: torch.Tensor) -> bool:
    """Whether the tiles of split-K products fit: they are cut for 16-bit numbers, and with larger ones they exceed a
    multiprocessor's shared memory."""
    return not weight.is_cuda or weight.element_size() <= 2


def steps_of_a_timing(config: ModelConfig) -> int:
    """Steps per timing; fewer for large models, whose steps take milliseconds each and vary less. The same on every
    rank. config: of this rank."""
    inner = 3 * config.intermediate_size + 2 * config.num_attention_heads * config.head_dim
    return max(
        LEAST_STEPS, min(STEPS, STEPS * ENOUGH_WEIGHTS // (config.num_hidden_layers * config.hidden_size * inner))
    )


class Autotuner:
    """The path of each batch size: chosen by timing, or by the rule. names: paths chosen earlier, by batch size; those
    that are not candidates are dropped. file: where choices are kept; None: nothing is timed. All ranks of a group use
    rank 0's choice, since their steps wait for one another."""

    def __init__(
        self,
        candidates: dict[str, StepPath],
        file: Path | None,
        names: dict[int, str],
        ranks: Ranks = ALONE,
        *,
        num_steps: int = STEPS,
    ) -> None:
        self._candidates = candidates
        self._file = file
        self._ranks = ranks
        self._num_steps = num_steps
        self._sizes = tuple(size for size in TIMED_SIZES if len(self._names_of(size)) > 1)
        self.names = {size: name for size, name in names.items() if name in candidates}

    @classmethod
    def cublas_only(cls) -> "Autotuner":
        """An autotuner for weights that the kernels for few rows cannot read."""
        return cls({"cublas": Cublas()}, None, dict.fromkeys(range(1, DEFAULT_SMALL_BATCH + 1), "cublas"))

    @classmethod
    def find(cls, config: ModelConfig, weight: torch.Tensor, ranks: Ranks = ALONE) -> "Autotuner":
        """An autotuner with the choices kept for this shape and the weight's dtype and device, if any. config: of this
        rank."""
        overlaps = fits_overlapping(config, weight)
        has_clusters = overlaps and fits_clustered(weight)
        usable = candidates(config, number_bytes=weight.element_size(), has_clusters=has_clusters)
        if not fits_split_k_tiles(weight):
            usable = {name: path for name, path in usable.items() if not isinstance(path, SplitK)}
        if not overlaps:
            usable = {name: path for name, path in usable.items() if not isinstance(path, Overlapping)}
        file = cache_file(config, weight, usable, num_ranks=ranks.size) if weight.is_cuda else None
        names = ranks.agree(read_names(file)) if file else {}
        return cls(usable, file, names, ranks, num_steps=steps_of_a_timing(config))

    def _names_of(self, size: int) -> list[str]:
        """Names of the candidates to choose from for one of TIMED_SIZES."""
        return [name for name in timed_names(size) if name in self._candidates]

    def _stands_for(self, batch_size: int) -> int | None:
        """The size in TIMED_SIZES that stands for this batch size; None if there is nothing to choose."""
        return next((size for size in self._sizes if batch_size <= size), None)

    def path(self, batch_size: int) -> StepPath:
        """The path of this batch size."""
        name = self.names.get(batch_size) or self.names.get(self._stands_for(batch_size) or 0)
        if name is None:
            is_small = batch_size <= DEFAULT_SMALL_BATCH and "small_batch" in self._candidates
            name = "small_batch" if is_small else "cublas"
        return self._candidates[name]

    def choose(self, sizes: Iterable[int], run: Callable[[int], None]) -> None:
        """For each of TIMED_SIZES without a choice, time `run` on every path and keep the fastest. It is timed with the
        middle one of the sizes that it stands for, since with exactly 256 rows another path may be faster than with any
        smaller number. Call it before serving: the device must be idle, and the rows that `run` advances must belong to
        no request. Without a CUDA device nothing is timed and the rule holds."""
        stood_for: dict[int, list[int]] = {}
        for size in sorted(sizes):
            if (key := self._stands_for(size)) is not None and key not in self.names:
                stood_for.setdefault(key, []).append(size)
        missing = {key: sizes[len(sizes) // 2] for key, sizes in stood_for.items()}
        if self._file is None or not missing:
            return
        stream = torch.cuda.Stream()  # one for all: a library keeps a workspace for each stream that it has seen
        for key, size in missing.items():
            times_ms = {
                name: time_graph(partial(run, size), stream, steps=self._num_steps) for name in self.try_all(size)
            }
            self.names[key] = self._ranks.agree(min(times_ms, key=lambda name: times_ms[name]))
        if self._ranks.rank == 0:
            write_names(self._file, self.names)

    def try_all(self, batch_size: int) -> Iterator[str]:
        """Set each path that this size may use, one after another, yielding its name; then restore the earlier
        choice."""
        key = self._stands_for(batch_size)
        if key is None:
            yield "cublas"
            return
        before = self.names.get(key)
        for name in self._names_of(key):
            self.names[key] = name
            yield name
        del self.names[key]
        if before is not None:
            self.names[key] = before


def time_graph(work: Callable[[], object], stream: torch.cuda.Stream | None = None, *, steps: int = STEPS) -> float:
    """Median milliseconds of the work as a CUDA graph, captured and replayed on the stream, or on a new one if None.
    steps: replays per timing."""
    stream = stream or torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        work()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode=CAPTURE):
            work()
        for _ in range(WARM_UP_STEPS):
            graph.replay()
        times_ms = [_time_replays(graph, steps) for _ in range(TIMINGS)]
    torch.cuda.current_stream().wait_stream(stream)
    return statistics.median(times_ms)


def _time_replays(graph: torch.cuda.CUDAGraph, steps: int) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(steps):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / steps


def cache_file(config: ModelConfig, weight: torch.Tensor, ways: dict[str, StepPath], *, num_ranks: int = 1) -> Path:
    """The file with the choice among these ways for this shape, dtype and device, these kernels and versions (in
    $XDG_CACHE_HOME or ~/.cache)."""
    shape = {
        name: getattr(config, name)
        for name in (
            "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
            "head_dim", "vocab_size",
        )
    }  # fmt: skip
    cuts = {name: asdict(path.cuts) for name, path in ways.items() if not isinstance(path, Cublas)}
    device = torch.cuda.get_device_name(weight.device)
    kind = [config.family.model_type, str(weight.dtype), device, torch.__version__, triton.__version__]
    key = json.dumps([KERNELS, shape, kind, cuts, *([num_ranks] if num_ranks > 1 else [])], sort_keys=True)
    return cache_folder("paths") / f"{hashlib.blake2b(key.encode(), digest_size=12).hexdigest()}.json"


def read_names(file: Path) -> dict[int, str]:
    """The names in the file; empty if the file is absent or not in the format of `write_names`."""
    try:
        kept = json.loads(file.read_text())
        return {int(size): str(name) for size, name in kept["paths"].items()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return {}


def write_names(file: Path, names: dict[int, str]) -> None:
    """Write the names to the file. If the folder is not writable, the next start repeats the timings."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps({"paths": {str(size): name for size, name in sorted(names.items())}}))
        unfinished.replace(file)
    except OSError:
        return
