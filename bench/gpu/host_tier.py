"""The second tier of KV blocks: what a prefix costs that comes back from host memory, and what that is worth.

    python -m bench.gpu.host_tier [--shape 7B] [--json out/gpu_host_tier.json]
    python -m bench.gpu.host_tier --device cpu --shape tiny --long 200 --conversations 6 --turns 3 --opening 40
        --question 12 --answer 6 --host-gib 0.05

rates: GB/s between staging and host memory, of runs of 1, 8 and all neighbouring blocks, beside one plain copy of
pinned memory each way. again: first token of a prompt of --long tokens that is new, and that was evicted by another
one. conversations: --conversations at once, each of --turns turns; a turn's prompt is all that was said before and
--question new tokens, its answer has --answer. The device's pool holds --share of what they have in the end; with the
tier and without: output tokens per second, first token p50. idle: 64 requests decode with room for all, with the tier
and without, in turns. The whole of it takes about three minutes on an H100, most of them the start and the runs without
the tier; what has not begun after --budget-s seconds is left out, and said so. Random weights, bf16 (on a CPU float32,
torch's steps).
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.figures import percentile, write_json
from bench.gpu.device import host_copy_rates, need_cuda
from bench.in_process import InProcess, KeptMail, tokens_of
from bench.shapes import NUM_IDS, SHAPES
from octavo.blockmgr.ids import PrefixCache
from octavo.model import CausalLM
from octavo.model.attention.host_blocks import HostBlocks
from octavo.model.attention.kv_pool import kv_block_bytes
from octavo.wire.messages import Finished, StepOutput
from octavo.worker.runners.torch.runner import TorchRunner, TorchRunnerConfig

BLOCK = 16
GIB = 1 << 30
WORKLOADS = ["rates", "again", "conversations", "idle"]
Figures = dict[str, float]


class TimedMail(KeptMail):
    """first_s: when each output's first token came."""

    def __init__(self) -> None:
        super().__init__()
        self.first_s: dict[int, float] = {}

    def take(self, output: StepOutput) -> None:
        """Keep everything, and when first tokens came."""
        now_s = time.perf_counter()
        for handle, _ in tokens_of(output):
            self.first_s.setdefault(handle, now_s)
        super().take(output)

    def pop_end(self, handle: int) -> Finished:
        """Take the end of an output that has ended. Ends the bench if the output failed."""
        finished = self.finished.pop(handle)
        if finished.error:
            raise SystemExit(f"error: a request failed: {finished.error} {finished.detail}")
        return finished


class Bench:
    """One runner, and engines over parts of its pool. with_tier: whether the runner may be asked for copies."""

    def __init__(self, runner: Any, *, max_batch_tokens: int, copy_s: float) -> None:
        self.runner = runner
        self.copy_s = copy_s
        self._copies = getattr(runner, "_host_copies", None)  # which CUDA runners have
        self._max_batch_tokens = max_batch_tokens

    def prompt(self, rng: np.random.Generator, num_tokens: int) -> np.ndarray:
        """A prompt of random ids."""
        return rng.integers(0, self.runner.config.vocab_size, num_tokens).astype(np.int32)

    def engine(self, *, num_blocks: int | None = None, with_tier: bool) -> InProcess:
        """An engine with an empty cache. Without the tier the runner does not look for copies either."""
        config = self.runner.config
        host = self.runner.host_blocks
        if self._copies is not None:
            self.runner._host_copies = self._copies if with_tier else None
        return InProcess(
            self.runner,
            replace(config, num_blocks=min(num_blocks or config.num_blocks, config.num_blocks)),
            max_batch_tokens=self._max_batch_tokens,
            prefix_cache=PrefixCache.ON,
            mail=TimedMail(),
            num_host_blocks=host.num_blocks if with_tier else 0,
            max_copies_in=self.runner.max_copies_in,
            copy_s_per_block=self.copy_s,
        )


def first_token_ms(engine: InProcess, prompt_ids_T: np.ndarray) -> tuple[float, int]:
    """Milliseconds from the request in the inbox to its token in the outbox, and how many tokens were cached."""
    begin_s = time.perf_counter()
    handle = engine.ask(prompt_ids_T, max_tokens=1, ignore_eos=True)
    while handle not in engine.mail.finished:
        engine.step()
    mail: Any = engine.mail
    return 1e3 * (mail.first_s[handle] - begin_s), mail.pop_end(handle).cached_tokens


def measure_again(bench: Bench, long: int, repeats: int) -> Figures:
    """Measure two prompts that do not fit at once, so that each evicts the other."""
    rng = np.random.default_rng(1)
    num_blocks = -(-long // BLOCK)
    engine = bench.engine(num_blocks=num_blocks + min(40, num_blocks // 8 + 2), with_tier=True)
    first_token_ms(engine, bench.prompt(rng, long))  # warm-up: libraries choose their kernels
    prompts = [bench.prompt(rng, long), bench.prompt(rng, long)]
    computed = [first_token_ms(engine, prompt)[0] for prompt in prompts]
    again, cached = [], []
    for turn in range(2 * repeats):
        ms, num_cached = first_token_ms(engine, prompts[turn % 2])
        again.append(ms)
        cached.append(num_cached)
    computed += [first_token_ms(engine, bench.prompt(rng, long))[0] for _ in range(2)]
    host = engine.blocks.host
    return {
        "computed_ms": statistics.median(computed),
        "again_ms": statistics.median(again),
        "percent": 100 * statistics.median(again) / statistics.median(computed),
        "cached_tokens_least": min(cached),
        "blocks_in": host.num_copied_in,
        "blocks_out": host.num_copied_out,
    }


@dataclass(slots=True)
class Conversation:
    """What was said so far, and when the current turn was sent."""

    ids_T: np.ndarray
    turn: int = 0
    asked_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationShape:
    """The shape of the conversations."""

    conversations: int
    turns: int
    opening: int
    question: int
    answer: int

    @classmethod
    def asked_for(cls, arguments: argparse.Namespace) -> "ConversationShape":
        """The shape that the command line asks for."""
        return cls(**{each.name: getattr(arguments, each.name) for each in fields(cls)})

    @property
    def longest(self) -> int:
        """Tokens of one conversation at its end."""
        return self.opening + self.turns * (self.question + self.answer)


def converse(bench: Bench, engine: InProcess, talk: ConversationShape) -> Figures:
    """Hold all conversations, sending each turn as soon as the one before is answered."""
    rng = np.random.default_rng(2)
    under_way: dict[int, Conversation] = {}
    waits_ms: list[float] = []
    num_cached = 0
    begin_s = time.perf_counter()

    def ask(each: Conversation) -> None:
        each.ids_T = np.concatenate([each.ids_T, bench.prompt(rng, talk.question)])
        each.asked_s = time.perf_counter()
        under_way[engine.ask(each.ids_T, max_tokens=talk.answer, ignore_eos=True)] = each

    for _ in range(talk.conversations):
        ask(Conversation(bench.prompt(rng, talk.opening)))
    mail: Any = engine.mail
    while under_way:
        engine.step()
        for handle in [handle for handle in mail.finished if handle in under_way]:
            each = under_way.pop(handle)
            num_cached += mail.pop_end(handle).cached_tokens
            waits_ms.append(1e3 * (mail.first_s.pop(handle) - each.asked_s))
            each.ids_T = np.concatenate([each.ids_T, np.array(mail.tokens.pop(handle), np.int32)])
            each.turn += 1
            if each.turn < talk.turns:
                ask(each)
    seconds = time.perf_counter() - begin_s
    counters, host = engine.scheduler.counters, engine.blocks.host
    copy_s = engine.scheduler.costs.copy.seconds or 0.0
    token_s = engine.scheduler.costs.prefill.seconds or 0.0
    return {
        "seconds": seconds,
        "tokens_per_s": talk.conversations * talk.turns * talk.answer / seconds,
        "first_token_p50_ms": percentile(waits_ms, 50),
        "first_token_p90_ms": percentile(waits_ms, 90),
        "cached_tokens": num_cached,
        "prefill_tokens": counters.num_prefill_tokens,
        "preemptions": counters.num_preemptions,
        "swaps": counters.num_swaps,
        "blocks_out": host.num_copied_out,
        "blocks_in": host.num_copied_in,
        "copy_us_per_block": 1e6 * copy_s,
        "prefill_us_per_token": 1e6 * token_s,
    }


def measure_conversations(bench: Bench, talk: ConversationShape, share: float, is_late: Callable[[], bool]) -> Any:
    """Measure without the tier and with it."""
    num_blocks = max(-(-talk.longest // BLOCK) + 8, int(share * talk.conversations * talk.longest) // BLOCK)
    found: dict[str, Figures] = {}
    for name, with_tier in (("with", True), ("without", False)):
        if is_late():
            print(f"  {name} the tier: left out, the time is over", flush=True)
            continue
        found[name] = converse(bench, bench.engine(num_blocks=num_blocks, with_tier=with_tier), talk)
        show(f"{name} the tier", found[name])
    if len(found) == 2:
        found["ratio"] = {
            name: found["with"][name] / found["without"][name] for name in ("tokens_per_s", "first_token_p50_ms")
        }
        show("with / without", found["ratio"])
    return found | {"pool": {"blocks": num_blocks, "tokens_in_the_end": talk.conversations * talk.longest}}


def decode_rate(bench: Bench, *, with_tier: bool, num_requests: int, num_tokens: int) -> float:
    """Tokens per second, measured from when all requests run."""
    engine, rng = bench.engine(with_tier=with_tier), np.random.default_rng(3)
    for _ in range(num_requests):
        engine.ask(bench.prompt(rng, 64), max_tokens=num_tokens, ignore_eos=True)
    mail: Any = engine.mail
    while len(mail.first_s) < num_requests:
        engine.step()
    begin_s, before = time.perf_counter(), mail.num_tokens
    while not mail.finished:
        engine.step()
    seconds, num_decoded = time.perf_counter() - begin_s, mail.num_tokens - before
    while len(mail.finished) < num_requests:
        engine.step()
    return num_decoded / seconds


def measure_idle(bench: Bench, *, rounds: int, num_requests: int, num_tokens: int) -> Figures:
    """The cost of the tier when nothing is copied: rounds take turns, so that a drifting clock affects both."""
    sizes = {"num_requests": num_requests, "num_tokens": num_tokens}
    decode_rate(bench, with_tier=True, **sizes)
    rates: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(2 * rounds):
        with_tier = (turn + turn // 2) % 2 == 0
        rates[with_tier].append(decode_rate(bench, with_tier=with_tier, **sizes))
    on, off = statistics.median(rates[True]), statistics.median(rates[False])
    spread = max((max(each) - min(each)) / statistics.median(each) for each in rates.values())
    return {
        "with_tokens_per_s": on,
        "without_tokens_per_s": off,
        "cost_percent": 100 * (off - on) / off,
        "spread_percent": 100 * spread,
    }


def show(name: str, figures: Figures) -> None:
    """Print one line."""
    cells = [f"{key} {value:.{0 if abs(value) >= 1000 else 2}f}" for key, value in figures.items()]
    print(f"  {name:18s}", "  ".join(cells), flush=True)


# ------------------------------------------------------------ on a CUDA device


def cuda_bench(arguments: argparse.Namespace) -> Bench:
    """A bench on a CUDA device. Imports what needs triton."""
    from bench.gpu.runner import make_runner
    from octavo.worker.runners.cuda.graph_runner import Autotune

    runner = make_runner(
        arguments.shape,
        max_slots=64,
        max_batch_tokens=arguments.max_batch_tokens,
        max_model_len=max(arguments.long, ConversationShape.asked_for(arguments).longest) + BLOCK,
        host_bytes=int(arguments.host_gib * GIB),
        autotune=Autotune.CACHED,
    )
    begin_s = time.perf_counter()
    copy_s = runner.measure_copies()
    print(f"  copies measured in {time.perf_counter() - begin_s:.2f} s: {1e6 * copy_s:.1f} us a block", flush=True)
    return Bench(runner, max_batch_tokens=arguments.max_batch_tokens, copy_s=copy_s)


def cuda_rates(bench: Bench) -> Figures:
    """GB/s, by events on the copy streams."""
    copies, host = bench.runner._host_copies, bench.runner.host_blocks
    num = min(4 * copies.rows, host.num_blocks // 8, bench.runner.config.num_blocks)
    found: Figures = {"block_bytes": host.row_bytes, "rows": copies.rows}
    none = np.empty((0, 2), np.int32)
    for name, run in (("1", 1), ("8", 8), ("all", num)):
        places = np.concatenate([np.arange(run) + start for start in range(0, num * 2, run * 2)])[:num].astype(np.int32)
        places = places[places < host.num_blocks]
        pairs_C2 = np.stack([np.arange(len(places), dtype=np.int32), places], axis=1)
        copies.wait()
        copies.take_times()
        copies.begin(pairs_C2, none)
        copies.wait()
        out_blocks, out_s = copies.take_times()
        for start in range(0, len(pairs_C2), copies.rows):
            copies.begin(none, pairs_C2[start : start + copies.rows, ::-1])
        copies.begin(none, none)
        copies.wait()
        in_blocks, in_s = copies.take_times()
        found[f"out_runs_of_{name}_gb_s"] = out_blocks * host.row_bytes / out_s / 1e9
        found[f"in_runs_of_{name}_gb_s"] = in_blocks * host.row_bytes / in_s / 1e9
    found["plain_out_gb_s"], found["plain_in_gb_s"] = (rate / 1e9 for rate in host_copy_rates())
    return found


# ------------------------------------------------------------ on a CPU


def cpu_bench(arguments: argparse.Namespace) -> Bench:
    """A bench with torch's steps over ordinary memory, to try the bench and to measure this machine's copies."""
    config = SHAPES[arguments.shape].config
    model = CausalLM.random(config, seed=0)
    longest = max(arguments.long, ConversationShape.asked_for(arguments).longest) + BLOCK
    runner_config = TorchRunnerConfig(
        num_blocks=max(2 * -(-longest // BLOCK) + 64, 16 * 24),
        block_size=BLOCK,
        max_slots=16,
        max_model_len=longest,
        vocab_size=min(NUM_IDS, config.vocab_size),
    )
    row_bytes = kv_block_bytes(config, block_size=BLOCK, dtype=model.dtype)
    host = HostBlocks(int(arguments.host_gib * GIB) // row_bytes, row_bytes, is_pinned=False)
    runner = TorchRunner(model, runner_config, host_blocks=host)
    return Bench(runner, max_batch_tokens=arguments.max_batch_tokens, copy_s=runner.measure_copies())


def cpu_rates(bench: Bench) -> Figures:
    """GB/s of the runner's own copies, out and back in."""
    row_bytes = bench.runner.host_blocks.row_bytes
    return {"block_bytes": row_bytes, "both_ways_gb_s": row_bytes / bench.runner.measure_copies() / 1e9}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="7B")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, default=WORKLOADS)
    parser.add_argument("--long", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--opening", type=int, default=768)
    parser.add_argument("--question", type=int, default=128)
    parser.add_argument("--answer", type=int, default=48)
    parser.add_argument("--share", type=float, default=0.25)
    parser.add_argument("--host-gib", type=float, default=16.0)
    parser.add_argument("--max-batch-tokens", type=int, default=8192)
    parser.add_argument("--budget-s", type=float, default=225.0)
    parser.add_argument("--json", type=Path)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> dict[str, object]:
    """Measure, print and write everything; returns the figures."""
    arguments, begin_s = parse(argv), time.perf_counter()
    is_cuda = arguments.device == "cuda"
    if is_cuda:
        need_cuda()
    bench = cuda_bench(arguments) if is_cuda else cpu_bench(arguments)
    found: dict[str, object] = {
        "device": torch.cuda.get_device_name() if is_cuda else "cpu", "shape": arguments.shape,
        "start_s": time.perf_counter() - begin_s,
    }  # fmt: skip

    def is_late() -> bool:
        return time.perf_counter() - begin_s > arguments.budget_s

    if "rates" in arguments.only:
        with torch.inference_mode():
            found["rates"] = (cuda_rates if is_cuda else cpu_rates)(bench)
        show("rates", found["rates"])  # type: ignore[arg-type]
    if "again" in arguments.only and not is_late():
        found["again"] = measure_again(bench, arguments.long, arguments.repeats)
        show("again", found["again"])  # type: ignore[arg-type]
    if "idle" in arguments.only and not is_late():
        sizes = {"num_requests": 64, "num_tokens": 192} if is_cuda else {"num_requests": 8, "num_tokens": 24}
        found["idle"] = measure_idle(bench, rounds=3, **sizes)
        show("idle", found["idle"])  # type: ignore[arg-type]
    if "conversations" in arguments.only:
        talk = ConversationShape.asked_for(arguments)
        found["conversations"] = measure_conversations(bench, talk, arguments.share, is_late)
    found["seconds"] = time.perf_counter() - begin_s
    print(f"  {found['seconds']:.0f} s in all", flush=True)
    write_json(arguments.json, found)
    return found


if __name__ == "__main__":
    main()
