"""Numbers, texts, formats and references of JSON schemas: llguidance gets what it handles exactly; the rest is refused.

llguidance stores every number of a schema as a double, may read the last place of a decimal wrongly, writes the
shortest decimal of a double, and forms ranges of integers in 64 bits. It drops control characters without a short
escape from texts that it matches. A value that it would change is refused here, with its path.
"""

import math
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, TypeGuard
from urllib.parse import unquote

import msgspec

from octavo.grammar.errors import GrammarRefused, Refusal
from octavo.grammar.lark import ends_in_escape

Json = dict[str, Any]
Number = int | Decimal

TYPES = ("null", "boolean", "number", "string", "array", "object")  # integers count as numbers
BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")

MAX_WHOLE = 2**53  # up to here every whole number is a double
MAX_BOUND = 10**18
# Bounds beyond the library's range are narrowed to these. It reads its highest integer from the double above that.
_INTEGERS = (-(2**63) + 1024, 2**63 - 1)
_NUMBERS = (-92 * 10**17, 92 * 10**17)
_LEAST = Decimal("1e-60")  # the library nests its expressions once per digit
_MAX_DIVISOR = 2**32 // 10 - 1  # the library appends a digit to a remainder by it, in 32 bits
_MAX_REMAINDERS = 100_000  # it visits all, 10 µs and a kilobyte each, except for one or two digits followed by zeros
_MEETING = ("allOf", "anyOf", "oneOf", "not", "if", "$ref", "dependentSchemas", "dependencies", "patternProperties")
_ENCODER = msgspec.json.Encoder(decimal_format="number")
_UNWRITTEN = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
_SURROGATE = re.compile("[\ud800-\udfff]")
# Parts of a regular expression that match a character of _UNWRITTEN, literally or escaped.
_CODE = "(?:0[0-7bBeEfF]|1[0-9a-fA-F]|7[fF])"
_CONTROL = rf"[\x00-\x07\x0b\x0e-\x1f\x7f]|\\(?:x{_CODE}|u00{_CODE}|[xu]\{{0*(?:{_CODE}|[0-7bBeEfF])\}}|[av])"
_PROPERTY, _BRACKETS = r"\\[pP](?:\{[^}]*\}|.)", r"\[(?P<negated>\^?)(?P<class>\]?(?:\\.|[^\]\\])*)\]"
_REGEX_PART = re.compile(rf"(?P<control>{_CONTROL})|(?P<property>{_PROPERTY})|\\.|{_BRACKETS}", re.DOTALL)
_IN_CLASS = re.compile(r"(\\.|.)(?:-(\\.|.))?", re.DOTALL)  # a character, a class or a range
_COUNTED = "is supported where nothing but the required properties is named, or one more of the named ones counts"
_SET_SIGNS = "[]&~-"  # which the library reads as nested sets or operations on sets

# Dates and times of RFC 3339, without leap seconds and without the year 0, so that every date exists in every calendar
# library.
_DIVISIBLE_BY_4 = "(?:0[48]|[2468][048]|[13579][26])"
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP_YEAR = f"(?:[0-9]{{2}}{_DIVISIBLE_BY_4}|{_DIVISIBLE_BY_4}00)"
_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_CLOCK = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = f"{_CLOCK}:[0-5][0-9](?:\\.[0-9]{{1,6}})?(?:Z|[+-]{_CLOCK})"

OWN_FORMATS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}
"""Formats for which llguidance is too lax, by name: a pattern for the whole string."""

LIBRARY_FORMATS = frozenset(("email", "hostname", "ipv4", "ipv6", "uri", "uuid", "duration"))
"""Formats that are left to llguidance."""


def encode(schema: Any) -> str:
    """A schema as JSON text, in which numbers are spelled so that the library reads their exact values."""
    return _ENCODER.encode(_spelled(schema)).decode()


def check_type(value: Any, path: str) -> None:
    """Check the name of a type, or a list of names. Raises GrammarRefused."""
    for name in value if isinstance(value, list) else [value]:
        if not isinstance(name, str) or name not in (*TYPES, "integer"):
            names = ", ".join((*TYPES, "integer"))
            raise GrammarRefused(Refusal.SYNTAX, f"must be one of {names}, or a list of them", path=path)


def check_text(text: str, path: str) -> None:
    """Check a string in a const or an enum. Raises GrammarRefused."""
    if found := _UNWRITTEN.search(text):
        raise _refused(path, f"has the control character U+{ord(found[0]):04X}, which is not supported")


def check_encoding(value: Any, path: str) -> None:
    """Raises GrammarRefused if any text in a schema has half a surrogate pair, which is no character."""
    for place, text in _texts(value, path):
        if _SURROGATE.search(text):
            raise _refused(place, "has half a surrogate pair, which no text can have")


def pattern(value: Any, path: str) -> Any:
    """A regular expression as the library needs it. Raises GrammarRefused for control characters on their own and a
    backslash at the end, which the library drops. For a set with all characters below U+0020 it writes quotation marks
    and backslashes, even if the set excludes these: so U+0000, which is never written, is taken out of sets."""
    if not isinstance(value, str):
        raise GrammarRefused(Refusal.SYNTAX, "must be a regular expression", path=path)
    if ends_in_escape(value):
        raise GrammarRefused(Refusal.SYNTAX, "ends with a backslash that escapes nothing", path=path)
    for part in _REGEX_PART.finditer(value):
        if part["control"] or (part["class"] and re.fullmatch(_CONTROL, part["class"]) and not part["negated"]):
            raise _refused(path, "matches a control character by itself, which is not supported")
    return _REGEX_PART.sub(_without_null, value)


def _without_null(part: re.Match[str]) -> str:
    if part["property"]:
        return rf"[{part[0]}&&[^\x00]]"
    if part["class"] is None:
        return part[0]
    return rf"[[{part['negated']}{_IN_CLASS.sub(_as_in_ecma, part['class'])}]&&[^\x00]]"


def _as_in_ecma(found: re.Match[str]) -> str:
    return "-".join(f"\\{each}" if each in _SET_SIGNS else each for each in found.groups() if each)


def check_literal(value: Any, path: str) -> None:
    """Check a const, or the values of an enum, of any type. Raises GrammarRefused."""
    if isinstance(value, str):
        check_text(value, path)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            check_literal(item, f"{path}[{index}]")
    elif isinstance(value, dict):
        for key, item in value.items():
            check_literal(item, f"{path}.{key}")
    elif is_number(value) and not _is_written_exactly(value):
        raise _refused(path, "is a number that cannot be written exactly")


def is_number(value: Any) -> TypeGuard[Number]:
    """Whether a value is a number; True and False are not."""
    return isinstance(value, int | Decimal) and not isinstance(value, bool)


def count(value: Any, path: str) -> int:
    """A length or number of items, as int. Raises GrammarRefused."""
    if is_number(value) and 0 <= value < 2**32 and value == int(value):
        return int(value)
    raise GrammarRefused(Refusal.SYNTAX, "must be a whole number from 0 to 4294967295", path=path)


def property_counts(schema: Json, path: str) -> Json:
    """The schema without property counts that always hold. Raises GrammarRefused for those that the library gets wrong:
    it counts an unnamed key that occurs twice as two, and at most one of the optional named properties."""
    names, required = {*schema.get("properties", ())}, {*schema.get("required", ())}
    is_closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    least, most, one_more = schema.get("minProperties", 0), schema.get("maxProperties", math.inf), len(required) + 1
    idle = ["minProperties"] * (least < one_more) + ["maxProperties"] * (is_closed and most >= len(names | required))
    kept = {key: value for key, value in schema.items() if key not in idle}
    for key in ("minProperties", "maxProperties"):
        is_free = names <= required and (is_closed or key == "maxProperties")
        if key in kept and not is_free and not (is_closed and kept[key] == one_more):
            raise _refused(f"{path}.{key}" if path else key, _COUNTED)
    return kept


class Divisors:
    """Every `multipleOf` of a schema: several may apply to one value, and the library multiplies them in 32 bits.
    schema: the whole one; if it includes schemas in others, one of them may apply to a value twice."""

    def __init__(self, schema: Any) -> None:
        self._most = 2**16 - 1 if mentions(schema, ("allOf", "$ref")) else _MAX_DIVISOR
        self._may_meet = mentions(schema, _MEETING)
        self._paths: set[str] = set()
        self._multiple = 1
        self._exponent = 0

    def add(self, value: Any, path: str) -> Number:
        """Add a divisor and return it; a path that was added before changes nothing. Raises GrammarRefused."""
        if not is_number(value) or value <= 0:
            raise GrammarRefused(Refusal.SYNTAX, "must be a number greater than 0", path=path)
        divisor, exponent = _divisor(value)
        if divisor is None:
            raise _refused(path, "is a number that cannot be held exactly")
        if path in self._paths:
            return value
        self._paths.add(path)
        shared = max(exponent, self._exponent)
        held, added = self._multiple * 10 ** (shared - self._exponent), divisor * 10 ** (shared - exponent)
        multiple = math.lcm(held, added)
        met = multiple if self._may_meet else divisor
        is_slow = met > _MAX_REMAINDERS and len(str(met).rstrip("0")) > 2
        if is_slow or divisor > self._most or held * added >= 2**32 or multiple > _MAX_DIVISOR:
            raise _refused(path, "is too large, alone or together with another multipleOf")
        self._multiple, self._exponent = multiple, shared
        return value


def bounds(schema: Json, path: str, *, nearest: bool) -> Json:
    """The schema's numeric bounds as the library needs them. nearest: an exclusive integer bound becomes the next
    double, since the library includes the bound itself if the other one is a fraction. Raises GrammarRefused."""
    given = {key: schema[key] for key in BOUNDS if key in schema and not isinstance(schema[key], bool)}
    for exclusive, inclusive in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if schema.get(exclusive) is True and inclusive in given:  # as in draft 4
            given[exclusive] = given.pop(inclusive)
    is_integer = schema.get("type") == "integer"
    lowest, highest = _INTEGERS if is_integer else _NUMBERS
    result: Json = {}
    for key, value in given.items():
        if not is_number(value):
            raise GrammarRefused(Refusal.SYNTAX, "must be a number", path=f"{path}{key}")
        is_lower = key.endswith("inimum")
        if value < lowest if is_lower else value > highest:
            name, limit = ("minimum", lowest) if is_lower else ("maximum", highest)
            result.setdefault(name, limit)
            continue
        name, held = _bound(key, value, is_integer=is_integer, nearest=nearest)
        if held is None:
            raise _refused(f"{path}{key}", "is a number that cannot be held exactly")
        result[name] = _stricter(result.get(name), held, is_lower=is_lower)
    return result


def has_fractions(schema: Any) -> bool:
    """Whether any bound in a schema is not an integer."""
    return any(isinstance(value, Decimal) and not _is_whole(value) for key, value in _members(schema) if key in BOUNDS)


def mentions(schema: Any, keywords: tuple[str, ...]) -> bool:
    """Whether any of these keywords, or a property with such a name, occurs in a schema."""
    return any(key in keywords for key, _ in _members(schema))


def has_depth(value: Any, depth: int) -> bool:
    """Whether lists and objects are nested deeper than this."""
    if not isinstance(value, dict | list):
        return False
    return depth == 0 or any(
        has_depth(each, depth - 1) for each in (value.values() if isinstance(value, dict) else value)
    )


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    """Keys and values of every object in a value."""
    if isinstance(value, dict):
        yield from value.items()
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _members(item)


# ---------------------------------------------------------------- numbers


def _bound(key: str, value: Number, *, is_integer: bool, nearest: bool) -> tuple[str, Number | None]:
    """The keyword and the number for the library; None if it cannot hold the number."""
    is_exclusive, is_lower = key.startswith("exclusive"), key.endswith("inimum")
    if not _is_whole(value):
        return key, value if abs(Decimal(value)) >= _LEAST and _names_a_double(value) else None
    if not -(2**63) <= value <= 2**63:  # it may have a billion digits
        return key, None
    whole = int(value)
    if is_exclusive and is_integer:  # the library would add one to a double
        key, whole = ("minimum", whole + 1) if is_lower else ("maximum", whole - 1)
        is_exclusive = False
    if abs(whole) >= MAX_WHOLE and (is_exclusive or not _is_held(whole, is_integer=is_integer)):
        return key, None
    if not is_exclusive or not nearest:
        return key, whole
    name, towards = ("minimum", math.inf) if is_lower else ("maximum", -math.inf)
    if whole == 0:
        return name, _LEAST if is_lower else -_LEAST
    beyond = math.nextafter(whole, towards)
    while not _names_a_double(Decimal(repr(beyond))):
        beyond = math.nextafter(beyond, towards)
    return name, Decimal(repr(beyond))


def _is_held(whole: int, *, is_integer: bool) -> bool:
    if whole == _INTEGERS[1] or whole == _INTEGERS[0]:
        return is_integer
    return abs(whole) <= MAX_BOUND and float(whole) == whole and (is_integer or _names_a_double(whole))


def _stricter(held: Number | None, value: Number, *, is_lower: bool) -> Number:
    if held is None:
        return value
    return max(held, value) if is_lower else min(held, value)


def _is_written_exactly(value: Number) -> bool:
    if _is_whole(value):  # written as a range of one 64-bit integer
        return -(2**63) < value < 2**63 and float(value) == value
    return _names_a_double(value)


def _names_a_double(value: Number) -> bool:
    """Whether the library writes exactly these digits after it has read the number."""
    try:
        nearest = float(value)
    except OverflowError:
        return False
    shortest = Decimal(repr(nearest)) if math.isfinite(nearest) else None
    if shortest is None or shortest != value or _spelling(nearest) is None:
        return False
    last_place = Decimal(1).scaleb(int(shortest.as_tuple().exponent))
    return abs(Decimal(nearest) - shortest) * 2 != last_place  # a tie, which the library may round the other way


def _is_whole(value: Number) -> bool:
    return isinstance(value, int) or value == value.to_integral_value()


def _divisor(value: Number) -> tuple[int | None, int]:
    """The digits as an integer (None if inexact), and how many are decimals, as the library finds them."""
    if not _names_a_double(value):
        return None, 0
    scaled, exponent = float(value), 0
    while not scaled.is_integer() and scaled < 2**32:
        scaled, exponent = scaled * 10, exponent + 1
    if scaled > _MAX_DIVISOR or Decimal(int(scaled)).scaleb(-exponent) != value:
        return None, 0
    return int(scaled), exponent


def _spelled(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _spelled(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_spelled(item) for item in value]
    if isinstance(value, Decimal):
        return int(value) if _is_whole(value) else _spelling(float(value))
    return value


def _spelling(number: float) -> Decimal | None:
    """A decimal that the library reads as this double; None if none is found. It misreads some decimals, as it first
    rounds the digits and then divides by a power of ten."""
    shortest = Decimal(repr(number))
    for candidate in (abs(shortest), *_near(abs(number))):
        _, digits, exponent = candidate.as_tuple()
        if _as_read(int("".join(map(str, digits))), int(exponent)) == abs(number):
            return candidate.copy_sign(shortest)
    return None


def _near(number: float) -> Iterator[Decimal]:
    exact = Decimal(number)
    for num_digits in (17, 18, 19):
        exponent = exact.adjusted() - num_digits + 1
        middle = int(exact.scaleb(-exponent))
        step = int(math.ulp(float(middle)))
        for off in range(8):
            yield Decimal(middle + off * step).scaleb(exponent)
            yield Decimal(middle - off * step).scaleb(exponent)


def _as_read(significand: int, exponent: int) -> float:
    """The number as serde_json reads it without its feature `float_roundtrip`."""
    number = float(significand)
    if exponent > 308:
        return math.inf
    while exponent < -308:
        number, exponent = number / 1e308, exponent + 308
    return number * float(f"1e{exponent}") if exponent >= 0 else number / float(f"1e{-exponent}")


# ---------------------------------------------------------------- texts


def _texts(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _texts(item, f"{path}[{index}]")
    elif isinstance(value, dict):
        for key, item in value.items():
            place = f"{path}.{key}" if path else key
            yield path, key
            yield from _texts(item, place)


def _refused(path: str, description: str) -> GrammarRefused:
    return GrammarRefused(Refusal.UNSUPPORTED, description, path=path)


# ---------------------------------------------------------------- references


def pointed_to(whole: Any, reference: str) -> Any:
    """What a reference into the whole schema points to; None if there is nothing."""
    value = whole
    for name in names_of(reference):
        if isinstance(value, dict) and name in value:
            value = value[name]
        elif isinstance(value, list) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        else:
            return None
    return value


def names_of(reference: str) -> list[str]:
    """The parts of a reference, with percent-encoding and then JSON pointer escapes decoded."""
    return [unquote(name).replace("~1", "/").replace("~0", "~") for name in reference.split("/")[1:]]
