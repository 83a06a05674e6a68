"""The fuzz finds what it is to find."""

import asyncio
import logging
import random
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError

from kvferry.cache.errors import ConfigError, ControlError, InvariantError, KVError, LocalProtocolError
from kvferry.transfer.control.convert import channel, inference, rank
from kvferry.transfer.control.directory import Directory
from kvferry.transfer.control.server import ControlServer
from kvferry.transfer.control.wire import open_channel
from kvferry.transfer.inference import GenerateCall, PrefillReply
from kvferry.transfer.types import Role
from kvferry.v1.peer_pb2 import RegisterRequest
from kvferry.v1.transfer_pb2 import Grant
from tests.control import samples
from tests.control.worlds import run
from tests.fuzz import tables, verdict
from tests.fuzz.mutation import change_fields, mutated
from tests.fuzz.runs import watched_log
from tests.fuzz.verdict import Answer

GRANT = channel.grant_to_wire(samples.grant())


def test_seed_decides_the_message() -> None:
    drawn = [[mutated(GRANT, random.Random(seed)) for seed in range(50)] for _ in range(2)]

    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) > 40


def test_some_changes_parse_and_some_do_not() -> None:
    parsed = []
    for seed in range(300):
        try:
            parsed.append(Grant.FromString(mutated(GRANT, random.Random(seed))))
        except DecodeError:
            continue
    assert 150 < len(parsed) < 290


@pytest.mark.parametrize(
    "message", [GRANT, RegisterRequest(rank=rank.rank_to_wire(samples.rank(samples.PREFILL, Role.BOTH)))]
)
def test_every_field_is_changed_some_time(message: Any) -> None:
    inner = message.rank if isinstance(message, RegisterRequest) else message
    changed = set()
    for seed in range(600):
        other = type(message).FromString(change_fields(message, random.Random(seed)))
        other = other.rank if isinstance(message, RegisterRequest) else other
        fields = inner.DESCRIPTOR.fields
        changed |= {field.name for field in fields if getattr(other, field.name) != getattr(inner, field.name)}

    assert changed == {field.name for field in inner.DESCRIPTOR.fields}


class Failing:
    """A worker's handler with one thing wrong."""

    def __init__(self, error: Exception | None) -> None:
        self._error = error

    async def prefill(self, call: GenerateCall) -> PrefillReply:
        if self._error is not None:
            raise self._error
        return PrefillReply(samples.KEY, samples.PREFILL, (), 0.0, 0.0, 1.0)


def answer_of(error: Exception | None) -> Answer:
    answer, raw = Answer(), verdict.PREFILL.request(call=inference.call_to_wire(samples.call())).SerializeToString()

    async def test() -> None:
        handler: Any = Failing(error)
        server = ControlServer("127.0.0.1:0", inference=handler)
        await server.start()
        async with open_channel(server.address) as wire:
            try:
                answer.responses.append(await wire.unary_unary(verdict.PREFILL.path)(raw, timeout=5))
            except grpc.aio.AioRpcError as caught:
                answer.error = caught
        await server.stop(0)

    run(test)
    return answer


@pytest.mark.parametrize(
    "error, complaint",
    [
        (ZeroDivisionError("oops"), "UNKNOWN without details"),
        (LocalProtocolError("we erred"), "blames itself"),
        (InvariantError("3 + 4 != 8"), "blames itself"),
        (KVError("hm"), "without a meaning"),
        (ControlError("hm", peer=""), "without a meaning"),
        (None, "prompt_token_ids"),
    ],
    ids=str,
)
def test_answer_of_a_broken_server_is_not_good(error: Exception | None, complaint: str) -> None:
    answer = answer_of(error)
    with pytest.raises((AssertionError, KVError), match=complaint):
        verdict.check_answer(verdict.PREFILL, [b""], answer)


def test_answer_that_blames_the_caller_is_good() -> None:
    answer = answer_of(ConfigError("too many tokens"))
    assert verdict.check_answer(verdict.PREFILL, [b""], answer) == ["ConfigError"]


def test_table_that_grows_is_found_by_its_path() -> None:
    directory = Directory()
    before = tables.table_sizes(directory=directory)
    asyncio.run(directory.join(samples.entry(samples.PREFILL), 5.0))
    now = tables.table_sizes(directory=directory)

    assert tables.grown(before, now, {})["directory._members"] == (0, 1)
    assert not [path for path in tables.grown(before, now, {"directory._members": 1}) if path == "directory._members"]


def test_logged_error_is_kept() -> None:
    with watched_log() as errors:
        logging.getLogger("somewhere").warning("fine")
        logging.getLogger("somewhere").error("not %s", "fine")

    assert errors.stories == ["somewhere: not fine"]
