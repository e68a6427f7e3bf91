"""`octavo generate`: one request, streamed to stdout."""

import json
import sys
from collections.abc import Sequence

from rich.console import Console

from octavo import TextStream
from octavo.cli.client.connect import connect
from octavo.cli.client.generate_options import parse_ids, request_fields
from octavo.cli.client.json_fields import json_fields
from octavo.cli.client.receipt import receipt_table
from octavo.cli.errors import usage
from octavo.cli.settings.groups import ClientSettings
from octavo.client.events import OutputSoFar
from octavo.client.requests import GenerateFields


def prompt_fields(prompt: str, *, kind: str, system: str) -> GenerateFields:
    """The input of a request from the command line: kind is text, chat or ids. Raises CliError."""
    if system and kind != "chat":
        raise usage("--system is for chats", "the prompt is no chat", "give --chat too, or leave it out")
    if kind == "text":
        return GenerateFields(text=prompt)
    if kind == "ids":
        return GenerateFields(token_ids=parse_ids(prompt))
    before = [("system", system)] if system else []
    return GenerateFields(messages=[*before, ("user", prompt)])


def generate(
    settings: ClientSettings, fields: GenerateFields, *, output: str, wants_receipt: bool, wants_json: bool
) -> int:
    """Send the request and print the result: text or ids as they come, or one JSON object at the end."""
    fields = GenerateFields(**request_fields(settings), **fields, output=output)
    with connect(settings) as client:
        try:
            stream = client.stream(timeout_s=settings.timeout_s, **fields)
        except ValueError as error:
            raise usage("bad request", str(error), "change that field; see `octavo generate --help`") from None
        if wants_json:
            _print_json(stream)
        else:
            _print_stream(stream)
            if wants_receipt and stream.finished is not None:
                Console(stderr=True).print(receipt_table(stream.finished))
    return 0


def _print_stream(stream: TextStream) -> None:
    """A single output as it comes; several once the last is complete, each under its number."""
    for delta in stream.deltas():
        if len(stream.outputs) == 1:
            _write(_shown(delta.text, delta.token_ids))
    several = len(stream.outputs) > 1
    for index, output in enumerate(stream.outputs if several else ()):
        _write(f"[{index}] {_shown(output.text, output.token_ids)}\n")
    _write("\n" * (not several))


def _shown(text: str, token_ids: Sequence[int]) -> str:
    return text or " ".join(map(str, token_ids)) + " " * bool(token_ids)


def _print_json(stream: TextStream) -> None:
    for _ in stream.deltas():
        pass
    content = _output_content(stream.outputs[0])
    if stream.started is not None:
        content |= json_fields(stream.started)
    if stream.prompt_logprobs:
        content["prompt_logprobs"] = [json_fields(each) for each in stream.prompt_logprobs]
    if len(stream.outputs) > 1:
        content["further_outputs"] = [_output_content(output) for output in stream.outputs[1:]]
    _write(json.dumps(content, ensure_ascii=False) + "\n")


def _output_content(output: OutputSoFar) -> dict[str, object]:
    content: dict[str, object] = {"text": output.text, "token_ids": output.token_ids}
    if output.logprobs:
        content["logprobs"] = [json_fields(each) for each in output.logprobs]
    if output.finished is not None:
        content["finished"] = json_fields(output.finished)
    return content


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
