"""gRPC for Node with the .proto files alone, against `octavo serve`."""

import json
from collections.abc import Callable
from pathlib import Path

from octavo import Client
from tests.support.services.service import Service

RunNode = Callable[..., str]


def test_the_example_for_node_gets_the_text_that_the_python_client_gets(node: RunNode, service: Service) -> None:
    with Client(service.target) as client:
        wanted = "".join(client.stream(messages=[("user", "Hello!")], max_tokens=40, temperature=0))
    text, reason = node("examples/client/node.js", service.target).rstrip("\n").rsplit("\n", 1)
    assert wanted
    assert text == wanted
    assert reason.startswith("FINISH_REASON_")


def test_node_sees_why_it_was_refused_and_what_it_cancels_ends(node: RunNode, service: Service) -> None:
    told = json.loads(node("tests/interop/drivers/node_client.js", service.target))
    assert (told["code"], told["reason"], told["cancelled"]) == (3, "INVALID_FIELD", 1)
    assert "top_p" in told["details"]
    service.wait_until_idle()


def test_the_page_shows_the_example_that_was_run(repository: Path) -> None:
    assert (repository / "examples/client/node.js").read_text().strip() in (repository / "docs/clients.md").read_text()
