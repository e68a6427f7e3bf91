"""Limits on the size of a grammar, and on the work that it may cause."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLParserLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarLimits:
    """max_source_bytes: of JSON schemas, EBNF and tools. max_depth: of schemas nested in schemas.

    The limits from max_compile_fuel on are in llguidance's units. A compilation or a step that needs more ends with an
    error: fuel counts derivatives of regular expressions (about 15,000 per millisecond), items are Earley items (20,000
    per millisecond), states are lexer states (about a kilobyte each).
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
        """These limits as llguidance takes them."""
        from llguidance import LLParserLimits  # some commands read settings without needing the library

        return LLParserLimits(
            max_items_in_row=self.max_row_items,
            initial_lexer_fuel=self.max_compile_fuel,
            step_lexer_fuel=self.max_step_fuel,
            step_max_items=self.max_step_items,
            max_lexer_states=self.max_states,
            max_grammar_size=self.max_symbols,
            verbose_errors=False,
        )
