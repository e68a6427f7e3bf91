"""Whether the time of a refusal tells how right a key was: Welch's t-test between keys that share nothing with a known
one, and keys that share all but the last character, or are the first or the last of the ring.

`python -m bench.gateway.key_timing --samples 10000 --keys 64`. JSON on stdout. |t| below 4.5 is the customary bound of
"no difference found" (Goodwill and others, TVLA). The negative control, a ring that returns at its first match, must
exceed it.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import math
import random
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import structlog

from octavo.gateway.auth.authenticator import Caller, KeyEntry, KeyRing, Scope, digest_of, new_key
from octavo.v1 import model_pb2, model_pb2_grpc

Samples = dict[str, list[int]]


class EarlyExitRing(KeyRing):
    """The negative control: stops at the first match."""

    def find(self, key: str) -> KeyEntry | None:
        """Find a key in the naive way."""
        digest = digest_of(key)
        return next((entry for entry in self._entries if entry.digest == digest), None)


def presented(known: list[str]) -> dict[str, Callable[[], str]]:
    """Makers of keys to present, by what the keys have in common with the known ones; all have one length."""
    middle = known[len(known) // 2]
    return {
        "nothing": new_key,
        "all but the last": lambda: middle[:-1] + random.choice([each for each in "ABCDwxyz" if each != middle[-1]]),
        "first of the ring": lambda: known[0],
        "last of the ring": lambda: known[-1],
    }


def time_ring(ring: KeyRing, kinds: dict[str, Callable[[], str]], num_samples: int) -> Samples:
    """Nanoseconds of `find`, with the kinds in random order."""
    samples: Samples = {kind: [] for kind in kinds}
    for _ in range(num_samples):
        for kind in random.sample(list(kinds), len(kinds)):
            key = kinds[kind]()
            begin_ns = time.perf_counter_ns()
            ring.find(key)
            samples[kind].append(time.perf_counter_ns() - begin_ns)
    return samples


async def time_calls(known: list[str], kinds: dict[str, Callable[[], str]], num_samples: int) -> Samples:
    """Nanoseconds of a refused call on a real server over a Unix socket."""
    from octavo.gateway.app import Gateway
    from octavo.gateway.config import AccessConfig, GatewayConfig
    from octavo.gateway.workers.config import WorkerPoolConfig

    samples: Samples = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory() as made:
        file = Path(made) / "keys.toml"
        file.touch(mode=0o600)
        file.write_text("".join(f'[keys.k{n}]\nsha256 = "{digest_of(key).hex()}"\n' for n, key in enumerate(known)))
        config = GatewayConfig(
            workers=WorkerPoolConfig(endpoints=()),
            listen_address=f"unix:{made}/s",
            metrics_address=None,
            access=AccessConfig(api_keys_file=file),
        )
        gateway = Gateway(config)
        await gateway.start()
        async with grpc.aio.insecure_channel(gateway.listeners.address) as channel:
            call = model_pb2_grpc.ModelServiceStub(channel).ListModels
            for _ in range(num_samples):
                for kind in random.sample(list(kinds), len(kinds)):
                    samples[kind].append(await _refusal_ns(call, kinds[kind]()))
        await gateway.stop()
    return samples


async def _refusal_ns(call: Any, key: str) -> int:
    metadata, request = (("x-api-key", key),), model_pb2.ListModelsRequest()
    begin_ns = time.perf_counter_ns()
    with contextlib.suppress(grpc.aio.AioRpcError):
        await call(request, metadata=metadata)
    return time.perf_counter_ns() - begin_ns


def welch(one: list[int], other: list[int]) -> dict[str, float]:
    """t and two-sided p (normal approximation, for thousands of samples) of the samples below their common 95th
    percentile: those above are interruptions by the machine."""
    bound = statistics.quantiles([*one, *other], n=20)[-1]
    one, other = [each for each in one if each <= bound], [each for each in other if each <= bound]
    spread = math.sqrt(statistics.variance(one) / len(one) + statistics.variance(other) / len(other))
    t = (statistics.fmean(one) - statistics.fmean(other)) / spread
    medians = statistics.median(one), statistics.median(other)
    return {"t": round(t, 2), "p": math.erfc(abs(t) / math.sqrt(2)), "median_ns": medians[0], "other_ns": medians[1]}


def compare(samples: Samples) -> dict[str, dict[str, float]]:
    """Compare every kind with the keys that share nothing."""
    return {kind: welch(samples["nothing"], samples[kind]) for kind in samples if kind != "nothing"}


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--keys", type=int, default=64)
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    known = [new_key() for _ in range(arguments.keys)]
    caller = Caller(name="k", tenant="k", scopes=frozenset({Scope.GENERATE}))
    entries = [KeyEntry(digest=digest_of(key), caller=caller) for key in known]
    kinds = presented(known)
    wrong = {kind: kinds[kind] for kind in ("nothing", "all but the last")}
    random.seed(secrets.randbits(64))
    report = {
        "samples": arguments.samples,
        "keys": arguments.keys,
        "ring": compare(time_ring(KeyRing(entries), kinds, arguments.samples)),
        "calls": compare(asyncio.run(time_calls(known, wrong, arguments.samples))),
        "control, a hasty ring": compare(time_ring(EarlyExitRing(entries), kinds, arguments.samples)),
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
