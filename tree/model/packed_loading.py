"""Packed matrices (GPTQ, AWQ) of a checkpoint: which tensors they are, and how they get into a model.

    q_proj.qweight, q_proj.qzeros, q_proj.scales, q_proj.g_idx   ->   rows of qkv_proj

Must not know: how integers are packed (model/quantization), devices' kernels.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

import torch

from model.errors import CheckpointError, ConfigError
from model.linear import Linear
from model.quantization.grouped import GroupedWeight, join_outputs
from model.quantization.packing import PackingError, packed_shapes, unpack
from model.quantization.settings import GroupSettings
from model.qwen2 import Qwen2ForCausalLM
from model.safetensors_file import READABLE
from model.shards import Shards
from model.weight_names import split

OnBytes = Callable[[int, int], None]
WEIGHT = ".weight"
TENSORS = ("qweight", "qzeros", "scales", "g_idx")
INTEGERS = (".qweight", ".qzeros", ".g_idx")


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
    def of(cls, model: Qwen2ForCausalLM) -> "PackedWeights":
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

    def read(self, shards: Shards, model: Qwen2ForCausalLM, packed: Packed, on_progress: OnBytes) -> set[str]:
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

    def _read_part(
        self, shards: Shards, model: Qwen2ForCausalLM, name: str, shape: tuple[int, int]
    ) -> GroupedWeight | None:
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
