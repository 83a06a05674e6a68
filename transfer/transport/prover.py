"""Finds out on this machine what `quiescence.judge` wants to know of a peer."""

import os
import struct
from collections.abc import Mapping
from pathlib import Path

from kvferry.transfer.transport.base import Quiescence
from kvferry.transfer.transport.lanes import UNKNOWN, possible_lanes
from kvferry.transfer.transport.processes import ProcessLife, gone, own_life
from kvferry.transfer.transport.quiescence import Condition, Drain, Fact, judge
from kvferry.transfer.transport.sockets import streams

MAX_DRAINS = 256
"""Lives followed at a time. The one followed longest is begun anew when there are more."""

_DESTROYED = Fact(True, "our agent is destroyed")
_REGISTERED = Fact(False, "a remote key is valid while our memory is registered: this process has to be restarted")
_ADAPTERS = Path("/sys/class/infiniband")


class Prover:
    """The proofs of one agent.

    Concurrency: the thread that owns the agent.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.own = own_life()
        """The life of this process, for the card; None when it cannot be told."""
        self._environ = {name: value for name, value in environ.items() if name.startswith("UCX_")}
        self._is_destroyed = False
        self._drains: dict[ProcessLife, Drain] = {}

    def destroyed(self) -> None:
        """The agent is no more, nor are its sockets."""
        self._is_destroyed = True

    def prove(self, life: ProcessLife | None, *, on_device: bool, lane: str = UNKNOWN) -> Quiescence:
        """Whether writes and reads of that life over a lane are over.

        Args:
            on_device: memory of a GPU is registered.
        """
        # First, so that whatever is looked at afterwards holds all that the writer left.
        ended = gone(life, self.own)
        facts = {Condition.WRITER_GONE: ended}
        if self._is_destroyed:
            facts |= dict.fromkeys((Condition.STREAMS_DRAINED, Condition.KEY_INVALIDATED), _DESTROYED)
        else:
            facts[Condition.KEY_INVALIDATED] = _REGISTERED
            if life is not None and ended.holds:
                facts[Condition.STREAMS_DRAINED] = self._drained(life)
        return judge(lane, possible_lanes(self._environ, has_rdma=_has_rdma(), on_device=on_device), facts)

    def _drained(self, life: ProcessLife) -> Fact:
        drain = self._drains.setdefault(life, Drain())
        if len(self._drains) > MAX_DRAINS:
            del self._drains[next(iter(self._drains))]
        same_network = self.own is not None and life.net_space == self.own.net_space
        try:
            return drain.look(streams(same_network))
        except (OSError, ValueError, struct.error) as error:
            return Fact(False, f"the sockets of this process cannot be looked at: {error!r:.200}")


def _has_rdma() -> bool:
    try:
        return bool(os.listdir(_ADAPTERS))
    except FileNotFoundError:
        return False
    except OSError:
        return True
