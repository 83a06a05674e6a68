"""Transports by name."""

import sys
from collections.abc import Iterator
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec

import pytest

from kvferry.cache.errors import ConfigError
from kvferry.transfer.transport import registry
from kvferry.transfer.transport.loopback import LoopbackTransport, open_agents


class Missing(MetaPathFinder):
    """Makes one library look as if it were not installed."""

    def __init__(self, library: str) -> None:
        self._library = library

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name.partition(".")[0] == self._library:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


@pytest.fixture
def without_nixl() -> Iterator[None]:
    hidden = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "nixl"}
    hidden |= {name: module for name, module in sys.modules.items() if name == "kvferry.transfer.transport.nixl"}
    finder = Missing("nixl")
    for name in hidden:
        del sys.modules[name]
    sys.meta_path.insert(0, finder)
    yield
    sys.meta_path.remove(finder)
    sys.modules.update(hidden)


def test_known_lists_built_in_transports_sorted() -> None:
    assert set(registry.known()) >= {"loopback", "nixl"}
    assert list(registry.known()) == sorted(registry.known())


def test_create_loopback_makes_an_agent_of_that_name() -> None:
    agent = registry.create("loopback", "by-name")
    assert isinstance(agent, LoopbackTransport)
    assert (agent.name, agent.agent_name) == ("loopback", "by-name")
    agent.close()
    assert "by-name" not in open_agents()


def test_create_unknown_name_names_the_nearest_and_all() -> None:
    with pytest.raises(ConfigError, match=r"no transport is named 'nixel'.*did you mean 'nixl'.*loopback, nixl"):
        registry.create("nixel", "a")


def test_create_unknown_name_far_from_all_gives_no_hint() -> None:
    with pytest.raises(ConfigError) as caught:
        registry.create("smoke-signals", "a")
    assert "did you mean" not in str(caught.value)


def test_create_unknown_option_raises() -> None:
    with pytest.raises(ConfigError, match="log_path"):
        registry.create("loopback", "a", log_path=None)


def test_create_without_library_says_what_to_install(without_nixl: None) -> None:
    with pytest.raises(ConfigError, match=r"'nixl' needs package 'nixl'.*pip install nixl"):
        registry.create("nixl", "a")


def test_loopback_works_without_nixl(without_nixl: None) -> None:
    registry.create("loopback", "alone").close()
    assert "nixl" not in sys.modules
