"""How large a grammar may be, and how much work it may cause."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLParserLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarLimits:
    """max_source_bytes: of JSON schemas, EBNF and tools. max_depth: of schemas inside schemas.

    The rest are llguidance's units. A compile or a step that needs more ends with an error instead: fuel is derivatives
    of regular expressions (some 15,000 a millisecond), items are Earley's (20,000 a millisecond), states are those of
    the lexer, about a kilobyte each.
    """

    max_source_bytes: int = 65_536
    max_depth: int = 16
    max_regex_bytes: int = 4_096
    max_choices: int = 1_024
    max_choice_bytes: int = 4_096
    max_compile_fuel: int = 1_000_000
    max_step_fuel: int = 200_000
    max_step_items: int = 50_000
    max_row_items: int = 2_000
    max_states: int = 30_000
    max_symbols: int = 100_000

    def for_parser(self) -> "LLParserLimits":
        """The library's form."""
        from llguidance import LLParserLimits  # settings are read by commands that need no library

        return LLParserLimits(
            max_items_in_row=self.max_row_items,
            initial_lexer_fuel=self.max_compile_fuel,
            step_lexer_fuel=self.max_step_fuel,
            step_max_items=self.max_step_items,
            max_lexer_states=self.max_states,
            max_grammar_size=self.max_symbols,
            verbose_errors=False,
        )
