"""What is known of the RPC that the current task answers.

A context variable, because the guard stands around handlers of libraries too (health, reflection), whose signatures
have no room for it, and because log lines pick up the same context.
"""

import time
from contextvars import ContextVar
from dataclasses import dataclass, field

from gateway.access.caller import ANYBODY, Caller
from gateway.validation.table import REQUEST_ID


@dataclass(slots=True, kw_only=True, eq=False)
class RpcScope:
    """Filled in on the way; read by the guard for trailers, metrics and the log line at the end.

    started_s: monotonic. wire_timeout_s: the call's own deadline, in seconds from its start; None: none.
    model: by its metadata or its listener, for requests that name none.
    tokens_delivered: generated tokens in messages that were sent. peer: what gRPC calls the connection's other end.
    """

    method: str
    caller: Caller = ANYBODY
    peer: str = ""
    model: str = ""
    wire_timeout_s: float | None = None
    # Looked up when it is called, not when the class is made: a simulation has a clock of its own.
    started_s: float = field(default_factory=lambda: time.monotonic())
    request_id: str = ""
    tokens_delivered: int = 0
    log_fields: dict[str, object] = field(default_factory=dict)

    def name_by(self, request_id: str) -> None:
        """Know the RPC by its caller's id, before that was checked. One that is no request id stays out of trailers,
        which gRPC would refuse to send, and out of the log; the check of the request's fields refuses it by name."""
        if REQUEST_ID(request_id) is None:
            self.request_id = request_id

    @property
    def key(self) -> str:
        """The request's id as no other tenant can have it."""
        return self.caller.key_of(self.request_id)


current_rpc: ContextVar[RpcScope] = ContextVar("current_rpc")
