"""Formats of strings that are promised, and the regular expressions of those that llguidance takes too loosely.

RFC 3339 without leap seconds and without the year 0, so that every date exists in every calendar library.
"""

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
"""By name: a pattern of the whole string."""

LIBRARY_FORMATS = frozenset(("email", "hostname", "ipv4", "ipv6", "uri", "uuid", "duration"))
"""Formats whose expressions are llguidance's."""
