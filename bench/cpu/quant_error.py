"""What rounding weights and cache costs in exactness, against the same checkpoint in float32, on a CPU.

    python -m bench.cpu.quant_error [--model folio-chat] [--text FILE …] [--max-tokens 16384] [--json FILE]
        [--only "fp8 weights, tokens and cache" …]

Texts are plain files, cut into pieces of 512 tokens; without any, what the embedded model is recorded to answer
(answers.json). bench/held_out.txt has stories that it was not trained on. Greedy continuations are of the checkpoint's
recorded prompts, or of `octavo verify`'s. --only: these roundings, beside bf16.
Prints the table of docs/quantization.md; --json writes it, too.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import torch
from tokenizers import Tokenizer

from bench.figures import write_json
from octavo.model import load_model, resolve_checkpoint
from octavo.model.verify.prompts import make_prompts
from octavo.model.verify.rounding_error import Rounding, RoundingError, measure, round_model

PIECE_TOKENS = 512


def pieces(folder: Path, texts: list[Path], max_tokens: int) -> list[list[int]]:
    """Token ids of the texts, cut into pieces; those of the recorded answers if there are no texts."""
    if not texts:
        return [answer["prompt_ids"] + answer["ids"] for answer in recorded(folder)]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = [token for text in texts for token in tokenizer.encode(text.read_text(encoding="utf-8")).ids][:max_tokens]
    cut = [ids[start : start + PIECE_TOKENS] for start in range(0, len(ids), PIECE_TOKENS)]
    return [piece for piece in cut if len(piece) > 1]


def recorded(folder: Path) -> list[dict[str, list[int]]]:
    """Prompts and answers of answers.json, if the folder has one."""
    file = folder / "answers.json"
    return json.loads(file.read_text())["answers"] if file.is_file() else []


def table(rows: dict[str, RoundingError]) -> str:
    """The table in Markdown."""
    lines = [
        "| rounded | perplexity | logits, relative error | divergence, nats | same first choice | greedy, equal |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        lines.append(
            f"| {name} | {row.perplexity:.3f} | {row.relative_error:.4f} | {row.divergence:.5f} "
            f"| {row.same_choice:.1%} | {row.same_outputs} of {row.num_outputs}, {row.mean_prefix:.0f} tokens |"
        )
    return "\n".join(lines)


def main() -> None:
    """Print a row for each rounding."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="folio-chat")
    parser.add_argument("--text", type=Path, nargs="*", default=[])
    parser.add_argument("--max-tokens", type=int, default=16384)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--only", nargs="+", choices=[each.value for each in Rounding], help="beside bf16")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    folder = resolve_checkpoint(arguments.model)
    before = load_model(folder, dtype=torch.float32)
    texts = pieces(folder, arguments.text, arguments.max_tokens)
    prompts = [answer["prompt_ids"] for answer in recorded(folder)] or make_prompts(folder, before.config, 8)
    rows: dict[str, RoundingError] = {}
    for rounding in Rounding if arguments.only is None else map(Rounding, ("none", *arguments.only)):
        model = load_model(folder, dtype=torch.bfloat16)
        round_model(model, rounding)
        name = "bf16" if rounding is Rounding.NONE else rounding.value
        limit = arguments.max_new_tokens
        rows[name] = measure(model, before, texts, prompts, kv_dtype=rounding.kv_dtype, max_new_tokens=limit)
        print(f"{name}: {rows[name]}", flush=True)
    print(f"\n{sum(map(len, texts))} tokens, float32 perplexity {next(iter(rows.values())).before:.3f}\n")
    print(table(rows))
    write_json(arguments.json, {name: asdict(row) for name, row in rows.items()})


if __name__ == "__main__":
    main()
