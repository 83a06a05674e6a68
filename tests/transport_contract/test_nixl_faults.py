"""What the NIXL transport makes of errors of the library, injected by an agent that lies."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvferry.cache.errors import TransportError
from kvferry.transfer.transport.base import PostState
from kvferry.transfer.transport.nixl import NixlTransport
from tests.transport_contract.agents import NUM_RUNS, RUN_BYTES, Agent, Pair, connected, indices, runs


class LyingAgent:
    """A real NIXL agent, of which some calls first do what `lies` says: an exception to raise or a value to return."""

    def __init__(self, agent: Any, lies: dict[str, Any]) -> None:
        self._agent = agent
        self._lies = lies

    def __getattr__(self, name: str) -> Any:
        if name not in self._lies:
            return getattr(self._agent, name)
        lie = self._lies[name]

        def call(*_: object, **__: object) -> Any:
            if isinstance(lie, Exception):
                raise lie
            return lie

        return call


class LyingTransport(NixlTransport):
    def __init__(self, agent_name: str) -> None:
        self.lies: dict[str, Any] = {}
        super().__init__(agent_name)

    def _make_agent(self, config: Any) -> Any:
        return LyingAgent(super()._make_agent(config), self.lies)


@pytest.fixture
def pair() -> Iterator[Pair]:
    agents = []
    for name in ("lying-writer", "lying-target"):
        transport = LyingTransport(name)
        memory = torch.zeros(NUM_RUNS * RUN_BYTES, dtype=torch.uint8)
        transport.register([memory])
        agents.append(Agent(transport, memory))
    pair = connected(agents[0], agents[1])
    pair.write(indices(0), indices(0))
    yield pair
    for agent in agents:
        assert isinstance(agent.transport, LyingTransport)
        agent.transport.lies.clear()
        agent.transport.close()


def lies(pair: Pair) -> dict[str, Any]:
    assert isinstance(pair.writer.transport, LyingTransport)
    return pair.writer.transport.lies


@pytest.mark.parametrize("lie", ["ERR", RuntimeError("one run of many failed"), ValueError()])
def test_error_of_unknown_reach_fails_the_post_but_keeps_its_handle_until_the_write_is_over(
    pair: Pair, lie: object
) -> None:
    lies(pair)["transfer"] = lies(pair)["check_xfer_state"] = lie
    post = pair.post(indices(1), indices(1))
    assert pair.writer.transport.poll(post) is PostState.FAILED
    assert pair.writer.transport.release(post) is False
    with pytest.raises(TransportError, match="any more"):
        pair.post(indices(2), indices(2))
    lies(pair)["check_xfer_state"] = "PROC"
    assert pair.writer.transport.release(post) is False
    lies(pair)["check_xfer_state"] = "DONE"
    assert pair.writer.transport.release(post) is True
    assert pair.writer.transport.poll(post) is PostState.FAILED


def test_error_before_the_hand_over_raises_and_the_next_post_works(pair: Pair) -> None:
    lies(pair)["make_prepped_xfer"] = RuntimeError("no memory for a request")
    with pytest.raises(TransportError, match="no memory for a request") as caught:
        pair.post(indices(1), indices(1))
    assert caught.value.backend == "nixl"
    del lies(pair)["make_prepped_xfer"]
    pair.write(indices(1), indices(1))


@pytest.mark.parametrize(
    "call", ["get_new_notifs", "get_agent_metadata", "register_memory", "prep_xfer_dlist", "add_remote_agent"]
)
def test_error_of_any_other_call_becomes_a_transport_error(pair: Pair, call: str) -> None:
    transport = pair.writer.transport
    lies(pair)[call] = KeyError("inside the library")
    calls = {
        "get_new_notifs": transport.notifications,
        "get_agent_metadata": transport.metadata,
        "register_memory": lambda: transport.register([torch.zeros(8, dtype=torch.uint8)]),
        "prep_xfer_dlist": lambda: transport.prepare(None, runs(pair.writer.memory)),
        "add_remote_agent": lambda: (
            pair.target_runs.release(),
            transport.disconnect("lying-target"),
            transport.connect(pair.target.transport.metadata()),
        ),
    }
    with pytest.raises(TransportError, match="inside the library"):
        calls[call]()


def test_errors_while_closing_do_not_stop_the_close(pair: Pair) -> None:
    lies(pair)["remove_remote_agent"] = lies(pair)["deregister_memory"] = RuntimeError("cannot")
    pair.writer.transport.close()
    with pytest.raises(TransportError, match="is closed"):
        pair.writer.transport.notifications()


def test_long_notification_of_a_stranger_is_dropped(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    lies(pair)["get_new_notifs"] = {"stranger": [b"x" * 5000, b"short"]}
    assert [notification.payload for notification in pair.writer.transport.notifications()] == [b"short"]
    assert "5000 bytes from stranger" in caplog.text


def test_closed_agent_leaves_no_open_file(pair: Pair) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for step in range(3):
        NixlTransport(f"brief-{step}").close()
    assert len(os.listdir("/proc/self/fd")) <= before
