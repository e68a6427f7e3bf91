"""NVIDIA Dynamo's KV router in front of two services, each behind `python -m octavo_dynamo`: real processes all."""

import http.client
import json
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from octavo import Client
from tests.support.services.dynamo import MODEL, Dynamo, dynamo, environment
from tests.support.services.service import Service, free_port, launch

GREETING = [{"role": "user", "content": "Hello!"}]
STORY = "The fox and the crow lived in the old wood by the river, and number {} of them had a tale to tell. "
TAILS = ("Who speaks?", "What happens then?", "Why?", "Where do they live?")
NUM_BLOCKS = 512
LONG_TOKENS = 1900
EVENTS_S = 60.0


@pytest.fixture(scope="module")
def services(dynamo_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Service]]:
    """Two, of this file's own: one of them is killed at the end."""
    with ExitStack() as stack:
        started = [
            stack.enter_context(launch(tmp_path_factory.mktemp(name), f"--num-blocks={NUM_BLOCKS}"))
            for name in ("left", "right")
        ]
        for each in started:
            each.wait_until_ready()
        yield started


@pytest.fixture(scope="module")
def front(dynamo_python: Path, services: list[Service], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dynamo]:
    """Dynamo in front of both."""
    with dynamo(dynamo_python, tmp_path_factory.mktemp("dynamo"), [each.target for each in services]) as running:
        yield running


def choice(answer: dict[str, object]) -> dict[str, object]:
    assert "choices" in answer, answer
    (only,) = answer["choices"]  # type: ignore[misc]
    return dict(only)


def streamed(front: Dynamo, **body: object) -> list[dict[str, object]]:
    """The events of a chat, without the last line, which is no JSON."""
    connection = http.client.HTTPConnection("127.0.0.1", front.port, timeout=120)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps({"model": "folio-chat", "stream": True, **body}),
                           {"content-type": "application/json"})  # fmt: skip
        lines = connection.getresponse().read().decode().splitlines()
    finally:
        connection.close()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    return [json.loads(each) for each in data[:-1]]


def test_the_backend_registers_the_limits_of_its_service(front: Dynamo, services: list[Service]) -> None:
    cards = [json.loads(each.read_text()) for each in (front.folder / "discovery/v1/mdc").rglob("*") if each.is_file()]
    assert len(cards) == len(services)
    with Client(services[0].target) as client:
        (model,) = client.models()
    for card in cards:
        told = json.dumps(card)
        assert f'"context_length": {model.max_model_len}' in told
        assert '"kv_cache_block_size": 16' in told
        assert f'"total_kv_blocks": {NUM_BLOCKS}' in told
        assert '"max_num_seqs": ' in told


def test_a_chat_is_what_the_service_says_whole_and_streamed(front: Dynamo, services: list[Service]) -> None:
    with Client(services[0].target) as client:
        ours = client.complete(messages=[("user", "Hello!")], max_tokens=60, temperature=0)
    whole = front.post("chat/completions", messages=GREETING, max_tokens=60, temperature=0)
    assert choice(whole)["message"]["content"] == ours.text  # type: ignore[index]
    assert choice(whole)["finish_reason"] == "stop"
    usage = ours.finished.usage
    assert whole["usage"]["prompt_tokens"] == usage.prompt_tokens  # type: ignore[index]
    assert whole["usage"]["completion_tokens"] == usage.completion_tokens  # type: ignore[index]
    events = streamed(front, messages=GREETING, max_tokens=60, temperature=0)
    pieces = [each["choices"][0] for each in events if each.get("choices")]  # type: ignore[index]
    assert "".join(each["delta"].get("content") or "" for each in pieces) == ours.text
    assert [each["finish_reason"] for each in pieces if each["finish_reason"]] == ["stop"]
    assert len(pieces) > 3


def test_log_probabilities_are_the_services(front: Dynamo, services: list[Service]) -> None:
    with Client(services[0].target) as client:
        ours = client.complete(messages=[("user", "Hello!")], max_tokens=6, temperature=0, logprobs=3)
    answer = front.post(
        "chat/completions", messages=GREETING, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3
    )
    theirs = choice(answer)["logprobs"]["content"]  # type: ignore[index]
    assert [each["logprob"] for each in theirs] == pytest.approx(
        [each.chosen.logprob for each in ours.logprobs], abs=1e-4
    )
    assert [each["token"] for each in theirs] == [each.chosen.text for each in ours.logprobs]
    for mine, other in zip(ours.logprobs, theirs, strict=True):
        expected = {each.text: pytest.approx(each.logprob, abs=1e-4) for each in mine.top}
        assert {each["token"]: each["logprob"] for each in other["top_logprobs"]} == expected


@pytest.mark.parametrize(
    ("options", "text", "reason"),
    [
        ({"max_tokens": 3}, "Hello! I", "length"),
        ({"stop": ["small"], "max_tokens": 60}, "Hello! I am Folio, a ", "stop"),
        ({"stop_token_ids": [298], "max_tokens": 60}, "Hello!", "stop"),  # " I"
        ({"max_tokens": 40, "min_tokens": 40, "ignore_eos": True}, None, "length"),
        ({"max_tokens": 20, "guided_regex": "ab(c|d)e"}, "ab.e", "stop"),
        ({"max_tokens": 20, "guided_choice": ["yes", "yes, but"]}, "yes.*", "stop"),
    ],
)
def test_an_output_ends_where_it_was_told_to(
    front: Dynamo, options: dict[str, object], text: str | None, reason: str
) -> None:
    answer = front.post("chat/completions", messages=GREETING, temperature=0, **options)
    said = choice(answer)
    assert said["finish_reason"] == reason
    content = said["message"]["content"]  # type: ignore[index]
    if text is None:
        assert answer["usage"]["completion_tokens"] == 40  # type: ignore[index]
    elif "guided_regex" in options or "guided_choice" in options:
        assert re.fullmatch(text, content), content
    else:
        assert content == text


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"seed": -3}, "sampling_options.seed"),
        ({"n": 2}, "sampling_options.n"),
        ({"guided_regex": "a", "guided_whitespace_pattern": " "}, "whitespace_pattern"),
        ({"guided_regex": "(?=a)b"}, "guided_decoding.regex"),
        ({"stop_token_ids": [10**9]}, "stop_conditions.stop_token_ids[0]"),
        (
            {"top_logprobs": 20, "logprobs": True, "max_tokens": 1, "prompt_logprobs": 21},
            "output_options.prompt_logprobs",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_by_its_name(front: Dynamo, options: dict[str, object], name: str) -> None:
    answer = front.post("chat/completions", messages=GREETING, **options)
    assert answer["status"] == 400, answer
    assert name in str(answer["message"])


def test_a_caller_that_leaves_ends_its_request(front: Dynamo, services: list[Service]) -> None:
    """Both services are idle long before the output would have been complete: its blocks are free."""
    before = [sum(load.num_steps for load in each.load()) for each in services]
    connection = http.client.HTTPConnection("127.0.0.1", front.port, timeout=120)
    body = {"model": "folio-chat", "messages": [{"role": "user", "content": "Tell me a very long story."}]}
    body |= {"stream": True, "max_tokens": LONG_TOKENS, "ignore_eos": True}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    for _ in range(8):
        response.readline()
    assert sum(audit.num_active_blocks for each in services for audit in each.audit()) > 0
    response.close()
    connection.close()
    for each in services:
        each.wait_until_idle()
        assert [(list(audit.violations), audit.num_active_blocks) for audit in each.audit()] == [([], 0)]
    made = [sum(load.num_steps for load in each.load()) - old for each, old in zip(services, before, strict=True)]
    assert sum(made) < LONG_TOKENS


def beginning(index: int) -> str:
    """Ten blocks and more."""
    return "".join(STORY.format(8 * index + line) for line in range(8))


def test_a_prompt_goes_where_its_beginning_is_as_the_events_tell(front: Dynamo, services: list[Service]) -> None:
    """What a service has, only its events tell: it was asked behind the frontend's back. The events may take a while;
    four prompts for each service, all of them routed right, are no chance."""
    deadline_s, attempt, wait_s = time.monotonic() + EVENTS_S, 0, 0.25
    while True:
        attempt, wait_s = attempt + 1, 2 * wait_s
        texts = [beginning(100 * attempt + index) for index in range(8)]
        for index, text in enumerate(texts):
            with Client(services[index % 2].target) as client:
                client.complete(messages=[("user", text + TAILS[0])], max_tokens=1)
        for each in services:
            each.wait_until_idle()
        time.sleep(wait_s)
        before = [each.audit()[0].num_cached_blocks for each in services]
        found = []
        for text in texts:
            messages = [{"role": "user", "content": text + TAILS[1]}]
            answer = front.post("chat/completions", messages=messages, max_tokens=2, temperature=0)
            usage = answer["usage"]
            found.append(usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] - 3 * 16)  # type: ignore[index]
        for each in services:
            each.wait_until_idle()
        after = [each.audit()[0].num_cached_blocks for each in services]
        if all(found):
            break
        assert time.monotonic() < deadline_s, f"{found}\n{front.logs()}"
    grown = [new - old for new, old in zip(after, before, strict=True)]
    assert max(grown) <= 4 * 4, "somebody computed a beginning that the other one has"


def test_the_runtime_tells_the_load_of_the_service(front: Dynamo) -> None:
    deadline_s = time.monotonic() + EVENTS_S
    for backend in front.backends:
        while backend.metrics().total("dynamo_component_total_blocks") != NUM_BLOCKS:
            assert time.monotonic() < deadline_s, front.logs()
            time.sleep(0.2)


def test_requests_go_to_the_other_service_while_one_is_gone_and_back_when_it_is_back(
    front: Dynamo, services: list[Service], tmp_path: Path
) -> None:
    right, port = services[1], services[1].port
    front.wait_until_listed(2)
    right.process.kill()
    right.process.wait(60)
    front.wait_until_listed(1)
    said = [choice(front.post("chat/completions", messages=GREETING, max_tokens=4, temperature=0)) for _ in range(6)]
    assert {each["message"]["content"] for each in said} == {"Hello! I am"}  # type: ignore[index]
    with launch(tmp_path, f"--port={port}", f"--num-blocks={NUM_BLOCKS}"):
        front.wait_until_listed(2)
        deadline_s, index = time.monotonic() + EVENTS_S, 0
        while True:
            index += 1
            # No beginning in common with what the other one has, for that one would be preferred.
            choice(front.post("completions", prompt=[index % 5000, *range(40)], max_tokens=1))
            with Client(f"127.0.0.1:{port}") as client:
                snapshot = next(iter(client.watch_load()))
            if snapshot.workers and snapshot.workers[0].blocks.num_cached:
                break
            assert time.monotonic() < deadline_s, front.logs()


def test_a_wrong_start_ends_with_one_sentence(dynamo_python: Path, tmp_path: Path) -> None:
    def last_line(*arguments: str) -> str:
        done = subprocess.run(
            [str(dynamo_python), "-m", "octavo_dynamo", *arguments],
            env=environment(tmp_path), capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode != 0
        assert "Traceback" not in done.stderr
        (line,) = [line for line in done.stderr.splitlines() if "octavo_dynamo: " in line]
        return line

    target = f"127.0.0.1:{free_port()}"
    gone = last_line(f"--target={target}", f"--model-path={MODEL}", "--start-timeout=1")
    assert gone.startswith(f"octavo_dynamo: no Octavo service with one model at {target} within 1 s: ")
    assert last_line("--model-path=/nowhere").endswith("error: --model-path: there is no folder /nowhere")
    assert last_line(f"--model-path={tmp_path}").endswith(f"error: --model-path: there is no config.json in {tmp_path}")
    assert last_line().endswith("error: the following arguments are required: --model-path")
