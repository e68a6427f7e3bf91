"""Whether the time to the first token tells a tenant what another one has asked: area under the ROC curve of
"its prefix was in the cache" against "nobody ever asked this", 0.5 for nothing learned.

Starts a guarded service on the embedded model with two tenants. A victim sends a long prompt; then the prompt and a
never-seen one of the same length are sent, in random order, by another tenant (apart) and, as the negative control, by
the victim itself (own). `python -m bench.gateway.prefix_probe --pairs 500`. JSON on stdout.
"""

import argparse
import json
import random
import subprocess
import tempfile
import time
from pathlib import Path

from octavo import Client
from octavo.cli.serve.launch import command_line, environment, write_settings
from octavo.cli.serve.ports import free_port
from octavo.gateway.auth.authenticator import digest_of, new_key

PROMPT_TOKENS = 640
VOCABULARY = 4000  # ids below this are ordinary text for the embedded model


def prompt() -> list[int]:
    """Random ids, never seen before."""
    return [random.randrange(100, VOCABULARY) for _ in range(PROMPT_TOKENS)]


def first_token_s(client: Client, ids: list[int]) -> tuple[float, int]:
    """Seconds to the first token, and the number of cached tokens that the service reports."""
    begin_s = time.perf_counter()
    stream = client.stream(token_ids=ids, max_tokens=1, output="token_ids", temperature=0.0, timeout_s=60)
    for _ in stream.deltas():
        pass
    assert stream.finished is not None
    return time.perf_counter() - begin_s, stream.finished.usage.cached_tokens


def area(hits: list[float], misses: list[float]) -> float:
    """How often a hit was faster than a miss: Mann-Whitney's U divided by its largest value."""
    ranked = sorted([(each, 0) for each in hits] + [(each, 1) for each in misses])
    num_hits, quicker = 0, 0
    for _, kind in ranked:
        num_hits += kind == 0
        quicker += num_hits * (kind == 1)
    return quicker / (len(hits) * len(misses))


def probe(victim: Client, prober: Client, num_pairs: int) -> dict[str, float]:
    """The area, and the cached tokens that were reported to the prober."""
    hits, misses, told = list[float](), list[float](), 0
    for _ in range(num_pairs):
        asked, fresh = prompt(), prompt()
        first_token_s(victim, asked)
        for is_hit in random.sample([True, False], 2):
            seconds, cached = first_token_s(prober, asked if is_hit else fresh)
            (hits if is_hit else misses).append(seconds)
            told += cached
    return {
        "roc_auc": round(area(hits, misses), 3),
        "asked_before_ms": round(1e3 * sorted(hits)[len(hits) // 2], 2),
        "never_seen_ms": round(1e3 * sorted(misses)[len(misses) // 2], 2),
        "cached_tokens_told": told,
    }


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=500)
    arguments = parser.parse_args()
    keys = {name: new_key() for name in ("victim", "prober")}
    taken: set[int] = set()
    with tempfile.TemporaryDirectory() as made:
        file, run_dir = Path(made) / "keys.toml", Path(made) / "run"
        file.touch(mode=0o600)
        file.write_text("".join(f'[keys.{name}]\nsha256 = "{digest_of(key).hex()}"\n' for name, key in keys.items()))
        ports = {name: free_port("127.0.0.1", taken) for name in ("port", "metrics_port", "worker_metrics_port")}
        settings = {"api_keys_file": file, "run_dir": run_dir, "num_blocks": 2048, "log_level": "error", **ports}
        command = command_line("serve", write_settings(settings | {"num_threads": 1}, Path(made) / "octavo.toml"))
        service = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            while not (run_dir / "ready").exists():
                assert service.poll() is None, "the service did not start"
                time.sleep(0.1)
            target = f"127.0.0.1:{ports['port']}"
            with Client(target, api_key=keys["victim"]) as victim, Client(target, api_key=keys["prober"]) as prober:
                report = {
                    "pairs": arguments.pairs,
                    "apart": probe(victim, prober, arguments.pairs),
                    "own": probe(victim, victim, arguments.pairs // 5),
                }
        finally:
            service.terminate()
            service.wait(60)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
