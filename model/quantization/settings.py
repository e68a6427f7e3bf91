"""`quantization_config` of a checkpoint's config.json, checked field by field: GPTQ and AWQ.

Sources: AutoGPTQ's QuantLinear.pack and BaseQuantizeConfig, GPTQModel's checkpoint formats, AutoAWQ's WQLinear_GEMM.
Must not know: tensors.
"""

from dataclasses import dataclass
from enum import Enum

from octavo.model.config_fields import ConfigFields, shown
from octavo.model.errors import ConfigError


class Packing(Enum):
    """How integers are laid out in a checkpoint's int32 words (model/checkpoint/packed.py)."""

    GPTQ = "gptq"
    AWQ = "awq"


MODULES = (*(f"self_attn.{name}_proj" for name in "qkvo"), "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
"""Of a layer, those with a matrix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSettings:
    """Integers of `bits` bits with a scale and a zero point for each output and each `group_size` inputs.

    group_size None: all inputs are one group. zero_offset: added to stored zero points (1 in GPTQ's first format).
    is_reordered: groups may consist of non-adjacent inputs (GPTQ's desc_act). left_out: parts of the names of modules
    that are not quantised.
    """

    packing: Packing
    bits: int
    group_size: int | None
    zero_offset: int
    is_reordered: bool = False
    left_out: tuple[str, ...] = ()

    @property
    def per_word(self) -> int:
        """Integers per 32-bit word."""
        return 32 // self.bits

    def groups_of(self, num_inputs: int) -> int:
        """Number of groups in a matrix. Raises ValueError if the inputs do not divide evenly."""
        size = self.group_size or num_inputs
        if num_inputs % size:
            raise ValueError(f"{num_inputs} inputs are no multiple of group_size {size}")
        return num_inputs // size

    def applies_to(self, module: str) -> bool:
        """Whether the module of this full name (model.layers.0.mlp.up_proj) is quantised."""
        return not any(part in module for part in self.left_out)


def parse_quantization(fields: ConfigFields) -> GroupSettings | None:
    """None if the config has no quantization_config. Raises ConfigError naming the field."""
    if not fields.has("quantization_config"):
        return None
    nested = fields.nested("quantization_config")
    method = nested.text("quant_method")
    if method == "gptq":
        return _parse_gptq(nested)
    if method == "awq":
        return _parse_awq(nested)
    raise ConfigError(nested.path("quant_method"), f"{shown(method)} is not supported, only 'gptq' and 'awq'")


def _parse_gptq(fields: ConfigFields) -> GroupSettings:
    layout = _format(fields, "checkpoint_format", ("gptq", "gptq_v2"))
    for name in ("is_marlin_format", "lm_head"):
        if fields.boolean(name, False):
            raise ConfigError(fields.path(name), "true is not supported")
    if fields.has("dynamic") and fields.value("dynamic"):
        raise ConfigError(fields.path("dynamic"), "settings of single modules are not supported")
    if fields.has("pack_dtype"):
        fields.must_be_one_of("pack_dtype", ("int32",))
    fields.boolean("sym", True)
    return GroupSettings(
        packing=Packing.GPTQ,
        bits=_bits(fields, (4, 8)),
        group_size=_group_size(fields),
        zero_offset=1 if layout == "gptq" else 0,
        is_reordered=fields.boolean("desc_act", False),
        left_out=_left_out(fields) + _unnamed(fields),
    )


def _parse_awq(fields: ConfigFields) -> GroupSettings:
    _format(fields, "version", ("gemm",))
    if not fields.boolean("zero_point", True):
        raise ConfigError(fields.path("zero_point"), "false is not supported")
    return GroupSettings(
        packing=Packing.AWQ,
        bits=_bits(fields, (4,)),
        group_size=_group_size(fields),
        zero_offset=0,
        left_out=_left_out(fields),
    )


def _format(fields: ConfigFields, name: str, supported: tuple[str, ...]) -> str:
    """How words are packed: from this field, or from `format`, as GPTQModel and transformers 5 call it; the first
    supported one if neither is present."""
    name = name if fields.has(name) else "format"
    found = fields.text(name).lower() if fields.has(name) else supported[0]
    if found not in supported:
        only = f"{shown(fields.value(name))} is not supported, only {' and '.join(map(repr, supported))}"
        raise ConfigError(fields.path(name), only)
    return found


def _bits(fields: ConfigFields, supported: tuple[int, ...]) -> int:
    bits = fields.positive_int("bits")
    if bits not in supported:
        raise ConfigError(fields.path("bits"), f"{bits} is not supported, only {' and '.join(map(str, supported))}")
    return bits


def _group_size(fields: ConfigFields) -> int | None:
    """None for one group of all inputs. 4-bit codes are paired within a group, even when unpacked."""
    if fields.has("group_size") and fields.value("group_size") == -1:
        return None
    size = fields.positive_int("group_size")
    if size % 2 and fields.positive_int("bits") == 4:
        raise ConfigError(fields.path("group_size"), f"{size} is odd, which is not supported for 4 bits")
    return size


def _unnamed(fields: ConfigFields) -> tuple[str, ...]:
    """Modules of a layer that are missing from optimum's list of lists of modules to quantise; none without such a
    list."""
    if not fields.has("modules_in_block_to_quantize"):
        return ()
    lists = fields.value("modules_in_block_to_quantize")
    if not isinstance(lists, list) or any(not isinstance(names, list) for names in lists):
        raise ConfigError(
            fields.path("modules_in_block_to_quantize"), f"must be a list of lists of names, is {shown(lists)}"
        )
    return tuple(module for module in MODULES if not any(module in names for names in lists))


def _left_out(fields: ConfigFields) -> tuple[str, ...]:
    names = fields.value("modules_to_not_convert") if fields.has("modules_to_not_convert") else []
    if not isinstance(names, list) or any(not isinstance(name, str) or not name for name in names):
        raise ConfigError(fields.path("modules_to_not_convert"), f"must be a list of names, is {shown(names)}")
    return tuple(names)
