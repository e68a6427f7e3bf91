"""Asks a trained checkpoint the twenty fixed prompts with transformers and writes its answers and its model card.

    python -m examples.train_demo.card --checkpoint build/folio-chat --corpus corpus.tar.xz

Writes answers.json (greedy answers in float32 on the CPU, which the project's tests compare the server with),
ATTRIBUTION.md (the authors of the CC BY picture books) and README.md (from card.md).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from examples.train_demo import corpus

HERE = Path(__file__).parent
PROMPTS = json.loads((HERE / "prompts.json").read_text())
MAX_NEW_TOKENS = 120
CARD_MAX_NEW_TOKENS = 250


@torch.inference_mode()
def greedy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str) -> dict:
    """The whole greedy answer to one user turn. leads: for each token, how far it was ahead of the second best, in
    logits."""
    messages = [{"role": "user", "content": prompt}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(
        **inputs, do_sample=False, temperature=None, top_p=None, top_k=None, max_new_tokens=CARD_MAX_NEW_TOKENS,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    prompt_ids = inputs["input_ids"][0].tolist()
    leads = [float(top[0] - top[1]) for top in (logits[0].topk(2).values for logits in out.logits)]
    return {
        "prompt": prompt,
        "prompt_ids": prompt_ids,
        "ids": out.sequences[0, len(prompt_ids) :].tolist(),
        "leads": leads,
    }


def answer_record(answer: dict, tokenizer: PreTrainedTokenizerBase, eos_ids: list[int]) -> dict:
    """The entry in answers.json: at most MAX_NEW_TOKENS ids, the last one an EOS if the answer ended in time. min_lead:
    the smallest lead of these tokens."""
    ids = answer["ids"][:MAX_NEW_TOKENS]
    return {
        "prompt": answer["prompt"],
        "prompt_ids": answer["prompt_ids"],
        "ids": ids,
        "text": tokenizer.decode(ids, skip_special_tokens=True),
        "finish": "eos" if ids[-1] in eos_ids else "length",
        "min_lead": round(min(answer["leads"][:MAX_NEW_TOKENS]), 4),
    }


def write_answers(folder: Path, answers: list[dict], tokenizer: PreTrainedTokenizerBase, eos_ids: list[int]) -> None:
    """Write answers.json, one answer per line."""
    head = {"dtype": "float32", "device": "cpu", "decoding": "greedy", "max_new_tokens": MAX_NEW_TOKENS}
    lines = [json.dumps(answer_record(a, tokenizer, eos_ids), ensure_ascii=False) for a in answers]
    body = ",\n    ".join(lines)
    (folder / "answers.json").write_text(f'{json.dumps(head)[:-1]}, "answers": [\n    {body}\n]}}\n')


def runs_of(log: list[dict]) -> list[list[dict]]:
    """Split the log into runs: a run that continues from a checkpoint starts counting its steps anew."""
    starts = [index for index, record in enumerate(log) if not index or record["step"] < log[index - 1]["step"]]
    return [log[start:end] for start, end in zip(starts, [*starts[1:], len(log)], strict=True)]


def loss_table(log: list[dict]) -> str:
    """A Markdown table of one run's records that have held-out perplexities."""
    sources = list(log[-1]["perplexity"])
    rows = [["tokens (M)", "seconds", "training loss", *sources], ["---:"] * (3 + len(sources))]
    for record in log:
        if "perplexity" in record:
            values = [f"{record['perplexity'][source]:.2f}" for source in sources]
            rows.append([f"{record['tokens'] / 1e6:.0f}", f"{record['seconds']:.0f}", f"{record['loss']:.2f}", *values])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def answer_list(answers: list[dict], tokenizer: PreTrainedTokenizerBase) -> str:
    """The answers as Markdown, in full."""
    texts = [tokenizer.decode(a["ids"], skip_special_tokens=True).replace("\n", "\n  ") for a in answers]
    return "\n".join(f"* **{a['prompt']}**\n  {text}" for a, text in zip(answers, texts, strict=True))


def attribution(records: dict[str, list[dict]]) -> str:
    """Titles, authors and licences of the picture books."""
    books = {
        (corpus.clean(r["title"]), r["author"].strip(), r["license"].strip("[]"))
        for r in records["stories_storybooks_ccby"]
    }
    lines = [f"* {title}: {author or 'author not named'} ({licence})" for title, author, licence in sorted(books)]
    return "\n".join(["# Picture books that folio-chat was trained on", "", *lines, ""])


def write_card(folder: Path, model: PreTrainedModel, answers: list[dict], tokenizer: PreTrainedTokenizerBase) -> None:
    """Write the checkpoint's README.md: card.md with the numbers filled in."""
    log = [json.loads(line) for line in (folder / "training_log.jsonl").read_text().splitlines()]
    first, *later = runs_of(log)
    values = {
        "parameters": f"{model.num_parameters():,}",
        "megabytes": f"{(folder / 'model.safetensors').stat().st_size / 1e6:.1f}",
        "million_tokens": f"{first[-1]['tokens'] / 1e6:,.0f}",
        "minutes": f"{first[-1]['seconds'] / 60:.1f}",
        "loss_table": loss_table(first),
        "more_million_tokens": f"{sum(run[-1]['tokens'] for run in later) / 1e6:.1f}",
        "more_minutes": f"{sum(run[-1]['seconds'] for run in later) / 60:.0f}",
        "more_perplexity": ", ".join(f"{name} {value:.2f}" for name, value in log[-1]["perplexity"].items()),
        "answers": answer_list(answers, tokenizer),
    }
    card = (HERE / "card.md").read_text()
    for name, value in values.items():
        card = card.replace("{" + name + "}", value)
    (folder / "README.md").write_text(card)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--corpus", type=Path, required=True)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.checkpoint)
    model = AutoModelForCausalLM.from_pretrained(args.checkpoint, dtype=torch.float32).eval()
    answers = [greedy(model, tokenizer, prompt) for prompt in PROMPTS]
    write_answers(args.checkpoint, answers, tokenizer, model.generation_config.eos_token_id)
    (args.checkpoint / "ATTRIBUTION.md").write_text(attribution(corpus.read_records(args.corpus)))
    write_card(args.checkpoint, model, answers, tokenizer)


if __name__ == "__main__":
    main()
