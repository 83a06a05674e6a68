"""Writes and reads through NIXL's UCX backend.

Two things the library does not do, found by trying (tests/transport_contract holds them):

* It cannot abort a post. Releasing the handle of one under way succeeds, and UCX goes on reading the source and writing
  to where it goes. So a handle is kept until the post is over, and `release` says False until then.
* It cannot forget a peer during a post. The post goes on, and asking for its state then fails. So a peer is forgotten
  once nothing posted to it is under way.
"""

import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import nixl._api as library
from nixl._bindings import nixlRemoteDisconnectError

from kvferry.cache.errors import TransportError
from kvferry.transfer.transport.base import (
    MAX_NOTIFICATION_BYTES,
    Indices,
    Notification,
    Operation,
    Post,
    PostState,
    Quiescence,
)
from kvferry.transfer.transport.checked import CheckedTransport, Peer
from kvferry.transfer.transport.lanes import UNKNOWN, LaneLog, wire_fingerprint
from kvferry.transfer.transport.memory import AgentCard, MemoryKind, Region, RegionTable
from kvferry.transfer.transport.prover import Prover
from kvferry.transfer.transport.runs import Rows, RunList, RunPairs

log = logging.getLogger(__name__)

_BACKEND = "UCX"
_OWN_SIDE = "NIXL_INIT_AGENT"


@contextmanager
def _library(action: str, explain: Callable[[], str] = str) -> Iterator[None]:
    """Turns whatever the library raises into a TransportError. Its errors share no class of their own."""
    try:
        yield
    except TransportError:
        raise
    except Exception as error:
        raise TransportError("nixl", _status(error), f"cannot {action}: {_reason(error)}{explain()}") from error


@contextmanager
def _cleanup(action: str) -> Iterator[None]:
    """As `_library`, for steps whose failure must not hide what came before nor stop what comes after: logs it."""
    try:
        with _library(action):
            yield
    except TransportError as error:
        log.warning("%s", error)


def _status(error: Exception) -> str:
    return str(error) if str(error).startswith("NIXL_ERR") else type(error).__name__


def _reason(error: Exception) -> str:
    if isinstance(error, nixlRemoteDisconnectError):
        return "the peer disconnected"
    return str(error) or type(error).__name__


@dataclass(eq=False)
class NixlPost(Post):
    """One write or read.

    Attributes:
        handle: the library's, until the post is over for certain.
        error: why it failed.
    """

    peer: str
    num_descriptors: int
    num_bytes: int
    operation: Operation
    handle: Any
    state: PostState = PostState.IN_PROGRESS
    error: str = ""

    def __str__(self) -> str:
        return f"{self.operation.name} of {self.num_bytes} bytes, peer {self.peer}: {self.error or self.state.name}"


class NixlRuns(RunList):
    """Runs the library checked as well and keeps under a handle."""

    def __init__(self, home: set[RunList], peer: str | None, rows: Rows, kind: MemoryKind, handle: Any) -> None:
        super().__init__(home, peer, rows, kind)
        self.handle = handle

    def release(self) -> None:
        super().release()
        handle, self.handle = self.handle, None
        if handle is not None:
            with _cleanup("release a run list"):
                handle.release()


@dataclass
class _Wire:
    """What is under way to one peer, and what was learned about it.

    Attributes:
        run_bytes: mean size of the runs of the last post.
        operation: of the last post.
        leaving: forget the peer once nothing posted to it is under way.
        lost: why nothing can be posted to it any more.
    """

    posts: set[NixlPost] = field(default_factory=set)
    run_bytes: int = 0
    operation: Operation = Operation.WRITE
    leaving: bool = False
    lost: str = ""


class NixlTransport(CheckedTransport):
    """One NIXL agent with the UCX backend and without the library's own progress thread, which spins.

    Args:
        agent_name: unique per process life.
        log_path: where UCX writes its log (see `lanes.prepare_environment`); without it every lane is "unknown".
        telemetry: take `num_descriptors` of finished posts from the library instead of computing it. The library then
            runs one more thread per agent.
    """

    name: ClassVar[str] = "nixl"

    def __init__(self, agent_name: str, *, log_path: Path | None = None, telemetry: bool = False) -> None:
        super().__init__(agent_name)
        self._log = LaneLog(log_path)
        self._telemetry = telemetry
        self._fingerprint = wire_fingerprint(os.environ)
        self._prover = Prover(os.environ)
        self._registered: list[Any] = []
        self._wires: dict[str, _Wire] = {}
        self._connections: defaultdict[str, frozenset[str]] = defaultdict(frozenset)
        config = library.nixl_agent_config(enable_prog_thread=False, backends=[_BACKEND], capture_telemetry=telemetry)
        with _library("make an agent", self._what_ucx_says):
            self._agent = self._make_agent(config)
        if _BACKEND not in self._agent.backends:
            raise self._error("NO_BACKEND", f"this build of NIXL has no {_BACKEND} backend")

    def _make_agent(self, config: Any) -> Any:
        return library.nixl_agent(self.agent_name, config)

    def _what_ucx_says(self) -> str:
        """For calls whose errors name no reason of their own."""
        self._log.refresh()
        return f" (UCX: {self._log.last_problem})" if self._log.last_problem else ""

    def _register(self, regions: Sequence[Region]) -> None:
        rows = [(region.address, region.num_bytes, region.device_index, "") for region in regions]
        with _library(f"register {sum(region.num_bytes for region in regions)} bytes", self._what_ucx_says):
            self._registered.append(self._agent.register_memory(rows, regions[0].kind))

    def _card(self, regions: tuple[Region, ...]) -> AgentCard:
        with _library("read the agent's metadata"):
            blob = self._agent.get_agent_metadata()
        return AgentCard(self.name, self.agent_name, regions, self._fingerprint, blob, self._prover.own)

    def _connect(self, card: AgentCard) -> None:
        peer = card.agent_name
        if peer in self._wires:
            raise self._error("IN_USE", f"posts of an earlier connection to {peer} are still under way")
        self._log.refresh()
        before = self._log.connections(self.agent_name)
        with _library(f"connect to {peer}", self._what_ucx_says):
            added = self._agent.add_remote_agent(card.blob).decode()
        if added != peer:
            with _cleanup(f"forget {added}"):
                self._agent.remove_remote_agent(added)
            raise self._error("METADATA", f"metadata of {peer} is that of agent {added}")
        with _library(f"connect to {peer}", self._what_ucx_says):
            self._agent.make_connection(peer)
        self._wires[peer] = _Wire()
        self._log.refresh()
        self._connections[card.wire] |= self._log.connections(self.agent_name) - before

    def _disconnect(self, peer: Peer) -> None:
        self._wires[peer.card.agent_name].leaving = True
        self._leave_if_idle(peer.card.agent_name)

    def _leave_if_idle(self, peer: str) -> None:
        wire = self._wires[peer]
        if wire.leaving and not wire.posts:
            del self._wires[peer]
            with _cleanup(f"forget {peer}"):
                self._agent.remove_remote_agent(peer)

    def _prepare(self, peer: str | None, rows: Rows, table: RegionTable) -> RunList:
        kind = table.kind(int(rows[0, 3]))
        with _library(f"prepare {len(rows)} runs of {peer or 'our own memory'}", self._what_ucx_says):
            handle = self._agent.prep_xfer_dlist(peer or _OWN_SIDE, rows[:, :3].copy(), kind)
        return NixlRuns(self._lists, peer, rows, kind, handle)

    def _post(
        self,
        local: RunList,
        local_indices: Indices,
        remote: RunList,
        remote_indices: Indices,
        pairs: RunPairs,
        notification: bytes,
        operation: Operation,
    ) -> Post:
        assert isinstance(local, NixlRuns)
        assert isinstance(remote, NixlRuns)
        peer = remote.peer or ""
        wire = self._wires[peer]
        if wire.lost:
            raise self._error("PEER_LOST", f"nothing can be posted to {peer} any more: {wire.lost}")
        with _library(f"prepare a {operation.name} with peer {peer}"):
            handle = self._agent.make_prepped_xfer(
                operation.value, local.handle, local_indices, remote.handle, remote_indices, notification
            )
        post = NixlPost(peer, len(pairs), pairs.num_bytes, operation, handle)
        wire.posts.add(post)
        wire.run_bytes, wire.operation = pairs.num_bytes // len(pairs), operation
        # From here on some bytes may have left, so a failure is the post's and not this call's.
        self._follow(post, self._agent.transfer)
        return post

    def _follow(self, post: NixlPost, ask: Callable[[Any], str]) -> None:
        """Ask the library for the state of a post and act on it."""
        try:
            with _library(f"{post.operation.name} with peer {post.peer}"):
                status = ask(post.handle)
        except TransportError as error:
            # The endpoint of a peer that disconnected is closed, and nothing is read for it any more. Any other error
            # may concern one run of many.
            self._fail(post, str(error), over=isinstance(error.__cause__, nixlRemoteDisconnectError))
            return
        if status == "DONE":
            self._end(post)
        elif status != "PROC":
            self._fail(post, f"the library reports {status}", over=False)

    def _fail(self, post: NixlPost, reason: str, *, over: bool) -> None:
        if post.state is PostState.IN_PROGRESS:
            self._log.refresh()
        post.state = PostState.FAILED
        post.error = post.error or reason
        self._wires[post.peer].lost = post.error
        if over:
            self._let_go(post)

    def _end(self, post: NixlPost) -> None:
        if post.state is PostState.IN_PROGRESS:
            post.state = PostState.DONE
            if self._telemetry:
                with _cleanup("read the telemetry of a post"):
                    post.num_descriptors = int(self._agent.get_xfer_telemetry(post.handle).descCount)
        self._let_go(post)

    def _let_go(self, post: NixlPost) -> None:
        handle, post.handle = post.handle, None
        self._wires[post.peer].posts.discard(post)
        with _cleanup("release a post"):
            handle.release()
        self._leave_if_idle(post.peer)

    def poll(self, post: Post) -> PostState:
        self._check_open()
        ours = self._ours(post)
        if ours.state is PostState.IN_PROGRESS:
            self._follow(ours, self._agent.check_xfer_state)
        return ours.state

    def release(self, post: Post) -> bool:
        self._check_open()
        ours = self._ours(post)
        if ours.handle is not None:
            self._follow(ours, self._agent.check_xfer_state)
        return ours.handle is None

    def notifications(self) -> list[Notification]:
        self._check_open()
        with _library("read notifications"):
            arrived: dict[str, list[bytes]] = self._agent.get_new_notifs()
        return [Notification(peer, payload) for peer, payloads in arrived.items() for payload in _short(peer, payloads)]

    def quiescence_proof(self, metadata: bytes) -> Quiescence:
        """Answers also when this agent is closed. Which lane a peer uses only the peer knows, so any is assumed.

        What is left in sockets is read by `notifications`, so go on calling that.
        """
        life = AgentCard.decode(self.name, metadata).life
        return self._prover.prove(life, on_device=any(region.kind == "VRAM" for region in self._table.regions))

    def lane(self, peer: str) -> str:
        self._check_open()
        known = self._known(peer)
        wire = self._wires[peer]
        if not wire.run_bytes:
            return UNKNOWN
        self._log.refresh()
        return self._log.lane(self.agent_name, wire.run_bytes, self._connections[known.card.wire], wire.operation)

    def close(self) -> None:
        """Posts still under way are given up, and a peer may be left with part of what was written."""
        if self._closed:
            return
        self._closed = True
        for wire in self._wires.values():
            self._give_up(wire)
        for runs in tuple(self._lists):
            runs.release()
        for peer in self._wires:
            with _cleanup(f"forget {peer}"):
                self._agent.remove_remote_agent(peer)
        for registered in self._registered:
            with _cleanup("deregister memory"):
                self._agent.deregister_memory(registered)
        # The agent goes with its last reference, and only then does UCX read our memory no more.
        del self._agent
        self._prover.destroyed()
        self._registered.clear()
        self._wires.clear()
        self._peers.clear()
        self._tensors.clear()
        self._log.refresh()

    def _give_up(self, wire: _Wire) -> None:
        for post in wire.posts:
            post.state, post.error = PostState.FAILED, "the agent was closed"
            handle, post.handle = post.handle, None
            with _cleanup("release a post"):
                handle.release()

    def _ours(self, post: Post) -> NixlPost:
        if isinstance(post, NixlPost):
            return post
        raise self._error("INVALID", f"{post!r} is not a post of this transport")


def _short(peer: str, payloads: list[bytes]) -> Iterator[bytes]:
    for payload in payloads:
        if len(payload) <= MAX_NOTIFICATION_BYTES:
            yield payload
        else:
            log.warning("dropped a notification of %d bytes from %s: it is not from kvferry", len(payload), peer)
