"""What answers say of outputs, without a service."""

from octavo.client.events import OutputSoFar
from octavo.gateway.front.answers import completion_logprobs, usage_of
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
    assert completion_logprobs([position], 0)["top_logprobs"] == [{"\ufffd": -0.5, "a": -1.0}]
