"""What tests of every folder share."""

import time
from collections.abc import Callable

_POLL_SECONDS = 0.002


def wait_until(predicate: Callable[[], object], timeout_s: float, what: str) -> None:
    """Poll until the predicate is true. The only place where a test sleeps.

    Raises: AssertionError naming `what` when it is still false after `timeout_s` seconds.
    """
    deadline = time.monotonic() + timeout_s
    while not predicate():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(_POLL_SECONDS)
