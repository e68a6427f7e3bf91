"""Grammars and everything else that may happen to a request: preemption, lookahead, forks, cancels, limits."""

import json
import threading
import time
from types import SimpleNamespace

import pytest

from octavo.grammar.errors import Refusal
from octavo.wire.messages import Finished, Grammar, GrammarKind, Pooling, WireFinishReason
from octavo.worker.grammar import manager
from octavo.worker.grammar.vocabulary import Vocabulary
from octavo.worker.scheduler.request import Phase
from octavo.worker.transport.heartbeat import heartbeat_of
from octavo.worker.transport.watchdog import Watchdog
from tests.support.grammar.models import Speaker, as_json, oracle_speaker, tiny_speaker
from tests.support.grammar.rig import GrammarRig, Output, json_schema
from tests.support.grammar.schemas import SchemaMaker

pytestmark = pytest.mark.usefixtures("one_thread")

TALE = {
    "type": "object",
    "properties": {"title": {"type": "string", "maxLength": 20}, "pages": {"type": "integer"}, "old": {"enum": [True]}},
    "required": ["title", "pages", "old"],
    "additionalProperties": False,
}


def regex(source: str) -> Grammar:
    return Grammar(kind=GrammarKind.REGEX, source=source)


@pytest.fixture(scope="module")
def tiny() -> Speaker:
    return tiny_speaker()


def end_of(output: Output) -> Finished:
    assert output.finished is not None
    return output.finished


def reason_of(output: Output) -> WireFinishReason:
    return end_of(output).reason


def ask_many(rig: GrammarRig, count: int = 24) -> None:
    """Constrained ones and others side by side."""
    for index in range(count):
        schema = SchemaMaker(index).schema()
        grammar = json_schema(as_json(schema)) if index % 3 else None
        rig.ask(index, range(10, 30 + index), grammar, seed=index, max_tokens=60, frequency_penalty=0.3 * (index % 2))


def tokens_of(rig: GrammarRig) -> dict[int, list[int]]:
    outputs = rig.run()
    rig.close()
    return {handle: output.token_ids for handle, output in outputs.items()}


@pytest.mark.parametrize("speak", [tiny_speaker, oracle_speaker])
def test_steps_ahead_and_preemption_change_no_token(speak: type) -> None:
    speaker = speak()
    plain = speaker.rig(num_seqs=8)
    ask_many(plain)
    expected = tokens_of(plain)
    for changes in ({"max_in_flight": 2}, {"num_blocks": 24}, {"max_in_flight": 2, "num_blocks": 24}):
        rig = speaker.rig(num_seqs=8, **changes)
        ask_many(rig)
        assert tokens_of(rig) == expected, changes
        assert ("num_blocks" in changes) == (rig.scheduler.counters.num_preemptions > 0)


@pytest.mark.parametrize("changes", [{"max_in_flight": 2}, {"num_blocks": 24}])
def test_callers_that_stop_reading_and_read_on_change_no_token(tiny: Speaker, changes: dict[str, int]) -> None:
    plain = tiny.rig(num_seqs=8)
    ask_many(plain)
    expected = tokens_of(plain)
    rig = tiny.rig(num_seqs=8, **changes)
    ask_many(rig)
    for turn in range(120):  # some are paused before their grammar is compiled
        rig.pause(turn % 24)
        rig.step()
        rig.resume((turn + 11) % 24)
    rig.resume(*range(24))
    assert tokens_of(rig) == expected
    assert rig.scheduler.counters.num_pauses > 24


def test_steps_without_grammars_wait_for_no_mask(tiny: Speaker) -> None:
    rig = tiny.rig(max_in_flight=2)
    rig.ask(0, [1, 2, 3], max_tokens=20)
    rig.run()
    rig.close()
    assert rig.observed.mask_s == []


def test_a_prompt_that_is_pooled_waits_for_no_grammar_and_follows_none(tiny: Speaker) -> None:
    rig = tiny.rig(max_in_flight=2)
    rig.ask(0, range(1, 200), regex("abc"), pooling=Pooling.MEAN)
    rig.ask(1, [1, 2, 3], regex("no regex (at all"), pooling=Pooling.LAST_TOKEN)
    outputs = rig.run()
    for _ in range(20):  # a compiled grammar would find a row
        rig.step()
    rig.close()
    assert {handle: (reason_of(output), end_of(output).error) for handle, output in outputs.items()} == {
        0: (WireFinishReason.LENGTH, ""),
        1: (WireFinishReason.LENGTH, ""),
    }
    assert (rig.observed.mask_s, rig.observed.refusals, rig.cache.num_misses) == ([], [], 0)


def test_an_output_whose_grammar_ends_needs_no_end_token(tiny: Speaker) -> None:
    rig = tiny.rig(max_in_flight=2)
    rig.ask(0, [1, 2, 3], regex("abc"))
    rig.ask(1, [1, 2, 3], json_schema(as_json(TALE)), ignore_eos=True)
    outputs = rig.run()
    rig.close()
    assert tiny.text(outputs[0].token_ids) == "abc"
    assert (reason_of(outputs[0]), end_of(outputs[0]).stop_token_id) == (WireFinishReason.STOP, None)
    assert reason_of(outputs[1]) is WireFinishReason.STOP
    assert not {*outputs[0].token_ids, *outputs[1].token_ids} & set(tiny.eos_token_ids)


def test_an_end_token_ends_an_output_that_could_go_on(tiny: Speaker) -> None:
    rig = tiny.rig()
    for seed in range(10):
        rig.ask(seed, [1, 2, 3], regex("[ab]+"), seed=seed, max_tokens=50)
    outputs = rig.run()
    rig.close()
    ended = [output for output in outputs.values() if reason_of(output) is WireFinishReason.STOP]
    assert len(ended) >= 8
    for output in ended:
        assert end_of(output).stop_token_id == output.token_ids[-1] in tiny.eos_token_ids


def test_a_complete_grammar_wins_over_min_tokens_and_ignore_eos(tiny: Speaker) -> None:
    rig = tiny.rig()
    rig.ask(0, [1, 2, 3], regex("a{2,4}"), min_tokens=40, max_tokens=60)
    rig.ask(1, [1, 2, 3], regex("(ab|b)*"), min_tokens=12, max_tokens=60)
    rig.ask(2, [1, 2, 3], regex("[ab]*"), ignore_eos=True, max_tokens=30)
    rig.ask(3, [1, 2, 3], regex("xq"), stop_token_ids=(tiny.tokenizer.token_to_id("q"),), min_tokens=10)
    outputs = rig.run()
    rig.close()
    assert tiny.text(outputs[0].token_ids) == "aaaa"
    assert reason_of(outputs[0]) is WireFinishReason.STOP
    assert len(outputs[1].token_ids) > 12
    assert (tiny.tokenizer.decode(outputs[3].token_ids), reason_of(outputs[3])) == ("xq", WireFinishReason.STOP)
    assert (reason_of(outputs[2]), len(outputs[2].token_ids)) == (WireFinishReason.LENGTH, 30)


def test_max_tokens_cuts_an_output_in_the_middle(tiny: Speaker) -> None:
    rig = tiny.rig()
    rig.ask(0, [1, 2, 3], json_schema(as_json(TALE)), max_tokens=7)
    output = rig.run()[0]
    rig.close()
    assert (reason_of(output), len(output.token_ids)) == (WireFinishReason.LENGTH, 7)
    with pytest.raises(json.JSONDecodeError):
        json.loads(tiny.text(output.token_ids))


def test_further_outputs_of_a_prompt_go_their_own_ways(tiny: Speaker) -> None:
    rig = tiny.rig()
    rig.ask(0, range(40), json_schema(as_json(TALE)), fork_handles=(1, 2, 3), seed=5)
    together = {handle: output.token_ids for handle, output in rig.run().items()}
    rig.close()
    alone = tiny.rig()
    for handle in range(4):
        alone.ask(handle, range(40), json_schema(as_json(TALE)), seed=5 + handle)
    assert together == tokens_of(alone)
    assert len({tuple(tokens) for tokens in together.values()}) == 4


def test_an_output_goes_on_where_another_worker_stopped(tiny: Speaker) -> None:
    whole = tiny.rig()
    whole.ask(0, [1, 2, 3], json_schema(as_json(TALE)), seed=3, max_tokens=80)
    expected = tokens_of(whole)[0]
    rest = tiny.rig()
    begun = [1, 2, 3, *expected[:9]]
    rest.ask(0, begun, json_schema(as_json(TALE)), seed=3, max_tokens=80, num_resumed_tokens=9)
    assert tokens_of(rest)[0] == expected[9:]
    wrong = tiny.rig()
    wrong.ask(0, [1, 2, 3, 9, 9], json_schema(as_json(TALE)), num_resumed_tokens=2)
    output = wrong.run()[0]
    wrong.close()
    assert (end_of(output).error, output.token_ids) == ("CONSTRAINT", [])


def test_what_else_is_forbidden_may_leave_no_token(tiny: Speaker) -> None:
    rig = tiny.rig()
    rig.ask(0, [1, 2, 3], regex("abc"), allowed_token_ids=(5, 6))
    rig.ask(1, [1, 2, 3], regex("[0-9]{3}"), allowed_token_ids=(tiny.tokenizer.token_to_id("7"),))
    outputs = rig.run()
    rig.close()
    assert (reason_of(outputs[0]), end_of(outputs[0]).error) == (WireFinishReason.ERROR, "CONSTRAINT")
    assert tiny.text(outputs[1].token_ids) == "777"


# ---------------------------------------------------------------- while grammars are compiled


class SlowVocabulary:
    """Holds every compile until the test lets go."""

    def __init__(self, speaker: Speaker) -> None:
        self.may_go = threading.Event()
        self._speaker = speaker

    def __call__(self) -> Vocabulary:
        assert self.may_go.wait(30)
        return self._speaker.vocabulary()


def slow_rig(speaker: Speaker, **more: object) -> tuple[GrammarRig, SlowVocabulary]:
    rig, slow = speaker.rig(**more), SlowVocabulary(speaker)  # type: ignore[arg-type]
    rig.compiler._load_vocabulary = slow
    return rig, slow


def phases(rig: GrammarRig) -> list[Phase]:
    return [request.phase for request in rig.scheduler.requests]


def test_others_go_on_while_a_grammar_is_compiled_and_no_block_is_held_for_it(tiny: Speaker) -> None:
    rig, slow = slow_rig(tiny)
    rig.ask(0, range(64), regex("ab"), fork_handles=(1,))
    rig.ask(2, [1, 2, 3], max_tokens=20)
    while rig.outputs[2].finished is None:
        rig.step()
    assert phases(rig) == [Phase.COMPILING, Phase.FOLLOWING]
    assert (rig.blocks.num_active, rig.scheduler.num_waiting) == (0, 2)
    slow.may_go.set()
    assert [tiny.text(rig.run()[handle].token_ids) for handle in (0, 1)] == ["ab", "ab"]
    rig.close()


def test_a_worker_that_only_waits_for_grammars_makes_no_steps_and_is_not_stalled(tiny: Speaker) -> None:
    rig, slow = slow_rig(tiny)
    watchdog = Watchdog(stall_timeout_s=40.0)
    rig.ask(0, [1, 2], regex("ab"), fork_handles=(1,))
    rig.ask(2, [1, 2], regex("cd"))
    rig.step()
    assert [watchdog.is_stalled(rig.engine.stats, now_s) for now_s in (0.0, 30.0, 60.0)] == [False] * 3
    beat = heartbeat_of(rig.engine.stats, "e")
    assert (beat.has_work, beat.num_running, beat.num_waiting, beat.num_paused) == (False, 0, 0, 3)
    rig.ask(3, [1, 2, 3], max_tokens=20)
    rig.step()
    beat = heartbeat_of(rig.engine.stats, "e")
    assert (beat.has_work, beat.num_running, beat.num_waiting, beat.num_paused) == (True, 1, 3, 0)
    slow.may_go.set()
    rig.run()
    rig.close()


def test_a_cancel_and_a_deadline_end_a_request_that_is_compiled(tiny: Speaker) -> None:
    rig, slow = slow_rig(tiny)
    rig.ask(0, [1, 2], regex("ab"), fork_handles=(1,))
    rig.ask(2, [1, 2], regex("ab"), timeout_s=0.02)
    rig.step()
    rig.cancel(0)
    while rig.outputs[2].finished is None:
        rig.step()
    assert reason_of(rig.outputs[2]) is WireFinishReason.DEADLINE
    assert reason_of(rig.outputs[0]) is WireFinishReason.CANCELLED
    assert phases(rig) == [Phase.COMPILING]  # its follower leads now
    slow.may_go.set()
    assert tiny.text(rig.run()[1].token_ids) == "ab"
    rig.close()


def test_who_waits_too_long_for_a_grammar_fails_alone(tiny: Speaker) -> None:
    rig, slow = slow_rig(tiny, timeout_s=0.05)
    rig.ask(0, [1, 2], regex("ab"))
    rig.ask(1, [1, 2, 3], max_tokens=5)
    outputs = rig.run()
    assert end_of(outputs[0]).error == "CONSTRAINT"
    assert "took longer than 0.05 s" in end_of(outputs[0]).detail
    assert reason_of(outputs[1]) is WireFinishReason.LENGTH
    assert rig.observed.refusals == [Refusal.TIMEOUT]
    slow.may_go.set()
    rig.close()


@pytest.mark.parametrize(
    ("schema", "refusal"),
    [({"contains": {}}, Refusal.UNSUPPORTED), ({"$ref": "#"}, Refusal.UNSATISFIABLE), ("nonsense", Refusal.SYNTAX)],
)
def test_a_grammar_that_cannot_be_compiled_fails_alone(tiny: Speaker, schema: object, refusal: Refusal) -> None:
    rig = tiny.rig()
    rig.ask(0, [1, 2], json_schema(as_json(schema)))
    rig.ask(1, [1, 2, 3], max_tokens=5)
    outputs = rig.run()
    rig.close()
    assert (end_of(outputs[0]).error, rig.observed.refusals) == ("CONSTRAINT", [refusal])
    assert reason_of(outputs[1]) is WireFinishReason.LENGTH


def test_a_grammar_that_leads_nowhere_within_its_text_fails_in_words(tiny: Speaker) -> None:
    """The library names a state of its own there."""
    rig = tiny.rig()
    endless = {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}, "required": ["a"],
               "additionalProperties": False}  # fmt: skip
    rig.ask(0, [1, 2], json_schema(as_json(endless)), max_tokens=40)
    end = end_of(rig.run()[0])
    rig.close()
    assert (end.error, end.detail) == ("CONSTRAINT", "constraint: nothing can match: its rules never lead to a text")


def test_a_panic_of_the_library_fails_its_request_alone(tiny: Speaker) -> None:
    class Panic(BaseException):
        pass

    def panic() -> Vocabulary:
        raise Panic("no thread")

    rig = tiny.rig()
    rig.compiler._load_vocabulary = panic
    rig.ask(0, [1, 2], regex("a"))
    finished = end_of(rig.run(timeout_s=30.0)[0])
    rig.close()
    assert (finished.error, "Panic: no thread" in finished.detail) == ("CONSTRAINT", True)


def test_a_model_without_a_supported_tokenizer_says_so(tiny: Speaker) -> None:
    strange = Speaker(tiny.model, {"tokenizer.json": b'{"model": {}}'}, tiny.vocab_size, tiny.eos_token_ids)
    endless = Speaker(tiny.model, tiny.files, tiny.vocab_size, ())
    for speaker, words in ((strange, "tokenizer is not supported"), (endless, "end token")):
        rig = speaker.rig()
        rig.ask(0, [1, 2], regex("a"))
        finished = end_of(rig.run()[0])
        rig.close()
        assert finished.error == "CONSTRAINT"
        assert words in finished.detail
        assert rig.observed.refusals == [Refusal.TOKENIZER]


HOSTILE = {
    "states": regex("(.*a.{1000}){3}"),
    "repeats": regex("((a{1,100}){1,100}){1,100}"),
    "alternatives": regex("|".join(f"x{i}y.*z{i}" for i in range(280))),
    "properties": json_schema(
        as_json({"type": "object", "properties": {f"p{i}": {"pattern": "^(a|b)*a(a|b){40}$"} for i in range(600)}})
    ),
    "unions": json_schema(
        as_json({"allOf": [{"anyOf": [{"properties": {f"p{i}_{j}": {}}} for j in range(4)]} for i in range(8)]})
    ),
    "loop": json_schema(as_json({"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, {}]}}})),
}


def test_hostile_grammars_cost_their_own_requests_and_little_time(
    tiny: Speaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Work, not time: while the machine does other things, or pauses, a mask takes as long as that.
    monkeypatch.setattr(manager, "time", SimpleNamespace(perf_counter=time.process_time))
    calm = tiny.rig()
    calm.ask(99, [1, 2, 3], max_tokens=120, seed=1)
    expected = tokens_of(calm)[99]
    rig = tiny.rig()
    rig.ask(99, [1, 2, 3], max_tokens=120, seed=1)
    for handle, grammar in enumerate(HOSTILE.values()):
        rig.ask(handle, [4, 5, handle], grammar, max_tokens=60, temperature=1.5)
    outputs = rig.run(timeout_s=240)
    rig.close()
    assert outputs[99].token_ids == expected
    assert max(rig.observed.mask_s) < 2.0  # some tens of milliseconds, what the compiler does meanwhile included
    errors = {finished.error for output in outputs.values() if (finished := output.finished) and finished.error}
    assert errors <= {"CONSTRAINT"}
