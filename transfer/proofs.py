"""Proof that a peer touches our memory no more, asked of the transport."""

import logging
from collections.abc import Callable

from kvferry.transfer.peers import Peer
from kvferry.transfer.transport.base import Transport
from kvferry.transfer.types import WorkerId

log = logging.getLogger(__name__)

ASK_SECONDS = 0.5
SETTLE_SECONDS = 5.0
"""How long after a failure the other side may take to prove quiet before pages count as in doubt."""


class Proofs:
    """Remembers what was proven of each life of a worker, and asks again now and then about the others.

    Concurrency: the thread that owns the transport.
    """

    def __init__(self, transport: Transport, clock: Callable[[], float]) -> None:
        self._transport = transport
        self._clock = clock
        self._asked_at: dict[WorkerId, float] = {}
        self._stories: dict[WorkerId, str] = {}
        self._proven: set[WorkerId] = set()

    def quiet(self, peer: Peer) -> bool:
        """Whether nothing that this life of a peer started can touch our memory any more."""
        worker, now = peer.info.worker, self._clock()
        if worker in self._proven:
            return True
        if now < self._asked_at.get(worker, now - ASK_SECONDS) + ASK_SECONDS:
            return False
        proof = self._transport.quiescence_proof(peer.info.agent_metadata)
        if self._stories.get(worker) != proof.story:
            log.info("%s: %s: %s", worker, "quiet" if proof.proven else "not proven quiet", proof.story)
        self._asked_at[worker], self._stories[worker] = now, proof.story
        if proof.proven:
            self._proven.add(worker)
        return proof.proven

    def forget_all_but(self, workers: set[WorkerId]) -> None:
        """Drop what is remembered of workers without an attempt in doubt."""
        self._asked_at = {worker: at for worker, at in self._asked_at.items() if worker in workers}
        self._stories = {worker: story for worker, story in self._stories.items() if worker in workers}
        self._proven &= workers
