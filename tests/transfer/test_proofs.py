"""How often the transport is asked, and what is remembered of its answers."""

from kvferry.transfer.proofs import ASK_SECONDS, Proofs
from kvferry.transfer.transport.base import Quiescence
from kvferry.transfer.transport.loopback import LoopbackTransport
from tests.transfer.pairs import FakeClock, pair


class Asked(LoopbackTransport):
    """Counts questions; says yes when the test says so."""

    def __init__(self, agent_name: str) -> None:
        super().__init__(agent_name)
        self.num_asked = 0
        self.proven = False

    def quiescence_proof(self, metadata: bytes) -> Quiescence:
        self.num_asked += 1
        return Quiescence(self.proven, "as the test says")


def test_transport_is_asked_now_and_then_and_never_again_once_it_proved() -> None:
    with pair() as running:
        transceiver, transport, clock = running.receiver.transceiver, Asked("asked"), FakeClock()
        peer = transceiver._peers.find(running.sender.worker)
        assert peer is not None
        proofs = Proofs(transport, clock)
        assert [proofs.quiet(peer) for _ in range(3)] == [False] * 3
        assert transport.num_asked == 1
        clock.now += ASK_SECONDS
        transport.proven = True
        assert [proofs.quiet(peer) for _ in range(3)] == [True] * 3
        assert transport.num_asked == 2
        proofs.forget_all_but(set())
        assert proofs.quiet(peer)
        assert transport.num_asked == 3
        transport.close()
