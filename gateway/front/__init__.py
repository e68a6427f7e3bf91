"""OpenAI's HTTP interface in front of a service: a client of octavo.v1 that speaks JSON to its own callers.

    HTTP, JSON -> fields.py (the request) -> octavo.v1 over gRPC -> chat.py, completions.py -> JSON, SSE

Must not know: how gateways, workers and models work; beside the sockets of this host's gateways it has what every
caller of the service has.
"""
