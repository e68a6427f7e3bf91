"""The messages between the gateways of a service: questions, reports, and their answers."""

import msgspec

from octavo.wire.messages import Message


class PeerAbort(Message, frozen=True, kw_only=True):
    """End the requests of this id, of any tenant, as an operator does."""

    call_id: int
    request_id: str


class PeerCancel(Message, frozen=True, kw_only=True):
    """End the requests with these keys, as their caller asked. A key combines tenant and id (`Caller.key_of`)."""

    call_id: int
    keys: tuple[str, ...]


class PeerCancelAll(Message, frozen=True, kw_only=True):
    """End all requests of one tenant, as it asked. tenant None: of all callers, if callers are not identified."""

    call_id: int
    tenant: str | None = None


class PeerDrain(Message, frozen=True, kw_only=True):
    """Take no new requests, finish the others, then stop. grace_s None: the receiver's default."""

    call_id: int
    grace_s: float | None = None


class PeerAskLoad(Message, frozen=True, kw_only=True):
    """Ask for the load."""

    call_id: int


class PeerWatch(Message, frozen=True, kw_only=True):
    """Describe your requests, and list up to max_requests of the oldest."""

    call_id: int
    max_requests: int = 0


class TenantUse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One tenant's use of its limits at one gateway. num_in_flight: outputs; num_queued of these are not begun.
    num_spent: tokens reserved less those given back; num_spent_before: the same when its bucket was last full.
    num_lacking: tokens missing from the bucket, as far as the gateway knows."""

    name: str
    num_in_flight: int = 0
    num_queued: int = 0
    num_spent: int = 0
    num_spent_before: int = 0
    num_lacking: int = 0
    tokens_per_minute: int = 0  # 0: it has no bucket
    burst_tokens: int = 0


class PeerUse(Message, frozen=True, kw_only=True):
    """A report of what is used here of limits that all gateways share. Answered if call_id is not 0.

    gateway_id: new at each start of a gateway. name, release: for people. models: those that it expects.
    number: grows from message to message.
    num_outputs: in flight.
    tenants: in a snapshot, all that use anything (or some of them, if it is sent in parts); else those that changed.
    is_leaving: nothing is in flight here, and nothing follows.
    """

    call_id: int
    gateway_id: str
    number: int
    name: str = ""
    release: str = ""
    models: tuple[str, ...] = ()
    num_outputs: int = 0
    is_snapshot: bool = False
    is_leaving: bool = False
    tenants: tuple[TenantUse, ...] = ()


class LoadPart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Requests of one model or tenant at one gateway: their states, and what was counted in the last
    `GatewayPart.window_s` seconds. Histograms have the buckets of `gateway.observability.meters`."""

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
    """One request in flight. phase: an octavo.v1.RequestPhase. num_blocks None: its worker has not reported it."""

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
    """What one gateway knows of the load. total: of all requests, without counts, which are in the models' parts."""

    window_s: float
    total: LoadPart
    models: tuple[LoadPart, ...] = ()
    tenants: tuple[LoadPart, ...] = ()
    requests: tuple[RequestPart, ...] = ()


class PeerReply(Message, frozen=True, kw_only=True):
    """Answer to each of these, once it was carried out. gateway_id: new at each start of a gateway. part: for a
    PeerWatch."""

    call_id: int
    gateway_id: str
    num_ended: int = 0
    num_in_flight: int = 0
    num_preparing: int = 0  # of these, with no worker yet
    tokens_per_s: float = 0.0
    is_draining: bool = False
    part: GatewayPart | None = None


ToPeer = PeerAbort | PeerCancel | PeerCancelAll | PeerDrain | PeerAskLoad | PeerWatch | PeerUse
