"""What a load consists of, from files as they are found in the field."""

import json
from pathlib import Path

import pytest

from octavo.cli.bench.datasets import Ask, Lengths, random_asks, read_asks
from octavo.cli.errors import CliError

LENGTHS = Lengths(num_prompt=10, num_output=7)


def read(path: Path, count: int = 3) -> list[Ask]:
    return read_asks(path, count, LENGTHS, vocab_size=100, seed=1, count_tokens=lambda text: len(text.split()))


def test_random_prompts_have_the_lengths_asked_for_and_the_seed_draws_them() -> None:
    asks = random_asks(50, Lengths(num_prompt=10, num_output=20, range_ratio=0.5), vocab_size=100, seed=1)
    assert {len(ask.prompt["token_ids"]) for ask in asks} <= set(range(5, 16))
    assert {ask.num_output for ask in asks} <= set(range(10, 31))
    assert len({ask.num_output for ask in asks}) > 5
    assert all(0 <= token_id < 100 for ask in asks for token_id in ask.prompt["token_ids"])
    assert all(ask.is_exact and ask.due_s is None for ask in asks)
    assert asks == random_asks(50, Lengths(num_prompt=10, num_output=20, range_ratio=0.5), vocab_size=100, seed=1)
    assert asks != random_asks(50, Lengths(num_prompt=10, num_output=20, range_ratio=0.5), vocab_size=100, seed=2)


def conversation(*turns: str) -> dict[str, object]:
    return {"id": "x", "conversations": [{"from": "human", "value": turn} for turn in turns]}


def test_sharegpt_gives_first_turns_as_long_as_their_answers_without_the_extremes(tmp_path: Path) -> None:
    file = tmp_path / "sharegpt.json"
    useful = conversation("what is a fox at night", "an animal with a tail")
    others = [
        conversation("only one turn of it"),
        conversation("too short", "an answer of some length"),
        conversation("a question of length", "short"),
        conversation("w " * 1025, "an answer of some length"),
        conversation("w " * 1000, "w " * 1100),
        {"id": "none"},
        {"conversations": [{"from": "human"}, 3]},
    ]
    file.write_text(json.dumps([others[0], useful, *others[1:]]))
    expected = Ask(prompt={"text": "what is a fox at night"}, num_output=5, is_exact=False)
    assert read(file) == [expected] * 3


def test_prompts_come_as_text_chat_or_turns(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    chat = [{"role": "user", "content": "hello"}]
    told = [{**each, "timestamp": "2026-01-01"} for each in chat]
    rows = [{"prompt": "one", "output_tokens": 3}, {"messages": told}, {"turns": ["two", "three"]}]
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    assert read(file, 4) == [
        Ask(prompt={"text": "one"}, num_output=3, is_exact=False),
        Ask(prompt={"messages": chat}, num_output=7, is_exact=False),
        Ask(prompt={"text": "two"}, num_output=7, is_exact=False),
        Ask(prompt={"text": "one"}, num_output=3, is_exact=False),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,3,4\n2023-11-16 18:15:50.6805900,2,1\n",
        '{"timestamp": 1000, "input_length": 3, "output_length": 4, "hash_ids": [1]}\n'
        '{"timestamp": 5000, "input_length": 2, "output_length": 1, "hash_ids": [2]}\n',
    ],
    ids=["azure", "mooncake"],
)
def test_a_trace_has_lengths_and_times_and_is_never_repeated(text: str, tmp_path: Path) -> None:
    file = tmp_path / "trace"
    file.write_text(text)
    asks = read(file, 9)
    assert [(len(ask.prompt["token_ids"]), ask.num_output, ask.is_exact, ask.due_s) for ask in asks] == [
        (3, 4, True, 0.0),
        (2, 1, True, 4.0),
    ]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "there is nothing in it"),
        (b"\xff\xfe", "it is not text"),
        (b"hello", "it is not JSON: .*"),
        (b"[1, 2]", "its first entry is of no kind that is known"),
        (b'{"question": "x"}', "its first entry is of no kind that is known"),
        (b'[{"conversations": []}]', "no entry of it is of use"),
        (b'{"prompt": "x"}\n{"answer": "y"}', "entry 2 has no prompt, messages or turns"),
        (b'{"prompt": "x", "output_tokens": "many"}', "entry 1: output_tokens is 'many', which is no count"),
        (b'{"prompt": "x", "output_tokens": 1000001}', "entry 1: output_tokens is 1000001, which is no count"),
        (
            b'{"timestamp": 0, "input_length": Infinity, "output_length": 4}',
            "entry 1: input_length: inf is no number of tokens",
        ),
        (b'{"turns": []}', "entry 1 has no prompt, messages or turns"),
        (b'{"turns": 5}', "entry 1 has no prompt, messages or turns"),
        (b'[{"conversations": 5}]', "no entry of it is of use"),
        (b'{"messages": [{"content": "x"}]}', "entry 1: messages: role None is none of system, user, assistant, tool"),
        (
            b'{"messages": [{"role": "user", "content": [{"type": "text"}]}]}',
            "entry 1: messages: content is text, not .*",
        ),
        (b'{"prompt": "x"}\n{"prompt": "\\ud800"}', "entry 2: text: is not UTF-8 text, from its character 1 on"),
        (
            b"TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,3,4\n",
            "entry 1: timestamp: 'yesterday' is neither .*",
        ),
        (
            b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,three,4\n",
            "entry 1: input_length: 'three' is .*",
        ),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,-3,4\n", "entry 1: input_length: -3 is no .*"),
        (
            b'{"timestamp": 0, "input_length": 5000000000, "output_length": 4}',
            "entry 1: input_length: 5000000000 is .*",
        ),
        (b'{"timestamp": 1e400, "input_length": 5, "output_length": 4}', "entry 1: timestamp: inf is no time .*"),
        (b"[" * 100_000, "its JSON is nested too deeply"),
    ],
)
def test_a_file_of_no_use_is_told_with_its_name_and_the_entry(content: bytes, why: str, tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_bytes(content)
    with pytest.raises(CliError, match=f"^the dataset cannot be used: {file}: {why}$"):
        read(file)


def test_a_mark_of_the_order_of_bytes_is_no_part_of_the_text(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b'\xef\xbb\xbf{"prompt": "x"}')
    assert read(tmp_path / "data")[0].prompt == {"text": "x"}


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(CliError, match="nowhere: No such file or directory"):
        read(tmp_path / "nowhere")
