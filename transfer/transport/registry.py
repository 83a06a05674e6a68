"""Transports by name. Installed packages add theirs through the entry point group `kvferry.transports`."""

import difflib
import inspect
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import cast

from kvferry.cache.errors import ConfigError
from kvferry.transfer.transport.base import Transport

GROUP = "kvferry.transports"

# Found also where kvferry runs from its sources and no entry point is installed.
_BUILT_IN = {
    "loopback": "kvferry.transfer.transport.loopback:LoopbackTransport",
    "nixl": "kvferry.transfer.transport.nixl:NixlTransport",
}
_PACKAGES = {"nixl": "nixl"}
"""What to install for a transport."""


def known() -> tuple[str, ...]:
    """Names `create` accepts, sorted. Nothing is imported."""
    return tuple(sorted(_found()))


def create(name: str, agent_name: str, **options: object) -> Transport:
    """Make an agent of the transport with this name.

    Args:
        options: keyword arguments of the transport's class; `nixl` takes `log_path`.

    Raises:
        ConfigError: no such transport, its library is not installed, or it has no such option.
        TransportError: the library could not make an agent.
    """
    factory = load(name)
    try:
        inspect.signature(factory).bind(agent_name, **options)
    except TypeError as error:
        raise ConfigError(f"transport {name!r} cannot be made with options {sorted(options)}: {error}") from error
    return factory(agent_name, **options)


def load(name: str) -> Callable[..., Transport]:
    """The class of a transport. Raises ConfigError as `create` does."""
    found = _found()
    if name not in found:
        raise ConfigError(_unknown(name, tuple(sorted(found))))
    try:
        loaded = found[name].load()
    except ImportError as error:
        package = _PACKAGES.get(name, found[name].module.partition(".")[0])
        raise ConfigError(
            f"transport {name!r} needs package {package!r}, which cannot be imported ({error}): pip install {package}"
        ) from error
    if not (isinstance(loaded, type) and issubclass(loaded, Transport)):
        raise ConfigError(f"transport {name!r} is {found[name].value}, which is not a Transport")
    return cast(Callable[..., Transport], loaded)


def _found() -> dict[str, EntryPoint]:
    found = {name: EntryPoint(name, value, GROUP) for name, value in _BUILT_IN.items()}
    found.update({entry.name: entry for entry in entry_points(group=GROUP)})
    return found


def _unknown(name: str, names: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"no transport is named {name!r}: {hint}known are {', '.join(names)}"
