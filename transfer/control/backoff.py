"""How long to wait before trying again."""

import random

FIRST_SECONDS = 0.1
LAST_SECONDS = 5.0
JITTER = 0.2


class Backoff:
    """Doubling delays with a bound, each shortened by up to a fifth so that many clients do not return in step."""

    def __init__(self, first_seconds: float = FIRST_SECONDS, last_seconds: float = LAST_SECONDS) -> None:
        self._first = first_seconds
        self._last = last_seconds
        self._delay = first_seconds

    def next(self) -> float:
        """The delay in seconds before the next try."""
        delay = self._delay
        self._delay = min(self._delay * 2, self._last)
        return delay * (1 - JITTER * random.random())

    def reset(self) -> None:
        """The last try succeeded."""
        self._delay = self._first
