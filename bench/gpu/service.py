"""What callers of the whole service get, part after part, each line printed as soon as it is known.

    one            one stream at a time
    nano           streams of nano bench, `octavo serve` without flags and with the best ones in turns
    cached         its prompts fresh, and the same again, wholly cached, in turns
    conversations  64 of six turns over 1,000 common tokens
    trace          1,000 requests of a trace (long prompts, short answers), all at once
    burst          1,024 short requests at once, five times
    start          seconds to ready with empty caches, then with what that start left in them

    python -m bench.gpu.service [--only PART ...] [--trace FILE] [--load-generator FILE] [--best-flags FLAGS]
        [--seconds 570] [--out FILE] [--quick]

A part that fails, or takes longer than its limit, says why in a line, and the next one begins. `--quick`: tiny sizes
and the embedded model on this CPU. Without --trace, lengths are drawn like those of a code assistant.
"""

import argparse
import json
import os
import random
import shlex
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from bench import talks
from bench.callers import CallerAnswers, Callers, CallersError
from bench.figures import percentile, write_json
from bench.gpu.device import need_cuda
from bench.gpu.grpc import BenchError, Service, serving, shares
from bench.random_checkpoint import write_checkpoint
from bench.shapes import SHAPES
from octavo.cli.errors import CliError
from octavo.cli.serve.ports import free_port

PARTS = {"one": 20.0, "nano": 45.0, "cached": 45.0, "conversations": 30.0, "trace": 60.0, "burst": 40.0, "start": 150.0}
"""Seconds that each part may take; nano: with each of its services."""
START_LIMIT_S = 120.0
BEST_FLAGS = "--gateways=8 --max-model-len=4096 --page=off --log-level=warning"
FLAGS_BAR, CACHED_BAR, GAP_BAR_MS, TURN_BAR_MS, BURST_BAR, START_BAR_S = 0.97, 1.05, 26.0, 60.0, 90_000, 20.0
ONE_FIRST_BAR_MS, ONE_TOKEN_BAR_MS = 4.5, 0.46


class Bench:
    """One run: prints lines, keeps figures, stops a part at its limit."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.figures: dict[str, object] = {}
        self.rates: dict[str, list[float]] = {"default": [], "best": []}
        self.sizes = talks.QUICK if arguments.quick else talks.Sizes()
        self._callers = Callers(self.sizes.processes, arguments.load_generator)
        self._folder, self._arguments = folder, arguments
        self._end_s = time.monotonic() + arguments.seconds
        self._begin_s = time.monotonic()
        self._limit_s = self._end_s
        self._num_starts = 0

    def say(self, text: str) -> None:
        """Print a line immediately."""
        print(f"[{time.monotonic() - self._begin_s:5.1f} s] {text}", flush=True)

    def keep(self, name: str, figures: object) -> None:
        """Put figures into the report, which is rewritten each time, so that a run that is cut off loses nothing."""
        self.figures[name] = figures
        write_json(self._arguments.out, self.figures)

    def attempt(self, name: str, limit_s: float, work: Callable[[], None]) -> bool:
        """Do the work; whether it succeeded. If not, a line says why."""
        now_s = time.monotonic()
        self._limit_s = min(now_s + limit_s, self._end_s)
        if self._limit_s - now_s < 1:
            self.say(f"{name}: NOT RUN, the {self._arguments.seconds:.0f} s of this run are over")
            return False
        try:
            work()
        except (BenchError, CallersError, CliError, OSError, ValueError) as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            self.say(f"{name}: FAILED: " + "\n    ".join(lines[-25:]))
            self.keep(f"{name} failed", str(error)[-2000:])
            return False
        return True

    @property
    def left_s(self) -> float:
        """Seconds left of the current part."""
        return max(0.1, self._limit_s - time.monotonic())

    @contextmanager
    def service(self, name: str, flags: list[str], *, caches: Path | None = None) -> Iterator["Measured"]:
        """A service with these flags, ready and warm. Raises BenchError."""
        self._num_starts += 1
        folder, port = self._folder / f"service-{self._num_starts}", free_port("127.0.0.1", set())
        folder.mkdir()
        own = [f"--model={self._arguments.model}", f"--device={self._arguments.device}", "--log-level=info"]
        own += [f"--worker-metrics-port={port}", *self._arguments.serve_flags, *flags]
        limit_s = min(START_LIMIT_S, self.left_s)
        with serving(folder, own, start_timeout_s=limit_s, caches=caches) as service:
            self.say(f"service {name}: ready after {service.start_s:.1f} s; flags: {shlex.join(flags) or 'none'}")
            self.keep(f"start {self._num_starts}, {name}, s", round(service.start_s, 2))
            yield Measured(bench=self, service=service, metrics_url=f"http://127.0.0.1:{port}/metrics")

    def call(self, service: Service, conversations: list[talks.Conversation]) -> CallerAnswers:
        """Make the calls. Raises CallersError, also if answers are incomplete."""
        heard = self._callers.call(service.target, conversations, timeout_s=self.left_s)
        if heard.complaint:
            raise CallersError(heard.complaint)
        return heard

    def close(self) -> None:
        """End the callers."""
        self._callers.close()

    def run(self, parts: list[str]) -> None:
        """Run these parts, the most important first."""
        best = shlex.split(self._arguments.best_flags)
        with_default = [part for part in PARTS if part in parts and part != "start"]
        self._with("default", [], with_default)
        if "nano" in parts:
            for name, flags in (("best", best), ("default", []), ("best", best)):
                self._with(name, flags, ["nano"])
            self._compare_flags()
        if "start" in parts:
            self.attempt("start", PARTS["start"], self._start)

    def _with(self, name: str, flags: list[str], parts: list[str]) -> None:
        """Run these parts with one service."""
        if not parts:
            return

        def work() -> None:
            with self.service(name, flags) as measured:
                self.call(measured.service, talks.nano(self.sizes, 99)[:8])
                again = ", again" if self.rates[name] else ""
                work_of = {
                    "one": measured.one,
                    "nano": lambda: measured.nano(name),
                    "cached": measured.cached,
                    "conversations": measured.conversations,
                    "trace": lambda: measured.trace(self._arguments.trace),
                    "burst": measured.burst,
                }
                for part in parts:
                    self.attempt(f"{part}, {name}{again}", PARTS[part], work_of[part])
                self._limit_s = self._end_s  # stopping the service has its own limit

        self.attempt(f"service {name}", START_LIMIT_S, work)

    def _compare_flags(self) -> None:
        default, best = (self.rates[name] for name in ("default", "best"))
        if not default or not best:
            return
        ratio = statistics.median(default) / statistics.median(best)
        self.say(f"NANO default / best flags, medians: {ratio:.3f} (bar {FLAGS_BAR}){_verdict(ratio >= FLAGS_BAR)}")
        self.keep("nano, default / best", round(ratio, 4))

    def _start(self) -> None:
        caches = self._folder / "caches"
        for state in ("empty", "warm"):
            with self.service(f"with {state} caches", [], caches=caches) as measured:
                start_s, log = measured.service.start_s, measured.service.log.read_text()
            bar = f" (bar {START_BAR_S:.0f}){_verdict(start_s <= START_BAR_S)}" if state == "empty" else ""
            self.say(f"START {state} caches: {start_s:.1f} s{bar}")
            for line in stages(log):
                self.say(f"    {line}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The parts measured with a running service. Every method raises BenchError or CallersError."""

    bench: Bench
    service: Service
    metrics_url: str

    def one(self) -> None:
        """Single requests, one after another, each with a new prompt."""
        sizes = self.bench.sizes
        firsts, tokens = list[float](), list[float]()
        for turn in range(sizes.ones):
            (answer,) = self.bench.call(self.service, talks.one(sizes, 600 + turn)).answers
            (first_s, num_first), (last_s, _) = answer.arrivals[0], answer.arrivals[-1]
            firsts.append(1e3 * first_s)
            tokens.append(1e3 * (last_s - first_s) / max(1, answer.got - num_first))
        first_ms, token_ms = statistics.median(firsts), statistics.median(tokens)
        self.bench.say(
            f"ONE STREAM first token {first_ms:.2f} ms (bar {ONE_FIRST_BAR_MS}){_verdict(first_ms <= ONE_FIRST_BAR_MS)}"
            f" of {' '.join(f'{each:.1f}' for each in firsts)}; {token_ms:.3f} ms a token (bar {ONE_TOKEN_BAR_MS})"
            + _verdict(token_ms <= ONE_TOKEN_BAR_MS)
        )
        self.bench.keep("one stream, ms", {"first token": firsts, "a token": tokens})

    def nano(self, name: str) -> None:
        """New prompts for each seed."""
        for seed in self.bench.sizes.seeds:
            heard = self._one(f"nano, {name}, seed {seed}", talks.nano(self.bench.sizes, seed))
            self.bench.rates[name].append(heard.tokens_per_s)

    def cached(self) -> None:
        """New prompts of other seeds, and the same again, in turns."""
        ratios, firsts = list[float](), {"fresh": list[float](), "cached": list[float]()}
        for seed in (10 + seed for seed in self.bench.sizes.seeds):
            rates = list[float]()
            for state, first_ms in firsts.items():
                heard = self._one(f"cached, {state}, seed {seed}", talks.nano(self.bench.sizes, seed))
                rates.append(heard.tokens_per_s)
                first_ms += heard.first_ms()
            ratios.append(rates[1] / rates[0])
        first = "; ".join(f"{state} first token {_spread(values)}" for state, values in firsts.items())
        ratio, pairs = statistics.median(ratios), " ".join(f"{each:.3f}" for each in ratios)
        is_met = ratio >= CACHED_BAR
        self.bench.say(f"CACHED / fresh: {ratio:.3f} of {pairs} (bar {CACHED_BAR}){_verdict(is_met)}; {first}")
        self.bench.keep("cached / fresh", [round(each, 4) for each in ratios])

    def conversations(self) -> None:
        """Conversations of several turns with a common prefix; again with other ids."""
        sizes, later, rates = self.bench.sizes, list[float](), list[float]()
        for seed in sizes.seeds:
            heard = self._one(f"conversations, seed {seed}", talks.conversations(sizes, 200 + seed))
            rates.append(heard.tokens_per_s)
            later += heard.first_ms(from_turn=1)
            worst = [max(each.first_ms for each in heard.answers if each.index == turn) for turn in range(sizes.turns)]
            self.bench.say("    worst first token by turn, ms: " + " ".join(f"{each:.0f}" for each in worst))
        is_met = max(later) <= TURN_BAR_MS
        self.bench.say(
            f"CONVERSATIONS {_rates(rates)}; first token of turns 2 and on: {_spread(later)}, worst single turn"
            f" {max(later):.0f} ms (bar {TURN_BAR_MS:.0f}){_verdict(is_met)}"
        )
        self.bench.keep("conversations, worst cached turn, ms", round(max(later), 1))

    def trace(self, path: Path | None) -> None:
        """All requests at once; again with other ids of the same lengths."""
        lengths = talks.trace_lengths(self.bench.sizes, path)
        num_prompt, num_output = (statistics.fmean(count) for count in zip(*lengths, strict=True))
        what = path.name if path is not None else "lengths drawn like a code assistant's"
        self.bench.say(f"    trace: {what}; {len(lengths)} of {num_prompt:.0f} + {num_output:.0f} tokens on average")
        gaps, rates = list[float](), list[float]()
        for turn in (1, 2):
            heard = self._one(f"trace, {turn}", talks.of_lengths(lengths, random.Random(turn)))
            rates.append(heard.tokens_per_s)
            gaps.append(percentile(heard.gaps_ms or [0.0], 99))
        told, is_met = " ".join(f"{each:.1f}" for each in gaps), max(gaps) <= GAP_BAR_MS
        self.bench.say(f"TRACE {_rates(rates)}; gap p99 {told} ms (bar {GAP_BAR_MS:.0f}){_verdict(is_met)}")
        self.bench.keep("trace, gap p99, ms", gaps)

    def burst(self) -> None:
        """Several bursts."""
        sizes = self.bench.sizes
        asked = [talks.burst(sizes, 400 + turn) for turn in range(sizes.bursts)]
        rates = [self._one(f"burst, {turn}", each).tokens_per_s for turn, each in enumerate(asked, 1)]
        is_met = min(rates) >= BURST_BAR
        self.bench.say(f"BURST lowest {min(rates):,.0f} of {_rates(rates)} (bar {BURST_BAR:,}){_verdict(is_met)}")
        self.bench.keep("burst, tok/s", [round(each) for each in rates])

    def _one(self, name: str, conversations: list[talks.Conversation]) -> CallerAnswers:
        """Make the calls, and print what came and what the service did for it."""
        before, cpu_before = self._counts(), self.service.cpu_s()
        heard = self.bench.call(self.service, conversations)
        after, cpu_after = self._counts(), self.service.cpu_s()
        did = {name: after[name] - before.get(name, 0.0) for name in after}
        steps = max(1.0, did.get("octavo_engine_steps_total", 0.0))
        asked = max(1.0, did.get("octavo_prefix_cache_queries_total", 0.0))
        figures = {
            "tok/s": round(heard.tokens_per_s),
            "seconds": round(heard.seconds, 2),
            "first token, ms": [round(percentile(heard.first_ms(), each), 1) for each in (50, 99, 100)],
            "gap, ms": [round(percentile(heard.gaps_ms or [0.0], each), 1) for each in (50, 99, 100)],
            "messages": sum(len(each.arrivals) for each in heard.answers),
            "steps": round(steps),
            "rows a step": round(did.get("octavo_iteration_requests_sum", 0.0) / steps, 1),
            "tokens a step": round(did.get("octavo_iteration_tokens_sum", 0.0) / steps, 1),
            "step, ms": round(1e3 * did.get("octavo_step_time_seconds_sum", 0.0) / steps, 2),
            "host, ms": round(1e3 * did.get("octavo_step_host_time_seconds_sum", 0.0) / steps, 2),
            "cached": round(did.get("octavo_prefix_cache_hits_total", 0.0) / asked, 3),
            "preempted": round(did.get("octavo_num_preemptions_total", 0.0)),
            "cores": {role: shares(cpu_before[role], cpu_after[role], heard.seconds) for role in cpu_after},
        }
        self.bench.say(f"  {name}: {heard.tokens_per_s:,.0f} tok/s " + json.dumps(figures))
        self.bench.keep(name, figures)
        return heard

    def _counts(self) -> dict[str, float]:
        """The worker's counters and sums; empty if it does not answer."""
        try:
            with urllib.request.urlopen(self.metrics_url, timeout=5) as answer:
                text = answer.read().decode()
        except OSError:
            return {}
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name.endswith(("_total", "_sum", "_count")):
                    found[sample.name] = found.get(sample.name, 0.0) + sample.value
        return found


def stages(log: str) -> list[str]:
    """The stages of a start, with seconds since its first log line, from the service's log."""
    told, first = list[str](), None
    for line in log.splitlines():
        try:
            row = json.loads(line)
            at = datetime.fromisoformat(row.pop("timestamp"))
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
        first = first or at
        facts = " ".join(f"{name}={row[name]}" for name in ("done", "total", "unit", "num_blocks") if name in row)
        told.append(f"{(at - first).total_seconds():6.2f} {row.get('event')} {facts}".rstrip())
    return told


def _spread(values: list[float]) -> str:
    """Median and 99th percentile, as text."""
    return f"p50 {percentile(values, 50):.1f} p99 {percentile(values, 99):.1f} ms"


def _rates(rates: list[float]) -> str:
    return " ".join(f"{each:,.0f}" for each in rates) + " tok/s"


def _verdict(is_met: bool) -> str:
    return " met" if is_met else " MISSED"


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--trace", type=Path, help="CSV or JSONL, as octavo bench --dataset takes them")
    parser.add_argument("--load-generator", type=Path, help="sends what has one turn: a file with a function client")
    parser.add_argument("--best-flags", default=BEST_FLAGS, help=f"default: {BEST_FLAGS}")
    parser.add_argument("--serve-flags", type=shlex.split, default=[], help="of every service, the one without, too")
    parser.add_argument("--model", help="a checkpoint, instead of random weights in --shape")
    parser.add_argument("--shape", choices=SHAPES, default="0.5B")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=570.0, help="after them no part begins or goes on")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, the embedded model, this CPU")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(words)
    if arguments.quick:
        arguments.best_flags = "--gateways=2" if arguments.best_flags == BEST_FLAGS else arguments.best_flags
        arguments.device, arguments.model = "cpu", arguments.model or "folio-chat"
        arguments.serve_flags = ["--num-blocks=512", "--num-threads=1", *arguments.serve_flags]
    return arguments


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, object]:
    """The figures of all parts that ran."""
    bench = Bench(arguments, folder)
    if arguments.model is None:
        arguments.model = str(write_checkpoint(folder / "random-model", SHAPES[arguments.shape]))
    bench.say(f"{len(os.sched_getaffinity(0))} CPUs, device {arguments.device}, model {Path(arguments.model).name}")
    try:
        bench.run(arguments.only)
    finally:
        bench.close()
    return bench.figures


def main() -> None:
    """Measure and print."""
    arguments = parse()
    if arguments.device.startswith("cuda"):
        need_cuda()
    with tempfile.TemporaryDirectory(prefix="octavo-bench-") as folder:
        measure(arguments, Path(folder))


if __name__ == "__main__":
    main()
