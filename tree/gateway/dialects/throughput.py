"""Tokens per second from a counter that only grows. Pure: the caller brings the clock."""

MIN_WINDOW_S = 1.0  # callers that ask more often get the rate of the last window


class Throughput:
    """The rate between two readings; several readers share the windows."""

    def __init__(self, *, now_s: float) -> None:
        self._since_s = now_s
        self._total = 0
        self._rate = 0.0

    def read(self, total: int, *, now_s: float) -> float:
        """total: the counter now. 0.0 until the first window is over."""
        elapsed_s = now_s - self._since_s
        if elapsed_s >= MIN_WINDOW_S:
            self._rate = (total - self._total) / elapsed_s
            self._since_s, self._total = now_s, total
        return self._rate
