"""NVIDIA Dynamo's KV router in front of two services, each behind `python -m octavo_dynamo`: real processes all."""

import http.client
import json
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from octavo import Client
from tests.support.gateway.certificates import Authority
from tests.support.services.dynamo import MODEL, Dynamo, dynamo, environment
from tests.support.services.guarded import guarded_service, octavo
from tests.support.services.scrape import scrape
from tests.support.services.service import Service, free_port, launch

GREETING = [{"role": "user", "content": "Hello!"}]
STORY = "The fox and the crow lived in the old wood by the river, and number {} of them had a tale to tell. "
TAILS = ("Who speaks?", "What happens then?", "Why?", "Where do they live?")
NUM_BLOCKS = 512
LONG_TOKENS, MANY_TOKENS = 1900, 800
LONG = "Tell me a very long story."
EVENTS_S = 60.0


@pytest.fixture(scope="module")
def services(dynamo_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Service]]:
    """Two, of this file's own: one of them is killed at the end."""
    with ExitStack() as stack:
        started = [
            stack.enter_context(launch(tmp_path_factory.mktemp(name), f"--num-blocks={NUM_BLOCKS}", "--deterministic"))
            for name in ("left", "right")
        ]
        for each in started:
            each.wait_until_ready()
        yield started


@pytest.fixture(scope="module")
def front(dynamo_python: Path, services: list[Service], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dynamo]:
    """Dynamo in front of both."""
    folder, targets = tmp_path_factory.mktemp("dynamo"), [each.target for each in services]
    with dynamo(dynamo_python, folder, targets, "--migration-limit=3") as running:
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


class Stream:
    """A long chat, begun: an event has come."""

    def __init__(self, front: Dynamo, num_tokens: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", front.port, timeout=120)
        body = {"model": "folio-chat", "messages": [{"role": "user", "content": LONG}], "stream": True}
        body |= {"max_tokens": num_tokens, "ignore_eos": True, "temperature": 0}
        headers = {"content-type": "application/json"}
        self._connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        self._response = self._connection.getresponse()
        self._lines = [self._response.readline() for _ in range(2)]

    def leave(self) -> None:
        """As a caller that has seen enough."""
        self._response.close()
        self._connection.close()

    def rest(self) -> tuple[str, str]:
        """All of its text, once it is whole, and why it ended."""
        lines = self._lines + self._response.read().splitlines()
        self.leave()
        events = [json.loads(line.removeprefix(b"data: ")) for line in lines if line.startswith(b"data: {")]
        assert not [each for each in events if "error" in each]
        choices = [each["choices"][0] for each in events if each["choices"]]
        (reason,) = [each["finish_reason"] for each in choices if each["finish_reason"]]
        return "".join(each["delta"].get("content") or "" for each in choices), reason


def told(service: Service, num_tokens: int) -> tuple[str, str]:
    """The same of a service itself."""
    with Client(service.target) as client:
        return (
            client.complete(messages=[("user", LONG)], max_tokens=num_tokens, temperature=0, ignore_eos=True).text,
            "length",
        )


def busy(services: list[Service]) -> int:
    """Which of them has the only request."""
    (found,) = [index for index, each in enumerate(services) if any(audit.num_active_blocks for audit in each.audit())]
    return found


def test_a_caller_that_leaves_ends_its_request(front: Dynamo, services: list[Service]) -> None:
    """Both services are idle long before the output would have been complete: its blocks are free."""
    before = [sum(load.num_steps for load in each.load()) for each in services]
    stream = Stream(front, LONG_TOKENS)
    busy(services)
    stream.leave()
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


@pytest.mark.parametrize("grace_s", [60, 0], ids=["in time", "elsewhere"])
def test_a_backend_that_is_stopped_lets_its_streams_end(
    dynamo_python: Path, services: list[Service], grace_s: int, tmp_path: Path
) -> None:
    targets, flags = [each.target for each in services], [f"--drain-grace={grace_s}"]
    with dynamo(dynamo_python, tmp_path, targets, "--migration-limit=3", of_backends=flags) as front:
        stream = Stream(front, MANY_TOKENS)
        stopped = front.backends[busy(services)]
        stopped.process.terminate()
        front.wait_until_listed(1)
        assert stream.rest() == told(services[0], MANY_TOKENS)
        stopped.process.wait(60)
        assert (num_migrated(front) > 0) == (grace_s == 0)


def num_migrated(front: Dynamo) -> float:
    """Streams that the frontend continued at another backend."""
    return scrape(front.port).total("dynamo_frontend_model_migration_total")


def test_a_stream_goes_on_at_the_other_service_and_requests_go_there_until_the_first_is_back(
    front: Dynamo, services: list[Service], tmp_path: Path
) -> None:
    front.wait_until_listed(2)
    before = num_migrated(front)
    stream = Stream(front, MANY_TOKENS)
    lost = services[busy(services)]
    (rest,) = [each for each in services if each is not lost]
    lost.process.kill()  # its gateways and workers die with it
    assert stream.rest() == told(rest, MANY_TOKENS)
    assert num_migrated(front) == before + 1
    port = lost.port
    lost.process.wait(60)
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


def failed_start(python: Path, folder: Path, *arguments: str, api_key: str = "") -> str:
    """The one sentence that a backend ends with."""
    done = subprocess.run(
        [str(python), "-m", "octavo_dynamo", *arguments],
        env=environment(folder) | {"OCTAVO_API_KEY": api_key},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "octavo_dynamo: " in line]
    return line


def test_a_service_with_keys_and_tls_that_is_full(dynamo_python: Path, tmp_path: Path) -> None:
    """It takes one request at a time."""
    authority = Authority(tmp_path)
    pair, keys, made = authority.sign("gateway"), tmp_path / "keys.toml", {}
    for name, scopes in {"router": ("generate", "models", "admin"), "caller": ("generate", "models")}.items():
        flags = [flag for scope in scopes for flag in ("--scope", scope)]
        done = octavo("keys", "new-api", name, "--file", keys, *flags, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        made[name] = done.stdout.strip()
    arguments = (f"--tls-cert-file={pair.cert}", f"--tls-key-file={pair.key}", f"--api-keys-file={keys}")
    with guarded_service(tmp_path, *arguments, "--max-requests=1", "--num-blocks=256", "--gateways=1") as service:
        flags = [f"--tls-ca-file={authority.cert}"]
        start = (f"--target={service.target}", f"--model-path={MODEL}", *flags)
        needs = f"octavo_dynamo: the Octavo service at {service.target} refuses: its key needs the scopes generate, "
        needs += "models and admin ("
        assert failed_start(dynamo_python, tmp_path, *start, api_key=made["caller"]).startswith(needs)
        assert failed_start(dynamo_python, tmp_path, *start, api_key="none of them").startswith(needs)
        router = made["router"]
        folder = tmp_path / "dynamo"
        folder.mkdir()
        with dynamo(dynamo_python, folder, [service.target], of_backends=flags, api_key=router) as front:
            stream = Stream(front, LONG_TOKENS)
            assert front.post("chat/completions", messages=GREETING)["status"] == 429
            stream.leave()
            deadline_s = time.monotonic() + EVENTS_S
            while "status" in (answer := front.post("chat/completions", messages=GREETING, max_tokens=3)):
                assert time.monotonic() < deadline_s, f"{answer}\n{front.logs()}"
            assert choice(answer)["message"]["content"]  # type: ignore[index]


def test_a_backend_that_waits_for_its_service_can_be_stopped(dynamo_python: Path, tmp_path: Path) -> None:
    command = [str(dynamo_python), "-m", "octavo_dynamo", f"--target=127.0.0.1:{free_port()}", f"--model-path={MODEL}"]
    with subprocess.Popen(command, env=environment(tmp_path), stderr=subprocess.PIPE, text=True) as waiting:
        assert waiting.stderr is not None
        assert waiting.stderr.readline().startswith("waiting for the Octavo service at ")
        waiting.terminate()
        assert waiting.wait(30) == -signal.SIGTERM


def test_a_wrong_start_ends_with_one_sentence(dynamo_python: Path, tmp_path: Path) -> None:
    def last_line(*arguments: str) -> str:
        return failed_start(dynamo_python, tmp_path, *arguments)

    target = f"127.0.0.1:{free_port()}"
    gone = last_line(f"--target={target}", f"--model-path={MODEL}", "--start-timeout=1")
    assert gone.startswith(f"octavo_dynamo: no Octavo service with one model at {target} within 1 s: ")
    assert last_line("--model-path=/nowhere").endswith("error: --model-path: there is no folder /nowhere")
    assert last_line(f"--model-path={tmp_path}").endswith(f"error: --model-path: there is no config.json in {tmp_path}")
    assert last_line().endswith("error: the following arguments are required: --model-path")
