"""Rate limit in tokens per minute, as a token bucket. Pure: times are arguments."""

_UNITS_PER_TOKEN = 60_000_000_000  # a rate of one token a minute adds one unit per nanosecond: integers, no rounding


class NotEnough(Exception):
    """The bucket holds too few tokens. wait_ns: until it holds enough; None: never."""

    def __init__(self, wait_ns: int | None) -> None:
        super().__init__(wait_ns)
        self.wait_ns = wait_ns


class TokenBucket:
    """Refills at tokens_per_minute up to burst_tokens; starts full. Exact: counts in units of 1/60e9 token. The level
    is negative after more was spent at other gateways than there was."""

    def __init__(self, *, tokens_per_minute: int, burst_tokens: int, now_ns: int) -> None:
        self._rate = tokens_per_minute
        self._capacity = burst_tokens * _UNITS_PER_TOKEN
        self._level = self._capacity
        self._at_ns = now_ns

    def take(self, num_tokens: int, now_ns: int) -> None:
        """Take tokens. Raises NotEnough; then nothing was taken."""
        self._fill(now_ns)
        wanted = num_tokens * _UNITS_PER_TOKEN
        if wanted > self._capacity:
            raise NotEnough(None)
        if wanted > self._level:
            raise NotEnough(-(-(wanted - self._level) // self._rate))
        self._level -= wanted

    def give_back(self, num_tokens: int, now_ns: int) -> None:
        """Return tokens that were taken but not used."""
        self._fill(now_ns)
        self._level = min(self._capacity, self._level + num_tokens * _UNITS_PER_TOKEN)

    def charge(self, num_tokens: int, now_ns: int) -> None:
        """Take what another gateway spent, even if the level becomes negative. Below 0: what it gave back."""
        self.give_back(-num_tokens, now_ns)

    def empty_to(self, num_lacking: int, now_ns: int) -> None:
        """Lower the level until at least this many tokens are missing."""
        self._fill(now_ns)
        self._level = min(self._level, self._capacity - num_lacking * _UNITS_PER_TOKEN)

    def level(self, now_ns: int) -> int:
        """The level, in units of 1/60e9 token."""
        self._fill(now_ns)
        return self._level

    def lacking(self, now_ns: int) -> int:
        """Tokens missing from a full bucket, rounded up."""
        self._fill(now_ns)
        return -(-(self._capacity - self._level) // _UNITS_PER_TOKEN)

    def _fill(self, now_ns: int) -> None:
        passed_ns = max(0, now_ns - self._at_ns)
        self._level = min(self._capacity, self._level + passed_ns * self._rate)
        self._at_ns += passed_ns
