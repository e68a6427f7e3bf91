"""One of several texts."""

import json

from grammar.errors import GrammarRefused, Refusal
from grammar.lark import quoted
from grammar.limits import GrammarLimits


def choice_to_lark(source: str, limits: GrammarLimits) -> str:
    """source: a JSON array of strings. Raises GrammarRefused."""
    try:
        options = json.loads(source)
    except ValueError as error:
        raise GrammarRefused(Refusal.SYNTAX, f"is not valid JSON: {error}") from None
    if not isinstance(options, list) or not options or not all(isinstance(option, str) for option in options):
        raise GrammarRefused(Refusal.SYNTAX, "must be a list of texts, at least one")
    if len(options) > limits.max_choices:
        raise GrammarRefused(Refusal.LIMIT, f"has {len(options)} options, at most {limits.max_choices} are allowed")
    for index, option in enumerate(options):
        num_bytes = len(option.encode())
        if not 1 <= num_bytes <= limits.max_choice_bytes:
            raise GrammarRefused(
                Refusal.LIMIT, f"has {num_bytes} bytes, 1 to {limits.max_choice_bytes} are allowed", path=f"[{index}]"
            )
    return "start: CHOICE\nCHOICE: " + "\n  | ".join(quoted(option) for option in dict.fromkeys(options)) + "\n"
