"""The live page as a user has it: a whole service, a real browser."""

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from octavo import Client
from octavo.gateway.auth.authenticator import digest_of
from octavo.v1 import common_pb2
from octavo.v1 import inference_pb2 as pb
from tests.browser.conftest import Browse
from tests.support.services.service import Service, serve

PATIENCE_S = 60.0  # for what a busy machine is late with
AT_ONCE_S, NUM_TRIES = 2.0, 3  # a pause of the machine comes once
SIZES = {"wide": (1280, 900), "narrow": (390, 844)}
HOSTILE = '"><img/src=x/onerror=alert(1)>'
KEYS = {name: f"octavo-the-key-of-{name}-0123456789" for name in ("root", "ann")}


def page_of(service: Service) -> str:
    """As the summary names it."""
    deadline_s = time.monotonic() + PATIENCE_S
    while (found := re.search(r"^  page: +(http://\S+)$", service.log.read_text(), re.MULTILINE)) is None:
        assert time.monotonic() < deadline_s, service.log.read_text()[-2000:]
        time.sleep(0.05)
    return found[1]


def wait_for(browser: Any, script: str, what: Callable[[Any], object] = bool) -> Any:
    """What a script gives, once that is as wanted."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not what(found := browser.execute_script(f"return {script}")):
        assert time.monotonic() < deadline_s, f"{script} is {found!r}"
        time.sleep(0.05)
    return found


def resize(browser: Any, width: int, height: int) -> None:
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def colours(browser: Any, name: str) -> None:
    features = [{"name": "prefers-color-scheme", "value": name}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def complaints(browser: Any) -> list[str]:
    return [line["message"] for line in browser.get_log("browser") if line["level"] in ("SEVERE", "WARNING")]


def ask(browser: Any, text: str) -> None:
    browser.find_element("id", "prompt").send_keys(text + "\n")


@contextmanager
def busy(
    service: Service, *, num: int, max_tokens: int = 2000, ids: Callable[[int], str] = "load-{}".format
) -> Iterator[None]:
    """So many requests in flight all the time."""
    over = threading.Event()

    def call(n: int, client: Client) -> None:
        turn = 0
        while not over.is_set():
            turn += 1
            prompt = common_pb2.TokenIds(ids=[7 + n % 3] * (40 + 30 * (n % 5)) + [n + 5, turn % 200 + 5])
            request = pb.GenerateRequest(
                request_id=ids(n) if turn == 1 else f"{ids(n)}.{turn}",
                token_ids=prompt,
                stop=pb.StopConditions(max_tokens=max_tokens - 40 * (n % 7), ignore_eos=True),
            )
            with client.stream(request) as stream:
                for _ in stream.deltas():
                    if over.is_set():
                        break

    clients = [Client(service.target, options=[("grpc.use_local_subchannel_pool", 1)]) for _ in range(min(num, 16))]
    threads = [threading.Thread(target=call, args=(n, clients[n % len(clients)])) for n in range(num)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(30)
        for client in clients:
            client.close()


def test_it_streams_an_answer_with_its_receipt_and_fits_every_screen(
    tmp_path: Path, browse: Browse, oracle_checkpoint: Path
) -> None:
    arguments = ["--model", str(oracle_checkpoint), "--runner", "oracle", "--oracle-step-delay-s", "0.01"]
    with serve(tmp_path, *arguments, "--oracle-vocab-size", "300") as service:
        browser = browse(page_of(service))
        wait_for(browser, "document.getElementById('status').textContent", "live".__eq__)
        ask(browser, "What is a folio?")
        lengths = wait_for(
            browser,
            "[...document.querySelectorAll('.turn.assistant')].map((each) => each.textContent.length)",
            lambda found: found and found[0] > 0,
        )
        wait_for(
            browser,
            "[...document.querySelectorAll('.turn.assistant')].map((each) => each.textContent.length)",
            lambda found: found[0] > lengths[0],  # it grows while it streams
        )
        assert browser.execute_script("return document.querySelectorAll('#receipt .bar').length") == 0
        browser.find_element("id", "stop").click()
        wait_for(browser, "document.getElementById('stop').hidden")
        browser.find_element("id", "clear").click()
        browser.execute_script("document.getElementById('prompt').value = ''")
        label = _answered(browser, service)
        assert all(part in label for part in ("gateway", "queue", "prefill", "decode"))
        wait_for(browser, "document.querySelectorAll('.worker').length", (1).__eq__)
        for name, (width, height) in SIZES.items():
            for scheme in ("light", "dark"):
                resize(browser, width, height)
                colours(browser, scheme)
                time.sleep(0.3)
                wide = browser.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
                assert wide[0] <= wide[1], (name, scheme, wide)
        assert complaints(browser) == []
    wait_for(browser, "document.getElementById('status').dataset.state", "live".__ne__)


def _answered(browser: Any, service: Service) -> str:
    """The receipt of an answer that goes to its end: by a limit that the page does not know."""
    browser.execute_script(
        "const send = window.fetch; window.fetch = (url, options) => send(url, {...options, body:"
        " options.body.replace('\"max_tokens\":1024', '\"max_tokens\":8')});"
    )
    ask(browser, "And a quarto?")
    return str(
        wait_for(browser, "document.querySelector('#receipt .bar')?.getAttribute('aria-label')", lambda found: found)
    )


def test_one_page_shows_four_gateways_and_eight_workers_and_who_is_killed(
    tmp_path: Path, browse: Browse, oracle_checkpoint: Path
) -> None:
    arguments = ["--model", str(oracle_checkpoint), "--runner", "oracle", "--oracle-step-delay-s", "0.02"]
    arguments += ["--gateways", "4", "--workers", "8", "--num-blocks", "2048", "--oracle-vocab-size", "300"]
    with serve(tmp_path, *arguments) as service:
        service.wait_until_supervised()
        browser = browse(page_of(service))
        with busy(service, num=24, ids=lambda n: f"{HOSTILE}{n}"):
            ready = "[...document.querySelectorAll('.worker .badge.ready')].length"
            wait_for(browser, ready, (8).__eq__)
            wait_for(browser, "document.querySelectorAll('#gateways tbody tr').length", (4).__eq__)
            wait_for(browser, "document.querySelectorAll('#requests tbody tr').length", (24).__eq__)
            wait_for(browser, "document.querySelectorAll('#requests .badge.decode').length", lambda found: found > 0)
            first = wait_for(browser, "document.querySelector('#requests tbody td').textContent")
            assert first.startswith(HOSTILE)
            assert browser.execute_script("return document.querySelectorAll('main img').length") == 0
            told_s = list[float]()
            for victim in service.children("worker")[:NUM_TRIES]:
                killed_s = time.monotonic()
                victim.send_signal(signal.SIGKILL)
                lost = "document.querySelectorAll('.worker[data-condition=lost]').length"
                wait_for(browser, lost, (len(told_s) + 1).__eq__)
                told_s.append(time.monotonic() - killed_s)
                if told_s[-1] < AT_ONCE_S:
                    break
            assert told_s[-1] < AT_ONCE_S, told_s
            wait_for(browser, ready, (8).__eq__)  # it was started again
        assert complaints(browser) == []


def colours_on(browser: Any, canvas: str, names: tuple[str, ...]) -> set[str]:
    """Which of these colours of the page a canvas has anywhere."""
    script = """
    const canvas = document.querySelector(arguments[0]), style = getComputedStyle(document.documentElement);
    const pen = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true });
    pen.drawImage(canvas, 0, 0);
    const { data } = pen.getImageData(0, 0, canvas.width, canvas.height);
    const found = new Set();
    for (let at = 0; at < data.length; at += 4) found.add(`#${[0, 1, 2].map((part) =>
      data[at + part].toString(16).padStart(2, "0")).join("")}`);
    return arguments[1].filter((name) => found.has(style.getPropertyValue(name).trim()));
    """
    return set(browser.execute_script(script, canvas, list(names)))


DEVICE_COLOURS = ("--cached", "--active", "--shared")
HOST_COLOURS = ("--host-free", "--host-cached", "--host-swapped", "--host-copying")


def test_a_worker_with_a_second_tier_has_a_second_map_in_colours_of_its_own(
    tmp_path: Path, browse: Browse, oracle_checkpoint: Path
) -> None:
    arguments = ["--model", str(oracle_checkpoint), "--runner", "oracle", "--oracle-step-delay-s", "0.01"]
    arguments += ["--oracle-vocab-size", "300", "--num-blocks", "48", "--host-kv-gib", "0.0001"]
    with serve(tmp_path, *arguments) as service:
        browser = browse(page_of(service))
        wait_for(browser, "document.getElementById('status').textContent", "live".__eq__)
        with busy(service, num=8, max_tokens=400):
            wait_for(browser, "document.querySelectorAll('.worker .tier:not([hidden])').length", (1).__eq__)
            assert browser.execute_script("return document.getElementById('host-legend').offsetHeight") > 0
            told = "document.querySelector('.worker .tier canvas').getAttribute('aria-label')"
            moved = re.compile(r"Host memory of .*: [\d,]+ blocks in host memory: [1-9][\d,]* of evicted prefixes, ")
            wait_for(browser, told, lambda found: moved.match(found or ""))
            for scheme in ("light", "dark"):
                colours(browser, scheme)
                deadline_s = time.monotonic() + PATIENCE_S
                while "--host-cached" not in (seen := colours_on(browser, ".worker .tier canvas", HOST_COLOURS)):
                    assert time.monotonic() < deadline_s, seen
                    time.sleep(0.05)
                assert colours_on(browser, ".worker .tier canvas", DEVICE_COLOURS) == set()
                assert not colours_on(browser, ".worker > canvas", HOST_COLOURS)
        resize(browser, *SIZES["narrow"])
        wide = browser.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
        assert wide[0] <= wide[1]
        assert complaints(browser) == []


def test_a_worker_without_a_second_tier_has_one_map(tmp_path: Path, browse: Browse, oracle_checkpoint: Path) -> None:
    arguments = ["--model", str(oracle_checkpoint), "--runner", "oracle", "--oracle-vocab-size", "300"]
    with serve(tmp_path, *arguments) as service:
        browser = browse(page_of(service))
        wait_for(browser, "document.querySelectorAll('.worker .badge.ready').length", (1).__eq__)
        mapped = "document.querySelector('.worker > canvas').width"
        wait_for(browser, mapped, lambda found: found != 300)  # drawn once: 300 is what a canvas has before
        shown = "document.querySelectorAll('.worker .tier:not([hidden]), #host-legend:not([hidden])').length"
        assert browser.execute_script(f"return {shown}") == 0
        assert complaints(browser) == []


QUESTIONS = ("What is a folio?", "Tell me a short story.", "Why is the sky blue?", "What is a quarto?")
NAMES = ("press", "bindery", "reading-room", "archive")


@pytest.mark.skipif("PAGE_PICTURES" not in os.environ, reason="PAGE_PICTURES names no folder to keep pictures in")
def test_pictures_for_the_documents(tmp_path: Path, browse: Browse) -> None:
    """PAGE_PICTURES=docs/pictures: the embedded model under some load, at both widths, light and dark."""
    folder = Path(os.environ["PAGE_PICTURES"]).absolute()
    arguments = ["--gateways", "4", "--workers", "4", "--num-blocks", "640", "--num-threads", "1"]
    with serve(tmp_path, *arguments) as service:
        service.wait_until_supervised()
        browser = browse(page_of(service))
        with busy(service, num=20, ids=lambda n: f"{NAMES[n % 4]}-{4177 + 37 * n}", max_tokens=900):
            time.sleep(45)  # lines of some length
            ask(browser, QUESTIONS[0])
            wait_for(browser, "document.querySelector('#receipt .bar')")
            for name, scheme in (("wide", "light"), ("wide", "dark"), ("narrow", "light")):
                width, height = SIZES[name]
                colours(browser, scheme)
                resize(browser, width, height)
                time.sleep(1.0)
                tall = browser.execute_script("return document.documentElement.scrollHeight")
                resize(browser, width, min(tall, 2900))
                time.sleep(1.5)
                browser.save_screenshot(str(folder / f"page-{name}-{scheme}.png"))


def test_where_there_are_keys_one_is_typed_and_names_of_tenants_are_text(
    tmp_path: Path, browse: Browse, oracle_checkpoint: Path
) -> None:
    tenant = "<img src=x onerror=alert(1)>"
    file = tmp_path / "keys.toml"
    file.write_text(
        f'[keys.root]\nsha256 = "{digest_of(KEYS["root"]).hex()}"\nscopes = ["admin", "generate"]\n'
        f'[keys.ann]\nsha256 = "{digest_of(KEYS["ann"]).hex()}"\ntenant = {json.dumps(tenant)}\n'
    )
    file.chmod(0o600)
    arguments = ["--model", str(oracle_checkpoint), "--runner", "oracle", "--oracle-step-delay-s", "0.02"]
    with serve(tmp_path, *arguments, "--oracle-vocab-size", "300", "--api-keys-file", str(file)) as service:
        browser = browse(page_of(service))
        wait_for(browser, "document.getElementById('status').textContent", "locked".__eq__)
        assert len(complaints(browser)) == 1  # the browser's own line on the 401
        browser.find_element("id", "key").send_keys(KEYS["root"] + "\n")
        wait_for(browser, "document.getElementById('status').textContent", "live".__eq__)
        assert KEYS["root"] not in browser.current_url
        assert (
            browser.execute_script("return JSON.stringify([localStorage, sessionStorage, document.cookie])")
            == '[{},{},""]'
        )
        with (
            Client(service.target, api_key=KEYS["ann"]) as client,
            client.stream(text="hello", max_tokens=2000) as stream,
        ):
            next(iter(stream.deltas()))
            shown = wait_for(browser, "document.querySelector('#tenants tbody td')?.textContent")
            assert shown == tenant
            assert browser.execute_script("return document.querySelectorAll('main img').length") == 0
        assert complaints(browser) == []


def test_the_page_says_when_the_gateway_does_not_answer_and_goes_on_when_it_does(
    tmp_path: Path, browse: Browse, oracle_checkpoint: Path
) -> None:
    arguments = ["--model", str(oracle_checkpoint), "--runner", "oracle", "--oracle-vocab-size", "300"]
    with serve(tmp_path, *arguments) as service:
        service.wait_until_supervised()
        address = page_of(service)
        browser = browse(address)
        wait_for(browser, "document.getElementById('status').textContent", "live".__eq__)
        (gateway,) = service.children("gateway")
        gateway.send_signal(signal.SIGSTOP)
        wait_for(browser, "document.getElementById('status').dataset.state", "down".__eq__)
        gateway.send_signal(signal.SIGCONT)
        wait_for(browser, "document.getElementById('status').textContent", "live".__eq__)


def test_grpc_and_the_page_are_apart(tmp_path: Path, oracle_checkpoint: Path) -> None:
    """No browser: a page that is off costs nobody a port."""
    arguments = ["--model", str(oracle_checkpoint), "--runner", "oracle", "--oracle-vocab-size", "300", "--page", "off"]
    with serve(tmp_path, *arguments) as service:
        service.wait_until_supervised()
        assert "page:" not in service.log.read_text()
        with grpc.insecure_channel(service.target) as channel:
            grpc.channel_ready_future(channel).result(timeout=PATIENCE_S)
