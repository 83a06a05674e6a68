"""Senders that the workers dial and that say what they like."""

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from kvferry.cache.errors import RemoteProtocolError
from kvferry.transfer.control.convert import channel, rank
from kvferry.transfer.control.handlers import ChannelBody, Hello
from kvferry.transfer.control.wire import server_options
from kvferry.transfer.types import (
    PROTOCOL_VERSION,
    AuxRecord,
    Cancel,
    Direction,
    Failure,
    Grant,
    Permit,
    Phase,
    Renewal,
    ResultStatus,
    Side,
    TransferKey,
    TransferResult,
    Usage,
    WireReport,
)
from kvferry.v1.peer_pb2 import RegisterResponse
from kvferry.v1.transfer_pb2 import ChannelRequest, ChannelResponse
from tests.fuzz.mutation import mutated, mutated_body
from tests.fuzz.world import Stranger

SPOILT_SHARE = 0.5


@dataclass
class Script:
    """What a rogue says in one case, and what it said.

    Attributes:
        num_channels: channels that a worker opened and said hello on.
        said: messages as they were sent.
        over: set at its end; the channels end then.
    """

    stranger: Stranger
    rng: random.Random
    num_channels: int = 0
    said: list[bytes] = field(default_factory=list)
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def register(self) -> bytes:
        answer = RegisterResponse(accepted=rank.rank_to_wire(self.stranger.info))
        return mutated(answer, self.rng) if self.rng.random() < 0.2 else answer.SerializeToString()

    def heard(self, body: ChannelBody) -> list[ChannelBody]:
        """What to say to something that a worker said."""
        if isinstance(body, Hello):
            self.num_channels += 1
            return [Hello(self.stranger.worker, PROTOCOL_VERSION)] if self.rng.random() < 0.97 else []
        return self._answers(body) if isinstance(body, Grant) else []

    def _answers(self, grant: Grant) -> list[ChannelBody]:
        """Some good messages about this grant, possibly out of place.

        With pull a result that says ok would make the worker believe what it read from memory that nobody filled.
        """
        ends, rng = (grant.key, self.stranger.worker, grant.receiver), self.rng
        failure = Failure("fuzzed", rng.choice(list(Phase)), "for a test", "", (0,))
        failed = TransferResult(*ends, ResultStatus.FAILED, grant.fence, rng.random() < 0.7, failure=failure)
        aux = AuxRecord((5,), (-0.5,), Usage(grant.prompt.num_tokens))
        succeeded = TransferResult(*ends, ResultStatus.OK, grant.fence, True, WireReport(1), aux)
        pages = self.stranger.pages(grant.prompt.num_tokens, rng)
        bodies: list[ChannelBody] = [
            failed,
            Permit(*ends, grant.fence, pages, rng.choice((0.05, 1.0))),
            Permit(*ends, rng.choice((grant.fence, 7)), grant.pages, 1.0),
            Renewal(self.stranger.worker, Side.SENDER, (grant.key, TransferKey("0" * 32, 1)), 0.2),
            Cancel(grant.key, self.stranger.worker, failure),
            Hello(self.stranger.worker, PROTOCOL_VERSION),
            succeeded if grant.direction is Direction.PUSH else failed,
        ]
        return rng.choices(bodies, (5, 5, 3, 4, 1, 1, 3), k=rng.randint(1, 4))

    def spoken(self, body: ChannelBody, sequence: int) -> bytes:
        """The message of a body, perhaps spoilt or out of order."""
        at = sequence if self.rng.random() < 0.97 else self.rng.choice((0, 2**64 - 1))
        response = ChannelResponse(message=channel.numbered(channel.body_to_wire(body), at))
        spoils = not isinstance(body, Hello) and self.rng.random() < SPOILT_SHARE
        raw = mutated_body(response, self.rng) if spoils else response.SerializeToString()
        self.said.append(raw)
        return raw


class RogueServer:
    """Serves Peer.Register and Transfer.Channel in bytes, as the script of the moment wants."""

    def __init__(self) -> None:
        self.script: Script | None = None
        self._server = grpc.aio.server(options=server_options())
        register = grpc.unary_unary_rpc_method_handler(self._register)
        talk = grpc.stream_stream_rpc_method_handler(self._channel)
        self._server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler("kvferry.v1.Peer", {"Register": register}),
                grpc.method_handlers_generic_handler("kvferry.v1.Transfer", {"Channel": talk}),
            )
        )
        self._port = self._server.add_insecure_port("127.0.0.1:0")

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self._port}"

    async def start(self) -> None:
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(0.1)

    async def _register(self, request: bytes, context: Any) -> bytes:
        return self.script.register() if self.script is not None else b""

    async def _channel(self, requests: AsyncIterator[bytes], context: Any) -> None:
        """Until the script is over."""
        if self.script is None:
            return
        parts = self._talk(self.script, requests, context), self.script.over.wait()
        tasks = [asyncio.create_task(part) for part in parts]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _talk(self, script: Script, requests: AsyncIterator[bytes], context: Any) -> None:
        sequence = 0
        async for body in _bodies(requests):
            for answer in script.heard(body):
                await context.write(script.spoken(answer, sequence))
                sequence += 1


async def _bodies(requests: AsyncIterator[bytes]) -> AsyncIterator[ChannelBody]:
    """What the worker says, which must be good."""
    async for raw in requests:
        try:
            yield channel.envelope_from_wire(ChannelRequest.FromString(raw).message).body
        except (DecodeError, RemoteProtocolError) as error:
            raise AssertionError(f"a worker said nonsense, {raw.hex()}: {error}") from error
