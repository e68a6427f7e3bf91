"""The settings of a gateway process; read once at its start, never changed.

Where the values come from (flags, environment, file) is the command line's business.
"""

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from octavo.gateway.workers.config import WorkerPoolConfig
from octavo.grammar.limits import GrammarLimits

MIB = 1024 * 1024


class Exposure(Enum):
    """Who may reach the listeners in plain text. With TLS, any address may be bound."""

    LOOPBACK_ONLY = "loopback-only"  # any other address refuses to bind
    INSECURE = "insecure"  # plain text on any address: an explicit choice


class PortSharing(Enum):
    """Whether other processes of this host may listen on the same port (SO_REUSEPORT)."""

    EXCLUSIVE = "exclusive"
    SHARED = "shared"


class Dialects(Enum):
    """Which services besides octavo.v1 are served on the same port."""

    INSTALLED = "installed"  # all of them; VllmEngine where its stubs are (extra `vllm-dialect`)
    NONE = "none"


class LogFormat(Enum):
    """AUTO: key=value for people on a terminal, JSON lines elsewhere."""

    AUTO = "auto"
    CONSOLE = "console"
    JSON = "json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLimits:
    """Limits on rendering one chat, or checking one constraint. wall_s: includes time without a CPU. memory_bytes:
    beyond what an idle process takes."""

    cpu_s: float = 2.0
    wall_s: float = 30.0
    memory_bytes: int = 256 << 20
    max_waiting: int = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """What callers may ask of one gateway process."""

    max_message_bytes: int = 4 * MIB  # gRPC messages received
    max_metadata_bytes: int = 16 * 1024
    max_streams_per_connection: int = 512
    max_requests: int = 4096  # in flight, all workers together
    max_service_requests: int | None = None  # in flight at all gateways of the service; None: any
    max_prompt_bytes: int = 2 * MIB  # UTF-8 bytes of text, or of a rendered chat, before it is tokenized
    tokenizer_threads: int = 2
    max_tokenizing: int = 512  # texts waiting for these threads …
    max_tokenizing_bytes: int = 64 * MIB  # … and their bytes; beyond that the tenant with the most waiting is refused
    render: ProcessLimits = field(default_factory=ProcessLimits)  # of one chat by the checkpoint's template
    pause_pending_tokens: int = 512  # tokens that a slow reader may leave unread before its output is paused …
    max_pending_tokens: int = 16_384  # … and before its stream ends, where the worker continues in spite of the pause
    write_stall_s: float = 30.0  # how long one message may wait for the reader
    pushback_ms: int = 500  # `grpc-retry-pushback-ms` of refusals
    grammar: GrammarLimits = field(default_factory=GrammarLimits)  # of constraints on outputs
    constraint_timeout_s: float = 2.0  # of CPU time, for checking one


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionConfig:
    """HTTP/2 keepalive and limits on connections. A vanished client is noticed after time + timeout."""

    keepalive_time_s: float = 20.0
    keepalive_timeout_s: float = 10.0
    min_ping_interval_s: float = 10.0  # pings that come sooner are strikes …
    # … and clients with more strikes than this are disconnected; 0: never, for gateways that ping idle connections.
    max_ping_strikes: int = 0
    handshake_timeout_s: float = 10.0
    message_timeout_s: float = 20.0  # from a call's beginning until its request has arrived
    settings_timeout_s: float = 5.0  # limits on metadata bind a client only once it has acknowledged them
    max_idle_s: float = 300.0  # without a call, whatever pings it answers
    max_connections: int | None = None  # of callers; None: what the descriptors have room for, 8192 at most
    max_connections_per_peer: int | None = None  # of one address; None: half of them


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """PEM files. With client_ca_file, clients have to prove a certificate of that authority (mTLS)."""

    cert_file: Path
    key_file: Path
    client_ca_file: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessConfig:
    """Who may call. Without a file of keys and without client certificates: every caller that reaches a listener.

    public_scopes: names of gateway.auth.authenticator.Scope that need no key. prefix_salt_secret: the same on every
    gateway of a service, so that their callers share cached prefixes; empty: drawn at the start.
    """

    tls: TlsConfig | None = None
    api_keys_file: Path | None = None
    public_scopes: tuple[str, ...] = ("health",)
    prefix_salt_secret: str = field(default="", repr=False)
    reload_interval_s: float = 1.0  # how often the files are looked at

    @property
    def knows_callers(self) -> bool:
        """Whether callers are identified."""
        return self.api_keys_file is not None or (self.tls is not None and self.tls.client_ca_file is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerConfig:
    """The other gateways of the service, which an abort, a drain or a query of the load has to reach too.

    endpoint: where they reach this one, ``ipc:///run/dir/NAME.peers.sock`` or ``tcp://host:port``; empty: there is one
    gateway. others: their endpoints; this gateway's own may be among them, so that all gateways can have one list. A
    name stands for every address that it has, now and later. others_file: lists more, now and later.
    key_file: the CURVE pair that all gateways of the service share; tcp needs it, on loopback too."""

    endpoint: str = ""
    others: tuple[str, ...] = ()
    others_file: Path | None = None
    key_file: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PageConfig:
    """The live page. port None: 50080, or a free one where that is busy; 0: a free one. names: by which browsers reach
    it, beside addresses and localhost."""

    host: str = "127.0.0.1"
    port: int | None = None
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """One gateway process.

    Addresses are ``host:port``, ``[ipv6]:port`` or ``unix:/path``; port 0 lets the system choose (the log line
    ``listening`` has it). ``admin_address`` and ``metrics_address`` None: not served. The metrics endpoint is
    HTTP on ``host:port``. ``status_address``: a socket in the run directory where the supervisor asks for health and
    models without TLS and keys. ``front_address``: another one, where the front for HTTP passes its callers' calls on,
    with their keys and without TLS. ``supervisor_address``: where the supervisor takes ``AdminService.Scale``; None:
    nobody started this gateway. ``expected_models``: names of those that have to be ready before health says so;
    none: any is enough. ``page`` None: there is none. ``model_addresses``: further addresses, each with the model of
    requests that name none.
    """

    workers: WorkerPoolConfig
    peers: PeerConfig = field(default_factory=PeerConfig)
    expected_models: tuple[str, ...] = ()
    listen_address: str = "127.0.0.1:50051"
    model_addresses: tuple[tuple[str, str], ...] = ()
    admin_address: str | None = None
    metrics_address: str | None = "127.0.0.1:9090"
    page: PageConfig | None = None
    status_address: str | None = None
    front_address: str | None = None
    supervisor_address: str | None = None
    exposure: Exposure = Exposure.LOOPBACK_ONLY
    access: AccessConfig = field(default_factory=AccessConfig)
    port_sharing: PortSharing = PortSharing.EXCLUSIVE
    dialects: Dialects = Dialects.INSTALLED
    limits: RequestLimits = field(default_factory=RequestLimits)
    connection: ConnectionConfig = field(default_factory=ConnectionConfig)
    drain_grace_s: float = 30.0
    stop_receipt_timeout_s: float = 2.0  # after a stop string: wait for the worker's figures this long
    log_format: LogFormat = LogFormat.AUTO
    log_level: str = "info"  # debug, info, warning, error
