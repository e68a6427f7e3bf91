"""Constraints on an output: from a caller's schema, regular expression, grammar or choice to a checked grammar.

`json_schema`, `gbnf` and `tool_calls` each convert one kind of source to a form that llguidance reads; `source` covers
all kinds, and `check` says whether llguidance accepts the result. Used by gateways, to refuse early and with a reason,
and by workers, to compile. Must not know requests, processes, or tokens, save the ids of the tags around tool calls
that it is given.
"""
