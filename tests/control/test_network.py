import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from kvferry.cache.errors import Incompatibility, LocalProtocolError, TransportError, Unavailable
from kvferry.transfer.control import stream as streams
from kvferry.transfer.control.client import InferenceClient
from kvferry.transfer.control.convert import channel, rank
from kvferry.transfer.control.errors import calling
from kvferry.transfer.control.handlers import ChannelBody, Envelope, Hello
from kvferry.transfer.control.server import ControlServer
from kvferry.transfer.control.wire import open_channel
from kvferry.transfer.inference import WorkerStatus
from kvferry.transfer.types import PROTOCOL_VERSION, Grant, RankInfo, Role, Side, WorkerId
from kvferry.v1.peer_pb2 import RegisterRequest
from kvferry.v1.peer_pb2_grpc import PeerStub
from kvferry.v1.transfer_pb2 import ChannelRequest
from kvferry.v1.transfer_pb2_grpc import TransferStub
from tests.control import samples
from tests.control.worlds import Worker, closing, connected_pair, run, wait_until, workers

PREFILL, DECODE = samples.PREFILL, samples.DECODE


def test_connect_registers_both_ways_and_reports_paired() -> None:
    async def test() -> None:
        async with connected_pair() as (prefill, decode):
            assert prefill.pairings == [DECODE]
            assert decode.pairings == [PREFILL]
            assert (prefill.sink.up, decode.sink.up) == ([DECODE], [PREFILL])
            assert (prefill.network.paired, decode.network.paired) == ({DECODE}, {PREFILL})
            assert decode.paired_changes == [{PREFILL}]

    run(test)


def test_messages_cross_in_order_and_equal() -> None:
    async def test() -> None:
        async with connected_pair() as (prefill, decode):
            assert decode.network.send(PREFILL, samples.grant())
            assert decode.network.send(PREFILL, samples.renewal())
            assert decode.network.send(PREFILL, samples.cancel(DECODE))
            assert prefill.network.send(DECODE, samples.renewal(PREFILL, Side.SENDER))
            assert prefill.network.send(DECODE, samples.permit())
            assert prefill.network.send(DECODE, samples.result())
            await wait_until(lambda: prefill.sink.cancels and decode.sink.results, "all messages arrived")

            peer, grant = prefill.sink.grants[0]
            assert (peer, grant.key) == (DECODE, samples.KEY)
            assert [slots.tolist() for slots in grant.pages.slots] == [[3, 4, 9], [-1, -1, 7]]
            assert prefill.sink.cancels == [(DECODE, samples.cancel(DECODE))]
            assert prefill.sink.renewals == [(DECODE, samples.renewal())]
            assert decode.sink.renewals == [(PREFILL, samples.renewal(PREFILL, Side.SENDER))]
            peer, permit = decode.sink.permits[0]
            assert (peer, permit.key, permit.fence) == (PREFILL, samples.KEY, grant.fence)
            assert [slots.tolist() for slots in permit.pages.slots] == [[3, 4, 9], [-1, -1, 7]]
            assert decode.sink.results == [(PREFILL, samples.result())]

    run(test)


def test_send_from_many_threads_delivers_every_message() -> None:
    async def test() -> None:
        async with connected_pair() as (prefill, decode):
            accepted: list[bool] = []

            def post() -> None:
                accepted.extend(decode.network.send(PREFILL, samples.cancel()) for _ in range(50))

            threads = [threading.Thread(target=post) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                await asyncio.to_thread(thread.join)
            await wait_until(lambda: len(prefill.sink.cancels) == sum(accepted), "what was accepted arrived")
            assert sum(accepted) == 200

    run(test)


def test_send_without_a_channel_for_it_is_refused() -> None:
    async def test() -> None:
        async with connected_pair() as (prefill, decode):
            assert not prefill.network.send(DECODE, samples.grant())
            assert not prefill.network.send(DECODE, samples.cancel(PREFILL))
            assert not prefill.network.send(DECODE, samples.renewal(PREFILL, Side.RECEIVER))
            assert not decode.network.send(PREFILL, samples.result())
            assert not decode.network.send(PREFILL, samples.permit())
            assert not decode.network.send(PREFILL, samples.renewal(DECODE, Side.SENDER))
            assert not decode.network.send(WorkerId("prefill-0", 0x99), samples.grant())
            assert not decode.network.send(WorkerId("stranger", 1), samples.cancel())

    run(test)


def test_full_queue_refuses_until_it_drains() -> None:
    async def test() -> None:
        async with connected_pair() as (prefill, decode):
            taken = [decode.network.send(PREFILL, samples.cancel()) for _ in range(streams.MAX_QUEUED + 5)]
            assert taken == [True] * streams.MAX_QUEUED + [False] * 5
            await wait_until(lambda: len(prefill.sink.cancels) == streams.MAX_QUEUED, "the queue drained")
            assert decode.network.send(PREFILL, samples.cancel())

    run(test)


def test_two_workers_of_both_roles_have_a_stream_each_way() -> None:
    async def test() -> None:
        one, two = Worker(WorkerId("one", 1)), Worker(WorkerId("two", 2))
        async with workers(one, two):
            await one.network.connect(two.entry)
            await two.network.connect(one.entry)
            await wait_until(lambda: len(one.sink.up) == 2 == len(two.sink.up), "both streams are up")
            assert one.network.send(two.id, samples.grant(sender=two.id, receiver=one.id))
            assert one.network.send(two.id, samples.result(sender=one.id, receiver=two.id))
            for side in Side:
                assert one.network.send(two.id, samples.renewal(one.id, side))
            await wait_until(lambda: two.sink.grants and two.sink.results, "grant and result arrived")
            await wait_until(lambda: len(two.sink.renewals) == 2, "a renewal over each stream")
            assert {renewal.side for _, renewal in two.sink.renewals} == set(Side)
            assert one.network.paired == {two.id}
            assert one.paired_changes == [{two.id}]

    run(test)


def test_rejected_pairing_reports_every_difference_once(caplog: pytest.LogCaptureFixture) -> None:
    reasons = [Incompatibility("dtype", "bfloat16", "float32", "bytes differ"), Incompatibility("block", "16", "4", "")]

    async def test() -> None:
        prefill, decode = Worker(PREFILL), Worker(DECODE)
        prefill.refusals = reasons
        async with workers(prefill, decode):
            await decode.network.connect(prefill.entry)
            await wait_until(lambda: "dtype" in caplog.text, "the refusal is logged")
            await decode.network.connect(prefill.entry)
            assert not decode.network.paired
            assert decode.pairings == []

    run(test)
    refusals = [record.message for record in caplog.records if "no channel to" in record.message]
    assert len(refusals) == 1
    assert "dtype: local float32, remote bfloat16 (bytes differ); block: local 4, remote 16" in refusals[0]


def test_own_refusal_opens_no_channel(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        prefill, decode = Worker(PREFILL), Worker(DECODE)
        decode.refusals = [Incompatibility("model", "a", "b", "other weights")]
        async with workers(prefill, decode):
            await decode.network.connect(prefill.entry)
            await wait_until(lambda: "other weights" in caplog.text, "the refusal is logged")
            assert not decode.sink.up
            assert not prefill.sink.up

    run(test)


def test_stopped_server_is_noticed_and_dialled_again() -> None:
    async def test() -> None:
        async with connected_pair() as (prefill, decode):
            port = prefill.server.address
            await prefill.stop()
            await wait_until(lambda: decode.sink.lost, "the loss is noticed")
            assert decode.sink.lost[0][0] == PREFILL
            assert not decode.network.paired
            assert not decode.network.send(PREFILL, samples.grant())

            again = Worker(PREFILL, Role.PREFILL)
            again.server = type(again.server)(port, peer=again.network, transfer=again.network)
            async with workers(again):
                await wait_until(lambda: decode.sink.up == [PREFILL, PREFILL], "the channel is up again")
                assert decode.paired_changes == [{PREFILL}, frozenset(), {PREFILL}]

    run(test)


def test_closing_receiver_is_noticed_by_the_sender() -> None:
    async def test() -> None:
        async with connected_pair() as (prefill, decode):
            await decode.network.close()
            await wait_until(lambda: prefill.sink.lost, "the loss is noticed")
            assert decode.sink.lost == [(PREFILL, "this worker is shutting down")]
            assert not prefill.network.paired

    run(test)


def test_disconnect_ends_the_channel_for_good() -> None:
    async def test() -> None:
        async with connected_pair() as (prefill, decode):
            await decode.network.disconnect(WorkerId("prefill-0", 0x99))
            assert decode.network.paired
            await decode.network.disconnect(PREFILL, "no longer needed")
            assert decode.sink.lost == [(PREFILL, "no longer needed")]
            await wait_until(lambda: prefill.sink.lost, "the sender noticed")

    run(test)


def test_update_connects_wanted_members_and_keeps_a_live_channel_of_a_vanished_one() -> None:
    async def test() -> None:
        prefill, other, decode = Worker(PREFILL, Role.PREFILL), Worker(WorkerId("d1", 3), Role.DECODE), Worker(DECODE)
        async with workers(prefill, other, decode):
            everyone = [prefill.entry, other.entry, decode.entry]
            await decode.network.update(everyone, lambda entry: entry.role.prefills)
            await wait_until(lambda: decode.sink.up, "the channel is up")
            await decode.network.update([decode.entry], lambda entry: entry.role.prefills)
            assert decode.network.paired == {PREFILL}
            assert other.pairings == []

            await prefill.network.close()
            await wait_until(lambda: decode.sink.lost, "the loss is noticed")
            await wait_until(lambda: not decode.network._links, "a vanished member is not dialled again")

    run(test)


def test_new_incarnation_replaces_the_old_channel() -> None:
    async def test() -> None:
        async with connected_pair() as (prefill, decode):
            newer = Worker(WorkerId(PREFILL.name, 0x77), Role.PREFILL)
            async with workers(newer):
                await decode.network.update([newer.entry], lambda entry: entry.role.prefills)
                await wait_until(lambda: decode.network.paired == {newer.id}, "the new life is paired")
                assert decode.sink.lost[0][0] == PREFILL
                assert not decode.network.send(PREFILL, samples.grant())
                assert decode.network.send(newer.id, samples.grant(sender=newer.id))
            await wait_until(lambda: prefill.sink.lost, "the old life lost its channel")

    run(test)


def test_newer_life_of_a_receiver_ends_the_channel_of_the_older() -> None:
    async def test() -> None:
        async with connected_pair() as (prefill, _):
            newer = Worker(WorkerId(DECODE.name, 0x77), Role.DECODE)
            async with workers(newer):
                await newer.network.connect(prefill.entry)
                await wait_until(lambda: prefill.network.paired == {newer.id}, "only the newer life is paired")
                assert prefill.sink.lost == [(DECODE, f"replaced by {newer.id}")]

    run(test)


def test_endpoint_of_another_life_is_not_paired_with() -> None:
    async def test() -> None:
        prefill, decode = Worker(PREFILL), Worker(DECODE)
        async with workers(prefill, decode):
            await decode.network.connect(samples.entry(WorkerId(PREFILL.name, 0x99), prefill.server.address))
            await wait_until(lambda: prefill.pairings, "the registration arrived")
            assert decode.pairings == []
            assert not prefill.sink.up

    run(test)


def test_own_name_cannot_register(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        one, double = Worker(WorkerId("same", 1)), Worker(WorkerId("same", 2))
        async with workers(one, double):
            await one.network.connect(double.entry)
            await wait_until(lambda: "names of workers must be unique" in caplog.text, "the refusal is logged")
            await one.network.update([double.entry], lambda entry: True)
            assert not one.network.paired
            assert not one.sink.up
            assert double.pairings == []

    run(test)


class Intruder:
    """A receiver that says what it likes: registered under `worker`, with a raw channel to a server."""

    def __init__(self, endpoint: str, worker: WorkerId) -> None:
        self._wire = open_channel(endpoint)
        self._worker = worker
        self._call = TransferStub(self._wire).Channel()

    async def register(self) -> None:
        request = RegisterRequest(rank=rank.rank_to_wire(samples.rank(self._worker, Role.DECODE)))
        await PeerStub(self._wire).Register(request, timeout=5)

    async def say(self, sequence: int, body: ChannelBody) -> None:
        await self._call.write(ChannelRequest(message=channel.envelope_to_wire(Envelope(sequence, body))))

    async def ending(self) -> None:
        """Read to the end; raises the server's error."""
        with calling("server"):
            async for _ in self._call:
                pass

    async def close(self) -> None:
        self._call.cancel()
        await self._wire.close()


HELLO = Hello(DECODE, PROTOCOL_VERSION)
STRANGER = WorkerId("stranger", 5)


@pytest.mark.parametrize(
    "said, complaint",
    [
        pytest.param(
            [(0, Hello(WorkerId(DECODE.name, 0x23), PROTOCOL_VERSION))], "registered is", id="wrong incarnation"
        ),
        pytest.param([(0, Hello(STRANGER, PROTOCOL_VERSION))], "no such worker", id="never registered"),
        pytest.param([(0, Hello(DECODE, PROTOCOL_VERSION + 1))], "protocol version", id="other protocol version"),
        pytest.param([(1, HELLO)], "0 was due", id="hello out of order"),
        pytest.param([(0, samples.grant())], "must be a hello", id="grant before hello"),
        pytest.param([(0, HELLO), (2, samples.grant())], "1 was due", id="gap"),
        pytest.param([(0, HELLO), (1, samples.cancel()), (1, samples.cancel())], "2 was due", id="repeat"),
        pytest.param([(0, HELLO), (1, HELLO)], "hello comes once", id="second hello"),
        pytest.param([(0, HELLO), (1, samples.result())], "senders send permits", id="result to a sender"),
        pytest.param([(0, HELLO), (1, samples.grant(receiver=STRANGER))], "stranger", id="grant for another receiver"),
        pytest.param([(0, HELLO), (1, samples.grant(sender=STRANGER))], "stranger", id="grant of another sender"),
        pytest.param([(0, HELLO), (1, samples.permit())], "senders send permits", id="permit to a sender"),
        pytest.param([(0, HELLO), (1, samples.cancel(STRANGER))], "origin stranger", id="cancel of another"),
        pytest.param([(0, HELLO), (1, samples.renewal(STRANGER))], "origin stranger", id="renewal of another"),
        pytest.param(
            [(0, HELLO), (1, samples.renewal(side=Side.SENDER))], "renewals of their side", id="renewal of a sender"
        ),
    ],
)
def test_broken_protocol_closes_the_stream(said: list[tuple[int, ChannelBody]], complaint: str) -> None:
    async def test() -> None:
        prefill = Worker(PREFILL)
        async with workers(prefill):
            intruder = Intruder(prefill.server.address, DECODE)
            try:
                await intruder.register()
                for sequence, body in said:
                    await intruder.say(sequence, body)
                with pytest.raises(LocalProtocolError, match=complaint):
                    await intruder.ending()
            finally:
                await intruder.close()
            await wait_until(lambda: len(prefill.sink.lost) == len(prefill.sink.up), "what was up is lost")
            assert all(complaint in reason for _, reason in prefill.sink.lost)
            assert not prefill.network.paired

    run(test)


class RogueSender:
    """A sender that pairs like any other and then says what it likes."""

    def __init__(self, said: list[Envelope]) -> None:
        self._said = said
        self.channels = 0

    async def register(self, remote: RankInfo) -> RankInfo:
        return samples.rank(PREFILL, Role.PREFILL)

    async def get_status(self) -> WorkerStatus:
        return samples.status()

    async def channel(self, inbound: AsyncIterator[Envelope]) -> AsyncIterator[Envelope]:
        self.channels += 1
        for envelope in self._said:
            yield envelope
        async for _ in inbound:
            pass


GREETING = Envelope(0, Hello(PREFILL, PROTOCOL_VERSION))


@pytest.mark.parametrize(
    "said, complaint",
    [
        pytest.param(
            [Envelope(0, Hello(STRANGER, PROTOCOL_VERSION))], "expected hello from prefill", id="hello of another"
        ),
        pytest.param(
            [Envelope(0, Hello(PREFILL, PROTOCOL_VERSION + 1))], "protocol version", id="other protocol version"
        ),
        pytest.param([Envelope(0, samples.result())], "expected hello", id="result before hello"),
        pytest.param([GREETING, Envelope(2, samples.result())], "1 was due", id="gap"),
        pytest.param([GREETING, Envelope(1, samples.grant())], "receivers send grants", id="grant to a receiver"),
        pytest.param([GREETING, Envelope(1, samples.result(receiver=STRANGER))], "stranger", id="foreign result"),
        pytest.param([GREETING, Envelope(1, samples.permit(sender=STRANGER))], "stranger", id="foreign permit"),
        pytest.param(
            [GREETING, Envelope(1, samples.cancel(PREFILL))], "receivers send grants", id="cancel to a receiver"
        ),
        pytest.param(
            [GREETING, Envelope(1, samples.renewal(DECODE, Side.SENDER))],
            "names origin decode",
            id="renewal of another",
        ),
        pytest.param(
            [GREETING, Envelope(1, samples.renewal(PREFILL, Side.RECEIVER))],
            "renewals of theirs",
            id="renewal of a receiver",
        ),
    ],
)
def test_sender_that_breaks_the_protocol_is_dropped(
    said: list[Envelope], complaint: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        rogue, decode = RogueSender(said), Worker(DECODE)
        server = ControlServer("127.0.0.1:0", peer=rogue, transfer=rogue)
        await server.start()
        async with workers(decode), closing(lambda: server.stop(0.1)):
            await decode.network.connect(samples.entry(PREFILL, server.address))
            await wait_until(lambda: complaint in caplog.text, "the complaint is logged")
            assert all(complaint in reason for _, reason in decode.sink.lost)
            assert len(decode.sink.lost) == len(decode.sink.up)
            assert not decode.sink.results
            assert rogue.channels == 1

    run(test)


def test_status_of_a_worker_is_served() -> None:
    async def test() -> None:
        prefill = Worker(PREFILL)
        async with workers(prefill), InferenceClient(prefill.server.address) as client:
            assert await client.get_status() == samples.status(PREFILL)

    run(test)


def test_sink_that_fails_ends_the_channel_with_its_error() -> None:
    async def test() -> None:
        async with connected_pair() as (prefill, decode):
            error = TransportError("loopback", "stopped", "the reactor ended")

            def fail(peer: WorkerId, grant: Grant) -> None:
                raise error

            prefill.sink.on_grant = fail  # type: ignore[method-assign]
            assert decode.network.send(PREFILL, samples.grant())
            await wait_until(lambda: decode.sink.lost and prefill.sink.lost, "both ends lost the channel")
            assert prefill.sink.lost[0] == (DECODE, str(error))
            assert decode.sink.lost[0] == (PREFILL, str(error))

    run(test)


def test_malformed_message_closes_the_stream() -> None:
    async def test() -> None:
        prefill = Worker(PREFILL)
        async with workers(prefill):
            intruder = Intruder(prefill.server.address, DECODE)
            try:
                await intruder.register()
                await intruder.say(0, HELLO)
                await intruder._call.write(ChannelRequest())
                with pytest.raises(LocalProtocolError, match=r"ChannelRequest\.message"):
                    await intruder.ending()
            finally:
                await intruder.close()
            await wait_until(lambda: prefill.sink.lost, "the loss is reported")

    run(test)


def test_closed_network_takes_no_channel() -> None:
    async def test() -> None:
        prefill = Worker(PREFILL)
        async with workers(prefill):
            await prefill.network.close()
            intruder = Intruder(prefill.server.address, DECODE)
            try:
                with pytest.raises(Unavailable, match="shutting down"):
                    await intruder.ending()
            finally:
                await intruder.close()
            assert not prefill.sink.up

    run(test)


def test_hang_up_of_either_side_loses_nothing_that_was_queued_and_the_channel_comes_back() -> None:
    async def test() -> None:
        async with connected_pair() as (prefill, decode):
            for count in range(1, 4):
                before = len(decode.sink.up)
                for _ in range(40):
                    assert decode.network.send(PREFILL, samples.cancel(DECODE))
                decode.network.hang_up(PREFILL, "a read failed")
                await wait_until(lambda c=count: len(prefill.sink.cancels) == 40 * c, "all cancels arrived")
                await wait_until(lambda b=before: len(decode.sink.up) > b, "the receiver dialled again")
            before = len(decode.sink.up)
            await wait_until(lambda: prefill.network.send(DECODE, samples.result()), "the sender's side is up, too")
            prefill.network.hang_up(DECODE, "a write failed")
            await wait_until(lambda: decode.sink.results, "the result arrived")
            await wait_until(lambda: len(decode.sink.up) > before, "the receiver dialled again")

    run(test)
