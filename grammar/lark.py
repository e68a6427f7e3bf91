"""Writes texts in llguidance's notation, a dialect of Lark."""

import json


def quoted(text: str) -> str:
    """A string literal. Lark has the same escapes as JSON; characters outside ASCII stay as they are."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def class_character(character: str) -> str:
    """A character as written in a bracketed class of a regular expression between slashes."""
    if character.isascii() and character.isalnum():
        return character
    return f"\\x{{{ord(character):X}}}"


def ends_in_escape(pattern: str) -> bool:
    """Whether a regular expression ends with a backslash that escapes nothing, which llguidance would silently drop."""
    return (len(pattern) - len(pattern.rstrip("\\"))) % 2 == 1
