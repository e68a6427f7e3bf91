"""Tokens a minute: a bucket that fills by itself and is taken from. Pure: times are arguments."""

_UNITS_PER_TOKEN = 60_000_000_000  # one unit comes in per nanosecond and token a minute: whole numbers, no rounding


class NotEnough(Exception):
    """A bucket is too empty. wait_ns: until it is full enough, None for never."""

    def __init__(self, wait_ns: int | None) -> None:
        super().__init__(wait_ns)
        self.wait_ns = wait_ns


class TokenBucket:
    """Fills by tokens_per_minute up to burst_tokens; starts full. Exact: an integer of 1/60e9 tokens, below 0
    where more was taken elsewhere than there was."""

    def __init__(self, *, tokens_per_minute: int, burst_tokens: int, now_ns: int) -> None:
        self._rate = tokens_per_minute
        self._capacity = burst_tokens * _UNITS_PER_TOKEN
        self._level = self._capacity
        self._at_ns = now_ns

    def take(self, num_tokens: int, now_ns: int) -> None:
        """Raises NotEnough; then nothing was taken."""
        self._fill(now_ns)
        wanted = num_tokens * _UNITS_PER_TOKEN
        if wanted > self._capacity:
            raise NotEnough(None)
        if wanted > self._level:
            raise NotEnough(-(-(wanted - self._level) // self._rate))
        self._level -= wanted

    def give_back(self, num_tokens: int, now_ns: int) -> None:
        """Tokens that were taken and not used."""
        self._fill(now_ns)
        self._level = min(self._capacity, self._level + num_tokens * _UNITS_PER_TOKEN)

    def charge(self, num_tokens: int, now_ns: int) -> None:
        """Tokens that another gateway has taken, whether they are here or not; below 0: that it gave back."""
        self.give_back(-num_tokens, now_ns)

    def empty_to(self, num_lacking: int, now_ns: int) -> None:
        """Lack at least so many tokens of being full."""
        self._fill(now_ns)
        self._level = min(self._level, self._capacity - num_lacking * _UNITS_PER_TOKEN)

    def level(self, now_ns: int) -> int:
        """In units of 1/60e9 tokens."""
        self._fill(now_ns)
        return self._level

    def lacking(self, now_ns: int) -> int:
        """Tokens that it lacks of being full; a part of one counts as one."""
        self._fill(now_ns)
        return -(-(self._capacity - self._level) // _UNITS_PER_TOKEN)

    def _fill(self, now_ns: int) -> None:
        passed_ns = max(0, now_ns - self._at_ns)
        self._level = min(self._capacity, self._level + passed_ns * self._rate)
        self._at_ns += passed_ns
