"""A host of a Ray cluster is killed under streams: the longest pause, tokens lost, seconds until capacity is back.

    python -m bench.gateway.node_loss [--streams 64] [--tokens 600] [--json out/node_loss.json]

Three raylets of one CPU each on this machine, two workers without a model (the oracle, 10 ms a step), so that what is
measured is the way of streams and of placement. The first run is left alone; in the second one of the two hosts is
killed when every stream has got 50 tokens. Ray calls a host dead after 1.5 s here, where its default is 15 s.
"""

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from octavo import Client
from tests.support.services.raylets import QUIET, Raylets, raylets
from tests.support.services.service import Service, serve

KILL_AFTER = 50
LIMIT_S = 300.0
FLAGS = ("--runner=oracle", "--num-blocks=8192", "--page=off", "--oracle-step-delay-s=0.01")
ENDLESS = ("--oracle-eos-every=1000000",)


class Streams:
    """Callers that read concurrently, each in its own thread."""

    def __init__(self, target: str, number: int, num_tokens: int) -> None:
        self.got: list[list[int]] = [[] for _ in range(number)]
        self.pauses_s = [0.0] * number
        self.moves = [0] * number
        self._threads = [threading.Thread(target=self._read, args=(target, n, num_tokens)) for n in range(number)]
        for each in self._threads:
            each.start()

    def _read(self, target: str, n: int, num_tokens: int) -> None:
        asked: dict[str, Any] = {"max_tokens": num_tokens, "seed": n, "output": "token_ids"}
        with Client(target) as client:
            stream = client.stream(token_ids=[n + 1, 6, 7], **asked)
            last_s = 0.0
            for delta in stream.deltas():
                now_s = time.monotonic()
                self.pauses_s[n] = max(self.pauses_s[n], now_s - (last_s or now_s))
                last_s = now_s
                self.got[n] += delta.token_ids
            self.moves[n] = stream.finished.receipt.migrations if stream.finished else -1

    def join(self) -> None:
        for each in self._threads:
            each.join(LIMIT_S)


def measure(service: Service, cluster: Raylets, *, number: int, num_tokens: int) -> dict[str, Any]:
    """Both runs."""
    quiet = Streams(service.target, number, num_tokens)
    quiet.join()
    disturbed = Streams(service.target, number, num_tokens)
    deadline_s = time.monotonic() + LIMIT_S
    while min(map(len, disturbed.got)) < KILL_AFTER and time.monotonic() < deadline_s:
        time.sleep(0.005)
    before = {each.epoch for each in service.load()}
    victim = next(node for node in cluster.raylets if cluster.processes(node))
    killed_s = time.monotonic()
    cluster.kill(victim)
    while time.monotonic() < deadline_s:
        epochs = {each.epoch for each in service.load()}
        if len(epochs) == len(before) and epochs != before:
            break
        time.sleep(0.02)
    capacity_s = time.monotonic() - killed_s
    disturbed.join()
    pairs = list(zip(quiet.got, disturbed.got, strict=True))
    return {
        "streams": number,
        "tokens": num_tokens,
        "moved": sum(moves > 0 for moves in disturbed.moves),
        "tokens_lost": sum(max(0, len(a) - len(b)) for a, b in pairs),
        "tokens_other": sum(x != y for a, b in pairs for x, y in zip(a, b, strict=False)),
        "longest_pause_s": round(max(disturbed.pauses_s), 3),
        "longest_pause_undisturbed_s": round(max(quiet.pauses_s), 3),
        "capacity_back_s": round(capacity_s, 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="A host of a Ray cluster is killed under streams.")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    os.environ.update(QUIET)
    with raylets() as cluster, tempfile.TemporaryDirectory() as folder:
        for _ in range(3):
            cluster.add(cpus=1)
        flags = (*FLAGS, *ENDLESS, f"--cluster={cluster.address}", "--workers=2", "--max-num-seqs=64")
        with serve(Path(folder), *flags) as service:
            service.wait_until_supervised()
            result = measure(service, cluster, number=asked.streams, num_tokens=asked.tokens)
    for name, value in result.items():
        print(f"{name:<30}{value}")
    if asked.json:
        asked.json.parent.mkdir(parents=True, exist_ok=True)
        asked.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
