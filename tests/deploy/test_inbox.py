"""Commands from any thread to one loop: order, bound, waking, and the end."""

import threading
import time

import pytest

from kvferry.cache.errors import CapacityError, Unavailable
from kvferry.deploy.inbox import Inbox


def closed() -> Unavailable:
    return Unavailable("closed", peer="w")


def test_commands_run_in_order_and_once() -> None:
    inbox, ran = Inbox(4), list[int]()
    assert inbox.empty
    for number in range(3):
        inbox.put(lambda number=number: ran.append(number))  # type: ignore[misc]
    assert not inbox.empty
    inbox.run()
    inbox.run()
    assert ran == [0, 1, 2]
    assert inbox.empty


def test_command_put_by_a_command_runs_in_the_next_turn() -> None:
    inbox, ran = Inbox(4), list[str]()
    inbox.put(lambda: inbox.put(lambda: ran.append("second")))
    inbox.run()
    assert ran == []
    inbox.run()
    assert ran == ["second"]


def test_full_inbox_refuses_with_its_limit_and_takes_more_after_a_turn() -> None:
    inbox = Inbox(2)
    for _ in range(2):
        inbox.put(lambda: None)
    with pytest.raises(CapacityError, match="2 commands wait already"):
        inbox.put(lambda: None)
    inbox.run()
    inbox.put(lambda: None)
    assert not inbox.empty


def test_closed_inbox_refuses_with_the_first_reason_and_still_runs_what_it_has() -> None:
    inbox, ran = Inbox(2), list[int]()
    inbox.put(lambda: ran.append(1))
    inbox.close(closed)
    inbox.close(lambda: Unavailable("later", peer="w"))
    with pytest.raises(Unavailable, match="closed"):
        inbox.put(lambda: ran.append(2))
    inbox.run()
    assert ran == [1]


def test_wait_ends_at_its_timeout_and_at_once_when_woken() -> None:
    inbox = Inbox(1)
    started = time.monotonic()
    inbox.wait(0.02)
    assert time.monotonic() - started >= 0.015
    inbox.wake()
    started = time.monotonic()
    inbox.wait(30.0)
    assert time.monotonic() - started < 10.0


@pytest.mark.parametrize("what", ["put", "close"])
def test_put_and_close_end_the_wait_of_another_thread(what: str) -> None:
    inbox = Inbox(1)
    waiting = threading.Thread(target=inbox.wait, args=(30.0,))
    waiting.start()
    if what == "put":
        inbox.put(lambda: None)
    else:
        inbox.close(closed)
    waiting.join(10.0)
    assert not waiting.is_alive()


def test_nobody_gets_in_after_close_from_many_threads() -> None:
    """Whoever was told that the command is queued finds it run."""
    inbox, ran, refused = Inbox(10_000), list[int](), list[int]()
    ready = threading.Barrier(5)

    def put_many() -> None:
        ready.wait(10.0)
        for number in range(1000):
            try:
                inbox.put(lambda number=number: ran.append(number))  # type: ignore[misc]
            except Unavailable:
                refused.append(number)

    threads = [threading.Thread(target=put_many) for _ in range(4)]
    for thread in threads:
        thread.start()
    ready.wait(10.0)
    inbox.close(closed)
    for thread in threads:
        thread.join(10.0)
    inbox.run()
    assert len(ran) + len(refused) == 4000
    assert inbox.empty
