"""What answers say of outputs, without a service."""

from random import Random

import pytest

from octavo.client.events import OutputSoFar
from octavo.gateway.front.answers import TextOffsets, bytes_of, chat_logprobs, completion_logprobs, usage_of
from octavo.gateway.front.completions import EchoedPrompt, first_token
from octavo.v1 import common_pb2
from octavo.v1 import inference_pb2 as pb


def output(*, cached: int) -> OutputSoFar:
    usage = common_pb2.Usage(prompt_tokens=42, completion_tokens=5, cached_tokens=cached)
    return OutputSoFar(finished=pb.Finished(reason=pb.FINISH_REASON_LENGTH, usage=usage))


def test_a_prompt_that_several_outputs_share_was_cached_once_or_not_at_all() -> None:
    """Outputs after the first find all of it, since the first one computed it."""
    fresh, known = [output(cached=0), output(cached=42)], [output(cached=32), output(cached=42)]
    assert usage_of([fresh]) == {
        "prompt_tokens": 42,
        "completion_tokens": 10,
        "total_tokens": 52,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert usage_of([fresh, known])["prompt_tokens_details"] == {"cached_tokens": 32}


def test_of_tokens_with_one_text_the_most_probable_one_is_told() -> None:
    """Parts of characters all read U+FFFD."""
    top = [("\ufffd", -0.5), ("a", -1.0), ("\ufffd", -2.0)]
    position = pb.TokenLogprobs(
        chosen=pb.TokenLogprob(text="\ufffd", logprob=-0.5),
        top=[pb.TokenLogprob(text=text, logprob=logprob) for text, logprob in top],
    )
    assert completion_logprobs([position], TextOffsets())["top_logprobs"] == [{"\ufffd": -0.5, "a": -1.0}]


def test_the_chosen_token_is_told_beside_the_most_probable_ones() -> None:
    """As OpenAI has it: the map has one entry more than was asked for where something else was drawn."""
    top = [pb.TokenLogprob(text="a", logprob=-0.5), pb.TokenLogprob(text="b", logprob=-1.5)]
    drawn = pb.TokenLogprobs(chosen=pb.TokenLogprob(text="c", logprob=-7.0), top=top)
    alone = pb.TokenLogprobs(chosen=top[1])
    told = completion_logprobs([drawn, pb.TokenLogprobs(chosen=top[1], top=top), alone], TextOffsets())["top_logprobs"]
    assert [list(each.items()) for each in told] == [
        [("a", -0.5), ("b", -1.5), ("c", -7.0)], [("a", -0.5), ("b", -1.5)], [("b", -1.5)],
    ]  # fmt: skip


def part(raw: bytes) -> pb.TokenLogprobs:
    """A token of these bytes, as gateways tell it."""
    text = raw.decode("utf-8", "replace")
    is_text = text.encode() == raw
    return pb.TokenLogprobs(chosen=pb.TokenLogprob(text=text, raw=b"" if is_text else raw))


def parts(text: bytes, random: Random) -> list[pb.TokenLogprobs]:
    """Tokens of one to three bytes."""
    found, start = list[pb.TokenLogprobs](), 0
    while start < len(text):
        size = random.randint(1, 3)
        found.append(part(text[start : start + size]))
        start += size
    return found


TEXTS = [
    "a\N{LLAMA}b \u65e5\u672c\ufffd\u00e9".encode(),
    b"a\xf0\x9f\xa6b\xe6\x97",
    b"\xa6\x99 \xf0\x9f\xf0\x9f\xa6\x99",
]


@pytest.mark.parametrize("text", TEXTS)
def test_a_token_begins_where_its_first_byte_is(text: bytes) -> None:
    for seed in range(50):
        offsets, before = TextOffsets(), b""
        for each in parts(text, Random(seed)):
            raw = each.chosen.raw or each.chosen.text.encode()
            with_byte = (before + raw[:1]).decode("utf-8", "replace")
            assert offsets.next(each.chosen) == len(with_byte) - 1
            before += raw


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_of_parts_of_characters_make_the_text(text: bytes) -> None:
    told = chat_logprobs(parts(text, Random(1)))["content"]
    assert b"".join(bytes(each["bytes"]) for each in told) == text


@pytest.mark.parametrize("text", ["\N{LLAMA}", "a\u65e5x", "\N{LLAMA}\N{LLAMA} b", "ab"])
def test_the_first_token_of_a_prompt_has_the_bytes_that_the_others_leave(text: str) -> None:
    for seed in range(30):
        first, *others = parts(text.encode(), Random(seed))
        assert first_token(first.chosen.text, text + "more", others) == first.chosen


def test_bytes_of_the_first_token_that_are_no_character_are_as_many_as_in_the_text() -> None:
    """The last of them may be the beginning of one."""
    assert bytes_of(first_token("\ufffd\ufffd", "\ufffd\ufffd.", [part(b".")])).decode() == "\ufffd\ufffd"
    llama = "\N{LLAMA}".encode()
    begun = first_token("\ufffd\ufffd", "\ufffd\N{LLAMA}", [part(llama[2:])])
    assert bytes_of(begun) == "\ufffd".encode() + llama[:2]


def test_an_unfinished_character_of_a_prompt_is_not_finished_by_the_output() -> None:
    prompt = EchoedPrompt(first=part(b"a").chosen, positions=[part(b"\xf0\x9f")])
    offsets = TextOffsets()
    assert prompt.logprobs(offsets)["text_offset"] == [0, 1]
    assert completion_logprobs([part(b"\xa6"), part(b"b")], offsets)["text_offset"] == [2, 3]
