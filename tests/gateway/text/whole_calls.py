"""Reference for `octavo.gateway.text.tool_calls`: the calls in a whole output, read at once."""

import json
from typing import Any

from octavo.gateway.text.json_scanner import MAX_DEPTH, WHITESPACE
from octavo.gateway.text.tool_calls import CLOSE, OPEN, callable_name


def parse_whole(text: str) -> tuple[str, list[tuple[str, str]]]:
    """Plain text, and (name, arguments as text) of each call, of a whole output."""
    plain, calls, position = [""], list[tuple[str, str]](), 0  # plain: before the first call, behind each
    while (start := text.find(OPEN, position)) >= 0:
        plain[-1] += text[position:start]
        position = start + len(OPEN)
        found = _call_at(text, position)
        if found is None:
            plain[-1] += OPEN
        else:
            name, arguments, position = found
            calls.append((name, arguments))
            plain.append("")
    plain[-1] += text[position:]
    return plain[0] + "".join(each for each in plain[1:] if each.strip(WHITESPACE)), calls


def _call_at(text: str, position: int) -> tuple[str, str, int] | None:
    """Name, arguments, and where the call ends."""
    try:
        start = _skip(text, position)
        _, end = _decode(text, start)
        if text[start] != "{":
            return None
        members = _members(text, start)
        (name,) = [value for key, value in members if key == "name"]
        (arguments,) = [value for key, value in members if key == "arguments"]
        name = callable_name(name) if name.startswith('"') else ""
        if arguments.startswith('"'):
            arguments = json.loads(arguments).strip(WHITESPACE)
            arguments.encode()  # half a surrogate pair raises
            if _decode(arguments, 0)[1] != len(arguments):
                return None
    except (ValueError, IndexError, RecursionError):
        return None
    rest = text[_skip(text, end) :]
    if not name or not arguments.startswith("{") or not (rest.startswith(CLOSE) or CLOSE.startswith(rest)):
        return None
    return name, arguments, len(text) - len(rest) + min(len(rest), len(CLOSE))


def _members(text: str, start: int) -> list[tuple[str, str]]:
    """Key and value's text of each member of the valid object that begins here."""
    members, position = list[tuple[str, str]](), _skip(text, start + 1)
    while text[position] != "}":
        position = _skip(text, position + (text[position] == ","))
        key, position = _decode(text, position)
        value_start = _skip(text, _skip(text, position) + 1)
        _, end = _decode(text, value_start)
        members.append((str(key), text[value_start:end]))
        position = _skip(text, end)
    return members


def _skip(text: str, position: int) -> int:
    while position < len(text) and text[position] in WHITESPACE:
        position += 1
    return position


def _refuse(name: str) -> None:
    raise ValueError(name)


_DECODER = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=_refuse)


def _decode(text: str, position: int) -> tuple[Any, int]:
    value, end = _DECODER.raw_decode(text, position)
    if _depth(value) > MAX_DEPTH:
        raise ValueError("too deep")
    return value, end


def _depth(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(_depth, value.values()), default=0)
    return 1 + max(map(_depth, value), default=0) if isinstance(value, list) else 0
