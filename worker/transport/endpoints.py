"""Which gateways a worker dials: those configured at the start, and those listed in a file that may change while it
serves. The file is read in a thread, because the disk may be slow."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from octavo.wire.endpoints import Endpoint, EndpointError, EndpointsFile, parse_endpoint

log = structlog.get_logger(__name__)
LOOK_S = 0.5  # between two looks at the file


class GatewayEndpoints:
    """endpoints: all of them now. A file that becomes unusable later changes nothing; that is logged once."""

    def __init__(self, fixed: Sequence[str], file: Path | None, *, check: Callable[[Endpoint], None]) -> None:
        """check(endpoint): raises EndpointError if it must not be dialled; so does this."""
        for address in fixed:
            check(parse_endpoint(address))
        self.endpoints = self._fixed = tuple(fixed)
        self._file = None if file is None else EndpointsFile(file)
        self._check = check
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.look()

    def look(self) -> bool:
        """Read the file again. Returns whether the endpoints have changed. Raises EndpointError, once after each change
        of the file."""
        listed = None if self._file is None else self._file.changed()
        if listed is None:
            return False
        for address in listed:
            self._check(parse_endpoint(address))
        before, self.endpoints = self.endpoints, tuple(dict.fromkeys((*self._fixed, *listed)))
        return before != self.endpoints

    def follow(self, dial: Callable[[Sequence[str]], None]) -> None:
        """From now on call dial(endpoints), in a thread, whenever they change."""
        if self._file is not None:
            self._thread = threading.Thread(target=self._run, args=(dial,), name="gateway endpoints", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop and wait for the thread. Idempotent."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, dial: Callable[[Sequence[str]], None]) -> None:
        while not self._stop.wait(LOOK_S):
            try:
                if self.look():
                    log.info("gateways_listed", gateways=list(self.endpoints))
                    dial(self.endpoints)
            except EndpointError as error:
                log.error("gateways_not_listed", error=str(error))
