"""How a gateway listens for workers and when it gives one up."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPoolConfig:
    """endpoints: ``ipc:///run/dir/gateway-0.sock`` and/or ``tcp://host:port``, one ROUTER socket each.

    An ipc socket's folder must be (or is made) 0700 and ours. tcp needs ``server_key_file`` and
    at least one allow-listed client key (CURVE), or, on loopback only, a ``registration_token``.
    """

    endpoints: tuple[str, ...]
    registration_token: str = ""  # where set, a worker must present it
    server_key_file: Path | None = None  # secret key file (`octavo keys new`)
    allowed_key_files: tuple[Path, ...] = ()  # public key files of workers
    heartbeat_timeout_s: float = 5.0  # silence that ends a worker
    stall_timeout_s: float = 30.0  # no step while it has work
    tick_s: float = 0.25  # how often silence and stalls are looked for
    max_prefix_nodes: int = 262_144  # blocks that the router remembers per model
    max_migrations: int = 3  # times that an output may go on at another worker after its own was lost
    migration_timeout_s: float = 60.0  # how long such an output waits for a worker
    drain_budget: int = 64  # messages taken from one socket before the loop gets its turn
