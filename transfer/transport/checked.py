"""The argument checks and the books all transports share, so that each is equally strict."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvferry.cache.errors import TransportError
from kvferry.transfer.transport.base import (
    MAX_NOTIFICATION_BYTES,
    DescriptorList,
    Descriptors,
    Indices,
    Operation,
    Post,
    Transport,
)
from kvferry.transfer.transport.memory import MAX_AGENT_NAME_BYTES, AgentCard, Region, RegionTable, region_of
from kvferry.transfer.transport.runs import Rows, RunList, RunPairs, checked_rows, pair_runs


@dataclass(frozen=True)
class Peer:
    """A connected agent as its metadata describes it."""

    card: AgentCard
    metadata: bytes
    table: RegionTable


class CheckedTransport(Transport):
    """Checks every call, then does it through the methods below, which may assume that their arguments are right."""

    def __init__(self, agent_name: str) -> None:
        if not 0 < len(agent_name.encode()) <= MAX_AGENT_NAME_BYTES:
            raise TransportError(self.name, "INVALID", f"agent name {agent_name!r} is empty or too long")
        self.agent_name = agent_name
        self._table = RegionTable(self.name, ())
        self._tensors: dict[int, torch.Tensor] = {}
        self._peers: dict[str, Peer] = {}
        self._lists: set[RunList] = set()
        self._closed = False

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._table.regions)} regions, {len(self._peers)} peers"
        return f"<{self.name} agent {self.agent_name}: {state}>"

    @abstractmethod
    def _register(self, regions: Sequence[Region]) -> None: ...

    @abstractmethod
    def _card(self, regions: tuple[Region, ...]) -> AgentCard: ...

    @abstractmethod
    def _connect(self, card: AgentCard) -> None: ...

    @abstractmethod
    def _disconnect(self, peer: Peer) -> None: ...

    @abstractmethod
    def _prepare(self, peer: str | None, rows: Rows, table: RegionTable) -> RunList: ...

    @abstractmethod
    def _post(
        self,
        local: RunList,
        local_indices: Indices,
        remote: RunList,
        remote_indices: Indices,
        pairs: RunPairs,
        notification: bytes,
        operation: Operation,
    ) -> Post: ...

    def register(self, regions: Sequence[torch.Tensor]) -> None:
        self._check_open()
        added = [region_of(self.name, tensor) for tensor in regions]
        if len({(region.kind, region.device_index) for region in added}) > 1:
            raise self._error("INVALID", "regions of one call lie on several devices: register each device by itself")
        table = RegionTable(self.name, (*self._table.regions, *added))
        if added:
            self._register(added)
        self._table = table
        # Holding the tensors keeps their memory from being reused while peers may write to it.
        self._tensors.update({region.address: tensor for region, tensor in zip(added, regions, strict=True)})

    def metadata(self) -> bytes:
        self._check_open()
        return self._card(self._table.regions).encode()

    def connect(self, metadata: bytes) -> str:
        self._check_open()
        card = AgentCard.decode(self.name, metadata)
        known = self._peers.get(card.agent_name)
        if known is not None and known.metadata == metadata:
            return card.agent_name
        if known is not None:
            raise self._error("CONNECTED", f"{card.agent_name} is connected with other metadata: disconnect it first")
        if card.agent_name == self.agent_name:
            raise self._error("INVALID", "an agent cannot connect to itself")
        peer = Peer(card, metadata, RegionTable(self.name, card.regions))
        self._connect(card)
        self._peers[card.agent_name] = peer
        return card.agent_name

    def disconnect(self, peer: str) -> None:
        self._check_open()
        if any(runs.peer == peer for runs in self._lists):
            raise self._error("IN_USE", f"run lists of {peer} are still held: release them first")
        known = self._peers.pop(peer, None)
        if known is not None:
            self._disconnect(known)

    def prepare(self, peer: str | None, descriptors: Descriptors) -> DescriptorList:
        self._check_open()
        table = self._table if peer is None else self._known(peer).table
        return self._prepare(peer, checked_rows(self.name, table, descriptors), table)

    def post(
        self,
        local: DescriptorList,
        local_indices: Indices,
        remote: DescriptorList,
        remote_indices: Indices,
        notification: bytes,
        operation: Operation = Operation.WRITE,
    ) -> Post:
        self._check_open()
        mine, peers = self._held(local), self._held(remote)
        if mine.peer is not None or peers.peer is None:
            raise self._error("INVALID", f"{mine!r} and {peers!r}: local runs are our own and remote ones a peer's")
        if not 0 < len(notification) <= MAX_NOTIFICATION_BYTES:
            raise self._error(
                "INVALID", f"notification of {len(notification)} bytes: 1 to {MAX_NOTIFICATION_BYTES} are allowed"
            )
        ours, theirs = np.ascontiguousarray(local_indices), np.ascontiguousarray(remote_indices)
        pairs = pair_runs(self.name, mine, ours, peers, theirs)
        return self._post(mine, ours, peers, theirs, pairs, notification, operation)

    def _check_open(self) -> None:
        if self._closed:
            raise self._error("CLOSED", f"agent {self.agent_name} is closed")

    def _known(self, peer: str) -> Peer:
        try:
            return self._peers[peer]
        except KeyError:
            raise self._error("UNKNOWN_PEER", f"{peer} is not connected") from None

    def _held(self, runs: DescriptorList) -> RunList:
        if isinstance(runs, RunList) and runs in self._lists:
            return runs
        raise self._error("RELEASED", f"{runs!r} was released, or belongs to another agent")

    def _error(self, status: str, message: str) -> TransportError:
        return TransportError(self.name, status, message)
