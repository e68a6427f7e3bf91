"""What a load consists of: prompts and lengths, drawn at random or read from a file.

    random            ids U[0, vocabulary), lengths U[(1 - ratio) L, (1 + ratio) L]
    ShareGPT          JSON: [{"conversations": [{"from": …, "value": …}, …]}, …]: the first turn, as long as its answer
    prompts           JSONL: {"prompt": …} or {"messages": […]} or {"turns": […]}, and "output_tokens" where it is known
    trace             CSV TIMESTAMP,ContextTokens,GeneratedTokens (Azure's), or JSONL {"timestamp": ms, "input_length",
                      "output_length"} (Mooncake's): lengths and the times at which they came

Must not know: services, clocks.
"""

import csv
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from octavo.cli.bench.limits import MOST_DRAWN_TOKENS
from octavo.cli.errors import shorten, usage
from octavo.client.requests import MESSAGE_FIELDS, GenerateFields, generate_request

FEWEST_TOKENS = 4  # of a ShareGPT turn that counts, and
MOST_PROMPT_TOKENS, MOST_TOKENS = 1024, 2048  # the most, as vLLM's benchmark has it
_LATEST_MS = 1e15  # the year 33658
FORMATS = "a ShareGPT JSON list, JSONL of prompts, or a trace (CSV or JSONL)"
CountTokens = Callable[[str], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request. num_output: the most tokens, or exactly that many, whatever the model says. due_s: seconds after the
    trace's first request; None if the dataset has no times."""

    prompt: GenerateFields
    num_output: int
    is_exact: bool
    due_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Tokens of prompts and outputs if the dataset does not say. range_ratio: how far drawn lengths deviate from
    them."""

    num_prompt: int
    num_output: int
    range_ratio: float = 0.0


def random_asks(count: int, lengths: Lengths, *, vocab_size: int, seed: int) -> list[Ask]:
    """Requests with prompts of random ids."""
    dice = random.Random(seed)

    def draw(length: int) -> int:
        reach = lengths.range_ratio * length
        return max(1, dice.randint(round(length - reach), round(length + reach)))

    drawn = [(draw(lengths.num_prompt), draw(lengths.num_output)) for _ in range(count)]
    return [_exact(dice, num_prompt, num_output, vocab_size) for num_prompt, num_output in drawn]


def read_asks(
    path: Path, count: int, lengths: Lengths, *, vocab_size: int, seed: int, count_tokens: CountTokens
) -> list[Ask]:
    """`count` requests from a file, which starts over if it has fewer; a trace is never longer than its file. Raises
    CliError."""
    rows = _rows(path)
    if not rows:
        raise _unusable(path, "there is nothing in it")
    first = rows[0]
    if isinstance(first, dict) and "conversations" in first:
        return _many(path, _from_conversations(rows, count_tokens), count)
    if isinstance(first, dict) and _PROMPTS & first.keys():
        return _many(path, (_from_prompt(path, number, row, lengths) for number, row in enumerate(rows, 1)), count)
    if isinstance(first, dict) and first.keys() >= _TRACE:
        return _from_trace(path, rows[:count], vocab_size=vocab_size, seed=seed)
    raise _unusable(path, "its first entry is of no kind that is known")


_PROMPTS = {"prompt", "messages", "turns"}
_TRACE = {"timestamp", "input_length", "output_length"}
_AZURE = {"TIMESTAMP": "timestamp", "ContextTokens": "input_length", "GeneratedTokens": "output_length"}


def _rows(path: Path) -> list[Any]:
    """The entries of the file. Raises CliError."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # Windows begins files with a mark of their order of bytes
    except (OSError, UnicodeDecodeError) as error:
        raise _unusable(path, getattr(error, "strerror", None) or "it is not text") from None
    if text.lstrip().startswith("TIMESTAMP"):
        lines = csv.DictReader(text.splitlines())
        return [{_AZURE.get(name, name): cell for name, cell in row.items()} for row in lines]
    try:
        if text.lstrip().startswith("["):
            return list(json.loads(text))
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except RecursionError:
        raise _unusable(path, "its JSON is nested too deeply") from None
    except ValueError as error:
        raise _unusable(path, f"it is not JSON: {error}") from None


def _unusable(path: Path, why: str) -> Exception:
    return usage("the dataset cannot be used", f"{path}: {why}", f"give --dataset a file of {FORMATS}")


def _many(path: Path, asks: Iterator[Ask], count: int) -> list[Ask]:
    found = list(islice(asks, count))
    if not found:
        raise _unusable(path, "no entry of it is of use")
    return list(islice(cycle(found), count))


def _from_conversations(rows: Sequence[Any], count_tokens: CountTokens) -> Iterator[Ask]:
    for row in rows:
        turns = row.get("conversations") if isinstance(row, dict) else None
        turns = turns if isinstance(turns, list) else []
        values: list[Any] = [turn.get("value") for turn in turns if isinstance(turn, dict)]
        if len(values) < 2 or not all(isinstance(value, str) and value for value in values[:2]):
            continue
        num_prompt, num_output = count_tokens(values[0]), count_tokens(values[1])
        is_long = min(num_prompt, num_output) >= FEWEST_TOKENS
        if is_long and num_prompt <= MOST_PROMPT_TOKENS and num_prompt + num_output <= MOST_TOKENS:
            yield Ask(prompt=GenerateFields(text=values[0]), num_output=num_output, is_exact=False)


def _from_prompt(path: Path, number: int, row: Any, lengths: Lengths) -> Ask:
    fields = row if isinstance(row, dict) else {}
    num_output = fields.get("output_tokens") or lengths.num_output
    if not isinstance(num_output, int) or not 1 <= num_output <= MOST_DRAWN_TOKENS:
        raise _unusable(path, f"entry {number}: output_tokens is {shorten(num_output)}, which is no count")
    if isinstance(fields.get("messages"), list) and all(isinstance(each, dict) for each in fields["messages"]):
        # Datasets tell more of messages, such as times.
        known = [{name: each[name] for name in MESSAGE_FIELDS if name in each} for each in fields["messages"]]
        prompt = GenerateFields(messages=known)
    else:
        turns = fields.get("turns")
        text: Any = fields.get("prompt") or (next(iter(turns), None) if isinstance(turns, list) else turns)
        if not isinstance(text, str) or not text:
            raise _unusable(path, f"entry {number} has no prompt, messages or turns")
        prompt = GenerateFields(text=text)
    try:
        generate_request(**prompt)
    except (TypeError, ValueError) as error:
        raise _unusable(path, f"entry {number}: {error}") from None
    return Ask(prompt=prompt, num_output=num_output, is_exact=False)


def _from_trace(path: Path, rows: Sequence[Any], *, vocab_size: int, seed: int) -> list[Ask]:
    dice, asks, first_s = random.Random(seed), [], None
    for number, row in enumerate(rows, 1):
        try:
            at_s = _seconds(row["timestamp"])
            num_prompt, num_output = (_count(row, name) for name in ("input_length", "output_length"))
        except (KeyError, TypeError, ValueError) as error:
            raise _unusable(path, f"entry {number}: {error}") from None
        first_s = at_s if first_s is None else first_s
        asks.append(_exact(dice, max(1, num_prompt), max(1, num_output), vocab_size, due_s=max(0.0, at_s - first_s)))
    return asks


def _seconds(stamp: object) -> float:
    """Seconds from a date with a time, or from milliseconds."""
    if isinstance(stamp, int | float):
        if not abs(stamp) <= _LATEST_MS:
            raise ValueError(f"timestamp: {shorten(stamp)} is no time in milliseconds")
        return stamp / 1000
    try:
        return datetime.fromisoformat(str(stamp)[:26]).timestamp()
    except (ValueError, OverflowError):
        raise ValueError(f"timestamp: {shorten(stamp)} is neither milliseconds nor a date with a time") from None


def _count(row: Any, name: str) -> int:
    """Tokens, 0 for none. Raises KeyError, TypeError, ValueError."""
    try:
        count = int(row[name])
    except (OverflowError, ValueError):
        raise ValueError(f"{name}: {shorten(row[name])} is no number of tokens") from None
    if not 0 <= count <= MOST_DRAWN_TOKENS:
        raise ValueError(f"{name}: {shorten(count)} is no number of tokens from 0 to {MOST_DRAWN_TOKENS:,}")
    return count


def _exact(
    dice: random.Random, num_prompt: int, num_output: int, vocab_size: int, *, due_s: float | None = None
) -> Ask:
    prompt = GenerateFields(token_ids=dice.choices(range(vocab_size), k=num_prompt))
    return Ask(prompt=prompt, num_output=num_output, is_exact=True, due_s=due_s)
