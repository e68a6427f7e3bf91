"""Whole numbers inside of words: ports, ids, counts."""


def whole_number(word: str, *, least: int, most: int) -> int | None:
    """The number that a word is, in ASCII digits alone; None if it is none from `least` to `most`. int() takes
    more, and says of thousands of digits what only programmers understand."""
    if not (word.isascii() and word.isdigit()) or len(word.lstrip("0")) > len(str(most)):
        return None
    number = int(word.lstrip("0") or "0")
    return number if least <= number <= most else None
