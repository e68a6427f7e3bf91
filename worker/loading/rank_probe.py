"""Whether ranks on this machine can reach each other, and how fast a sum over them is; for `octavo doctor`, before a
model is divided. Starts a process for each rank, as a group does, and times the sums of a decode step and of a prompt.

Must not know: models, workers.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from octavo.model.parallel import Ranks, join_ranks
from octavo.wire.host import die_with
from octavo.wire.run_dir import temporary_folder

WIDTH = 8192
"""Hidden size: that of the largest models that are divided among ranks."""

NUM_TOKENS = 512
_NUM_SUMS = 20
_WARM_UPS = 3
_TELLS = "octavo-rank-probe "


class RanksApart(RuntimeError):
    """The ranks did not find each other, or could not sum; the message names the rank and its error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """Medians of the slowest rank. transport: gloo or nccl. token_s: to sum the hidden states of one token. prompt_s:
    those of NUM_TOKENS tokens. dtype_bytes: bytes of a value."""

    transport: str
    token_s: float
    prompt_s: float
    dtype_bytes: int

    @property
    def bytes_per_s(self) -> float:
        """Bytes of a prompt's hidden states that are summed in a second."""
        return NUM_TOKENS * WIDTH * self.dtype_bytes / self.prompt_s


def probe_ranks(size: int, *, device: str, timeout_s: float = 60.0) -> ProbeResult:
    """Start the ranks, measure, end them. device: "cpu", or "cuda": rank n uses device n. Raises RanksApart."""
    with ExitStack() as stack:
        folder = stack.enter_context(temporary_folder("octavo-probe-"))
        asking = stack.enter_context(ThreadPoolExecutor(size))
        task = {"meeting": f"{folder}/meeting", "size": size, "device": device, "timeout_s": timeout_s}
        ranks = []
        for rank in range(size):
            words = json.dumps(task | {"rank": rank, "parent": os.getpid()})
            command = [sys.executable, "-P", "-m", __name__, words]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            ranks.append(stack.enter_context(process))
            stack.callback(process.kill)
        deadline_s = time.monotonic() + timeout_s
        answers = [
            asking.submit(_result_of, process, rank, size, deadline_s, timeout_s) for rank, process in enumerate(ranks)
        ]
        found = [answer.result() for answer in as_completed(answers)]  # raises the first failure: others wait for it
    return ProbeResult(
        transport=found[0].transport,
        token_s=max(each.token_s for each in found),
        prompt_s=max(each.prompt_s for each in found),
        dtype_bytes=found[0].dtype_bytes,
    )


def _result_of(
    process: "subprocess.Popen[str]", rank: int, size: int, deadline_s: float, timeout_s: float
) -> ProbeResult:
    try:
        said, errors = process.communicate(timeout=max(0.1, deadline_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise RanksApart(f"rank {rank} of {size} had no answer from the others within {timeout_s:g} s") from None
    told = next((line.removeprefix(_TELLS) for line in said.splitlines() if line.startswith(_TELLS)), None)
    if told is None:
        last = (errors.strip().splitlines() or [f"it ended with status {process.returncode}"])[-1]
        raise RanksApart(f"rank {rank} of {size} failed: {last[:300]}")
    return ProbeResult(**json.loads(told))


def _measure(ranks: Ranks, device: torch.device) -> ProbeResult:
    """Measure on one rank, while the others do the same."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def median_s(num_tokens: int) -> float:
        hidden_TD = torch.zeros(num_tokens, WIDTH, dtype=dtype, device=device)
        seconds = []
        for turn in range(_WARM_UPS + _NUM_SUMS):
            start_s = time.perf_counter()
            ranks.sum(hidden_TD)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if turn >= _WARM_UPS:
                seconds.append(time.perf_counter() - start_s)
        return statistics.median(seconds)

    return ProbeResult(
        transport="nccl" if device.type == "cuda" else "gloo",
        token_s=median_s(1),
        prompt_s=median_s(NUM_TOKENS),
        dtype_bytes=dtype.itemsize,
    )


def main(words: str) -> int:
    """Run one rank and print what it measured. Returns its exit status."""
    task = json.loads(words)
    die_with(task["parent"])
    torch.set_num_threads(1)
    device = torch.device("cpu" if task["device"] == "cpu" else f"cuda:{task['rank']}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        with join_ranks(
            Path(task["meeting"]), rank=task["rank"], size=task["size"], device=device, timeout_s=task["timeout_s"]
        ) as ranks:
            print(_TELLS + json.dumps(asdict(_measure(ranks, device))), flush=True)  # noqa: T201
    except (RuntimeError, OSError) as error:
        print(str(error).partition("\n")[0], file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
