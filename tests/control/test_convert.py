import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.cache.errors import Incompatibility, IncompatiblePeer, LocalProtocolError, RemoteProtocolError
from kvferry.cache.ids import LayerId
from kvferry.cache.layout import BufferView, SlotOrder, build_layout
from kvferry.cache.page_table import LayerGroupEntry, PageTable, PoolEntry
from kvferry.cache.spec import BufferSpec, LayerSpec, ModelSpec, StateSpec
from kvferry.transfer.control.convert import channel, checks, common, directory, inference, page_table, rank, status
from kvferry.transfer.control.handlers import Envelope, Hello
from kvferry.transfer.inference import GenerateCall, SamplingParams
from kvferry.transfer.types import (
    MAX_RENEWED,
    Cancel,
    Failure,
    Grant,
    Permit,
    Phase,
    RankInfo,
    Renewal,
    ResultStatus,
    Role,
    Side,
    TransferKey,
    TransferResult,
    WorkerId,
)
from kvferry.v1 import transfer_pb2 as pb
from tests.control import samples, strategies

M = TypeVar("M", bound=Message)
QUICK = settings(max_examples=40)


def through_bytes(message: M) -> M:
    """What the other side parses."""
    return type(message).FromString(message.SerializeToString())


def comparable(record: object) -> object:
    """Block lists hold arrays, which compare element by element: show them as lists with their types."""
    if not isinstance(record, Grant | Permit):
        return record
    arrays = [[(array.dtype.str, array.tolist()) for array in lists] for lists in record.pages]
    return vars(record) | {"pages": arrays}


@QUICK
@given(strategies.grants | strategies.permits | strategies.results() | strategies.cancels | strategies.renewals)
def test_channel_message_survives_the_wire(body: Any) -> None:
    envelope = channel.envelope_from_wire(through_bytes(channel.envelope_to_wire(Envelope(7, body))))

    assert envelope.sequence == 7
    assert comparable(envelope.body) == comparable(body)


def test_fence_is_the_same_at_both_ends() -> None:
    sent = samples.grant()
    got = channel.grant_from_wire(through_bytes(channel.grant_to_wire(sent)))

    assert got.fence == sent.fence != 0


def test_largest_renewal_survives_the_wire() -> None:
    keys = tuple(TransferKey(f"{number:032x}", 1) for number in range(MAX_RENEWED))
    record = Renewal(samples.PREFILL, Side.SENDER, keys, 3.0)

    assert channel.renewal_from_wire(through_bytes(channel.renewal_to_wire(record))) == record


def test_text_to_tokenize_and_its_tokens_survive_the_wire() -> None:
    assert inference.tokenize_from_wire(through_bytes(inference.tokenize_to_wire("a b", True))) == ("a b", True)
    assert inference.tokens_from_wire(through_bytes(inference.tokens_to_wire((5, 2**31 - 1)))) == (5, 2**31 - 1)


def test_hello_survives_the_wire() -> None:
    envelope = Envelope(0, Hello(samples.DECODE, 1))

    assert channel.envelope_from_wire(through_bytes(channel.envelope_to_wire(envelope))) == envelope


def test_arrays_are_copies_of_their_own_type() -> None:
    message = channel.grant_to_wire(samples.grant())
    grant = channel.grant_from_wire(through_bytes(message))

    assert message.layer_groups[1].slot_ids == b"\xff\xff\xff\xff\xff\xff\xff\xff\x07\x00\x00\x00"
    assert message.layer_groups[0].slot_epochs == b"\x01\x00\x00\x00\x01\x00\x00\x00\x02\x00\x00\x00"
    assert {array.dtype for array in grant.pages.slots} == {np.dtype(np.int32)}
    assert {array.dtype for array in grant.pages.epochs} == {np.dtype(np.uint32)}
    assert all(array.flags.owndata and array.flags.writeable for lists in grant.pages for array in lists)


@pytest.mark.parametrize("role", Role)
def test_rank_survives_the_wire(role: Role) -> None:
    info = samples.rank(samples.PREFILL, role)

    assert rank.rank_from_wire(through_bytes(rank.rank_to_wire(info))) == info


@QUICK
@given(strategies.ranks)
def test_any_rank_survives_the_wire(info: RankInfo) -> None:
    assert rank.rank_from_wire(through_bytes(rank.rank_to_wire(info))) == info


@QUICK
@given(st.data())
def test_view_that_ends_past_its_slot_is_refused(data: st.DataObject) -> None:
    table = data.draw(strategies.page_tables())
    group = data.draw(st.sampled_from(table.layer_groups))
    view = data.draw(st.sampled_from([*group.buffers, *group.states]))
    pool = group.pools[view.pool if isinstance(view, BufferView) else 0]
    pools = list(table.pools)
    too_small = strategies.end_of(view, table.tokens_per_block) - 1
    pools[pool] = dataclasses.replace(pools[pool], slot_bytes=max(1, too_small))
    message = page_table.page_table_to_wire(dataclasses.replace(table, pools=tuple(pools)))

    if too_small:
        with pytest.raises(RemoteProtocolError, match="past the slot's"):
            page_table.page_table_from_wire(through_bytes(message))
    else:
        assert page_table.page_table_from_wire(through_bytes(message)).pools == tuple(pools)


@pytest.mark.parametrize("own_base", [False, True])
@pytest.mark.parametrize("order", ["layer_major", "head_major"])
def test_table_of_a_real_layout_survives_the_wire(order: SlotOrder, own_base: bool) -> None:
    scale = BufferSpec("key_block_scale", 2, 4, "uint8", own_base)
    attention = (BufferSpec("key", 2, 8), BufferSpec("value", 2, 8), scale)
    state = StateSpec("ssm_state", (2, 3), "float32")
    layers = [LayerSpec(LayerId(0), None, attention, (state,)), LayerSpec(LayerId(1), 8, attention, sink_tokens=2)]
    layout = build_layout(ModelSpec("test", "bfloat16", tuple(layers)), tokens_per_block=4, order=order)
    groups, pools = [], []
    for life_cycle in layout.life_cycles:
        indices = tuple(range(len(pools), len(pools) + len(life_cycle.pool_bytes)))
        pools += [PoolEntry(0, size, size, 3) for size in life_cycle.pool_bytes]
        groups.append(LayerGroupEntry(life_cycle.life_cycle, indices, life_cycle.buffers, life_cycle.states))
    table = PageTable(layout.digest, layout.dtype, 4, "cpu", tuple(pools), tuple(groups))

    assert [len(group.pools) for group in groups] == ([2, 1, 2] if own_base else [1, 1, 1])
    assert page_table.page_table_from_wire(through_bytes(page_table.page_table_to_wire(table))) == table


@QUICK
@given(strategies.statuses)
def test_status_survives_the_wire(record: Any) -> None:
    assert status.status_from_wire(through_bytes(status.status_to_wire(record))) == record


@QUICK
@given(strategies.snapshots)
def test_snapshot_survives_the_wire(record: Any) -> None:
    assert directory.snapshot_from_wire(through_bytes(directory.snapshot_to_wire(record))) == record


@QUICK
@given(strategies.calls)
def test_call_survives_the_wire(record: Any) -> None:
    assert inference.call_from_wire(through_bytes(inference.call_to_wire(record))) == record


@QUICK
@given(strategies.decode_calls)
def test_decode_call_survives_the_wire(record: Any) -> None:
    assert inference.decode_call_from_wire(through_bytes(inference.decode_call_to_wire(record))) == record


@QUICK
@given(strategies.prefill_replies)
def test_prefill_reply_survives_the_wire(record: Any) -> None:
    assert inference.prefill_reply_from_wire(through_bytes(inference.prefill_reply_to_wire(record))) == record


@QUICK
@given(strategies.chunks | strategies.summaries)
def test_event_survives_the_wire(record: Any) -> None:
    assert inference.event_from_wire(through_bytes(inference.event_to_wire(record))) == record


def test_rejection_is_seen_from_the_other_side() -> None:
    sent = IncompatiblePeer("decode", [Incompatibility("dtype", "float32", "bfloat16", "bytes differ")])
    got = rank.rejection_from_wire(through_bytes(rank.rejection_to_wire(sent)), "prefill")

    assert (got.peer, got.reasons) == ("prefill", (Incompatibility("dtype", "bfloat16", "float32", "bytes differ"),))


def test_long_reasons_for_people_are_cut() -> None:
    long = Cancel(samples.KEY, samples.DECODE, Failure("c", Phase.WIRE, "x" * 100_000, "y" * 100_000))
    got = channel.cancel_from_wire(channel.cancel_to_wire(long)).failure

    assert (len(got.message), len(got.hint)) == (channel.MAX_FAILURE_CHARS,) * 2


ParseBytes = Callable[[bytes], object]


def _parsers() -> dict[str, ParseBytes]:
    ipb = inference.pb
    return {
        "channel": lambda raw: channel.envelope_from_wire(pb.ChannelMessage.FromString(raw)),
        "rank": lambda raw: rank.rank_from_wire(rank.pb.RankInfo.FromString(raw)),
        "status": lambda raw: status.status_from_wire(status.pb.WorkerStatus.FromString(raw)),
        "call": lambda raw: inference.call_from_wire(ipb.GenerateCall.FromString(raw)),
        "prefill": lambda raw: inference.prefill_reply_from_wire(ipb.PrefillResponse.FromString(raw)),
        "decode": lambda raw: inference.decode_call_from_wire(ipb.DecodeRequest.FromString(raw)),
        "event": lambda raw: inference.event_from_wire(ipb.GenerateEvent.FromString(raw)),
        "snapshot": lambda raw: directory.snapshot_from_wire(directory.pb.WatchResponse.FromString(raw)),
    }


@settings(max_examples=150)
@given(st.data())
def test_damaged_message_is_accepted_or_refused_as_the_peers_fault(data: st.DataObject) -> None:
    """Bytes of good messages with a few changed: parsing ends in a record or in one kind of error."""
    bodies = [samples.grant(), samples.permit(), samples.result(), samples.cancel(), samples.renewal()]
    good = {
        "channel": channel.envelope_to_wire(Envelope(1, data.draw(st.sampled_from(bodies)))),
        "rank": rank.rank_to_wire(samples.rank(samples.PREFILL, Role.BOTH)),
        "status": status.status_to_wire(samples.status()),
        "call": inference.call_to_wire(samples.call()),
        "prefill": inference.prefill_reply_to_wire(samples.prefill_reply()),
        "decode": inference.decode_call_to_wire(samples.decode_call()),
        "event": inference.event_to_wire(samples.summary()),
        "snapshot": directory.snapshot_to_wire(data.draw(strategies.snapshots)),
    }
    kind = data.draw(st.sampled_from(sorted(good)))
    raw = bytearray(good[kind].SerializeToString())
    for _ in range(data.draw(st.integers(1, 3))):
        if raw:
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        assert _parsers()[kind](bytes(raw)) is not None
    except (RemoteProtocolError, DecodeError):
        return


def _set(**changes: object) -> Callable[[Any], None]:
    """Set fields by dotted path, written with double underscores."""

    def change(message: Any) -> None:
        for path, value in changes.items():
            *parents, field = path.split("__")
            target = message
            for parent in parents:
                target = target[int(parent)] if parent.isdigit() else getattr(target, parent)
            setattr(target, field, value)

    return change


def _of_group(index: int, change: Callable[[Any], object]) -> Callable[[Any], object]:
    """Change one layer group of a rank's page table."""
    return lambda message: change(message.page_table.layer_groups[index])


def _clear(field: str) -> Callable[[Any], None]:
    return lambda message: message.ClearField(field)


GRANT_CHANGES = [
    ("TransferKey.transfer_id", _set(key__transfer_id=b"short")),
    ("TransferKey.attempt", _set(key__attempt=2**32 - 1)),
    ("Grant.key", _clear("key")),
    ("Grant.sender", _clear("sender")),
    ("WorkerId.name", _set(sender__name="")),
    ("WorkerId.name", _set(sender__name="two words")),
    ("WorkerId.name", _set(sender__name="line\nbreak")),
    ("WorkerId.name", _set(sender__name="x" * 129)),
    ("WorkerId.incarnation", _set(receiver__incarnation=0)),
    ("WorkerId.incarnation", _set(receiver__incarnation=2**63)),
    ("Grant.prompt_tokens", _set(prompt_tokens=0)),
    ("Grant.prompt_digest", _set(prompt_digest=b"short")),
    ("TransferKey.attempt", _set(key__attempt=0)),
    ("Grant.timeout_seconds", _set(timeout_seconds=0.0)),
    ("Grant.timeout_seconds", _set(timeout_seconds=-1.0)),
    ("Grant.timeout_seconds", _set(timeout_seconds=float("inf"))),
    ("Grant.timeout_seconds", _set(timeout_seconds=float("nan"))),
    ("Grant.timeout_seconds", _set(timeout_seconds=1e9)),
    ("Grant.layer_groups", _clear("layer_groups")),
    ("LayerGroupBlocks.slot_ids", _set(layer_groups__0__slot_ids=b"123")),
    ("LayerGroupBlocks.slot_ids", _set(layer_groups__0__slot_ids=b"\xfe\xff\xff\xff" * 3)),
    ("LayerGroupBlocks.slot_epochs", _set(layer_groups__0__slot_epochs=b"1234567")),
    ("LayerGroupBlocks.slot_epochs", _set(layer_groups__0__slot_epochs=b"1234")),
    ("LayerGroupBlocks.slot_epochs", _set(layer_groups__1__slot_epochs=b"1234" * 3)),
    ("Grant.request_id", _set(request_id="x" * 257)),
    ("Grant.request_id", _set(request_id="line\nbreak")),
    ("Grant.direction", _set(direction=0)),
    ("Grant.direction", _set(direction=3)),
]

PERMIT_CHANGES = [
    ("Permit.key", _clear("key")),
    ("Permit.sender", _clear("sender")),
    ("Permit.receiver", _clear("receiver")),
    ("Permit.fence", _set(fence=0)),
    ("Permit.timeout_seconds", _set(timeout_seconds=0.0)),
    ("Permit.timeout_seconds", _set(timeout_seconds=float("nan"))),
    ("Permit.layer_groups", _clear("layer_groups")),
    ("Permit.layer_groups", lambda message: message.layer_groups.extend([pb.LayerGroupBlocks()] * 255)),
    ("LayerGroupBlocks.slot_ids", _set(layer_groups__0__slot_ids=b"123")),
    ("LayerGroupBlocks.slot_epochs", _set(layer_groups__1__slot_epochs=b"1234" * 3)),
]

CANCEL_CHANGES = [
    ("Cancel.key", _clear("key")),
    ("Cancel.origin", _clear("origin")),
    ("Cancel.failure", _clear("failure")),
    ("WorkerId.incarnation", _set(origin__incarnation=0)),
    ("Failure.code", _set(failure__code="")),
    ("Failure.code", _set(failure__code="two\nlines")),
    ("Failure.phase", _set(failure__phase=0)),
    ("Failure.phase", _set(failure__phase=99)),
    ("Failure.message", _set(failure__message="x" * (channel.MAX_FAILURE_CHARS + 1))),
    ("Failure.hint", _set(failure__hint="x" * (channel.MAX_FAILURE_CHARS + 1))),
    ("Failure.layer_groups", lambda message: message.failure.layer_groups.append(channel.MAX_LAYER_GROUPS)),
    ("Failure.layer_groups", lambda message: message.failure.layer_groups.extend([1] * channel.MAX_LAYER_GROUPS)),
]

RENEWAL_CHANGES = [
    ("Renewal.origin", _clear("origin")),
    ("Renewal.side", _set(side=0)),
    ("Renewal.side", _set(side=3)),
    ("Renewal.keys", _clear("keys")),
    ("Renewal.keys", lambda message: message.keys.extend([message.keys[0]] * MAX_RENEWED)),
    ("TransferKey.transfer_id", _set(keys__1__transfer_id=b"short")),
    ("TransferKey.attempt", _set(keys__1__attempt=0)),
    ("Renewal.lease_seconds", _set(lease_seconds=0.0)),
    ("Renewal.lease_seconds", _set(lease_seconds=float("inf"))),
]

RESULT_CHANGES = [
    ("Result.status", _set(status=0)),
    ("Result.status", _set(status=77)),
    ("Result.aux", _clear("aux")),
    ("Result.aux", _set(status=2)),
    ("Result.wire", _clear("wire")),
    ("Result.failure", lambda message: message.failure.SetInParent()),
    ("Result.fence", _set(fence=0)),
    ("Result.key", _clear("key")),
    ("Result.sender", _clear("sender")),
    ("Result.receiver", _clear("receiver")),
    ("WireReport.seconds", _set(wire__seconds=float("nan"))),
    ("WireReport.num_bytes", _set(wire__num_bytes=2**64 - 1)),
    ("WireReport.lane", _set(wire__lane="")),
    ("AuxRecord.first_tokens", lambda message: message.aux.ClearField("first_tokens")),
    ("AuxRecord.first_tokens", lambda message: message.aux.first_tokens.extend([1] * 2000)),
    ("AuxRecord.first_tokens", lambda message: message.aux.first_tokens.__setitem__(0, 2**31)),
    ("AuxRecord.first_logprobs", lambda message: message.aux.first_logprobs.append(-1.0)),
    ("AuxRecord.first_logprobs", lambda message: message.aux.first_logprobs.__setitem__(0, float("nan"))),
    ("AuxRecord.usage", lambda message: message.aux.ClearField("usage")),
    ("Usage.cached_tokens", _set(aux__usage__cached_tokens=71)),
    ("Usage.prompt_tokens", _set(aux__usage__prompt_tokens=0)),
]

RANK_CHANGES = [
    ("RankInfo.worker", _clear("worker")),
    ("RankInfo.page_table", _clear("page_table")),
    ("RankInfo.role", _set(role=0)),
    ("RankInfo.role", _set(role=9)),
    ("RankInfo.rank", _set(rank=1)),
    ("RankInfo.num_ranks", _set(num_ranks=0)),
    ("RankInfo.transport", _set(transport="")),
    ("RankInfo.agent_name", _set(agent_name="")),
    ("RankInfo.agent_metadata", _set(agent_metadata=b"x" * (rank.MAX_METADATA_BYTES + 1))),
    ("RankInfo.model_digest", _set(model_digest="")),
    ("RankInfo.protocol_version", _set(protocol_version=0)),
    ("RankInfo.manager", _set(manager="")),
    ("RankInfo.manager", _set(manager="V" * 300)),
    ("PageTable.layout_digest", _set(page_table__layout_digest="")),
    ("PageTable.dtype", _set(page_table__dtype="float7")),
    ("PageTable.device", _set(page_table__device="cuda:x")),
    ("PageTable.device", _set(page_table__device="cuda:99999")),
    ("PageTable.tokens_per_block", _set(page_table__tokens_per_block=0)),
    ("PageTable.device", _set(page_table__device="")),
    ("PageTable.pools", lambda message: message.page_table.ClearField("pools")),
    ("PageTable.layer_groups", lambda message: message.page_table.ClearField("layer_groups")),
    ("Pool.slot_bytes", _set(page_table__pools__0__slot_bytes=0)),
    ("Pool.slot_stride_bytes", _set(page_table__pools__0__slot_stride_bytes=511)),
    ("Pool.num_slots", _set(page_table__pools__0__num_slots=0)),
    ("Pool.base", _set(page_table__pools__0__base=2**64 - 1)),
    ("PageTable.pools", _set(page_table__pools__1__num_slots=page_table.MAX_SLOTS)),
    ("LayerGroup.pools", _of_group(0, lambda group: group.ClearField("pools"))),
    ("LayerGroup.pools", _of_group(0, lambda group: group.pools.__setitem__(1, 4))),
    ("LayerGroup.pools", _of_group(0, lambda group: group.pools.__setitem__(1, 0))),
    ("LayerGroup.pools", _of_group(0, lambda group: group.pools.extend([1, 3, 0]))),
    ("LayerGroup.pools", _of_group(2, lambda group: group.pools.append(1))),
    ("LayerGroup.pools", _set(page_table__pools__2__num_slots=99)),
    ("LayerGroup.sink_blocks", _set(page_table__layer_groups__0__sink_blocks=1)),
    ("LayerGroup.sink_blocks", _set(page_table__layer_groups__2__sink_blocks=1)),
    ("LayerGroup.window_tokens", _set(page_table__layer_groups__2__window_tokens=8)),
    ("LayerGroup.buffers", _of_group(0, lambda group: group.ClearField("buffers"))),
    ("LayerGroup.buffers", _of_group(2, lambda group: group.buffers.add())),
    ("LayerGroup.buffers", _set(page_table__layer_groups__0__recurrent=True)),
    ("LayerGroup.buffers", _set(page_table__layer_groups__2__recurrent=False)),
    ("LayerGroup.states", _of_group(1, lambda group: group.states.add())),
    ("LayerGroup.states", _of_group(2, lambda group: group.ClearField("states"))),
    ("Buffer.role", _set(page_table__layer_groups__0__buffers__0__role="")),
    ("Buffer.dtype", _set(page_table__layer_groups__0__buffers__0__dtype="")),
    ("Buffer.dtype", _set(page_table__layer_groups__0__buffers__0__dtype="float7")),
    ("Buffer.pool", _set(page_table__layer_groups__0__buffers__0__pool=2)),
    ("Buffer.num_heads", _set(page_table__layer_groups__0__buffers__0__num_heads=0)),
    ("Buffer.head_dim", _set(page_table__layer_groups__0__buffers__0__head_dim=0)),
    ("Buffer.head_stride_bytes", _set(page_table__layer_groups__0__buffers__0__head_stride_bytes=0)),
    ("Buffer.token_stride_bytes", _set(page_table__layer_groups__0__buffers__0__token_stride_bytes=31)),
    ("Buffer.offset_bytes", _set(page_table__layer_groups__0__buffers__1__offset_bytes=257)),
    ("Buffer.offset_bytes", _set(page_table__layer_groups__0__buffers__0__pool=1)),
    ("Buffer.offset_bytes", _set(page_table__layer_groups__0__buffers__2__offset_bytes=1)),
    ("State.role", _set(page_table__layer_groups__2__states__0__role="")),
    ("State.dtype", _set(page_table__layer_groups__2__states__0__dtype="float7")),
    ("State.shape", _of_group(2, lambda group: group.states[0].ClearField("shape"))),
    ("State.shape", _of_group(2, lambda group: group.states[0].shape.extend([1] * 7))),
    ("State.shape", _of_group(2, lambda group: group.states[0].shape.__setitem__(0, 0))),
    ("State.shape", _of_group(2, lambda group: group.states[0].shape.__setitem__(0, 2**32 - 1))),
    ("State.offset_bytes", _of_group(2, lambda group: group.states[0].shape.__setitem__(0, 2**31))),
    ("State.offset_bytes", _set(page_table__layer_groups__2__states__1__offset_bytes=49)),
]

CALL_CHANGES = [
    ("GenerateCall.prompt", _clear("text")),
    ("GenerateCall.request_id", _set(request_id="x" * 300)),
    ("GenerateCall.sampling", _clear("sampling")),
    ("GenerateCall.timeout_seconds", _set(timeout_seconds=0.0)),
    ("SamplingParams.max_new_tokens", _set(sampling__max_new_tokens=0)),
    ("SamplingParams.temperature", _set(sampling__temperature=-0.5)),
    ("SamplingParams.temperature", _set(sampling__temperature=float("nan"))),
    ("GenerateCall.token_ids", lambda message: message.token_ids.ids.append(2**31)),
    ("GenerateCall.cache_salt", _set(cache_salt="x" * 257)),
    ("TransferKey.transfer_id", _set(key__transfer_id=b"")),
    ("TransferKey.attempt", _set(key__attempt=0)),
]

PREFILL_REPLY_CHANGES = [
    ("PrefillResponse.key", _clear("key")),
    ("PrefillResponse.sender", _clear("sender")),
    ("PrefillResponse.prompt_token_ids", _clear("prompt_token_ids")),
    ("PrefillResponse.cached_tokens", _set(cached_tokens=4)),
    ("PrefillResponse.queue_seconds", _set(queue_seconds=-1.0)),
    ("PrefillResponse.prefill_seconds", _set(prefill_seconds=float("nan"))),
    ("PrefillResponse.lease_seconds", _set(lease_seconds=0.0)),
    ("PrefillResponse.lease_seconds", _set(lease_seconds=float("inf"))),
]

DECODE_CALL_CHANGES = [
    ("DecodeRequest.key", _clear("key")),
    ("DecodeRequest.sender", _clear("sender")),
    ("DecodeRequest.sampling", _clear("sampling")),
    ("DecodeRequest.request_id", _set(request_id="x" * 300)),
    ("DecodeRequest.prompt_token_ids", _clear("prompt_token_ids")),
    ("DecodeRequest.timeout_seconds", _set(timeout_seconds=0.0)),
    ("DecodeRequest.cache_salt", _set(cache_salt="x" * 257)),
]

STATUS_CHANGES = [
    ("WorkerStatus.worker", _clear("worker")),
    ("WorkerStatus.integrity", _clear("integrity")),
    ("WorkerStatus.process_id", _clear("process_id")),
    ("WorkerStatus.condition", _clear("condition")),
    ("WorkerStatus.condition", _set(condition="x" * (checks.MAX_TEXT_CHARS + 1))),
    ("PairedWorker.lane", _set(peers__0__lane="")),
    ("PoolGroup.free", _set(pool_groups__0__free=2**64 - 1)),
    ("PoolGroup.cached", _set(pool_groups__0__cached=2**64 - 1)),
    ("PoolGroup.life_cycles", lambda message: message.pool_groups[0].life_cycles.append("")),
]

TOKENIZE_CHANGES = [("TokenizeRequest.prompt", _set(prompt="x" * (inference.MAX_PROMPT_CHARS + 1)))]

TOKENS_CHANGES = [
    ("TokenizeResponse.token_ids", lambda message: message.token_ids.append(2**31)),
    ("TokenizeResponse.token_ids", lambda message: message.token_ids.extend([0] * common.MAX_TOKENS)),
]

EVENT_CHANGES = [
    ("GenerateEvent.event", _clear("summary")),
    ("TokenChunk.logprobs", lambda message: message.chunk.token_ids.append(4)),
    ("GenerateSummary.timings", lambda message: message.summary.ClearField("timings")),
    ("GenerateSummary.finish_reason", _set(summary__finish_reason="")),
    ("Timings.queue_seconds", _set(summary__timings__queue_seconds=-1.0)),
    ("Usage.cached_tokens", _set(summary__usage__cached_tokens=71)),
    ("GenerateSummary.decode_cached_tokens", _set(summary__decode_cached_tokens=71)),
]


def cases() -> list[Any]:
    """Every change with the good message it spoils and the converter that must refuse it."""
    groups: list[tuple[Message, Callable[[Any], object], list[tuple[str, Callable[[Any], Any]]]]] = [
        (channel.grant_to_wire(samples.grant()), channel.grant_from_wire, GRANT_CHANGES),
        (channel.permit_to_wire(samples.permit()), channel.permit_from_wire, PERMIT_CHANGES),
        (channel.result_to_wire(samples.result()), channel.result_from_wire, RESULT_CHANGES),
        (channel.cancel_to_wire(samples.cancel()), channel.cancel_from_wire, CANCEL_CHANGES),
        (channel.renewal_to_wire(samples.renewal()), channel.renewal_from_wire, RENEWAL_CHANGES),
        (rank.rank_to_wire(samples.rank(samples.PREFILL, Role.BOTH)), rank.rank_from_wire, RANK_CHANGES),
        (inference.call_to_wire(samples.call()), inference.call_from_wire, CALL_CHANGES),
        (
            inference.prefill_reply_to_wire(samples.prefill_reply()),
            inference.prefill_reply_from_wire,
            PREFILL_REPLY_CHANGES,
        ),
        (inference.decode_call_to_wire(samples.decode_call()), inference.decode_call_from_wire, DECODE_CALL_CHANGES),
        (inference.tokenize_to_wire("hello", True), inference.tokenize_from_wire, TOKENIZE_CHANGES),
        (inference.tokens_to_wire((1, 2)), inference.tokens_from_wire, TOKENS_CHANGES),
        (status.status_to_wire(samples.status()), status.status_from_wire, STATUS_CHANGES),
        (inference.event_to_wire(samples.summary()), inference.event_from_wire, EVENT_CHANGES),
    ]
    return [
        pytest.param(good, convert, field, change, id=f"{field}-{number}")
        for good, convert, changes in groups
        for number, (field, change) in enumerate(changes)
    ]


@pytest.mark.parametrize("good, convert, field, change", cases())
def test_broken_rule_names_the_field(
    good: Message, convert: Callable[[Any], object], field: str, change: Callable[[Any], Any]
) -> None:
    message = through_bytes(good)
    assert convert(message) is not None
    change(message)

    with pytest.raises(RemoteProtocolError) as caught:
        convert(message)
    assert field in str(caught.value).partition(" is ")[0]


@pytest.mark.parametrize(
    "convert, record",
    [
        (inference.call_to_wire, GenerateCall(prompt=None)),
        (inference.call_to_wire, GenerateCall(prompt="a", prompt_token_ids=(1,))),
        (inference.call_to_wire, GenerateCall(prompt="a", sampling=SamplingParams(max_new_tokens=-1))),
        (inference.call_to_wire, GenerateCall(prompt="\ud800")),
        (common.key_to_wire, TransferKey("not hex", 0)),
        (common.worker_to_wire, WorkerId("a", -1)),
        (
            channel.body_to_wire,
            TransferResult(samples.KEY, samples.PREFILL, samples.DECODE, ResultStatus.FAILED, -1, False),
        ),
    ],
)
def test_own_record_that_does_not_fit_is_our_fault(convert: Callable[[Any], object], record: object) -> None:
    with pytest.raises(LocalProtocolError, match=type(record).__name__):
        convert(record)
