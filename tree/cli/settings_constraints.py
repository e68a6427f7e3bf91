"""Settings of constraints on outputs: JSON schemas, regular expressions, grammars, choices."""

from cli.setting import Settings, setting
from grammar.limits import GrammarLimits

PANEL = "Constraints"
MIB = 1024 * 1024


class ConstraintSettings(Settings):
    """How large a constraint may be; gateways refuse more, and workers compile no more."""

    max_schema_bytes: int = setting(65_536, "Bytes of a JSON schema, EBNF grammar or tools", panel=PANEL, ge=1)
    max_schema_depth: int = setting(16, "Schemas inside schemas", panel=PANEL, ge=1, le=64)

    @property
    def grammar_limits(self) -> GrammarLimits:
        """As the grammar folder takes them."""
        return GrammarLimits(max_source_bytes=self.max_schema_bytes, max_depth=self.max_schema_depth)


class ConstraintCheckSettings(ConstraintSettings):
    """Of a gateway."""

    constraint_timeout_s: float = setting(2.0, "Seconds that checking a constraint may take", panel=PANEL, gt=0)


class GrammarSettings(ConstraintSettings):
    """Of a worker."""

    grammar_timeout_s: float = setting(
        10.0, "Seconds that a request waits for its constraint to be compiled", panel=PANEL, gt=0
    )
    grammar_threads: int = setting(2, "Threads that compile constraints, per worker", panel=PANEL, ge=1)
    grammar_cache_entries: int = setting(256, "Compiled constraints that a worker keeps", panel=PANEL, ge=0)
    grammar_cache_bytes: int = setting(256 * MIB, "Bytes that they may take, estimated", panel=PANEL, ge=0)
