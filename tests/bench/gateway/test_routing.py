"""The bench of routers: the same conversations each time, figures of receipts and workers, a real run in small."""

import pytest
from tokenizers import Tokenizer

from bench.gateway.conversations import FOLDER, Shape, Turn, draw, words
from bench.gateway.routing import Setting, figures, measure, table
from bench.gateway.stand_ins import Pace, Room

SMALL = Setting(
    workers=2,
    pace=Pace(step_ms=1.0, prompt_token_us=1.0),
    room=Room(num_blocks=512),
    shape=Shape(conversations=4, turns=3, systems=1, answer=8, think_s=0.05, begin_s=0.1),
)


def test_the_same_seed_gives_the_same_conversations() -> None:
    assert draw(3, Shape()) == draw(3, Shape())
    assert draw(3, Shape()) != draw(4, Shape())
    assert len({each.system for each in draw(0, Shape(conversations=64, systems=8))}) == 8


def test_an_answer_of_words_is_read_as_the_tokens_that_it_was() -> None:
    """Else the next turn would not find the answer in the cache, whatever the router does."""
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    ids = [token_id for token_id, _ in words()][:400]
    prefix, text = "<|im_start|>assistant\n", "".join(text for _, text in words()[:400])
    assert tokenizer.encode(prefix + text).ids == [*tokenizer.encode(prefix).ids, *ids]


def test_figures_are_of_what_was_answered() -> None:
    turns = [
        Turn(number=0, first_s=0.1, prompt_tokens=100, cached_tokens=0),
        Turn(number=1, first_s=0.02, prompt_tokens=200, cached_tokens=150),
        Turn(number=2, first_s=0.0, prompt_tokens=0, cached_tokens=0, error="503"),
    ]
    found = figures(turns, [100, 50])
    assert (found["answered"], found["errors"], found["hit_receipts"], found["hit_workers"]) == (2, ["503"], 0.5, 0.5)
    assert (found["later_first_ms_p50"], found["first_ms_p99"], found["busiest_share"]) == (20.0, 100.0, 0.667)


@pytest.mark.slow
@pytest.mark.parametrize("router", ["ours", "round robin"])
def test_a_run_in_small(router: str) -> None:
    run = measure(router, 0, SMALL)
    assert (run["answered"], run["errors"]) == (12, [])
    assert run["hit_receipts"] == run["hit_workers"]
    if router == "ours":
        assert run["hit_workers"] > 0.5  # all but each turn's own words and blocks that are not full
    assert router in table([run])
