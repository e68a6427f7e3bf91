"""How config.json describes rotary embeddings: `rope_theta` and `rope_scaling` (transformers 4, as Qwen2.5's model
cards write it) or `rope_parameters` (transformers 5).

Must not know: tensors.
"""

from dataclasses import dataclass

from octavo.model.config_fields import ConfigFields, shown
from octavo.model.errors import ConfigError

DEFAULT_THETA = 10_000.0
"""What transformers takes for qwen2 where a config has no rope_theta."""

ORIGINAL = "original_max_position_embeddings"
"""Of the context that YaRN extends: a field of RoPE's, or beside it."""

MOST_FACTOR = 1 << 24
LEAST_BETA, MOST_BETA = 1e-6, 1e6
"""Of YaRN's rotations; published models have 1 and 32."""

KNOWN_YARN_FIELDS = {
    "type",
    "rope_type",
    "rope_theta",
    "factor",
    ORIGINAL,
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """YaRN (Peng et al. 2023, arXiv 2309.00071): how far the context is stretched, and where.

    beta_fast / beta_slow: rotations within the original context above which a frequency is kept as it is, and below
    which it is divided by `factor`; between them a linear ramp. attention_factor: what cosine and sine are multiplied
    with; None takes the paper's 0.1 ln(factor) + 1.
    """

    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeFields:
    """What a config says about RoPE."""

    theta: float
    yarn: YarnScaling | None


def parse_rope(fields: ConfigFields, max_position_embeddings: int) -> RopeFields:
    """Read either layout. Raises ConfigError, also where both are there."""
    if fields.has("rope_parameters") and fields.has("rope_scaling"):
        raise ConfigError("rope_scaling", "is there besides rope_parameters: keep one of them")
    name = "rope_parameters" if fields.has("rope_parameters") else "rope_scaling"
    rope = fields.nested(name) if fields.has(name) else ConfigFields({})
    owner = rope if rope.has("rope_theta") else fields
    theta = owner.positive_float("rope_theta", DEFAULT_THETA)
    original = fields.positive_int(ORIGINAL, max_position_embeddings)
    yarn = parse_scaling(rope, original)
    if yarn is not None and fields.has(ORIGINAL) and yarn.original_max_position_embeddings != original:
        both = f"{original} is not {rope.path(ORIGINAL)}, {yarn.original_max_position_embeddings}"
        raise ConfigError(ORIGINAL, f"{both}: keep one of them")  # the latter is ours, the other transformers 5's
    if theta < 1 or (yarn is not None and theta == 1):
        raise ConfigError(owner.path("rope_theta"), f"must be {'at least' if yarn is None else 'above'} 1, is {theta}")
    if yarn is not None and fields.has("partial_rotary_factor"):
        raise ConfigError("partial_rotary_factor", "is not supported with YaRN")
    return RopeFields(theta=theta, yarn=yarn)


def parse_scaling(rope: ConfigFields, original_max_position_embeddings: int) -> YarnScaling | None:
    """None for plain RoPE. Raises ConfigError for any other kind than YaRN, and for RoPE that differs by layer."""
    for name in sorted(rope.names()):
        if isinstance(rope.value(name), dict):
            raise ConfigError(rope.path(name), "RoPE of its own for a kind of layers is not supported")
    name = "rope_type" if rope.has("rope_type") else "type"
    kind = rope.text(name) if rope.has(name) else "default"
    if kind == "default":
        return None
    if kind != "yarn":
        raise ConfigError(rope.path(name), f"{shown(kind)} is not supported, only 'default' and 'yarn'")
    return parse_yarn(rope, original_max_position_embeddings)


def parse_yarn(rope: ConfigFields, original_max_position_embeddings: int) -> YarnScaling:
    """The fields of YaRN. An unknown one is refused: it would change the result if it were ignored.

    original_max_position_embeddings: where the fields do not say it.
    """
    for name in sorted(rope.names() - KNOWN_YARN_FIELDS):
        raise ConfigError(rope.path(name), "is not a known field of YaRN")
    for name in ("mscale", "mscale_all_dim"):
        if rope.has(name):
            raise ConfigError(rope.path(name), "is not supported (Qwen2.5 does not use it): give attention_factor")
    if not rope.boolean("truncate", True):
        raise ConfigError(rope.path("truncate"), "false is not supported")
    factor = rope.positive_float("factor")
    if not 1 <= factor <= MOST_FACTOR:
        bound = "at least 1" if factor < 1 else f"at most {MOST_FACTOR}"
        raise ConfigError(rope.path("factor"), f"must be {bound}, is {factor}")
    yarn = YarnScaling(
        factor=factor,
        original_max_position_embeddings=rope.positive_int(ORIGINAL, original_max_position_embeddings),
        attention_factor=rope.positive_float("attention_factor") if rope.has("attention_factor") else None,
        beta_fast=parse_beta(rope, "beta_fast", 32.0),
        beta_slow=parse_beta(rope, "beta_slow", 1.0),
    )
    if yarn.beta_fast < yarn.beta_slow:
        raise ConfigError(rope.path("beta_fast"), f"{yarn.beta_fast} is below beta_slow {yarn.beta_slow}")
    return yarn


def parse_beta(rope: ConfigFields, name: str, default: float) -> float:
    """A number of rotations."""
    beta = rope.positive_float(name, default)
    if not LEAST_BETA <= beta <= MOST_BETA:
        raise ConfigError(rope.path(name), f"must be from {LEAST_BETA:g} to {MOST_BETA:g}, is {beta}")
    return beta
