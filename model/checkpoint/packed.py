"""Packed matrices (GPTQ, AWQ) of a checkpoint: which tensors they are, and how they get into a model.

    q_proj.qweight, q_proj.qzeros, q_proj.scales, q_proj.g_idx   ->   rows of qkv_proj

Must not know: how integers are packed (model/quantization), devices' kernels.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

import torch

from octavo.model.causal_lm import CausalLM
from octavo.model.checkpoint.safetensors_file import READABLE
from octavo.model.checkpoint.shards import Shards
from octavo.model.checkpoint.weight_names import split
from octavo.model.errors import CheckpointError, ConfigError
from octavo.model.layers.linear import Linear
from octavo.model.quantization.grouped import GroupedWeight, join_outputs
from octavo.model.quantization.settings import GroupSettings, Packing

OnBytes = Callable[[int, int], None]
WEIGHT = ".weight"
TENSORS = ("qweight", "qzeros", "scales", "g_idx")
INTEGERS = (".qweight", ".qzeros", ".g_idx")


# How GPTQ and AWQ checkpoints pack integers into int32 words, unpacked to one code an element.
#
# GPTQ (AutoGPTQ, QuantLinear.pack): `qweight` [I * bits / 32, O], a word holds neighbouring *inputs*, lowest bits
# first; `qzeros` [G, O * bits / 32], a word holds neighbouring *outputs*; `g_idx` [I] is the group of each input. The
# first format stores zero points less one (a zero point of 0 wraps around); "gptq_v2" stores them as they are.
#
# AWQ (AutoAWQ, WQLinear_GEMM): `qweight` [I, O / 8] and `qzeros` [G, O / 8], a word holds 8 neighbouring outputs in the
# order 0 2 4 6 1 3 5 7, lowest bits first.
#
# Legend: O outputs · I inputs · G groups · C columns of words.
# Must not know: files, kernels.


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of 8 neighbouring outputs lies in the lowest four bits, in the next, and so on."""


class PackingError(ValueError):
    """The tensors of a quantised matrix contradict each other; names the tensor."""


def packed_shapes(settings: GroupSettings, num_outputs: int, num_inputs: int) -> dict[str, tuple[int, ...]]:
    """The tensors of a quantised matrix and their shapes. `scales` are floats, the others int32.

    Raises ValueError where the matrix cannot be quantised this way.
    """
    groups, per_word = settings.groups_of(num_inputs), 32 // settings.bits
    if num_outputs % per_word or num_inputs % per_word:
        raise ValueError(f"{num_outputs} outputs and {num_inputs} inputs are no multiples of {per_word}")
    zeros, scales = (groups, num_outputs // per_word), (groups, num_outputs)
    if settings.packing is Packing.AWQ:
        return {"qweight": (num_inputs, num_outputs // per_word), "qzeros": zeros, "scales": scales}
    words = (num_inputs // per_word, num_outputs)
    return {"qweight": words, "qzeros": zeros, "scales": scales, "g_idx": (num_inputs,)}


def unpack(settings: GroupSettings, tensors: dict[str, torch.Tensor], *, dtype: torch.dtype) -> GroupedWeight:
    """The matrix that tensors of `packed_shapes` hold. Raises PackingError for a g_idx that is none."""
    per_word, scale_GO, order_I = 32 // settings.bits, tensors["scales"], None
    if settings.packing is Packing.AWQ:
        # Place p of a word is output AWQ_ORDER[p]; so output o is in the place where AWQ_ORDER has o.
        place = torch.tensor([AWQ_ORDER.index(o) for o in range(per_word)], device=scale_GO.device)
        code_OI = split_words(tensors["qweight"], settings.bits)[:, :, place].flatten(1).T
        zero_GO = split_words(tensors["qzeros"], settings.bits)[:, :, place].flatten(1)
    else:
        code_OI = split_words(tensors["qweight"].T, settings.bits).flatten(1)
        zero_GO = split_words(tensors["qzeros"], settings.bits).flatten(1)
        order_I = input_order(tensors["g_idx"], num_groups=len(scale_GO))
    if order_I is not None:
        code_OI = code_OI[:, order_I.long()]
    zero_GO = ((zero_GO.int() + settings.zero_offset) & (2**settings.bits - 1)).to(torch.uint8)
    return GroupedWeight.pack(code_OI, scale_GO, zero_GO, bits=settings.bits, dtype=dtype, order_I=order_I)


def split_words(words_RC: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [R, C, 32 / bits]: the integers of each int32 word, lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words_RC.device)
    return ((words_RC[:, :, None] >> shifts) & (2**bits - 1)).to(torch.uint8)


def input_order(group_I: torch.Tensor, *, num_groups: int) -> torch.Tensor | None:
    """int32: inputs sorted by their group, None where they are already. Raises PackingError where groups are not all of
    one size."""
    I = len(group_I)
    if int(group_I.min()) < 0 or int(group_I.max()) >= num_groups:
        raise PackingError(f"g_idx: names groups {int(group_I.min())} to {int(group_I.max())}, of {num_groups}")
    counts = torch.bincount(group_I.long(), minlength=num_groups)
    if bool((counts != I // num_groups).any()):
        raise PackingError(
            f"g_idx: groups have {int(counts.min())} to {int(counts.max())} inputs, not {I // num_groups}"
        )
    order_I = torch.argsort(group_I.long(), stable=True).to(torch.int32)
    return None if torch.equal(order_I, torch.arange(I, dtype=torch.int32, device=order_I.device)) else order_I


class Packed(Enum):
    """What becomes of packed matrices. UNPACKED: plain weights in the model's dtype, for every device. KEPT: integers
    as they are, for steps that multiply with them; where parts of a fused matrix do not fit together, unpacked."""

    UNPACKED = "unpacked"
    KEPT = "kept"


@dataclass(frozen=True, slots=True)
class _Matrix:
    """One of our matrices. parts: (full name in the checkpoint, [O, I]) of what it is fused from."""

    path: str
    parts: tuple[tuple[str, tuple[int, int]], ...]


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """The packed matrices that a config asks for; none where the checkpoint is plain."""

    settings: GroupSettings | None
    matrices: tuple[_Matrix, ...]

    @classmethod
    def of(cls, model: CausalLM) -> "PackedWeights":
        """Of a model that may be without memory."""
        settings = model.config.quantization
        if settings is None:
            return cls(None, ())
        found = []
        for path, module in model.named_modules():
            if isinstance(module, Linear) and path.startswith("layers."):
                parts = split(f"{path}{WEIGHT}", "", module.weight.data, model.config)
                names = ((f"model.{name.removesuffix(WEIGHT)}", view.shape) for name, view in parts)
                found.append(_Matrix(path, tuple((name, (shape[0], shape[1])) for name, shape in names)))
        return cls(settings, tuple(found))

    @property
    def is_any(self) -> bool:
        """Whether the checkpoint is packed."""
        return self.settings is not None

    def replace_shapes(self, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Expected tensors with the packed ones in the place of the plain ones. Raises ConfigError."""
        shapes = dict(shapes)
        for name, (num_outputs, num_inputs) in self._packed_parts():
            assert self.settings is not None
            del shapes[name + WEIGHT]
            try:
                wanted = packed_shapes(self.settings, num_outputs, num_inputs)
            except ValueError as error:
                raise ConfigError("quantization_config", f"{name}: {error}") from error
            shapes |= {f"{name}.{tensor}": shape for tensor, shape in wanted.items()}
        return shapes

    def read(self, shards: Shards, model: CausalLM, packed: Packed, on_progress: OnBytes) -> set[str]:
        """Fill or replace every packed matrix; plain ones get their memory. Returns the names of the tensors read.
        Raises CheckpointError."""
        read: set[str] = set()
        for matrix in self.matrices:
            linear = model.get_submodule(matrix.path)
            assert isinstance(linear, Linear)
            parts = [self._read_part(shards, model, name, shape) for name, shape in matrix.parts]
            joined = self._joined(parts) if packed is Packed.KEPT else None
            if joined is not None:
                linear.hold(joined)
            else:
                linear.allocate(model.dtype, model.device)
                _fill(linear, matrix, parts)
            read |= {f"{name}.{tensor}" for name, _ in matrix.parts for tensor in TENSORS} & shards.file_of.keys()
            on_progress(shards.bytes_of(read), shards.num_bytes)
        return read

    def _packed_parts(self) -> Iterable[tuple[str, tuple[int, int]]]:
        if self.settings is None:
            return []
        every = (part for matrix in self.matrices for part in matrix.parts)
        return [(name, shape) for name, shape in every if self.settings.applies_to(name)]

    def _read_part(self, shards: Shards, model: CausalLM, name: str, shape: tuple[int, int]) -> GroupedWeight | None:
        """None for a part that is plain."""
        assert self.settings is not None
        if not self.settings.applies_to(name):
            return None
        tensors = {}
        for tensor, tensor_shape in packed_shapes(self.settings, *shape).items():
            file = shards.file_of[f"{name}.{tensor}"]
            dtype = READABLE[file.entries[f"{name}.{tensor}"].dtype]
            tensors[tensor] = torch.empty(tensor_shape, dtype=dtype, device=model.device)
            file.read(f"{name}.{tensor}", tensors[tensor])
        if not bool(tensors["scales"].isfinite().all()):
            raise CheckpointError(f"{file.path.name}: {name}.scales: holds NaN or infinity")
        try:
            return unpack(self.settings, tensors, dtype=model.dtype)
        except PackingError as error:
            raise CheckpointError(f"{file.path.name}: {name}.{error}") from error

    def _joined(self, parts: list[GroupedWeight | None]) -> GroupedWeight | None:
        there = [part for part in parts if part is not None]
        return join_outputs(there) if len(there) == len(parts) else None


def _fill(linear: Linear, matrix: _Matrix, parts: list[GroupedWeight | None]) -> None:
    """Unpacked values into the rows of the packed parts."""
    start = 0
    for (_, (num_outputs, _)), part in zip(matrix.parts, parts, strict=True):
        if part is not None:
            linear.weight.data[start : start + num_outputs] = part.dequantized()
        start += num_outputs


def packed_dtype(name: str, plain: Iterable[str]) -> tuple[str, ...]:
    """The dtypes that a tensor of this name may have."""
    return ("I32",) if name.endswith(INTEGERS) else tuple(plain)
