"""Trains folio-chat from the tokens that `prepare.py` wrote: about ten minutes on one H100.

    python -m examples.train_demo.train --data build/folio --out build/folio-chat --minutes 6.5

For the first half of the time the model reads (books, dialogues and some chat); in the second half it mostly chats,
while the learning rate falls to zero. Time, not steps, drives the schedule, so that any GPU ends with a finished model.
Legend: B rows in a batch · T tokens of a row · V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM

from examples.train_demo.prepare import CONTEXT_TOKENS
from examples.train_demo.tokenizer import END_OF_TEXT, TURN_END

READ_MIX = {"books": 1.0, "picture_books": 1.5, "dialogues": 1.0, "reading": 1.0, "folio": 0.2}
TALK_MIX = {"books": 0.15, "picture_books": 0.3, "dialogues": 0.15, "reading": 0.1, "folio": 0.5}
MORE_MIX = {"books": 0.01, "picture_books": 0.03, "dialogues": 0.01, "reading": 0.02, "folio": 1.0}
TALK_FROM, DECAY_FROM, WARMUP_UNTIL = 0.5, 0.5, 0.02
ROPE_THETA = 10_000.0
SHAPES = {
    "wide": {"hidden_size": 384, "intermediate_size": 896, "num_hidden_layers": 5, "num_attention_heads": 6},
    "deep": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 10, "num_attention_heads": 4},
    "tiny": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2},
}
Rows = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Clock:
    """Progress of the training, from 0 to 1, by time or by number of steps, whichever is further. start_s: on the clock
    of `time.perf_counter`."""

    minutes: float
    max_steps: int
    start_s: float

    def progress(self, step: int) -> float:
        return min(1.0, max((time.perf_counter() - self.start_s) / (60 * self.minutes), step / self.max_steps))


def build_model(shape: str, tokenizer: PreTrainedTokenizerBase) -> Qwen2ForCausalLM:
    """A randomly initialised Qwen2.5-architecture model: GQA, QKV bias, tied head."""
    config = Qwen2Config(
        **SHAPES[shape], num_key_value_heads=2 if shape != "tiny" else 1, vocab_size=len(tokenizer),
        max_position_embeddings=2 * CONTEXT_TOKENS, rope_theta=ROPE_THETA, rms_norm_eps=1e-6, tie_word_embeddings=True,
        bos_token_id=tokenizer.convert_tokens_to_ids(END_OF_TEXT),
        eos_token_id=tokenizer.convert_tokens_to_ids(TURN_END),
        use_sliding_window=False, attention_dropout=0.0,
    )  # fmt: skip
    return Qwen2ForCausalLM(config)


def pack(data: dict[str, np.ndarray], mix: dict[str, float], row_len: int, seed: int) -> Rows:
    """One epoch of rows. Documents come in random order, and each is put whole into the fullest of up to 32 open rows
    that has room; documents longer than a row are left out.

    mix: how many copies of each source's documents to use on average. A row's tail is filled with end-of-text ids with
    weight 0. Returns tokens (int32) and percentages (uint8), both [rows, row_len].
    """
    rng = np.random.default_rng(seed)
    copies = np.array([mix.get(name, 0.0) for name in data["names"]])[data["sources"]]
    copies = np.floor(copies + rng.random(len(copies))).astype(int)
    order = rng.permutation(np.repeat(np.arange(len(copies)), copies))
    lens, full = np.diff(data["ends"], prepend=0).tolist(), []
    open_rows: list[tuple[int, list[int]]] = [(row_len, [])]
    for document in order.tolist():
        need = lens[document]
        if need > row_len:
            continue
        room, row = min(((r, i) for i, (r, _) in enumerate(open_rows) if r >= need), default=(0, None))
        if row is None:
            if len(open_rows) == 32:
                full.append(open_rows.pop(min(range(32), key=lambda i: open_rows[i][0]))[1])
            open_rows.append((row_len, []))
            room, row = row_len, len(open_rows) - 1
        open_rows[row][1].append(document)
        open_rows[row] = (room - need, open_rows[row][1])
    return _fill(data, [*full, *(documents for _, documents in open_rows if documents)], row_len, rng)


def pack_file(path: Path, mix: dict[str, float], row_len: int, seed: int) -> Rows:
    """`pack` in a worker process, which reads the archive itself."""
    return pack(dict(np.load(path)), mix, row_len, seed)


def _fill(data: dict[str, np.ndarray], rows: list[list[int]], row_len: int, rng: np.random.Generator) -> Rows:
    """The rows' tokens and percentages, in random order."""
    ends = data["ends"]
    starts = np.concatenate([[0], ends[:-1]])
    tokens = np.full((len(rows), row_len), data["tokens"][-1], np.int32)
    percent = np.zeros((len(rows), row_len), np.uint8)
    for row, number in enumerate(rng.permutation(len(rows))):
        at = 0
        for document in rows[number]:
            start, end = starts[document], ends[document]
            tokens[row, at : at + end - start] = data["tokens"][start:end]
            percent[row, at : at + end - start] = data["percent"][start:end]
            at += end - start
    return tokens, percent


def batches(epochs: Iterator[Rows], batch_rows: int, device: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Token ids (int64) and loss weights (float32, 0 to 1) on the device, both [B, T + 1]. An epoch's incomplete last
    batch is dropped."""
    for tokens, percent in epochs:
        for start in range(0, len(tokens) - batch_rows + 1, batch_rows):
            ids = torch.from_numpy(tokens[start : start + batch_rows]).to(device).long()
            yield ids, torch.from_numpy(percent[start : start + batch_rows]).to(device).float() / 100


def token_losses(model: Qwen2ForCausalLM, ids_BT: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of every next token, [B, T]. ids_BT has T + 1 columns. The mask None makes attention causal,
    without regard to where documents end."""
    with torch.autocast(ids_BT.device.type, torch.bfloat16):
        hidden = model.model(input_ids=ids_BT[:, :-1], attention_mask={"full_attention": None}, use_cache=False)
        logits_BTV = model.lm_head(hidden.last_hidden_state)
    losses = F.cross_entropy(logits_BTV.float().flatten(0, 1), ids_BT[:, 1:].flatten(), reduction="none")
    return losses.view(ids_BT.shape[0], -1)


def weighted_loss(model: Qwen2ForCausalLM, ids_BT: torch.Tensor, weights_BT: torch.Tensor) -> torch.Tensor:
    """The batch's mean loss, weighted by token."""
    weights = weights_BT[:, 1:]
    return (token_losses(model, ids_BT) * weights).sum() / weights.sum()


def build_optimizers(model: Qwen2ForCausalLM, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the embedding, norms and biases."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    embedding = [p for n, p in model.named_parameters() if "embed" in n]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    muon = torch.optim.Muon(matrices, lr=lr, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    groups = [{"params": embedding, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return [muon, torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))]


def lr_factor(progress: float) -> float:
    """Factor of the learning rate: linear warm-up, constant, then linear decay to zero."""
    if progress < WARMUP_UNTIL:
        return max(progress / WARMUP_UNTIL, 0.01)
    return min(1.0, (1 - progress) / (1 - DECAY_FROM))


@torch.no_grad()
def evaluate(model: Qwen2ForCausalLM, heldout: dict[str, Rows], device: str) -> dict[str, float]:
    """Held-out perplexity by source, over the tokens with weight 1."""
    perplexity = {}
    for name, rows in heldout.items():
        total = num_tokens = 0.0
        for ids, weights in batches(iter([rows]), min(16, len(rows[0])), device):
            counted = (weights[:, 1:] == 1).float()
            total += (token_losses(model, ids) * counted).sum().item()
            num_tokens += counted.sum().item()
        perplexity[name] = round(math.exp(total / num_tokens), 3)
    return perplexity


def train(model: Qwen2ForCausalLM, args: argparse.Namespace, heldout: dict[str, Rows], device: str) -> list[dict]:
    """Train the model in place. Returns the log: about 40 records, evenly spaced by progress, with perplexities in
    every fourth."""
    optimizers = build_optimizers(model, args.lr)
    log: list[dict] = []
    loss_of = torch.compile(weighted_loss) if device == "cuda" else weighted_loss
    with ProcessPoolExecutor(args.workers, mp_context=get_context("spawn")) as pool:
        mixes = (MORE_MIX, MORE_MIX) if args.start else (READ_MIX, TALK_MIX)
        read, talk = (batches(_epochs(pool, mix, args), args.batch_rows, device) for mix in mixes)
        for _ in range(3):
            loss_of(model, *next(read)).backward()
        clock, step, progress = Clock(args.minutes, args.steps, time.perf_counter()), 0, 0.0
        while progress < 1:
            model.zero_grad()
            loss = loss_of(model, *next(read if progress < TALK_FROM else talk))
            loss.backward()
            _update(model, optimizers, args.lr * lr_factor(progress))
            step += 1
            if progress >= len(log) / 40:
                log.append(_record(step, progress, loss.item(), clock, args))
                if len(log) % 4 == 1:
                    log[-1]["perplexity"] = evaluate(model, heldout, device)
                print(json.dumps(log[-1]), flush=True)
            progress = clock.progress(step)
        log.append(_record(step, progress, loss.item(), clock, args))
        pool.shutdown(cancel_futures=True)
    return log


def _epochs(pool: ProcessPoolExecutor, mix: dict[str, float], args: argparse.Namespace) -> Iterator[Rows]:
    """Packed epochs of one mix, four of them prepared ahead."""
    make = partial(pack_file, args.data / "train.npz", mix, args.row_tokens + 1)
    futures = [pool.submit(make, seed) for seed in range(4)]
    for seed in count(len(futures)):
        yield futures.pop(0).result()
        futures.append(pool.submit(make, seed))


def _update(model: Qwen2ForCausalLM, optimizers: list[torch.optim.Optimizer], lr: float) -> None:
    """One step of every optimizer, with clipped gradients."""
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()


def _record(step: int, progress: float, loss: float, clock: Clock, args: argparse.Namespace) -> dict:
    """One record of the log; `tokens` counts whole rows, including the filling."""
    seconds = round(time.perf_counter() - clock.start_s, 1)
    tokens = step * args.batch_rows * args.row_tokens
    return {"step": step, "progress": round(progress, 3), "seconds": seconds, "tokens": tokens, "loss": round(loss, 3)}


def published_config(model: Qwen2ForCausalLM) -> dict:
    """A config.json with the same fields as the published Qwen2.5 checkpoints."""
    fields = (
        "architectures", "attention_dropout", "bos_token_id", "eos_token_id", "hidden_act", "hidden_size",
        "initializer_range", "intermediate_size", "max_position_embeddings", "max_window_layers", "model_type",
        "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps", "tie_word_embeddings",
        "use_cache", "use_sliding_window", "vocab_size",
    )  # fmt: skip
    config = {field: getattr(model.config, field) for field in fields}
    config |= {"architectures": ["Qwen2ForCausalLM"], "max_window_layers": model.config.num_hidden_layers}
    return config | {"rope_theta": ROPE_THETA, "sliding_window": None, "torch_dtype": "bfloat16"}


def save(model: Qwen2ForCausalLM, tokenizer_folder: Path, out: Path, log: list[dict]) -> None:
    """Write the checkpoint in bf16 with its configs and tokenizer, and the log of its training."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    eos = [tokenizer.convert_tokens_to_ids(t) for t in (TURN_END, END_OF_TEXT)]
    model.generation_config = GenerationConfig(
        bos_token_id=eos[1], pad_token_id=eos[1], eos_token_id=eos, do_sample=True, temperature=0.7, top_p=0.8, top_k=20
    )
    model.to(torch.bfloat16).save_pretrained(out)
    (out / "config.json").write_text(json.dumps(published_config(model), indent=2) + "\n")
    (out / "training_log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in log))
    shutil.copytree(tokenizer_folder, out, dirs_exist_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="the folder that prepare.py wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", choices=SHAPES, default="wide")
    parser.add_argument("--start", type=Path, help="a checkpoint to train on, with chats only, instead of a new model")
    parser.add_argument("--minutes", type=float, default=6.5, help="of training, after compiling")
    parser.add_argument("--steps", type=int, default=10**9, help="stop earlier after so many steps")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--batch-rows", type=int, default=96)
    parser.add_argument("--row-tokens", type=int, default=CONTEXT_TOKENS)
    parser.add_argument("--heldout-rows", type=int, default=10**9, help="of each source, to evaluate with")
    parser.add_argument("--workers", type=int, default=8, help="processes that pack rows")
    parser.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), help="of the CPU, where there is no GPU"
    )
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    held = dict(np.load(args.data / "heldout.npz"))
    heldout = {name: pack(held, {name: 1.0}, args.row_tokens + 1, 0) for name in held["names"]}
    heldout = {
        name: (ids[: args.heldout_rows], percent[: args.heldout_rows]) for name, (ids, percent) in heldout.items()
    }
    tokenizer = AutoTokenizer.from_pretrained(args.data / "tokenizer")
    if args.start:
        model = Qwen2ForCausalLM.from_pretrained(args.start, dtype=torch.float32).to(device)
    else:
        model = build_model(args.shape, tokenizer).to(device)
    print(args.shape, sum(p.numel() for p in model.parameters()), "parameters on", device, flush=True)
    log = train(model, args, heldout, device)
    log[-1]["perplexity"] = evaluate(model.to(torch.bfloat16).float(), heldout, device)
    print(json.dumps(log[-1]))
    if args.start:  # the log of earlier runs comes first
        log = [*map(json.loads, (args.start / "training_log.jsonl").read_text().splitlines()), *log]
    save(model, args.data / "tokenizer", args.out, log)


if __name__ == "__main__":
    main()
