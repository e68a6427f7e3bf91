"""How ranks of a group come apart: where one fails, where one waits forever, and where a library does not end."""

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from octavo.model.parallel import Ranks
from tests.support.model.ranks import RankFailed, on_ranks


def failing(ranks: Ranks) -> int:
    """Rank 1 fails, and rank 0 waits for it in a sum."""
    if ranks.rank == 1:
        raise LookupError("nothing there")
    return ranks.least(ranks.rank)


def test_what_fails_on_one_rank_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match=r"rank [01]: (?s:.*)(nothing there|Connection)"):
        on_ranks(2, failing, tmp_path)
    assert multiprocessing.active_children() == []


def ending(ranks: Ranks) -> None:
    """As a library does that finds a fault."""
    if ranks.rank == 1:
        os._exit(7)
    threading.Event().wait()


def test_a_rank_that_ends_is_told(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="rank 1 ended with status 7"):
        on_ranks(2, ending, tmp_path)
    assert multiprocessing.active_children() == []


def waiting(ranks: Ranks) -> None:
    """Forever."""
    threading.Event().wait()


def test_ranks_that_wait_forever_say_where(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RankFailed, match="0 of 2 ranks came to an end in time"):
        on_ranks(2, waiting, tmp_path, timeout_s=1.0)
    assert "in waiting" in capfd.readouterr().err
    assert multiprocessing.active_children() == []


LEAVING = """
import sys, threading
from pathlib import Path
from octavo.model import parallel
parallel.LEAVE_TIMEOUT_S = 0.1
parallel.abort = lambda ranks: threading.Event().wait()
with parallel.join_ranks(Path(sys.argv[1]), rank=int(sys.argv[2]), size=2) as ranks:
    told = ranks.gather_texts("x")
    if sys.argv[3] == "fails":
        raise LookupError("nothing there")
print("after", told)
"""


@pytest.mark.parametrize(("how", "status", "said"), [("ends", 0, "after ['x', 'x']"), ("fails", 1, "nothing there")])
def test_a_process_ends_where_its_library_does_not(how: str, status: int, said: str, tmp_path: Path) -> None:
    """NCCL waits for graphs that hold its sums, which an error's traceback may hold."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", LEAVING, str(tmp_path / "meeting"), str(rank), how],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    begin_s = time.monotonic()
    for process in processes:
        output, _ = process.communicate(timeout=120)
        assert (process.returncode, said in output) == (status, True), output
    assert time.monotonic() - begin_s < 120
