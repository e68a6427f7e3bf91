"""Tensor parallelism: one model cut over the ranks of a group (Megatron-LM, Shoeybi et al. 2019, arXiv 1909.08053).

A rank is a process with its own device and a part of every large matrix; the family says which part
(model/families/interface.py, `Cut`). Each rank has the full hidden states and, of each layer, some heads and some of
the MLP's inner columns, so that a layer needs two sums over ranks: after attention's output projection and after the
MLP's down projection. The embedding needs one more sum, the head a concatenation. A single rank needs none of this.

Every rank must run the same steps in the same order: a sum waits for all of them. On CUDA devices a sum is a kernel
like any other, recorded in the step's graph; `peers` decides whether it is NCCL's or one that reads peers' memory.

Legend: T tokens · S rows · D model dim · V vocabulary · W rows of the embedding that a rank has.
Must not know: layers, files, what makes a rank run a step.
"""

import atexit
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import distributed
from torch.nn import functional as F

from octavo.model.config import ModelConfig
from octavo.model.errors import ConfigError
from octavo.model.families.interface import Cut

JOIN_TIMEOUT_S = 120.0
"""Time for all ranks to join, and then for each sum."""

LEAVE_TIMEOUT_S = 10.0
"""Time for NCCL to end: it waits for every graph that holds one of its sums, and after a failure some may remain."""

MAX_TEXT_BYTES = 512

Part = tuple[slice, ...]
"""A rank's part of a tensor: a slice for each dimension."""

Agreed = TypeVar("Agreed")
_all_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
"""Named all_gather_single since torch 2.13."""


class PeerSums(Protocol):
    """An alternative to the group's own sums, for small tensors."""

    def takes(self, partial: torch.Tensor) -> bool:
        """Whether it is faster for tensors of this shape; the same answer on every rank."""

    def room(self, like: torch.Tensor) -> torch.Tensor:
        """Memory for the tensor to be summed next. Sums come in pairs, as in a layer; each begins with this."""

    def first_room(self, like: torch.Tensor) -> torch.Tensor:
        """`room` for the one sum that precedes the pairs of a step."""

    def sum(self, room: torch.Tensor, out: torch.Tensor) -> None:
        """Write to `out` the sum over all ranks of what is in `room`."""

    def add(self, room: torch.Tensor, x: torch.Tensor) -> None:
        """Add to x the sum over all ranks of what is in `room`."""


class PeerJoins(Protocol):
    """An alternative to the group's own concatenation of columns."""

    def room(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """Memory for the tensor to be joined; the same memory for all tensors of a dtype. None if there is none."""

    def takes(self, part: torch.Tensor) -> bool:
        """Whether this tensor is in such memory and this is faster for its shape; the same answer on every rank."""

    def concatenate(self, room: torch.Tensor, out: torch.Tensor) -> None:
        """Write all ranks' columns to `out`, in order. `room` may be overwritten once a later sum has begun."""


class DividedSums(Protocol):
    """An alternative way to sum many rows of the residual stream: each rank sums a share of the rows for all."""

    def stream(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """Memory for such a stream; always the same. None if there is none."""

    def takes(self, x: torch.Tensor) -> bool:
        """Whether x, the first rows of a stream, is in such memory and this is faster for it; the same answer on every
        rank."""

    def parts(self, x: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """(rows of the next product, where to write them); write each before asking for the next."""

    def add(self, x: torch.Tensor) -> None:
        """Add to x the sum of all ranks' products, once its rows have arrived."""

    def arrivals(self, x: torch.Tensor) -> Iterator[slice]:
        """Rows of x that may be read, as they arrive, until all have been given."""


class Sums(Enum):
    """The order of additions in a sum over ranks. FAST: whatever the library does, which may depend on the number of
    rows. BY_RANK: in fp32 from rank 0 on and rounded once, so that a row's bits only depend on the row and the number
    of ranks (docs/decisions/0006-deterministic-mode.md)."""

    FAST = "fast"
    BY_RANK = "by rank"


class Exchanges:
    """Time that this process spent exchanging with other ranks, waiting included."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._start_s = 0.0

    def __enter__(self) -> None:
        self._start_s = time.perf_counter()

    def __exit__(self, *_error: object) -> None:
        self.seconds += time.perf_counter() - self._start_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """A group of ranks, seen from one of them. group: of torch.distributed; None with one rank, or for a rehearsal
    without the other ranks, whose numbers are meaningless. peers: see PeerSums. joins: see PeerJoins. divided: see
    DividedSums. exchanges: time spent in them."""

    rank: int = 0
    size: int = 1
    group: "distributed.ProcessGroup | None" = None
    sums: Sums = Sums.FAST
    peers: PeerSums | None = None
    joins: PeerJoins | None = None
    divided: DividedSums | None = None
    exchanges: Exchanges = field(default_factory=Exchanges, compare=False)

    def room(self, like: torch.Tensor, *, plain: torch.Tensor | None = None) -> torch.Tensor:
        """Uninitialised memory of this shape for the next `sum` or `add_sum`. plain: for the first sum of a step, the
        memory to use unless special memory is needed; None: one of a pair of sums, with new memory."""
        if self.peers is not None and self.peers.takes(like):
            return self.peers.room(like) if plain is None else self.peers.first_room(like)
        return torch.empty_like(like) if plain is None else plain

    def sum(self, partial: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """The sum of all ranks' tensors, in `out`; if that is None, in place or in new memory. partial: in memory from
        `room`; its content is lost."""
        if self.peers is not None and self.peers.takes(partial):
            out = torch.empty_like(partial) if out is None else out
            self.peers.sum(partial, out)
            return out
        if self.sums is Sums.BY_RANK:
            first, *others = self._gather(partial)
            total = first.float()
            for other in others:
                total = total + other.float()
            return (partial if out is None else out).copy_(total)
        if self.group is not None:
            with self.exchanges:
                distributed.all_reduce(partial, group=self.group)
        return partial if out is None or out is partial else out.copy_(partial)

    def add_sum(self, partial: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Add the sum of all ranks' tensors to x, and return x; see `sum`."""
        if self.peers is not None and self.peers.takes(partial):
            self.peers.add(partial, x)
            return x
        return x.add_(self.sum(partial))

    def stream(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for the residual stream of a step that may have many rows; valid for one step."""
        found = None if self.divided is None else self.divided.stream(shape, dtype)
        return torch.empty(shape, dtype=dtype, device=device) if found is None else found

    def shares(self, x: torch.Tensor) -> DividedSums | None:
        """The DividedSums for x (the first rows of a `stream`); None if `room` and `add_sum` should be used."""
        return self.divided if self.divided is not None and self.divided.takes(x) else None

    def arrivals(self, x: torch.Tensor) -> Iterator[slice]:
        """Rows of a stream that may be read, as they arrive, until all have been given."""
        shares = self.shares(x)
        return iter((slice(0, len(x)),)) if shares is None else shares.arrivals(x)

    def await_arrivals(self, x: torch.Tensor) -> None:
        """Wait until all rows of a stream may be read."""
        for _ in self.arrivals(x):
            pass

    def least(self, number: int) -> int:
        """The minimum of all ranks' numbers."""
        if self.group is None:
            return number
        numbers = torch.tensor([number])
        distributed.all_reduce(numbers, op=distributed.ReduceOp.MIN, group=self.group)
        return int(numbers)

    def gather_texts(self, text: str) -> list[str]:
        """All ranks' texts, in order of the ranks. Raises ValueError for more than MAX_TEXT_BYTES bytes."""
        data = text.encode()
        if len(data) > MAX_TEXT_BYTES:
            raise ValueError(f"ranks exchange texts of up to {MAX_TEXT_BYTES} bytes, not {len(data)}")
        texts = self._gather(torch.frombuffer(bytearray(data.ljust(MAX_TEXT_BYTES, b"\0")), dtype=torch.uint8))
        return [each.numpy().tobytes().rstrip(b"\0").decode() for each in texts]

    def agree(self, value: Agreed) -> Agreed:
        """Rank 0's value, on every rank; must be picklable."""
        if self.group is None:
            return value
        values = [value]
        distributed.broadcast_object_list(values, src=0, group=self.group, device=torch.device("cpu"))
        return values[0]

    def room_of_columns(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for columns that are often given to `concatenate`."""
        room = None if self.joins is None else self.joins.room(shape, dtype)
        return torch.empty(shape, dtype=dtype, device=device) if room is None else room

    def concatenate(self, part_SW: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """[S, V]: all ranks' columns, in order of the ranks. out: where to write; None: new memory."""
        if out is not None and self.joins is not None and self.joins.takes(part_SW):
            self.joins.concatenate(part_SW, out)
            return out
        parts_SGW = self._gather(part_SW).transpose(0, 1)
        if out is None:
            return parts_SGW.reshape(len(part_SW), -1)
        out.view(parts_SGW.shape).copy_(parts_SGW)
        return out

    def _gather(self, part: torch.Tensor) -> torch.Tensor:
        """All ranks' tensors, in order, along a new first dimension."""
        parts = part.new_empty(self.size, *part.shape)
        if self.group is None:
            return parts.copy_(part)
        with self.exchanges:
            _all_gather(parts.view(-1, *part.shape[1:]), part.contiguous(), group=self.group)
        return parts

    def embed(self, ids_T: torch.Tensor, weight_WD: torch.Tensor) -> torch.Tensor:
        """A row for each id, from a weight whose rows are divided among the ranks."""
        row_T = ids_T - self.rank * len(weight_WD)
        is_elsewhere_T = (row_T < 0) | (row_T >= len(weight_WD))
        found_TD = F.embedding(row_T.masked_fill(is_elsewhere_T, 0), weight_WD)
        return self.sum(found_TD.masked_fill_(is_elsewhere_T[:, None], 0))


ALONE = Ranks()


@contextmanager
def join_ranks(
    meeting: Path,
    *,
    rank: int,
    size: int,
    device: torch.device | str = "cpu",
    timeout_s: float = JOIN_TIMEOUT_S,
) -> Iterator[Ranks]:
    """This process as one of `size` ranks on one host. Tensors on CPUs are summed by gloo, on CUDA devices by NCCL.

    meeting: a file that does not exist yet, the same for all ranks, in a folder to which no one else writes. device: of
    this rank alone; becomes torch's current device. Raises RuntimeError if not all ranks join in time.
    """
    if size == 1:
        yield ALONE
        return
    device = torch.device(device)
    for library in ("GLOO", "NCCL"):  # the ranks are on one host, and no other host is to reach them
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # sums by peers' memory (model/gpu) do without
    has_nccl = device.type == "cuda"
    distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if has_nccl else "gloo",
        init_method=meeting.absolute().as_uri(),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
    )
    ranks = Ranks(rank=rank, size=size, group=distributed.group.WORLD)
    try:
        if has_nccl:
            ranks.sum(torch.zeros(1, device=device))  # problems appear here, before minutes of loading
        yield ranks
    finally:
        _leave(ranks)


def _leave(ranks: Ranks) -> None:
    """Leave the group, or let this process end as soon as Python is done, without asking the other ranks."""
    ending = threading.Thread(target=abort, args=(ranks,), name="leave", daemon=True)
    ending.start()
    ending.join(LEAVE_TIMEOUT_S)
    if ending.is_alive():
        atexit.register(_exit_hard, 0 if sys.exc_info()[0] is None else 1)
    else:
        distributed.destroy_process_group()


def _exit_hard(status: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def has_device_sums(ranks: Ranks) -> bool:
    """Whether sums run on CUDA devices, which wait for their peers whatever happens to them."""
    return ranks.group is not None and "nccl" in distributed.get_backend_config(ranks.group)


def abort(ranks: Ranks) -> None:
    """End NCCL sums that wait for a rank which will not come; their results are undefined. From any thread. A gloo sum
    fails by itself when the other end is gone."""
    if has_device_sums(ranks):
        assert ranks.group is not None
        with suppress(RuntimeError):  # it has ended already
            ranks.group._get_backend(torch.device("cuda")).abort()


def config_of_rank(config: ModelConfig, size: int) -> ModelConfig:
    """The shape of one rank's part. The vocabulary stays whole: every rank knows all ids.

    Raises ConfigError naming the field that cannot be divided.
    """
    if size == 1:
        return config
    for name in ("num_attention_heads", "intermediate_size", "vocab_size"):
        if getattr(config, name) % size:
            raise ConfigError(name, f"{getattr(config, name)} cannot be divided among {size} tensor-parallel ranks")
    heads = config.num_key_value_heads
    if heads % size and size % heads:
        raise ConfigError(
            "num_key_value_heads", f"{heads} can neither be divided among {size} tensor-parallel ranks nor repeated"
        )
    part = replace(
        config,
        num_attention_heads=config.num_attention_heads // size,
        num_key_value_heads=max(heads // size, 1),
        intermediate_size=config.intermediate_size // size,
    )
    _check_packed(part, size)
    return part


def _check_packed(part: ModelConfig, size: int) -> None:
    """part: of one of `size` ranks. Raises ConfigError if a cut would split a word of packed integers or a group of
    inputs with one scale: ranks read whole ones."""
    settings, layers = part.quantization, range(part.num_hidden_layers)
    if settings is None:
        return
    q_size, kv_size = part.num_attention_heads * part.head_dim, part.num_key_value_heads * part.head_dim
    outputs = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size, "gate_proj": part.intermediate_size}
    inputs = {"self_attn.o_proj": q_size, "mlp.down_proj": part.intermediate_size}
    for name, length in (outputs | inputs).items():
        if length % settings.per_word:
            raise ConfigError(
                "quantization_config.bits",
                f"{settings.per_word} integers of {settings.bits} bits make a word, and each of {size} tensor-parallel "
                f"ranks would have {length} rows or columns of {name}",
            )
    for name, length in inputs.items():
        is_packed = any(settings.applies_to(f"model.layers.{index}.{name}") for index in layers)
        if is_packed and settings.group_size is not None and not settings.is_reordered and length % settings.group_size:
            raise ConfigError(
                "quantization_config.group_size",
                f"groups of {settings.group_size} do not divide the {length} inputs of {name} that each of {size} "
                "tensor-parallel ranks would have",
            )


def part_of(name: str, shape: tuple[int, ...], config: ModelConfig, ranks: Ranks) -> Part:
    """A rank's part of the checkpoint tensor of this name. config: of the whole model. Raises ValueError if the family
    does not say how it is divided."""
    whole = tuple(slice(0, length) for length in shape)
    module = name.split(".")[-2]
    if module not in config.family.cuts or (len(shape) == 1 and config.family.cuts[module] is Cut.INPUTS):
        raise ValueError(f"{name}: {config.family.model_type} does not say how it is cut into ranks")
    match config.family.cuts[module]:
        case Cut.WHOLE:
            return whole
        case Cut.INPUTS:
            return whole[0], _share(shape[1], ranks.rank, ranks.size)
        case Cut.KV_HEADS:
            num_parts = min(ranks.size, config.num_key_value_heads)
            return _share(shape[0], ranks.rank * num_parts // ranks.size, num_parts), *whole[1:]
        case Cut.OUTPUTS | Cut.VOCABULARY:
            return _share(shape[0], ranks.rank, ranks.size), *whole[1:]


def _share(length: int, number: int, count: int) -> slice:
    """The number-th of `count` equal parts."""
    return slice(length // count * number, length // count * (number + 1))
