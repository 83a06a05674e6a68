"""A pair of agents in this process, over every transport."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kvferry.transfer.transport import registry
from kvferry.transfer.transport.base import Transport
from kvferry.transfer.transport.lanes import prepare_environment
from tests.transport_contract.agents import NUM_RUNS, RUN_BYTES, Agent, Pair, connected

TRANSPORTS = ("loopback", "nixl")

MakeAgent = Callable[[str], Transport]


@pytest.fixture(scope="session")
def ucx_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One log for the life of the process: UCX opens it once."""
    return tmp_path_factory.mktemp("ucx") / "ucx.log"


@pytest.fixture(params=TRANSPORTS)
def make_agent(request: pytest.FixtureRequest, ucx_log: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeAgent]:
    """Makes agents of one transport and closes them all."""
    settings = dict(os.environ)
    prepare_environment(settings, ucx_log)
    for name in settings.keys() - os.environ.keys():
        monkeypatch.setenv(name, settings[name])
    options = {"log_path": ucx_log} if request.param == "nixl" else {}
    made: list[Transport] = []

    def make(agent_name: str) -> Transport:
        made.append(registry.create(request.param, agent_name, **options))
        return made[-1]

    yield make
    for transport in made:
        transport.close()


@pytest.fixture
def pair(make_agent: MakeAgent) -> Pair:
    writer = _agent(make_agent("writer"))
    target = _agent(make_agent("target"))
    writer.memory.copy_(torch.arange(len(writer.memory)) % 251)
    return connected(writer, target)


def _agent(transport: Transport) -> Agent:
    memory = torch.zeros(NUM_RUNS * RUN_BYTES, dtype=torch.uint8)
    transport.register([memory])
    return Agent(transport, memory)
