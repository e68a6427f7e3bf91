"""The messages between the gateways of a service: what one asks or tells the others, and their answers."""

import msgspec

from octavo.wire.messages import Message


class PeerAbort(Message, frozen=True, kw_only=True):
    """End the requests of this id, of any tenant, as an operator does."""

    call_id: int
    request_id: str


class PeerCancel(Message, frozen=True, kw_only=True):
    """End the requests of these keys, as their caller asked. A key is tenant and id in one (`Caller.key_of`)."""

    call_id: int
    keys: tuple[str, ...]


class PeerCancelAll(Message, frozen=True, kw_only=True):
    """End all requests of one tenant, as it asked. tenant None: of all callers, where these are not identified."""

    call_id: int
    tenant: str | None = None


class PeerDrain(Message, frozen=True, kw_only=True):
    """Take no new request, finish the others, then stop. grace_s None: the receiver's own."""

    call_id: int
    grace_s: float | None = None


class PeerAskLoad(Message, frozen=True, kw_only=True):
    """Ask for the load."""

    call_id: int


class PeerWatch(Message, frozen=True, kw_only=True):
    """Say what your requests are doing, and list the oldest of them, so many at most."""

    call_id: int
    max_requests: int = 0


class TenantUse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What one tenant uses of its limits at one gateway: outputs in flight and of these not begun, tokens reserved less
    those given back, the same number when its bucket was full for the last time, and what its bucket lacks of being
    full by all that the gateway knows."""

    name: str
    num_in_flight: int = 0
    num_queued: int = 0
    num_spent: int = 0
    num_spent_before: int = 0
    num_lacking: int = 0
    tokens_per_minute: int = 0  # 0: it has no bucket
    burst_tokens: int = 0


class PeerUse(Message, frozen=True, kw_only=True):
    """Tell what is used here of limits that all gateways share. Answered where call_id is not 0.

    gateway_id: new at each start of a gateway. name, release, models: for people; models: those that it expects.
    number: grows from message to message. num_outputs: in flight. tenants: all that use anything in a sweep (one of its
    parts, where it has several), else those whose use has changed. is_leaving: nothing is in flight any more, and
    nothing follows."""

    call_id: int
    gateway_id: str
    number: int
    name: str = ""
    release: str = ""
    models: tuple[str, ...] = ()
    num_outputs: int = 0
    is_sweep: bool = False
    is_leaving: bool = False
    tenants: tuple[TenantUse, ...] = ()


class LoadPart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Requests of one model, or of one tenant, at one gateway: how they stand, and what was counted in the last
    `GatewayPart.window_s` seconds. Counts by bucket are those of `gateway.observability.meters`."""

    name: str
    num_in_flight: int = 0
    num_preparing: int = 0
    num_waiting: int = 0
    num_running: int = 0
    num_paused: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    num_finished: int = 0
    time_to_first_token: tuple[int, ...] = ()
    inter_token: tuple[int, ...] = ()
    queue: tuple[int, ...] = ()


class RequestPart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One request in flight. phase: of octavo.v1.RequestPhase. num_blocks None: its worker has not said."""

    request_id: str
    phase: int
    age_s: float
    model: str = ""
    tenant: str = ""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_blocks: int | None = None
    worker_id: str = ""
    num_outputs: int = 1


class GatewayPart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What one gateway knows of the load. total: of all requests; its counts are left to the models."""

    window_s: float
    total: LoadPart
    models: tuple[LoadPart, ...] = ()
    tenants: tuple[LoadPart, ...] = ()
    requests: tuple[RequestPart, ...] = ()


class PeerReply(Message, frozen=True, kw_only=True):
    """Answer to each of these, after what was asked has been done. gateway_id: new at each start of a gateway. part:
    where a PeerWatch asked for it."""

    call_id: int
    gateway_id: str
    num_ended: int = 0
    num_in_flight: int = 0
    num_preparing: int = 0  # of these, with no worker yet
    tokens_per_s: float = 0.0
    is_draining: bool = False
    part: GatewayPart | None = None


ToPeer = PeerAbort | PeerCancel | PeerCancelAll | PeerDrain | PeerAskLoad | PeerWatch | PeerUse
