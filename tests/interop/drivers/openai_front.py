"""The openai client against our own front at OPENAI_BASE_URL, beyond what every endpoint has; run by test_openai.py."""

import json
import struct
from base64 import b64decode
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

MODEL = "folio-chat"
QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]
CALL = r'<tool_call>\n\{"name": "get_weather", "arguments": \{"city": "Rome"\}\}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def client() -> openai.OpenAI:
    return openai.OpenAI(api_key="none", max_retries=0, timeout=60)


def ask(client: openai.OpenAI, **wishes: Any) -> Any:
    wishes = {"model": MODEL, "messages": QUESTION, "max_tokens": 24, "temperature": 0} | wishes
    return client.chat.completions.create(**wishes)


def vectors(client: openai.OpenAI, given: Any, **wishes: Any) -> list[list[float]]:
    answer = client.embeddings.create(model=MODEL, input=given, **wishes)
    assert [each.index for each in answer.data] == list(range(len(answer.data)))
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0
    return [each.embedding for each in answer.data]


def test_a_list_of_texts_becomes_a_vector_for_each(client: openai.OpenAI) -> None:
    texts = ["A fox.", "A crow.", "A fox. A crow."]
    listed = vectors(client, texts)
    alone = [vectors(client, text)[0] for text in texts]
    assert listed == [pytest.approx(vector, abs=2e-3) for vector in alone]
    assert listed[0] != listed[1]


def test_lists_of_ids_and_floats_are_embedded_too(client: openai.OpenAI) -> None:
    assert len(vectors(client, [[65, 66], [67]])) == 2
    assert len(vectors(client, [65, 66, 67])) == 1
    plain = vectors(client, ["A fox."], encoding_format="float")  # the client asks for base64 by itself
    assert plain == [pytest.approx(vectors(client, ["A fox."])[0], abs=1e-6)]


def test_more_inputs_than_one_call_takes(client: openai.OpenAI) -> None:
    found = vectors(client, [f"text {number}" for number in range(300)])
    assert len(found) == 300
    assert found[299] == pytest.approx(vectors(client, "text 299")[0], abs=2e-3)


def test_base64_is_little_endian_float32(client: openai.OpenAI) -> None:
    raw = client.embeddings.with_raw_response.create(model=MODEL, input="A fox.", encoding_format="base64")
    data = json.loads(raw.text)["data"][0]["embedding"]
    values = struct.unpack(f"<{len(b64decode(data)) // 4}f", b64decode(data))
    assert list(values) == pytest.approx(vectors(client, "A fox.", encoding_format="float")[0], abs=1e-6)


def test_a_model_can_be_asked_for(client: openai.OpenAI) -> None:
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.models.retrieve("other")


def test_several_prompts_are_several_choices_whole_and_streamed(client: openai.OpenAI) -> None:
    wishes: dict[str, Any] = {"model": MODEL, "prompt": ["Once upon", "The fox"], "n": 2, "max_tokens": 6, "seed": 3}
    answer = client.completions.create(**wishes)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage.completion_tokens == 24
    texts = dict.fromkeys(range(4), "")
    ends: list[int] = []
    for chunk in client.completions.create(**wishes, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            ends += [choice.index] * (choice.finish_reason == "length")
        used = chunk.usage
    assert texts == {choice.index: choice.text for choice in answer.choices}
    assert sorted(ends) == [0, 1, 2, 3]
    assert used.completion_tokens == 24


def test_completions_have_sixteen_tokens_echo_and_logprobs(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt="Once upon", temperature=0)
    assert whole.usage.completion_tokens <= 16
    echoed = client.completions.create(model=MODEL, prompt="Once upon", temperature=0, max_tokens=4, echo=True)
    assert echoed.choices[0].text.startswith("Once upon")
    probable = client.completions.create(model=MODEL, prompt="Once upon", temperature=0, max_tokens=4, logprobs=2)
    found = probable.choices[0].logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(found.text_offset) == 4
    assert [len(each) for each in found.top_logprobs] == [2] * 4
    assert "".join(found.tokens) == probable.choices[0].text
    both = client.completions.create(
        model=MODEL, prompt="Once upon", temperature=0, max_tokens=1, echo=True, logprobs=1
    )
    found = both.choices[0].logprobs
    assert "".join(found.tokens) == both.choices[0].text
    assert found.token_logprobs[0] is None
    assert len(found.token_logprobs) == both.usage.total_tokens


def test_a_streamed_tool_call_is_whole(client: openai.OpenAI) -> None:
    chunks = list(ask(client, tools=[TOOL], max_tokens=64, stream=True, extra_body={"regex": CALL}))
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert [call.index for call in calls] == [0]
    assert (calls[0].function.name, json.loads(calls[0].function.arguments)) == ("get_weather", {"city": "Rome"})
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert chunks[0].choices[0].delta.role == "assistant"


def test_a_conversation_with_a_tools_answer_and_text_in_parts_goes_on(client: openai.OpenAI) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
    turns = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Weather in "}, {"type": "text", "text": "Rome?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    assert ask(client, messages=turns, tools=[TOOL]).choices[0].message.content


def test_a_finished_answer_can_be_found_by_its_id(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=QUESTION, max_completion_tokens=2)
    assert raw.headers["x-request-id"] == raw.parse().id
    assert raw.parse().id.startswith("chatcmpl-")
    assert raw.parse().usage.completion_tokens == 2


@pytest.mark.parametrize(
    ("wishes", "param", "said"),
    [
        ({"temperature": 1000}, "temperature", "temperature"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens"),
        ({"n": 1000}, "n", "n: "),
        ({"extra_body": {"stop_token_ids": [10_000_000]}}, "stop_token_ids", "token"),
        ({"extra_body": {"frobnicate": 1}}, "frobnicate", "unknown or unsupported field: frobnicate"),
        ({"top_logprobs": 3}, "top_logprobs", "belongs to logprobs"),
        ({"tool_choice": "required"}, "tool_choice", "there are none"),
        ({"response_format": {"type": "xml"}}, "response_format", "json_schema"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "none of system"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]", "only text"),
        ({"messages": []}, "messages", "messages"),
        ({"stop": [1]}, "stop", "stop"),
        ({"tools": [TOOL], "parallel_tool_calls": False}, "parallel_tool_calls", "not supported"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_what_is_refused_is_a_bad_request_that_names_the_field(
    wishes: dict[str, Any], param: str, said: str, stream: bool, client: openai.OpenAI
) -> None:
    with pytest.raises(openai.BadRequestError, match=r".*") as caught:
        ask(client, **wishes, stream=stream)
    error = caught.value
    assert (error.status_code, error.type, error.param.split("[")[0]) == (
        400,
        "invalid_request_error",
        param.split("[")[0],
    )
    assert said in str(error)


def test_other_mistakes_are_of_their_kinds(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        ask(client, model="other")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=MODEL, prompt="word " * 5000, max_tokens=5)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as size:
        client.embeddings.create(model=MODEL, input="x", dimensions=3)
    assert size.value.param == "dimensions"
    with pytest.raises(openai.BadRequestError) as empty:
        client.embeddings.create(model=MODEL, input=[])
    assert empty.value.param == "input"
    with pytest.raises(openai.NotFoundError, match="there is no /v1/images/generations here"):
        client.images.generate(model=MODEL, prompt="a fox")


def test_many_at_once(client: openai.OpenAI) -> None:
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda seed: ask(client, seed=seed, max_tokens=8).usage.completion_tokens, range(32)))
    assert all(answers)
