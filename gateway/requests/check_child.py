"""The process in which constraints of callers are checked: the library's work on some takes minutes and cannot be
stopped, and a defect of its own could end a process. Asked by `gateway.requests.constraints`:

    JSON {"kind", "source", "format_as_annotation", "limits"}
"""

import json

from octavo.gateway.text.process_child import DONE, REFUSED, answer_frames
from octavo.grammar.check import check_grammar
from octavo.grammar.errors import GrammarRefused
from octavo.grammar.limits import GrammarLimits
from octavo.wire.messages import Grammar, GrammarKind


def _answer(frame: bytes) -> tuple[bytes, bytes]:
    asked = json.loads(frame)
    grammar = Grammar(
        kind=GrammarKind(asked["kind"]),
        source=asked["source"],
        format_as_annotation=asked["format_as_annotation"],
    )
    try:
        check_grammar(grammar, GrammarLimits(**asked["limits"]))
    except GrammarRefused as refused:
        return REFUSED, json.dumps([refused.refusal.value, refused.description, refused.path]).encode()
    return DONE, b""


if __name__ == "__main__":
    answer_frames(_answer)
