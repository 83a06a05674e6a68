"""Good messages of every rpc, drawn from a seed."""

import random
from dataclasses import dataclass

from google.protobuf.message import Message

from kvferry.transfer.control.convert import channel, common, directory, inference, rank
from kvferry.transfer.control.handlers import ChannelBody, Hello
from kvferry.transfer.inference import DecodeCall, DirectoryEntry, GenerateCall, SamplingParams
from kvferry.transfer.types import (
    PROTOCOL_VERSION,
    AuxRecord,
    Cancel,
    Direction,
    Failure,
    Grant,
    Permit,
    Phase,
    PromptId,
    Renewal,
    ResultStatus,
    Role,
    Side,
    TransferKey,
    TransferResult,
    Usage,
    WireReport,
    WorkerId,
)
from kvferry.v1 import directory_pb2, inference_pb2, peer_pb2, transfer_pb2
from tests.fuzz import verdict
from tests.fuzz.verdict import Method
from tests.fuzz.world import End, Stranger, World

FIRST_TOKEN, LAST_TOKEN = 3, 250
MAX_PROMPT_TOKENS = 24
NUM_MEMBERS = 10
TEXTS = ("hello", "two words", "é\U0001f600", "x" * 40)


def prompt(rng: random.Random) -> tuple[int, ...]:
    return tuple(rng.randint(FIRST_TOKEN, LAST_TOKEN) for _ in range(rng.randint(1, MAX_PROMPT_TOKENS)))


def key(rng: random.Random) -> TransferKey:
    return TransferKey(rng.randbytes(16).hex(), rng.choice((1, 1, 1, 2, 2**31 - 1)))


def request_id(named: TransferKey) -> str:
    """A request and its attempt know of each other."""
    return f"r{named.transfer_id[:8]}"


def sampling(rng: random.Random) -> SamplingParams:
    return SamplingParams(rng.randint(1, 3), rng.choice((0.0, 0.0, 1.0)), rng.getrandbits(62), True)


def member(rng: random.Random) -> WorkerId:
    """Not one of the real workers: a newer life of a name ends the older."""
    return WorkerId(f"member-{rng.randrange(NUM_MEMBERS)}", rng.randint(1, 3))


@dataclass
class Attempt:
    """One attempt of a stranger to get a prompt's pages from a worker."""

    key: TransferKey
    prompt: tuple[int, ...]
    grant: Grant


class Corpus:
    """Draws good messages for one case, spoken to one of the workers by a stranger."""

    def __init__(self, world: World, end: End, stranger: Stranger, rng: random.Random) -> None:
        self.world = world
        self.end = end
        self.stranger = stranger
        self.rng = rng

    def request(self, method: Method) -> Message:
        """A good request of a unary or server-streaming rpc."""
        makers = {
            "Join": self._join,
            "Renew": self._renew,
            "Leave": lambda: directory_pb2.LeaveRequest(worker=common.worker_to_wire(member(self.rng))),
            "Watch": directory_pb2.WatchRequest,
            "Register": self.register,
            "GetStatus": peer_pb2.GetStatusRequest,
            "Generate": lambda: inference_pb2.GenerateRequest(call=inference.call_to_wire(self.call(None))),
            "Prefill": lambda: self.prefill(key(self.rng), prompt(self.rng)),
            "Decode": lambda: self.decode(key(self.rng), prompt(self.rng), self.rng.choice(self._senders())),
            "Cancel": lambda: inference_pb2.CancelRequest(key=common.key_to_wire(key(self.rng)), reason="fuzz"),
            "Tokenize": lambda: inference.tokenize_to_wire(self.rng.choice(TEXTS), self.rng.random() < 0.5),
        }
        return makers[method.name]()

    def _senders(self) -> list[WorkerId]:
        return [*(end.id for end in self.world.ends), self.stranger.worker, WorkerId("nobody", 1)]

    def _join(self) -> directory_pb2.JoinRequest:
        endpoint = f"127.0.0.1:{self.rng.randint(1, 9)}"
        entry = DirectoryEntry(member(self.rng), self.rng.choice(list(Role)), endpoint, "tiny", (member(self.rng),))
        return directory_pb2.JoinRequest(entry=directory.entry_to_wire(entry), lease_seconds=1.0)

    def _renew(self) -> directory_pb2.RenewRequest:
        paired = [common.worker_to_wire(member(self.rng)) for _ in range(self.rng.randrange(3))]
        return directory_pb2.RenewRequest(worker=common.worker_to_wire(member(self.rng)), paired=paired)

    def register(self) -> peer_pb2.RegisterRequest:
        return peer_pb2.RegisterRequest(rank=rank.rank_to_wire(self.stranger.info))

    def call(self, named: TransferKey | None, tokens: tuple[int, ...] | None = None) -> GenerateCall:
        rng = self.rng
        if tokens is None and rng.random() < 0.3:
            return GenerateCall("r1", rng.choice(TEXTS), None, True, sampling(rng), 3.0)
        ids, salt = tokens or prompt(rng), rng.choice(("", "", "a salt"))
        identity = request_id(named) if named is not None else ""
        return GenerateCall(identity, None, ids, False, sampling(rng), 3.0, salt, named)

    def prefill(self, named: TransferKey, tokens: tuple[int, ...]) -> inference_pb2.PrefillRequest:
        return inference_pb2.PrefillRequest(call=inference.call_to_wire(self.call(named, tokens)))

    def decode(
        self, named: TransferKey, tokens: tuple[int, ...], sender: WorkerId, *, early: bool = False
    ) -> inference_pb2.DecodeRequest:
        call = DecodeCall(request_id(named), named, sender, tokens, sampling(self.rng), 2.0, "", early)
        return inference.decode_call_to_wire(call)

    # ---- channel

    def attempt(self) -> Attempt:
        named, tokens = key(self.rng), prompt(self.rng)
        grant = Grant(
            named,
            self.end.id,
            self.stranger.worker,
            PromptId.of(tokens),
            self.stranger.pages(len(tokens), self.rng),
            self.rng.choice((0.05, 1.0, 2.0)),
            request_id(named),
            self.rng.choice(list(Direction)),
            self.rng.random() < 0.3,
        )
        return Attempt(named, tokens, grant)

    def bodies(self, attempts: list[Attempt]) -> list[ChannelBody]:
        """One body of each kind about one of these attempts, those of a sender too."""
        attempt = self.rng.choice(attempts)
        fence, ends = attempt.grant.fence, (attempt.key, self.end.id, self.stranger.worker)
        failure = Failure("fuzzed", self.rng.choice(list(Phase)), "for a test", "try again", (0,))
        aux = AuxRecord((1,), (-0.5,), Usage(len(attempt.prompt)))
        side = self.rng.choice((Side.RECEIVER, Side.RECEIVER, Side.RECEIVER, Side.SENDER))
        keys = (*(other.key for other in attempts), key(self.rng))
        return [
            attempt.grant,
            attempt.grant,
            Cancel(attempt.key, self.stranger.worker, failure, self.rng.choice((0, fence)), self.rng.random() < 0.5),
            Renewal(self.stranger.worker, side, keys, self.rng.choice((0.1, 1.0, 100.0))),
            Renewal(self.stranger.worker, Side.RECEIVER, keys, self.rng.choice((0.1, 1.0, 100.0))),
            Hello(self.stranger.worker, PROTOCOL_VERSION),
            Permit(*ends, fence, attempt.grant.pages, 1.0),
            TransferResult(*ends, ResultStatus.OK, fence, True, WireReport(), aux),
        ]

    def hello(self) -> transfer_pb2.ChannelMessage:
        return channel.body_to_wire(Hello(self.stranger.worker, PROTOCOL_VERSION))

    def message(self, attempts: list[Attempt]) -> transfer_pb2.ChannelMessage:
        """A good body that may be out of place; mostly one that a receiver may send."""
        bodies = self.bodies(attempts)
        return channel.body_to_wire(self.rng.choices(bodies, (6, 6, 5, 2, 5, 1, 1, 1))[0])


UNARY: tuple[tuple[Method, int], ...] = (
    *((verdict.JOIN, 6), (verdict.RENEW, 5), (verdict.LEAVE, 5), (verdict.WATCH, 2)),
    *((verdict.REGISTER, 6), (verdict.GET_STATUS, 6), (verdict.GENERATE, 5), (verdict.PREFILL, 5)),
    *((verdict.DECODE, 6), (verdict.CANCEL, 6), (verdict.TOKENIZE, 5)),
)
"""Rpcs that take one message, and how often each is tried."""
