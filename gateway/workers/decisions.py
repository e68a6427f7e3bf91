"""What the registry decides; the executor carries it out. Plain values, compared whole in tests."""

from dataclasses import dataclass
from typing import NamedTuple

from octavo.gateway.workers.views import LostReason
from octavo.wire.messages import ModelCard


class Peer(NamedTuple):
    """One connection: the socket it came in on, and the id that the socket drew for it."""

    socket: int
    routing_id: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Accept:
    """Send Welcome. Also the answer to a repeated Register."""

    peer: Peer
    epoch: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """Watch the process of a new incarnation, if it runs on this host."""

    incarnation: int
    pid: int
    pid_namespace: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """Send Refused. kind: a short closed set, for counting."""

    peer: Peer
    epoch: str
    kind: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AskTokenizer:
    """Ask for the tokenizer bundle with this digest, which this gateway does not have."""

    peer: Peer
    epoch: str
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Announce:
    """A worker became ready."""

    incarnation: int
    card: ModelCard


@dataclass(frozen=True, slots=True, kw_only=True)
class Lose:
    """The incarnation is over: end its outputs, forget its blocks."""

    incarnation: int
    worker_id: str
    reason: LostReason
    detail: str


Decision = Accept | Watch | Refuse | AskTokenizer | Announce | Lose
