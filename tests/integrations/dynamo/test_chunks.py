"""Events of a stream as the dicts that Dynamo's frontend reads."""

import json

import pytest

from octavo.v1 import common_pb2
from octavo.v1 import inference_pb2 as pb
from octavo_dynamo.chunks import Chunks

END = 6141
USAGE = common_pb2.Usage(prompt_tokens=13, completion_tokens=3, cached_tokens=8)


def delta(*token_ids: int, **fields: object) -> pb.GenerateResponse:
    return pb.GenerateResponse(delta=pb.Delta(token_ids=token_ids, **fields))  # type: ignore[arg-type]


def finished(reason: "pb.FinishReason.ValueType", **fields: object) -> pb.GenerateResponse:
    return pb.GenerateResponse(finished=pb.Finished(reason=reason, usage=USAGE, **fields))  # type: ignore[arg-type]


def scores(*pairs: tuple[int, float, str]) -> pb.TokenLogprobs:
    """The chosen token first, then the most probable ones."""
    made = [pb.TokenLogprob(token_id=token_id, logprob=logprob, text=text) for token_id, logprob, text in pairs]
    return pb.TokenLogprobs(chosen=made[0], top=made[1:])


def test_each_delta_is_a_chunk_and_the_end_has_reason_and_usage() -> None:
    chunks = Chunks()
    assert chunks.of(pb.GenerateResponse(started=pb.Started(request_id="a"))) == []
    assert chunks.of(delta(1, 2)) == [{"token_ids": [1, 2], "index": 0}]
    assert chunks.of(delta(text="lags behind")) == []
    assert chunks.of(delta(3)) == [{"token_ids": [3], "index": 0}]
    assert chunks.usage is None
    (last,) = chunks.of(finished(pb.FINISH_REASON_LENGTH))
    assert last == {
        "token_ids": [],
        "index": 0,
        "finish_reason": "length",
        "completion_usage": {
            "prompt_tokens": 13,
            "completion_tokens": 3,
            "total_tokens": 16,
            "prompt_tokens_details": {"cached_tokens": 8},
        },
    }
    assert chunks.usage == USAGE


def test_a_token_that_ends_the_output_comes_with_its_end() -> None:
    """The frontend stops reading at such a token."""
    chunks = Chunks(ends={END})
    assert chunks.of(delta(1, END)) == []
    (last,) = chunks.of(finished(pb.FINISH_REASON_STOP, stop=pb.StopMatch(token_id=END)))
    assert last["token_ids"] == [1, END]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", END)


def test_a_token_that_proves_to_be_no_end_is_not_lost() -> None:
    chunks = Chunks(ends={END})
    assert chunks.of(delta(END)) == []
    assert [each["token_ids"] for each in chunks.of(delta(5))] == [[END], [5]]


@pytest.mark.parametrize(
    ("reason", "theirs"),
    [
        (pb.FINISH_REASON_STOP, "stop"),
        (pb.FINISH_REASON_LENGTH, "length"),
        (pb.FINISH_REASON_TOOL_CALLS, "stop"),
        (pb.FINISH_REASON_DEADLINE, "length"),
    ],
)
def test_reasons(reason: "pb.FinishReason.ValueType", theirs: str) -> None:
    (last,) = Chunks().of(finished(reason))
    assert last["finish_reason"] == theirs
    assert "stop_reason" not in last


def test_a_stop_string_is_told() -> None:
    (last,) = Chunks().of(finished(pb.FINISH_REASON_STOP, stop=pb.StopMatch(text="the end")))
    assert last["stop_reason"] == "the end"


def test_log_probabilities_stand_beside_their_tokens() -> None:
    position = scores((7, -0.5, " a"), (8, -0.25, " b"), (7, -0.5, " a"))
    (chunk,) = Chunks().of(delta(7, logprobs=[position]))
    assert chunk["log_probs"] == [-0.5]
    assert chunk["top_logprobs"] == [
        [
            {"rank": 1, "token_id": 8, "token": " b", "logprob": -0.25},
            {"rank": 2, "token_id": 7, "token": " a", "logprob": -0.5},
        ]
    ]


def test_the_chosen_token_stands_for_none_and_names_may_be_ids() -> None:
    (chunk,) = Chunks(names_by_id=True).of(delta(7, logprobs=[scores((7, -0.5, " a"))]))
    assert chunk["top_logprobs"] == [[{"rank": 1, "token_id": 7, "token": "token_id:7", "logprob": -0.5}]]


def test_the_prompts_come_with_the_end_by_id() -> None:
    chunks = Chunks()
    chunks.of(delta(prompt_logprobs=[scores((2, -3.0, "x"), (1, -1.0, "y"))]))
    chunks.of(delta(9, prompt_logprobs=[scores((4, -0.5, "z"), (4, -0.5, "z"))]))
    (last,) = chunks.of(finished(pb.FINISH_REASON_LENGTH))
    assert last["engine_data"]["prompt_logprobs"] == [
        None,
        {"1": {"logprob": -1.0, "rank": 1, "decoded_token": "y"}, "2": {"logprob": -3.0, "decoded_token": "x"}},
        {"4": {"logprob": -0.5, "rank": 1, "decoded_token": "z"}},
    ]
    json.dumps(last)


def test_a_request_that_was_given_up_ends_as_cancelled() -> None:
    assert Chunks().cancelled() == {"token_ids": [], "index": 0, "finish_reason": "cancelled"}
