"""Recording work once and repeating it: CUDA graphs, and the batch sizes they are recorded for.

Must not know: what the work is.
"""

from collections.abc import Callable
from enum import Enum
from typing import Protocol

import torch


class Launching(Enum):
    """How recorded work is repeated."""

    GRAPHS = "graphs"  # one launch for all kernels
    EAGER = "eager"  # kernel by kernel: on a CPU, and to look for mistakes


class Recorder(Protocol):
    """Turns work into something that does it again."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """The work, repeatable. It must read and write the same buffers every time."""


class EagerRecorder:
    """Does the work itself, every time."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """The work as it is."""
        return work


class GraphRecorder:
    """CUDA graphs that share one pool of memory: only one of them runs at a time. Needs a CUDA device."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Do the work once, so that its kernels are compiled and its libraries ready, then capture it."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            work()
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph.replay


def make_recorder(launching: Launching) -> Recorder:
    """Of that kind."""
    return GraphRecorder() if launching is Launching.GRAPHS else EagerRecorder()


def batch_sizes(largest: int) -> tuple[int, ...]:
    """1, 2, 4, 8, then in steps of 8 up to 128, of 16 up to 256, of 32 up to 512, of 64 beyond; the largest is always
    one. 27 sizes for 256."""
    sizes, size = [1, 2, 4], 8
    while size < largest:
        sizes.append(size)
        size += 8 if size < 128 else 16 if size < 256 else 32 if size < 512 else 64
    return (*(size for size in sizes if size < largest), largest)
