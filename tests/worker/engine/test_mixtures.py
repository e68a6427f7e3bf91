"""Requests of all kinds together, over a pool too small for them, are each what they are alone."""

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from octavo.wire.messages import Finished, Grammar, GrammarKind
from tests.support.grammar.models import Speaker, tiny_speaker
from tests.support.grammar.rig import GrammarRig

pytestmark = pytest.mark.usefixtures("one_thread")

GRAMMARS = (
    Grammar(kind=GrammarKind.REGEX, source="(foo|ba+r)( [0-9]+)*"),
    Grammar(kind=GrammarKind.CHOICE, source='["yes", "no", "maybe so"]'),
    Grammar(kind=GrammarKind.JSON_OBJECT),
)
Outcome = tuple[list[int], str, int | None, int, int]
"""Tokens, reason or error, stop token, prompt and completion tokens."""


@pytest.fixture(scope="module")
def tiny() -> Speaker:
    return tiny_speaker()


def some_sampling(rng: np.random.Generator, vocab_size: int) -> dict[str, Any]:
    """Every parameter now and then."""
    ids = [int(each) for each in rng.integers(0, vocab_size, 60)]
    candidates: dict[str, Any] = {
        "top_k": int(rng.choice([1, 10])),
        "top_p": 0.7,
        "min_p": 0.05,
        "typical_p": 0.9,
        "top_n_sigma": 1.5,
        "repetition_penalty": 1.4,
        "presence_penalty": 0.6,
        "frequency_penalty": -0.5,
        "min_tokens": 5,
        "stop_token_ids": tuple(ids[:40]),
        "ignore_eos": True,
        "logit_bias": {ids[0]: 6.0, ids[1]: -100.0},
        "allowed_token_ids": tuple(ids),
        "bad_words": ((ids[2],), (ids[3], ids[4])),
        "grammar": GRAMMARS[rng.integers(len(GRAMMARS))],
    }
    wanted = {name: value for name, value in candidates.items() if rng.random() < 0.2}
    return wanted | {
        "temperature": float(rng.choice([0.0, 0.8, 1.5])),
        "seed": int(rng.choice([3, 2**64 - 1])),
        "max_tokens": int(rng.choice([5, 16, 17, 40])),
    }


def requests(seed: int, vocab_size: int) -> Iterator[tuple[int, list[int], tuple[int, ...], dict[str, Any]]]:
    """Handle, prompt, handles of forks, sampling. Prompts end at borders of blocks and beside them; many begin
    alike."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, vocab_size, 70).tolist()
    for handle in range(1, 19):
        length, num_shared = int(rng.choice([1, 15, 16, 17, 32, 33, 50])), int(rng.integers(0, 60))
        prompt = (shared[:num_shared] + rng.integers(0, vocab_size, length).tolist())[:length]
        forks = tuple(handle + 100 * index for index in range(1, int(rng.choice([1, 1, 3, 4]))))
        yield handle, prompt, forks, some_sampling(rng, vocab_size)


def outcome(tokens: list[int], end: Finished | None) -> Outcome:
    assert end is not None
    return tokens, end.error or end.reason.name, end.stop_token_id, end.prompt_tokens, end.completion_tokens


def ask(rig: GrammarRig, handle: int, prompt: list[int], forks: tuple[int, ...], sampling: dict[str, Any]) -> None:
    sampling = dict(sampling)
    rig.ask(handle, prompt, sampling.pop("grammar", None), fork_handles=forks, **sampling)


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_request_is_in_any_mixture_what_it_is_alone(tiny: Speaker, seed: int, max_in_flight: int) -> None:
    here = tiny.rig(num_seqs=6, num_blocks=14, max_in_flight=max_in_flight)
    rng = np.random.default_rng(100 + seed)
    asked = list(requests(seed, tiny.vocab_size))
    for handle, prompt, forks, sampling in asked:
        ask(here, handle, prompt, forks, sampling)
        here.step()
        here.pause(int(rng.integers(1, handle + 1)))
        here.step()
        here.resume(int(rng.integers(1, handle + 1)))
    here.resume(*here.outputs)
    found = {handle: outcome(each.token_ids, each.finished) for handle, each in here.run().items()}
    counters = here.scheduler.counters
    assert counters.num_preemptions == sum(each.finished.preemptions for each in here.outputs.values() if each.finished)
    assert counters.num_generated_tokens == sum(len(each.token_ids) for each in here.outputs.values())
    assert min(counters.num_preemptions, counters.num_pauses, counters.num_cached_tokens) > 0
    here.close()
    for handle, prompt, forks, sampling in asked:
        for index, each in enumerate((handle, *forks)):
            alone = tiny.rig(num_seqs=1)
            ask(alone, 1, prompt, (), sampling | {"seed": (sampling["seed"] + index) % 2**64})
            wanted = alone.run()[1]
            alone.close()
            assert found[each] == outcome(wanted.token_ids, wanted.finished), (each, msgspec.to_builtins(sampling))
