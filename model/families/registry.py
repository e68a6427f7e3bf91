"""Every family that is served, by the name that config.json gives it.

Must not know: what distinguishes them.
"""

from octavo.model.config_fields import ConfigFields, shown
from octavo.model.errors import ConfigError
from octavo.model.families.interface import Family
from octavo.model.families.qwen2 import QWEN2
from octavo.model.families.qwen3 import QWEN3

FAMILIES = {family.model_type: family for family in (QWEN2, QWEN3)}


def family_of(fields: ConfigFields) -> Family:
    """The family of a config.json. For any other, raises ConfigError naming those that are supported."""
    fields.must_be_one_of("model_type", tuple(FAMILIES))
    family = FAMILIES[fields.text("model_type")]
    if fields.has("architectures"):
        named = fields.value("architectures")
        if not isinstance(named, list):
            raise ConfigError("architectures", f"must be a list of names, is {shown(named)}")
        if family.architecture not in named:
            raise ConfigError("architectures", f"{shown(named)} does not name {family.architecture}")
    return family
