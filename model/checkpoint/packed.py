"""Packed matrices (GPTQ, AWQ) of a checkpoint: which tensors they are, and how they get into a model.

    q_proj.qweight, q_proj.qzeros, q_proj.scales, q_proj.g_idx   ->   rows of qkv_proj

How integers are packed into int32 words, which `unpack` turns into one code an element:

GPTQ (AutoGPTQ, QuantLinear.pack): `qweight` [I * bits / 32, O], a word holds neighbouring *inputs*, lowest bits first;
`qzeros` [G, O * bits / 32], a word holds neighbouring *outputs*; `g_idx` [I] is the group of each input. The first
format stores zero points less one (a zero point of 0 wraps around); "gptq_v2" stores them as they are.

AWQ (AutoAWQ, WQLinear_GEMM): `qweight` [I, O / 8] and `qzeros` [G, O / 8], a word holds 8 neighbouring outputs in the
order 0 2 4 6 1 3 5 7, lowest bits first.

Legend: O outputs · I inputs · G groups · C columns of words.
Must not know: devices' kernels.
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
from octavo.model.parallel import ALONE, Part, Ranks, part_of
from octavo.model.quantization.grouped import GroupedWeight, join_outputs
from octavo.model.quantization.settings import GroupSettings, Packing

OnTensors = Callable[[list[str]], None]
"""Called with the names of tensors that were read."""

WEIGHT = ".weight"
TENSORS = ("qweight", "qzeros", "scales", "g_idx")
INTEGERS = (".qweight", ".qzeros", ".g_idx")

GROUP_BYTES = 3
"""Of an output's group, kept: a scale of 16 bits and a zero point of 8."""

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of 8 neighbouring outputs lies in the lowest four bits, in the next, and so on."""


class PackingError(ValueError):
    """The tensors of a quantised matrix contradict each other; names the tensor."""


def packed_shapes(settings: GroupSettings, num_outputs: int, num_inputs: int) -> dict[str, tuple[int, ...]]:
    """The tensors of a quantised matrix and their shapes. `scales` are floats, the others int32.

    Raises ValueError if the matrix cannot be quantised this way.
    """
    groups, per_word = settings.groups_of(num_inputs), settings.per_word
    if num_outputs % per_word or num_inputs % per_word:
        raise ValueError(f"{num_outputs} outputs and {num_inputs} inputs are no multiples of {per_word}")
    zeros, scales = (groups, num_outputs // per_word), (groups, num_outputs)
    if settings.packing is Packing.AWQ:
        return {"qweight": (num_inputs, num_outputs // per_word), "qzeros": zeros, "scales": scales}
    words = (num_inputs // per_word, num_outputs)
    return {"qweight": words, "qzeros": zeros, "scales": scales, "g_idx": (num_inputs,)}


def groups_of_part(settings: GroupSettings, inputs: slice, num_groups: int, group_I: torch.Tensor | None) -> slice:
    """The groups that these inputs belong to, if the part consists of whole groups (also according to g_idx: group_I,
    of these inputs); otherwise all groups."""
    size = settings.group_size
    if size is None or inputs.start % size or inputs.stop % size:
        return slice(0, num_groups)
    groups = _every(inputs, size)
    is_apart = group_I is None or (int(group_I.min()) >= groups.start and int(group_I.max()) < groups.stop)
    return groups if is_apart else slice(0, num_groups)


def packed_cuts(settings: GroupSettings, part: Part, groups: slice) -> dict[str, Part]:
    """What belongs to a part of the matrix, for each tensor of `packed_shapes`."""
    outputs, inputs = part
    zeros, scales = (groups, _every(outputs, settings.per_word)), (groups, outputs)
    if settings.packing is Packing.AWQ:
        return {"qweight": (inputs, _every(outputs, settings.per_word)), "qzeros": zeros, "scales": scales}
    words = (_every(inputs, settings.per_word), outputs)
    return {"g_idx": (inputs,), "qweight": words, "qzeros": zeros, "scales": scales}


def _every(elements: slice, number: int) -> slice:
    """The words, or groups, of `number` elements each that these elements fill."""
    return slice(elements.start // number, elements.stop // number)


def unpack(settings: GroupSettings, tensors: dict[str, torch.Tensor], *, dtype: torch.dtype) -> GroupedWeight:
    """The matrix that tensors of `packed_shapes` hold. Raises PackingError for an invalid g_idx."""
    code_OI, zero_GO = _codes_and_zeros(settings, tensors)
    scale_GO, order_I = tensors["scales"], None
    if settings.packing is Packing.GPTQ:
        order_I = input_order(tensors["g_idx"], num_groups=len(scale_GO))
    if order_I is not None:
        code_OI = code_OI[:, order_I.long()]
    return GroupedWeight.pack(code_OI, scale_GO, zero_GO, bits=settings.bits, dtype=dtype, order_I=order_I)


def unpack_scattered(settings: GroupSettings, tensors: dict[str, torch.Tensor], *, dtype: torch.dtype) -> torch.Tensor:
    """Plain values [O, I] of inputs that belong to arbitrary groups, in uneven numbers: a part of a GPTQ matrix whose
    groups are not contiguous. Raises PackingError."""
    code_OI, zero_GO = _codes_and_zeros(settings, tensors)
    scale_GO, group_I = tensors["scales"], tensors["g_idx"].long()
    _check_groups(group_I, num_groups=len(scale_GO))
    return ((code_OI.float() - zero_GO[group_I].T.float()) * scale_GO[group_I].T.float()).to(dtype)


def _codes_and_zeros(settings: GroupSettings, tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 code_OI, inputs in stored order, and zero_GO."""
    if settings.packing is Packing.AWQ:
        # Place p of a word is output AWQ_ORDER[p]; so output o is in the place where AWQ_ORDER has o.
        place = torch.tensor([AWQ_ORDER.index(o) for o in range(settings.per_word)], device=tensors["scales"].device)
        code_OI = split_words(tensors["qweight"], settings.bits)[:, :, place].flatten(1).T
        zero_GO = split_words(tensors["qzeros"], settings.bits)[:, :, place].flatten(1)
    else:
        code_OI = split_words(tensors["qweight"].T, settings.bits).flatten(1)
        zero_GO = split_words(tensors["qzeros"], settings.bits).flatten(1)
    return code_OI, ((zero_GO.int() + settings.zero_offset) & (2**settings.bits - 1)).to(torch.uint8)


def split_words(words_RC: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [R, C, 32 / bits]: the integers of each int32 word, lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words_RC.device)
    return ((words_RC[:, :, None] >> shifts) & (2**bits - 1)).to(torch.uint8)


def input_order(group_I: torch.Tensor, *, num_groups: int) -> torch.Tensor | None:
    """int32: inputs sorted by group; None if they are sorted already. Raises PackingError if groups differ in size."""
    I = len(group_I)
    _check_groups(group_I, num_groups=num_groups)
    counts = torch.bincount(group_I.long(), minlength=num_groups)
    if bool((counts != I // num_groups).any()):
        raise PackingError(
            f"g_idx: groups have {int(counts.min())} to {int(counts.max())} inputs, not {I // num_groups}"
        )
    order_I = torch.argsort(group_I.long(), stable=True).to(torch.int32)
    return None if torch.equal(order_I, torch.arange(I, dtype=torch.int32, device=order_I.device)) else order_I


def _check_groups(group_I: torch.Tensor, *, num_groups: int) -> None:
    if int(group_I.min()) < 0 or int(group_I.max()) >= num_groups:
        raise PackingError(f"g_idx: names groups {int(group_I.min())} to {int(group_I.max())}, of {num_groups}")


class Packed(Enum):
    """What becomes of packed matrices. UNPACKED: plain weights in the model's dtype, for every device. KEPT: the
    integers, for steps that multiply with them; unpacked only if parts of a fused matrix do not fit together, or a
    rank's inputs share groups with another rank's."""

    UNPACKED = "unpacked"
    KEPT = "kept"


@dataclass(frozen=True, slots=True)
class _Part:
    """A checkpoint matrix that one of ours is fused from. name: in the checkpoint. shape: [O, I] there. cut: this
    rank's part."""

    name: str
    shape: tuple[int, int]
    cut: Part

    @property
    def num_outputs(self) -> int:
        """Outputs that this rank has."""
        return int(self.cut[0].stop - self.cut[0].start)


@dataclass(frozen=True, slots=True)
class _Matrix:
    """One of our matrices."""

    path: str
    parts: tuple[_Part, ...]


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """The packed matrices that a config asks for; none if the checkpoint is plain."""

    settings: GroupSettings | None
    matrices: tuple[_Matrix, ...]

    @classmethod
    def of(cls, model: CausalLM, ranks: Ranks = ALONE) -> "PackedWeights":
        """For a whole model, which may be without memory. ranks: the one that reads."""
        settings = model.config.quantization
        if settings is None:
            return cls(None, ())
        found = []
        for path, module in model.named_modules():
            if isinstance(module, Linear) and path.startswith("layers."):
                views = split(f"{path}{WEIGHT}", "", module.weight.data, model.config)
                parts = []
                for weight, view in views:
                    name, shape = f"model.{weight.removesuffix(WEIGHT)}", (view.shape[0], view.shape[1])
                    parts.append(_Part(name, shape, part_of(f"model.{weight}", shape, model.config, ranks)))
                found.append(_Matrix(path, tuple(parts)))
        return cls(settings, tuple(found))

    @property
    def is_any(self) -> bool:
        """Whether the checkpoint is packed."""
        return self.settings is not None

    def kept_bytes(self, plain_bytes: int, itemsize: int) -> int:
        """Size of a whole model whose matrices are kept packed, computed from their shapes. plain_bytes: its size when
        unpacked, with itemsize bytes per element. Assumes that parts of a fused matrix order their inputs alike, as
        GPTQ does."""
        for matrix in self.matrices:
            assert self.settings is not None
            if not all(self.settings.applies_to(part.name) for part in matrix.parts):
                continue
            for num_outputs, num_inputs in (part.shape for part in matrix.parts):
                codes = num_outputs * num_inputs
                groups = num_outputs * self.settings.groups_of(num_inputs)
                plain_bytes -= codes * itemsize - codes * self.settings.bits // 8 - GROUP_BYTES * groups
            plain_bytes += 4 * num_inputs if self.settings.is_reordered else 0
        return plain_bytes

    def replace_shapes(self, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """The expected tensors, with packed ones instead of plain ones. Raises ConfigError."""
        shapes = dict(shapes)
        for part in self._packed_parts():
            assert self.settings is not None
            del shapes[part.name + WEIGHT]
            try:
                wanted = packed_shapes(self.settings, *part.shape)
            except ValueError as error:
                raise ConfigError("quantization_config", f"{part.name}: {error}") from error
            shapes |= {f"{part.name}.{tensor}": shape for tensor, shape in wanted.items()}
        return shapes

    def idle_biases(self, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Name -> shape of biases that the model does not have, which AutoGPTQ writes, full of zeros, for packed
        matrices (in Qwen2's own GPTQ checkpoints too). shapes: of the tensors that the model has."""
        biases = {f"{part.name}.bias": part.shape[:1] for part in self._packed_parts()}
        return {name: shape for name, shape in biases.items() if name not in shapes}

    def cuts(self) -> dict[str, Part]:
        """What this rank reads of every packed tensor, unless g_idx shows that it needs all groups."""
        found: dict[str, Part] = {}
        for part in self._packed_parts():
            assert self.settings is not None
            groups = groups_of_part(self.settings, part.cut[1], self.settings.groups_of(part.shape[1]), None)
            cuts = packed_cuts(self.settings, part.cut, groups)
            found |= {f"{part.name}.{tensor}": cut for tensor, cut in cuts.items()}
        return found

    def read(self, shards: Shards, model: CausalLM, packed: Packed, on_tensors: OnTensors) -> None:
        """Fill or replace every packed matrix; plain ones get their memory. on_tensors: called with the names of the
        tensors that were read, matrix by matrix. Raises CheckpointError."""
        for matrix in self.matrices:
            linear = model.get_submodule(matrix.path)
            assert isinstance(linear, Linear)
            parts = [self._read_part(shards, model, part) for part in matrix.parts]
            joined = self._joined(parts) if packed is Packed.KEPT else None
            if joined is not None:
                linear.hold(joined)
            else:
                linear.allocate(model.dtype, model.device)
                _fill(linear, matrix, parts)
            every = (f"{part.name}.{tensor}" for part in matrix.parts for tensor in TENSORS)
            on_tensors([name for name in every if name in shards.file_of])

    def _packed_parts(self) -> list[_Part]:
        if self.settings is None:
            return []
        every = (part for matrix in self.matrices for part in matrix.parts)
        return [part for part in every if self.settings.applies_to(part.name)]

    def _read_part(self, shards: Shards, model: CausalLM, part: _Part) -> GroupedWeight | torch.Tensor | None:
        """None if the part is plain."""
        settings, inputs = self.settings, part.cut[1]
        assert settings is not None
        if not settings.applies_to(part.name):
            return None

        def read(tensor: str, cut: Part) -> torch.Tensor:
            file = shards.file_of[f"{part.name}.{tensor}"]
            dtype = READABLE[file.entries[f"{part.name}.{tensor}"].dtype]
            into = torch.empty([each.stop - each.start for each in cut], dtype=dtype, device=model.device)
            file.read(f"{part.name}.{tensor}", into, cut)
            return into

        group_I = read("g_idx", (inputs,)) if settings.packing is Packing.GPTQ else None
        num_groups = settings.groups_of(part.shape[1])
        groups = groups_of_part(settings, inputs, num_groups, group_I)
        cuts = packed_cuts(settings, part.cut, groups)
        tensors = {tensor: read(tensor, cut) for tensor, cut in cuts.items() if tensor != "g_idx"}
        if group_I is not None:
            tensors["g_idx"] = group_I - groups.start
        where = f"{shards.file_of[f'{part.name}.scales'].path.name}: {part.name}"
        if not bool(tensors["scales"].isfinite().all()):
            raise CheckpointError(f"{where}.scales: holds NaN or infinity")
        is_of_whole_groups = groups != slice(0, num_groups) or inputs == slice(0, part.shape[1])
        take = unpack if is_of_whole_groups or settings.group_size is None else unpack_scattered
        try:
            return take(settings, tensors, dtype=model.dtype)
        except PackingError as error:
            raise CheckpointError(f"{where}.{error}") from error

    def _joined(self, parts: list[GroupedWeight | torch.Tensor | None]) -> GroupedWeight | None:
        there = [part for part in parts if isinstance(part, GroupedWeight)]
        return join_outputs(there) if len(there) == len(parts) else None


def _fill(linear: Linear, matrix: _Matrix, parts: list[GroupedWeight | torch.Tensor | None]) -> None:
    """Write unpacked values into the rows of the packed parts."""
    start = 0
    for each, part in zip(matrix.parts, parts, strict=True):
        if part is not None:
            values = part.dequantized() if isinstance(part, GroupedWeight) else part
            linear.weight.data[start : start + each.num_outputs] = values
        start += each.num_outputs


def packed_dtype(name: str, plain: Iterable[str]) -> tuple[str, ...]:
    """The dtypes that a tensor of this name may have."""
    return ("I32",) if name.endswith(INTEGERS) else tuple(plain)
