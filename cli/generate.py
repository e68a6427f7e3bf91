"""`octavo generate`: one request, streamed to stdout."""

import json
import sys
from collections.abc import Sequence

from google.protobuf.json_format import MessageToDict
from octavo.client import TextStream
from octavo.client_requests import GenerateFields
from rich.console import Console

from cli.connect import connect
from cli.errors import usage
from cli.receipt import receipt_table
from cli.request_fields import request_fields
from cli.settings import ClientSettings


def prompt_fields(prompt: str, *, kind: str, system: str) -> GenerateFields:
    """The input of a request from the command line: kind is text, chat or ids. Raises CliError."""
    if kind == "text":
        return GenerateFields(text=prompt)
    if kind == "ids":
        return GenerateFields(token_ids=parse_ids(prompt))
    before = [("system", system)] if system else []
    return GenerateFields(messages=[*before, ("user", prompt)])


def parse_ids(text: str) -> list[int]:
    """Ids separated by commas or blanks. Raises CliError."""
    words = text.replace(",", " ").split()
    if not words or not all(word.isdecimal() for word in words):
        raise usage("bad token ids", f"{text!r} is not a list of numbers", "write them as 1,2,3")
    return [int(word) for word in words]


def generate(
    settings: ClientSettings, fields: GenerateFields, *, output: str, wants_receipt: bool, wants_json: bool
) -> int:
    """Send the request and print what comes: text or ids as they come, or one JSON object at the end."""
    fields = GenerateFields(**request_fields(settings), **fields, output=output)  # type: ignore[typeddict-item]
    with connect(settings) as client:
        stream = client.stream(timeout_s=settings.timeout_s, **fields)
        if wants_json:
            _print_json(stream)
        else:
            _print_stream(stream)
            if wants_receipt and stream.finished is not None:
                Console(stderr=True).print(receipt_table(stream.finished))
    return 0


def _print_stream(stream: TextStream) -> None:
    for delta in stream.deltas():
        _write(delta.text or " ".join(map(str, delta.token_ids)) + " " * bool(delta.token_ids))
    _write("\n")


def _print_json(stream: TextStream) -> None:
    text = "".join(stream)
    content: dict[str, object] = {"text": text, "token_ids": stream.token_ids}
    if stream.started is not None:
        content |= MessageToDict(stream.started, preserving_proto_field_name=True)
    if stream.finished is not None:
        content["finished"] = MessageToDict(stream.finished, preserving_proto_field_name=True)
    _write(json.dumps(content, ensure_ascii=False) + "\n")


def read_prompt(words: Sequence[str]) -> str:
    """The prompt: the words of the command line, or stdin for `-` or none."""
    if list(words) not in ([], ["-"]):
        return " ".join(words)
    if sys.stdin.isatty():
        raise usage("no prompt", "neither the command line nor stdin has one", 'octavo generate "Once upon a time"')
    return sys.stdin.read()


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
