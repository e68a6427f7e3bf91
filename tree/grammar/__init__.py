"""What an output must look like: from a caller's schema, regular expression, grammar or choice to a checked grammar.

`json_schema`, `gbnf`, `choice` and `tool_calls` each read one kind of source and give llguidance's own notation;
`source` puts them together, `check` says whether llguidance takes the result. Used by gateways, to refuse early and by
name, and by workers, to compile. Must not know requests, tokens, processes.
"""
