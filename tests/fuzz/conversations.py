"""Cases: what a stranger says over one connection, and whether the answers are good."""

import asyncio
import random
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeAlias

import grpc
from google.protobuf.message import Message

from kvferry.transfer.control.convert import channel as channel_wire
from kvferry.transfer.control.convert import common, directory
from kvferry.transfer.control.wire import open_channel
from kvferry.transfer.inference import DirectoryEntry
from kvferry.transfer.types import Role
from kvferry.v1 import directory_pb2
from kvferry.v1.transfer_pb2 import ChannelMessage, ChannelRequest
from tests.control.worlds import wait_until
from tests.fuzz import verdict
from tests.fuzz.corpus import UNARY, Attempt, Corpus, key, prompt
from tests.fuzz.mutation import mutated, mutated_body
from tests.fuzz.rogue import RogueServer, Script
from tests.fuzz.verdict import Answer, Method
from tests.fuzz.world import End, World

RawStream: TypeAlias = "grpc.aio.UnaryStreamCall[bytes, bytes] | grpc.aio.StreamStreamCall[bytes, bytes]"
RawChannel: TypeAlias = "grpc.aio.StreamStreamCall[bytes, bytes]"

UNARY_SECONDS = 5.0
"""Longer than any answer takes; only calls that may wait are given up earlier."""
PATIENCE_SECONDS = 0.4
CHANNEL_SECONDS = 0.15
DIAL_SECONDS = 0.5
MAX_READ = 8
WROTE_TOO_LATE = "Internal error from Core"
"""What the library says, in place of the server's answer, when a message meets a call that just ended."""
MUTATED_SHARE = 0.7
METHODS, WEIGHTS = zip(*UNARY, strict=True)


@dataclass
class Case:
    """What was said in one case so far, so that it can be said again."""

    number: int
    said: list[tuple[Method, bytes]] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join([f"case {self.number}:", *(f"  {verdict.shown(*message)}" for message in self.said)])


class Client:
    """Sends bytes as they are, over one connection to each server, and judges every answer.

    Attributes:
        tally: how often each method was answered, by method and outcome.
    """

    def __init__(self, world: World) -> None:
        self.tally: Counter[tuple[str, str]] = Counter()
        self._directory = open_channel(world.directory)
        self._workers = {end.id: open_channel(end.endpoint) for end in world.ends}

    async def close(self) -> None:
        for wire in (self._directory, *self._workers.values()):
            await wire.close()

    async def ask(self, case: Case, end: End, method: Method, raw: bytes) -> Answer:
        """One message in, one answer or a stream of them out."""
        case.said.append((method, raw))
        wire = self._directory if method.of_directory else self._workers[end.id]
        seconds, answer = PATIENCE_SECONDS if method.may_wait else UNARY_SECONDS, Answer()
        try:
            if method.streams:
                await _read(wire.unary_stream(method.path)(raw, timeout=seconds), answer)
            else:
                answer.responses.append(await wire.unary_unary(method.path)(raw, timeout=seconds))
        except grpc.aio.AioRpcError as error:
            answer.error = error
        self._judge(method, [raw], answer)
        return answer

    async def talk(self, case: Case, end: End, messages: list[bytes], *, politely: bool) -> None:
        """One channel: say all this and end it in order, or hear what comes for a moment and hang up."""
        case.said += [(verdict.CHANNEL, raw) for raw in messages]
        call, answer = self._workers[end.id].stream_stream(verdict.CHANNEL.path)(timeout=UNARY_SECONDS), Answer()
        try:
            async with asyncio.timeout(UNARY_SECONDS if politely else CHANNEL_SECONDS):
                await _say(call, messages, politely)
                await _read(call, answer)
        except TimeoutError:
            assert not politely, f"the channel did not end {UNARY_SECONDS:g} s after this side ended"
        except grpc.aio.AioRpcError as error:
            answer.error = None if error.details() == WROTE_TOO_LATE else error
        finally:
            call.cancel()
        self._judge(verdict.CHANNEL, messages, answer)

    def _judge(self, method: Method, requests: list[bytes], answer: Answer) -> None:
        for outcome in verdict.check_answer(method, requests, answer):
            self.tally[method.name, outcome] += 1


async def _say(call: RawChannel, messages: list[bytes], politely: bool) -> None:
    """All of them, or as many as the other end takes: reading tells why it took no more."""
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        for raw in messages:
            await call.write(raw)
        if politely:
            await call.done_writing()


async def _read(call: RawStream, answer: Answer) -> None:
    """What comes until the end, up to a bound; then the call is cancelled."""
    async for raw in call:
        answer.responses.append(raw)
        if len(answer.responses) == MAX_READ:
            break
    call.cancel()


class Talker:
    """One stranger's and one rogue's cases, each a function of its number and the seed alone."""

    def __init__(self, world: World, lane: int, server: RogueServer, client: Client, seed: int) -> None:
        self._world = world
        self._stranger, self._rogue = world.strangers[lane], world.rogues[lane]
        self._server = server
        self._client = client
        self._seed = seed

    async def run(self, case: Case) -> None:
        """Raises AssertionError when an answer is not good."""
        rng = random.Random(f"{self._seed}/{case.number}")
        end = rng.choices(self._world.ends, (2, 1))[0]
        kinds = (self._unary, self._replay, self._channel, self._fetch, self._dialled)
        kind = rng.choices(kinds, (77, 3, 13, 4, 3))[0]
        await kind(case, Corpus(self._world, end, self._stranger, rng))

    async def _unary(self, case: Case, corpus: Corpus) -> None:
        method = corpus.rng.choices(METHODS, WEIGHTS)[0]
        await self._client.ask(case, corpus.end, method, _bent(corpus.request(method), corpus.rng))

    async def _replay(self, case: Case, corpus: Corpus) -> None:
        """The same good request several times."""
        method = corpus.rng.choices(METHODS, WEIGHTS)[0]
        raw = corpus.request(method).SerializeToString()
        for _ in range(corpus.rng.randint(2, 4)):
            await self._client.ask(case, corpus.end, method, raw)

    async def _fetch(self, case: Case, corpus: Corpus) -> None:
        """Prefill at the other worker, then decode at this one, or both at once; one of the two may be bent."""
        rng, attempt = corpus.rng, corpus.attempt()
        source = next(end for end in self._world.ends if end is not corpus.end)
        early, bent = rng.random() < 0.3, rng.choice(("prefill", "decode", "neither"))
        prefill = corpus.prefill(attempt.key, attempt.prompt)
        decode = corpus.decode(attempt.key, attempt.prompt, source.id, early=early)
        asks = [
            self._client.ask(case, end, method, mutated(message, rng) if bent else message.SerializeToString())
            for end, method, message, bent in (
                (source, verdict.PREFILL, prefill, bent == "prefill"),
                (corpus.end, verdict.DECODE, decode, bent == "decode"),
            )
        ]
        if early:
            await asyncio.gather(*asks)
        else:
            for ask in asks:
                await ask

    # ---- as a receiver

    async def _channel(self, case: Case, corpus: Corpus) -> None:
        """Register, mostly as a new life, have a prompt or two computed, then speak on a channel."""
        rng = corpus.rng
        if rng.random() < 0.9:
            self._stranger.begin_life(rng.getrandbits(62) | 1)
            await self._client.ask(case, corpus.end, verdict.REGISTER, corpus.register().SerializeToString())
        attempts = [corpus.attempt() for _ in range(rng.randint(1, 2))]
        for attempt in attempts:
            if rng.random() < 0.5:
                prefill = corpus.prefill(attempt.key, attempt.prompt).SerializeToString()
                await self._client.ask(case, corpus.end, verdict.PREFILL, prefill)
        await self._client.talk(case, corpus.end, _spoken(corpus, attempts), politely=rng.random() < 0.6)

    # ---- as a sender

    async def _dialled(self, case: Case, corpus: Corpus) -> None:
        """Join the directory, be dialled by both workers, and answer one that wants a prompt's pages."""
        rng = corpus.rng
        self._rogue.begin_life(rng.getrandbits(62) | 1, Role.PREFILL)
        script = self._server.script = Script(self._rogue, rng)
        entry = DirectoryEntry(self._rogue.worker, Role.PREFILL, self._server.endpoint, "tiny")
        join = directory_pb2.JoinRequest(entry=directory.entry_to_wire(entry), lease_seconds=5.0)
        await self._client.ask(case, corpus.end, verdict.JOIN, join.SerializeToString())
        try:
            with suppress(AssertionError):
                await wait_until(lambda: script.num_channels == 2, "both workers dialled", DIAL_SECONDS)
            decode = corpus.decode(key(rng), prompt(rng), self._rogue.worker)
            await self._client.ask(case, corpus.end, verdict.DECODE, decode.SerializeToString())
        finally:
            script.over.set()
            self._server.script = None
            case.said += [(verdict.CHANNEL, raw) for raw in script.said]
        leave = directory_pb2.LeaveRequest(worker=common.worker_to_wire(self._rogue.worker))
        await self._client.ask(case, corpus.end, verdict.LEAVE, leave.SerializeToString())
        self._rogue.close()


def _spoken(corpus: Corpus, attempts: list[Attempt]) -> list[bytes]:
    """A hello and some more, in order or not; the last of them may be bent, since nothing is heard after it."""
    rng = corpus.rng
    said = [corpus.hello()] if rng.random() < 0.95 else []
    said += [corpus.message(attempts) for _ in range(rng.randint(2, 14))]
    if rng.random() < 0.15:
        said.insert(rng.randrange(len(said) + 1), rng.choice(said))
    if rng.random() < 0.1:
        rng.shuffle(said)
    numbered = [_request(message, at, rng) for at, message in enumerate(said)]
    raw = [request.SerializeToString() for request in numbered]
    if rng.random() < MUTATED_SHARE:
        raw[-1] = mutated_body(numbered[-1], rng)
    return raw


def _request(message: ChannelMessage, at: int, rng: random.Random) -> ChannelRequest:
    sequence = at if rng.random() < 0.97 else rng.choice((0, at + 1, 2**64 - 1))
    copied = ChannelMessage.FromString(message.SerializeToString())
    return ChannelRequest(message=channel_wire.numbered(copied, sequence))


def _bent(message: Message, rng: random.Random) -> bytes:
    return mutated(message, rng) if rng.random() < MUTATED_SHARE else message.SerializeToString()
