"""`octavo pull`: a checkpoint onto this machine, where `octavo serve` finds it."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from octavo.cli.errors import INTERRUPTED
from octavo.cli.progress import BYTES, Bars, PlainSteps, Step, can_redraw, shown_bytes
from octavo.model.checkpoint.source import OnDownload, resolve_checkpoint

PATIENCE_S = 3.0  # for threads that wait for the hub, after Ctrl-C


def pull(model: str, *, revision: str | None) -> int:
    """Print the checkpoint's folder on stdout, and progress on stderr. Raises CheckpointError."""
    console = Console(stderr=True, highlight=False, markup=False)
    begin_s = time.monotonic()
    with _told(model, console) as told:
        folder = resolve_checkpoint(model, revision=revision, on_progress=told)
    num_bytes = sum(path.stat().st_size for path in folder.iterdir())
    seconds = time.monotonic() - begin_s
    fetched = f"downloaded {shown_bytes(told.num_fetched)} in {seconds:.1f} s" if told.num_fetched else "already here"
    console.print(f"{model}: {fetched}, {shown_bytes(num_bytes)} in all", soft_wrap=True)
    print(folder)  # noqa: T201
    return 0


class _Told:
    """Shows progress; ends the download with KeyboardInterrupt once that was asked for."""

    def __init__(self, show: OnDownload) -> None:
        self.num_fetched = 0
        self.is_over = False
        self._show = show

    def __call__(self, done: int, total: int | None) -> None:
        if self.is_over:
            raise KeyboardInterrupt
        self.num_fetched = done
        self._show(done, total)

    def stop(self) -> None:
        """End the download at the next piece of any file, or by force if none comes."""
        self.is_over = True
        timer = threading.Timer(PATIENCE_S, os._exit, [INTERRUPTED])
        timer.daemon = True
        timer.start()


@contextmanager
def _told(model: str, console: Console) -> Iterator[_Told]:
    """A listener of the download. The hub's threads fetch a file each to its end, whatever the main thread hears, so
    Ctrl-C is told to them."""
    bars = Bars(console, {model: model}, stage="asking the hub") if can_redraw(console) else None
    plain = PlainSteps()

    def show(done: int, total: int | None) -> None:
        step = Step(stage="downloading", done=done, total=total, unit=BYTES)
        if bars is not None:
            bars.show(model, step)
        elif (line := plain.line(model, step)) is not None:
            console.print(line, soft_wrap=True)

    def on_interrupt(*_: object) -> None:
        if bars is not None:
            bars.close()
        console.print("stopped; files that are whole are kept, run it again for the others", soft_wrap=True)
        told.stop()
        raise KeyboardInterrupt

    told = _Told(show)
    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield told
    finally:
        signal.signal(signal.SIGINT, before)
        if bars is not None:
            bars.close()
