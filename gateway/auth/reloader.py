"""Loads the files of keys and certificates at the start, and loads them again when they change.

A file that has become unreadable or invalid changes nothing: the old content stays in force, the reason is logged, and
the file is tried at each check until it can be loaded. Open streams continue. A change counts once it is the same at
two consecutive checks, since half of a key list may well be a valid, shorter list. Certificates that expire soon are
logged at the start and once a day.
"""

import asyncio
import os
import ssl
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import structlog

from octavo.gateway.auth.authenticator import AccessList, Authenticator, ClientCertificates, Scope
from octavo.gateway.auth.expiry import CERT_FILE, CLIENT_CA_FILE, SOON_S, expiries
from octavo.gateway.auth.key_file import AccessFileError, load_access_list
from octavo.gateway.auth.tls import TlsListener, TlsMaterial, load_tls
from octavo.gateway.config import AccessConfig, TlsConfig

log = structlog.get_logger(__name__)
_T = TypeVar("_T")
DAY_S = 86_400.0
Stamp = tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class _Files:
    """Files that are loaded together. taken: their state when loaded; seen: their state at the last check. told: the
    failure that was logged last. is_asked: load at the next check even if nothing seems to have changed."""

    paths: tuple[Path, ...]
    taken: Stamp
    seen: Stamp
    told: tuple[Stamp, str] | None = None
    is_asked: bool = False


class AccessReloader:
    """authenticator: for every call. For metrics: reloads by (file, outcome); expiries by file, as in
    `gateway.auth.expiry`."""

    def __init__(self, config: AccessConfig, *, clock: Callable[[], float] = time.time) -> None:
        has_authority = config.tls is not None and config.tls.client_ca_file is not None
        self.authenticator = Authenticator(
            certificates=ClientCertificates.REQUIRED if has_authority else ClientCertificates.NONE,
            public=frozenset(map(Scope, config.public_scopes)),
        )
        self.reloads: Counter[tuple[str, str]] = Counter()
        self.expiries: dict[str, float] = {}
        self._clock = clock
        self._warned_s = -DAY_S  # when the log had the certificates that end soon
        self._config = config
        self._material: TlsMaterial | None = None
        self._listeners: list[TlsListener] = []
        self._files: dict[str, _Files] = {}
        self._asked = asyncio.Event()

    def load(self) -> None:
        """Load the files at the start. Raises AccessFileError."""
        config = self._config
        if config.tls is not None:
            self._watch("tls", self._tls_files())
            self._take_material(load_tls(config.tls))
        if config.api_keys_file is not None:
            self._watch("keys", (config.api_keys_file,))
            self.authenticator.access = load_access_list(config.api_keys_file)

    def _watch(self, name: str, paths: tuple[Path, ...]) -> None:
        stamp = _stamp(paths)
        self._files[name] = _Files(paths=paths, taken=stamp, seen=stamp)
        for outcome in ("taken", "failed"):  # series exist before the first of their kind
            self.reloads[name, outcome] = 0

    def follow(self, context: ssl.SSLContext) -> None:
        """From now on, handshakes of this context present the current certificate. It must be a server context for
        these files."""

        def take_newest(connection: Any, _name: object, _context: object) -> None:
            assert self._material is not None
            connection.context = self._material.context

        context.sni_callback = take_newest  # of each handshake, whether it has a name or not

    def listener(self) -> TlsListener | None:
        """Credentials for one more address; None without TLS."""
        if self._material is None:
            return None
        listener = TlsListener(self._material)
        self._listeners.append(listener)
        return listener

    def reload(self) -> None:
        """Load again soon, even if nothing seems to have changed (SIGHUP)."""
        for files in self._files.values():
            files.told, files.is_asked = None, True
        self._asked.set()

    async def run(self) -> None:
        """Check the files periodically, until cancelled."""
        while True:
            try:
                async with asyncio.timeout(self._config.reload_interval_s):
                    await self._asked.wait()
            except TimeoutError:
                pass
            self._asked.clear()
            await self.refresh()

    async def refresh(self) -> None:
        """Load what has changed."""
        tls, keys_file = self._config.tls, self._config.api_keys_file
        if tls is not None:
            await self._take("tls", lambda: load_tls(tls), self._take_material)
            self._warn_of_expiries(tls)
        if keys_file is not None:
            await self._take("keys", lambda: load_access_list(keys_file), self._take_access)

    async def _take(self, name: str, load: Callable[[], _T], use: Callable[[_T], None]) -> None:
        files = self._files[name]
        is_asked, files.is_asked = files.is_asked, False
        stamp = await asyncio.to_thread(_stamp, files.paths)
        before, files.seen = files.seen, stamp
        if not is_asked and (stamp == files.taken or stamp != before):
            return
        try:
            use(await asyncio.to_thread(load))
        except AccessFileError as error:
            if files.told != (stamp, str(error)):
                files.told = (stamp, str(error))
                self.reloads[name, "failed"] += 1
                log.error("reload_refused", files=name, error=str(error))
        else:
            files.taken, files.told = stamp, None
            self.reloads[name, "taken"] += 1
            log.info("reloaded", files=name)

    def _take_material(self, material: TlsMaterial) -> None:
        self._material = material
        for listener in self._listeners:
            listener.material = material
        self.expiries.clear()
        self.expiries.update(expiries(material.cert, material.client_ca))
        self._warned_s = -DAY_S

    def _warn_of_expiries(self, tls: TlsConfig) -> None:
        now_s = self._clock()
        if now_s - self._warned_s < DAY_S:
            return
        self._warned_s = now_s
        paths = {CERT_FILE: tls.cert_file, CLIENT_CA_FILE: tls.client_ca_file}
        for file, end_s in self.expiries.items():
            left_s = end_s - now_s
            if left_s < SOON_S:
                log.warning(
                    "certificate_expired" if left_s <= 0 else "certificate_expires_soon",
                    file=str(paths[file]),
                    not_after=datetime.fromtimestamp(end_s, UTC).isoformat(),
                    days_left=round(left_s / DAY_S, 1),
                )

    def _take_access(self, access: AccessList) -> None:
        self.authenticator.access = access

    def _tls_files(self) -> tuple[Path, ...]:
        tls = self._config.tls
        assert tls is not None
        paths = (tls.cert_file, tls.key_file, tls.client_ca_file)
        return tuple(path for path in paths if path is not None)


def _stamp(paths: tuple[Path, ...]) -> Stamp:
    """Changes whenever a file, or who may read it, changes. Links are followed, since mounted secrets swap them."""
    return tuple(_stamp_of(path) for path in paths)


def _stamp_of(path: Path) -> tuple[int, ...]:
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return (found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino)
