"""The openai client against an OpenAI-compatible endpoint at OPENAI_BASE_URL; run by test_smg.py and by
test_openai.py, so what holds here holds with smg in front and with our own front."""

import json
from typing import Any

import openai
import pytest

MODEL = "folio-chat"
QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]
STORY = [{"role": "user", "content": "Tell me a story about a fox."}]
DRAWN = {"messages": STORY, "temperature": 2.0, "top_p": 1.0}
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
NUM_TRIES = 10  # tokens that a busy machine is late with come together
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "Forecast.", "parameters": WEATHER}}


@pytest.fixture(scope="module")
def client() -> openai.OpenAI:
    return openai.OpenAI(api_key="none", max_retries=0, timeout=60)


def ask(client: openai.OpenAI, **wishes: Any) -> Any:
    wishes = {"messages": QUESTION, "max_tokens": 24, "temperature": 0} | wishes
    return client.chat.completions.create(model=MODEL, **wishes)


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


def test_a_stream_says_what_one_answer_says(client: openai.OpenAI) -> None:
    whole = ask(client, max_tokens=200)
    for _ in range(NUM_TRIES):
        chunks = list(ask(client, max_tokens=200, stream=True, stream_options={"include_usage": True}))
        texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
        if sum(bool(text) for text in texts) > 3:
            break
    (choice,) = whole.choices
    assert choice.message.role == "assistant"
    assert "".join(texts) == choice.message.content != ""
    assert sum(bool(text) for text in texts) > 3  # it did stream
    ends = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason]
    assert ends == [choice.finish_reason]
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens > 0
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens > 0


def test_max_tokens_end_an_answer_with_length(client: openai.OpenAI) -> None:
    answer = ask(client, max_tokens=3)
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 3)


def test_a_stop_string_is_where_the_text_ends(client: openai.OpenAI) -> None:
    whole = ask(client).choices[0].message.content
    stop = whole[len(whole) // 2 :][:4]
    cut = ask(client, stop=[stop]).choices[0]
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in ask(client, stop=[stop], stream=True))
    assert cut.message.content == streamed == whole[: whole.index(stop)]
    assert cut.finish_reason == "stop"


def test_a_seed_repeats_itself(client: openai.OpenAI) -> None:
    def draw(seed: int) -> str:
        return str(ask(client, seed=seed, max_tokens=16, **DRAWN).choices[0].message.content)

    texts = [draw(seed) for seed in (1, 1, 2, 2)]
    assert (texts[0], texts[2]) == (texts[1], texts[3])
    assert texts[0] != texts[2]


def test_logprobs_come_with_every_token(client: openai.OpenAI) -> None:
    answer = ask(client, logprobs=True, top_logprobs=3, max_tokens=8)
    positions = answer.choices[0].logprobs.content
    assert len(positions) == answer.usage.completion_tokens
    assert "".join(position.token for position in positions).strip() == answer.choices[0].message.content.strip()
    for position in positions:
        assert len(position.top_logprobs) == 3
        assert position.logprob == max(top.logprob for top in position.top_logprobs) <= 0  # temperature 0
    streamed = [
        position
        for chunk in ask(client, logprobs=True, top_logprobs=3, max_tokens=8, stream=True)
        if chunk.choices and chunk.choices[0].logprobs
        for position in chunk.choices[0].logprobs.content
    ]
    assert [position.token for position in streamed] == [position.token for position in positions]


def test_completions_go_on_with_a_text(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="Once upon", max_tokens=5, temperature=0)
    assert answer.choices[0].text.startswith(" a time")


def test_an_embedding_is_a_vector_of_length_one(client: openai.OpenAI) -> None:
    one, two = (client.embeddings.create(model=MODEL, input=text) for text in ("A fox.", "A crow."))
    assert sum(value * value for value in one.data[0].embedding) == pytest.approx(1.0, rel=1e-3)
    assert one.usage.prompt_tokens > 0
    assert one.data[0].embedding != two.data[0].embedding


def test_a_prompt_that_is_too_long_is_a_bad_request(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=MODEL, prompt="word " * 5000, max_tokens=5)


def test_two_outputs_of_one_prompt(client: openai.OpenAI) -> None:
    answer = ask(client, n=2, seed=5, max_tokens=12, **DRAWN)
    assert [choice.index for choice in answer.choices] == [0, 1]
    first, second = (choice.message.content for choice in answer.choices)
    assert first != second
    texts = {0: "", 1: ""}
    for chunk in ask(client, n=2, seed=5, max_tokens=12, stream=True, **DRAWN):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == {0: first, 1: second}


def test_an_answer_follows_its_json_schema(client: openai.OpenAI) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER, "strict": True}}
    value = json.loads(ask(client, response_format=schema, max_tokens=64).choices[0].message.content)
    assert set(value) == {"city", "days"}
    assert value["city"] in ("Paris", "Rome")
    assert 1 <= value["days"] <= 9


def test_any_json_object(client: openai.OpenAI) -> None:
    answer = ask(client, response_format={"type": "json_object"}, max_tokens=512, temperature=0.7, seed=1)
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content), dict)
    assert answer.choices[0].message.content.lstrip().startswith("{")


def test_a_regular_expression_and_a_grammar(client: openai.OpenAI) -> None:
    assert ask(client, extra_body={"regex": "(yes|no), [a-c]{3}"}).choices[0].message.content[:4] in ("yes,", "no, ")
    assert ask(client, extra_body={"ebnf": 'root ::= "left" | "right"'}).choices[0].message.content in ("left", "right")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_tool_that_must_be_called_is_called_with_arguments_that_validate(client: openai.OpenAI, choice: Any) -> None:
    for seed in range(16):  # a small model may go on calling until its tokens are used up
        drawn = {"temperature": 1.0, "seed": seed}
        answer = ask(client, tools=[TOOL], tool_choice=choice, max_tokens=200, **drawn).choices[0]
        if answer.finish_reason != "length":
            break
    (call,) = answer.message.tool_calls[:1]
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "get_weather"
    assert arguments["city"] in ("Paris", "Rome")
    assert 1 <= arguments["days"] <= 9


def test_tools_that_may_be_called_leave_plain_text_alone(client: openai.OpenAI) -> None:
    answer = ask(client, tools=[TOOL]).choices[0]
    assert answer.message.content
    assert not answer.message.tool_calls


def test_calls_in_qwens_own_words_become_tool_calls(client: openai.OpenAI) -> None:
    """The text that Qwen2.5 writes is forced here: the embedded model calls no tools by itself."""
    call = r'<tool_call>\n\{"name": "get_weather", "arguments": \{"city": "Rome", "days": [1-9]\}\}\n</tool_call>'
    answer = ask(client, tools=[TOOL], max_tokens=64, extra_body={"regex": call}).choices[0]
    (parsed,) = answer.message.tool_calls
    assert answer.finish_reason == "tool_calls"
    assert parsed.function.name == "get_weather"
    assert json.loads(parsed.function.arguments)["city"] == "Rome"
