"""Writes and reads between agents of one process: copies between their registered tensors."""

import secrets
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvferry.transfer.transport.base import Indices, Notification, Operation, Post, PostState, Quiescence
from kvferry.transfer.transport.checked import CheckedTransport, Peer
from kvferry.transfer.transport.memory import AgentCard, Region, RegionTable
from kvferry.transfer.transport.runs import Rows, RunList, RunPairs

MAX_WAITING_NOTIFICATIONS = 65536

_agents: dict[str, "LoopbackTransport"] = {}
_agents_lock = threading.Lock()


@dataclass(eq=False)
class LoopbackPost(Post):
    """A copy, ended before `post` returned."""

    peer: str
    num_descriptors: int
    num_bytes: int
    operation: Operation
    state: PostState = PostState.DONE
    error: str = ""

    def __str__(self) -> str:
        return f"{self.operation.name} of {self.num_bytes} bytes, peer {self.peer}: {self.error or self.state.name}"


class LoopbackTransport(CheckedTransport):
    """A transport whose agents find each other by name in this process; memory may be of any torch device.

    Concurrency: agents of different threads may write to each other.
    """

    name: ClassVar[str] = "loopback"

    def __init__(self, agent_name: str) -> None:
        super().__init__(agent_name)
        self._token = secrets.token_bytes(16)
        self._inbox: deque[Notification] = deque()
        self._receiving = threading.Lock()
        with _agents_lock:
            if agent_name in _agents:
                raise self._error("NAME_TAKEN", f"this process has an open agent named {agent_name}")
            _agents[agent_name] = self

    def _register(self, regions: Sequence[Region]) -> None:
        """Nothing to do: a copy finds the tensor through its region."""

    def _card(self, regions: tuple[Region, ...]) -> AgentCard:
        return AgentCard(self.name, self.agent_name, regions, blob=self._token)

    def _connect(self, card: AgentCard) -> None:
        self._find(card)

    def _disconnect(self, peer: Peer) -> None:
        """Nothing to do: agents keep nothing of each other."""

    def _prepare(self, peer: str | None, rows: Rows, table: RegionTable) -> RunList:
        return RunList(self._lists, peer, rows, table.kind(int(rows[0, 3])))

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
        peer = self._known(remote.peer or "")
        post = LoopbackPost(peer.card.agent_name, len(pairs), pairs.num_bytes, operation)
        views = _views(self._tensors, self._table, pairs.local)
        notice = Notification(self.agent_name, notification)
        self._find(peer.card)._serve(post, views, peer.table, pairs.remote, notice)
        return post

    def _find(self, card: AgentCard) -> "LoopbackTransport":
        agent = _open_agent(card)
        if agent is None:
            raise self._error("PEER_LOST", f"agent {card.agent_name} is not, or no longer, in this process")
        return agent

    def _serve(
        self,
        post: LoopbackPost,
        peers_views: list[torch.Tensor],
        table: RegionTable,
        rows: Rows,
        notification: Notification,
    ) -> None:
        """Called by the peer that posted. The lock makes sure that nothing is touched once `close` returned."""
        with self._receiving:
            if self._closed:
                raise self._error("PEER_LOST", f"agent {self.agent_name} is closed")
            if len(self._inbox) >= MAX_WAITING_NOTIFICATIONS:
                raise self._error("FULL", f"{self.agent_name} has not read its {len(self._inbox)} notifications")
            try:
                views = _views(self._tensors, table, rows)
                _copy(views, peers_views) if post.operation is Operation.READ else _copy(peers_views, views)
            except RuntimeError as error:
                # Some runs may have been copied, so this is a failed post and not a refused one.
                post.state, post.error = PostState.FAILED, str(error)
                return
            self._inbox.append(notification)

    def poll(self, post: Post) -> PostState:
        self._check_open()
        return self._ours(post).state

    def release(self, post: Post) -> bool:
        self._check_open()
        self._ours(post)
        return True

    def notifications(self) -> list[Notification]:
        self._check_open()
        with self._receiving:
            arrived = list(self._inbox)
            self._inbox.clear()
        return arrived

    def quiescence_proof(self, metadata: bytes) -> Quiescence:
        """A copy runs on its agent's thread, which has ended when the agent is closed."""
        card = AgentCard.decode(self.name, metadata)
        if _open_agent(card) is None:
            return Quiescence(True, f"agent {card.agent_name} is closed, and it copied only while it was open")
        return Quiescence(False, f"agent {card.agent_name} is open in this process")

    def lane(self, peer: str) -> str:
        self._check_open()
        self._known(peer)
        return "memcpy"

    def close(self) -> None:
        with _agents_lock:
            if _agents.get(self.agent_name) is self:
                del _agents[self.agent_name]
        with self._receiving:
            self._closed = True
            self._inbox.clear()
        self._lists.clear()
        self._peers.clear()
        self._tensors.clear()

    def _ours(self, post: Post) -> LoopbackPost:
        if isinstance(post, LoopbackPost):
            return post
        raise self._error("INVALID", f"{post!r} is not a post of this transport")


def _views(tensors: dict[int, torch.Tensor], table: RegionTable, rows: Rows) -> list[torch.Tensor]:
    views = []
    for address, length, _, index in rows.tolist():
        region = table.regions[index]
        start = address - region.address
        views.append(tensors[region.address][start : start + length])
    return views


def _copy(sources: Iterable[torch.Tensor], targets: Iterable[torch.Tensor]) -> None:
    devices: set[torch.device] = set()
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)
        devices.update(tensor.device for tensor in (source, target) if tensor.is_cuda)
    for device in devices:
        torch.cuda.synchronize(device)


def _open_agent(card: AgentCard) -> LoopbackTransport | None:
    """The agent that made this card; None once it is closed, whoever has its name now."""
    with _agents_lock:
        agent = _agents.get(card.agent_name)
    return agent if agent is not None and agent._token == card.blob else None


def open_agents() -> tuple[str, ...]:
    """Names of the loopback agents of this process that are not closed."""
    with _agents_lock:
        return tuple(_agents)
