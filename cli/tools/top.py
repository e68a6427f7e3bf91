"""`octavo top`: the load of a service in the terminal, as it changes."""

import contextlib
import json
import os
import queue
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
from rich.console import Console, Group
from rich.live import Live

from octavo import Client
from octavo.cli.client.connect import connect
from octavo.cli.client.json_fields import numeric_fields
from octavo.cli.errors import CliError
from octavo.cli.progress import can_redraw
from octavo.cli.settings.addresses import join_address
from octavo.cli.settings.groups import CallSettings
from octavo.cli.tools.top_screen import View, plain, screen
from octavo.client.errors import OctavoError
from octavo.v1 import load_pb2 as pb

MAX_REQUESTS = 200
RETRY_S = 1.0
POLL_S = 0.1
CONNECT_TIMEOUT_S = 10.0
QUIT = ("q", "\x03", "\x04", "\x1b")


def top(settings: CallSettings, *, interval_s: float, once: bool, as_json: bool) -> int:
    """Until q; once, or on what cannot be drawn on again, one plain snapshot. Raises CliError, OctavoError."""
    view = View(address=join_address(settings.host, settings.port))
    with connect(settings) as client:
        first = _first(client)
        if as_json:
            print(json.dumps(numeric_fields(first)))  # noqa: T201
        elif once or not (sys.stdout.isatty() and sys.stdin.isatty() and can_redraw(Console())):
            print(plain(first, view))  # noqa: T201
        else:
            _watch(client, first, view, interval_s=interval_s)
    return 0


def _first(client: Client) -> pb.WatchLoadResponse:
    """A snapshot. Raises CliError if the service does not have this call."""
    try:
        with contextlib.closing(client.watch_load(max_requests=MAX_REQUESTS, timeout_s=CONNECT_TIMEOUT_S)) as watch:
            return next(watch)
    except OctavoError as error:
        if error.code is grpc.StatusCode.UNIMPLEMENTED:
            numbers = f"{client.target} has no octavo.v1.LoadService"
            raise CliError(
                "the service is too old to be watched", numbers, "update it; `octavo ps` asks less"
            ) from None
        raise


def _watch(client: Client, snapshot: pb.WatchLoadResponse, view: View, *, interval_s: float) -> None:
    told: queue.SimpleQueue[pb.WatchLoadResponse | str] = queue.SimpleQueue()
    reader = threading.Thread(target=_read, args=(client, interval_s, told), daemon=True)
    reader.start()
    console = Console()
    with (
        _interrupts() as interrupts,
        _keys() as keyboard,
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        while not interrupts:
            lines = screen(snapshot, view, width=console.size.width, height=console.size.height)
            live.update(Group(*lines), refresh=True)
            for key in _pressed(keyboard):
                if key in QUIT:
                    return
                view = view.pressed(key)
            while not told.empty():
                news = told.get()
                if isinstance(news, str):
                    view = View(address=view.address, sort=view.sort, is_reversed=view.is_reversed, note=news)
                else:
                    snapshot = news
                    view = View(address=view.address, sort=view.sort, is_reversed=view.is_reversed)
    raise KeyboardInterrupt


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Ctrl-C as an entry in a list: as an exception it might be raised in a library's callback and get lost."""
    found: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: found.append(number))
    try:
        yield found
    finally:
        signal.signal(signal.SIGINT, before)


def _read(client: Client, interval_s: float, told: "queue.SimpleQueue[pb.WatchLoadResponse | str]") -> None:
    """Put snapshots into the queue as they come; when a stream ends, put the error and try again."""
    while True:
        try:
            for snapshot in client.watch_load(interval_s=interval_s, max_requests=MAX_REQUESTS):
                told.put(snapshot)
            told.put("the service has ended the watch; asking again")
        except OctavoError as error:
            told.put(f"no news: {error.message} ({error.reason or error.code.name}); asking again")
        except (ValueError, RuntimeError):  # the client is closed: we quit
            return
        time.sleep(RETRY_S)


@contextmanager
def _keys() -> Iterator[int]:
    """The keyboard without line buffering and echo; restored at the end."""
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    tty.setcbreak(keyboard)
    try:
        yield keyboard
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


def _pressed(keyboard: int) -> str:
    """Keys since the last call, waiting a moment for one. Escape sequences such as arrows are ignored."""
    if not select.select([keyboard], [], [], POLL_S)[0]:
        return ""
    keys = os.read(keyboard, 64).decode("utf-8", "replace")
    if not keys:
        return "q"  # nobody is there any more
    return "" if keys.startswith("\x1b") and len(keys) > 1 else keys
