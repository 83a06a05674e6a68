"""What travels on a transfer channel: hello, grant, permit, result, cancel, renewal."""

from collections.abc import Sequence

import numpy as np

from kvferry.cache.page_table import BlockLists, EpochList, SlotList
from kvferry.transfer.control.convert import checks, common
from kvferry.transfer.control.handlers import ChannelBody, Envelope, Hello
from kvferry.transfer.types import (
    MAX_RENEWED,
    AuxRecord,
    Cancel,
    Direction,
    Failure,
    Grant,
    Permit,
    PromptId,
    Renewal,
    ResultStatus,
    Side,
    TransferResult,
)
from kvferry.v1 import transfer_pb2 as pb

MAX_LAYER_GROUPS = 256
MAX_BLOCKS = 1 << 21
ENTRY_BYTES = 4
MAX_FIRST_TOKENS = 1024
DIGEST_BYTES = 32
MAX_FAILURE_CHARS = 4096
"""Of each text of a failure: thousands of failures are remembered."""

MAX_FENCE = (1 << 64) - 1

_STATUSES = {
    pb.RESULT_STATUS_OK: ResultStatus.OK,
    pb.RESULT_STATUS_FAILED: ResultStatus.FAILED,
    pb.RESULT_STATUS_CANCELLED: ResultStatus.CANCELLED,
}
_STATUS_NUMBERS = {status: number for number, status in _STATUSES.items()}
_DIRECTIONS = {pb.DIRECTION_PUSH: Direction.PUSH, pb.DIRECTION_PULL: Direction.PULL}
_DIRECTION_NUMBERS = {direction: number for number, direction in _DIRECTIONS.items()}
_SIDES = {pb.SIDE_SENDER: Side.SENDER, pb.SIDE_RECEIVER: Side.RECEIVER}
_SIDE_NUMBERS = {side: number for number, side in _SIDES.items()}


@checks.outgoing
def envelope_to_wire(envelope: Envelope) -> pb.ChannelMessage:
    return numbered(body_to_wire(envelope.body), envelope.sequence)


def numbered(message: pb.ChannelMessage, sequence: int) -> pb.ChannelMessage:
    """The same message with its place in the stream."""
    message.sequence = sequence
    return message


@checks.outgoing
def body_to_wire(body: ChannelBody) -> pb.ChannelMessage:
    """A message whose place in the stream is not known yet."""
    match body:
        case Hello():
            return pb.ChannelMessage(hello=hello_to_wire(body))
        case Grant():
            return pb.ChannelMessage(grant=grant_to_wire(body))
        case Permit():
            return pb.ChannelMessage(permit=permit_to_wire(body))
        case TransferResult():
            return pb.ChannelMessage(result=result_to_wire(body))
        case Cancel():
            return pb.ChannelMessage(cancel=cancel_to_wire(body))
        case Renewal():
            return pb.ChannelMessage(renewal=renewal_to_wire(body))


def envelope_from_wire(message: pb.ChannelMessage) -> Envelope:
    return Envelope(message.sequence, _body_from_wire(message))


def _body_from_wire(message: pb.ChannelMessage) -> ChannelBody:
    match checks.one_of(message, "body"):
        case "hello":
            return hello_from_wire(message.hello)
        case "grant":
            return grant_from_wire(message.grant)
        case "permit":
            return permit_from_wire(message.permit)
        case "result":
            return result_from_wire(message.result)
        case "cancel":
            return cancel_from_wire(message.cancel)
        case _:
            return renewal_from_wire(message.renewal)


def hello_to_wire(hello: Hello) -> pb.Hello:
    return pb.Hello(worker=common.worker_to_wire(hello.worker), protocol_version=hello.protocol_version)


def hello_from_wire(message: pb.Hello) -> Hello:
    checks.present(message, "worker")
    version = checks.count("Hello.protocol_version", message.protocol_version, low=1)
    return Hello(common.worker_from_wire(message.worker), version)


def _prompt_from_wire(message: pb.Grant) -> PromptId:
    num_tokens = checks.count("Grant.prompt_tokens", message.prompt_tokens, low=1, high=common.MAX_TOKENS)
    digest = message.prompt_digest
    checks.require(len(digest) == DIGEST_BYTES, "Grant.prompt_digest", digest, f"it must have {DIGEST_BYTES} bytes")
    return PromptId(num_tokens, digest)


def grant_to_wire(grant: Grant) -> pb.Grant:
    return pb.Grant(
        key=common.key_to_wire(grant.key),
        sender=common.worker_to_wire(grant.sender),
        receiver=common.worker_to_wire(grant.receiver),
        prompt_tokens=grant.prompt.num_tokens,
        prompt_digest=grant.prompt.digest,
        layer_groups=_pages_to_wire(grant.pages),
        timeout_seconds=grant.timeout_seconds,
        request_id=grant.request_id,
        direction=_DIRECTION_NUMBERS[grant.direction],
        early=grant.early,
    )


def grant_from_wire(message: pb.Grant) -> Grant:
    for field in ("key", "sender", "receiver"):
        checks.present(message, field)
    return Grant(
        key=common.key_from_wire(message.key),
        sender=common.worker_from_wire(message.sender),
        receiver=common.worker_from_wire(message.receiver),
        prompt=_prompt_from_wire(message),
        pages=_pages_from_wire("Grant.layer_groups", message.layer_groups),
        timeout_seconds=checks.seconds("Grant.timeout_seconds", message.timeout_seconds),
        request_id=common.request_id("Grant.request_id", message.request_id),
        direction=checks.known("Grant.direction", message.direction, _DIRECTIONS),
        early=message.early,
    )


def permit_to_wire(permit: Permit) -> pb.Permit:
    return pb.Permit(
        key=common.key_to_wire(permit.key),
        sender=common.worker_to_wire(permit.sender),
        receiver=common.worker_to_wire(permit.receiver),
        fence=permit.fence,
        layer_groups=_pages_to_wire(permit.pages),
        timeout_seconds=permit.timeout_seconds,
    )


def permit_from_wire(message: pb.Permit) -> Permit:
    for field in ("key", "sender", "receiver"):
        checks.present(message, field)
    return Permit(
        key=common.key_from_wire(message.key),
        sender=common.worker_from_wire(message.sender),
        receiver=common.worker_from_wire(message.receiver),
        fence=checks.count("Permit.fence", message.fence, low=1, high=MAX_FENCE),
        pages=_pages_from_wire("Permit.layer_groups", message.layer_groups),
        timeout_seconds=checks.seconds("Permit.timeout_seconds", message.timeout_seconds),
    )


def _pages_to_wire(pages: BlockLists) -> list[pb.LayerGroupBlocks]:
    return [_blocks_to_wire(slots, epochs) for slots, epochs in zip(pages.slots, pages.epochs, strict=True)]


def _blocks_to_wire(slots: SlotList, epochs: EpochList) -> pb.LayerGroupBlocks:
    return pb.LayerGroupBlocks(slot_ids=slots.astype("<i4").tobytes(), slot_epochs=epochs.astype("<u4").tobytes())


def _pages_from_wire(field: str, layer_groups: Sequence[pb.LayerGroupBlocks]) -> BlockLists:
    checks.sized(field, layer_groups, low=1, high=MAX_LAYER_GROUPS)
    lists = [_blocks_from_wire(blocks) for blocks in layer_groups]
    return BlockLists(tuple(slots for slots, _ in lists), tuple(epochs for _, epochs in lists))


def _blocks_from_wire(message: pb.LayerGroupBlocks) -> tuple[SlotList, EpochList]:
    _check_packed("LayerGroupBlocks.slot_ids", message.slot_ids)
    _check_packed("LayerGroupBlocks.slot_epochs", message.slot_epochs)
    slots = np.frombuffer(message.slot_ids, "<i4").astype(np.int32)
    epochs = np.frombuffer(message.slot_epochs, "<u4").astype(np.uint32)
    checks.same_length("LayerGroupBlocks.slot_epochs", epochs, "slot_ids", slots)
    least = int(slots.min(initial=0))
    checks.require(least >= -1, "LayerGroupBlocks.slot_ids", least, "an entry is a slot id or -1")
    stray = epochs[slots < 0]
    checks.require(not stray.any(), "LayerGroupBlocks.slot_epochs", stray.tolist(), "it must be 0 where the slot is -1")
    return slots, epochs


def _check_packed(field: str, packed: bytes) -> None:
    size = f"{len(packed)} bytes"
    checks.require(len(packed) % ENTRY_BYTES == 0, field, size, f"the size must be a multiple of {ENTRY_BYTES}")
    checks.require(len(packed) <= MAX_BLOCKS * ENTRY_BYTES, field, size, f"at most {MAX_BLOCKS} entries are allowed")


def result_to_wire(result: TransferResult) -> pb.Result:
    return pb.Result(
        key=common.key_to_wire(result.key),
        sender=common.worker_to_wire(result.sender),
        receiver=common.worker_to_wire(result.receiver),
        status=_STATUS_NUMBERS[result.status],
        fence=result.fence,
        quiet=result.quiet,
        wire=common.wire_report_to_wire(result.wire),
        aux=None if result.aux is None else aux_to_wire(result.aux),
        failure=None if result.failure is None else _failure_to_wire(result.failure),
    )


def result_from_wire(message: pb.Result) -> TransferResult:
    for field in ("key", "sender", "receiver", "wire"):
        checks.present(message, field)
    status = checks.known("Result.status", message.status, _STATUSES)
    _check_outcome(message, status)
    return TransferResult(
        key=common.key_from_wire(message.key),
        sender=common.worker_from_wire(message.sender),
        receiver=common.worker_from_wire(message.receiver),
        status=status,
        fence=message.fence,
        quiet=message.quiet,
        wire=common.wire_report_from_wire(message.wire),
        aux=aux_from_wire(message.aux) if message.HasField("aux") else None,
        failure=_failure_from_wire(message.failure) if message.HasField("failure") else None,
    )


def _check_outcome(message: pb.Result, status: ResultStatus) -> None:
    succeeded, has_failure = status is ResultStatus.OK, message.HasField("failure")
    checks.require(message.fence > 0 or not succeeded, "Result.fence", message.fence, "it must not be 0 when ok")
    checks.require(message.HasField("aux") == succeeded, "Result.aux", status.value, "it is present exactly when ok")
    checks.require(not (succeeded and has_failure), "Result.failure", status.value, "it must be absent when ok")
    needed = status is ResultStatus.FAILED
    checks.require(has_failure or not needed, "Result.failure", status.value, "it must be present when failed")


def aux_to_wire(aux: AuxRecord) -> pb.AuxRecord:
    return pb.AuxRecord(
        first_tokens=aux.first_tokens,
        first_logprobs=aux.first_logprobs,
        usage=common.usage_to_wire(aux.usage),
        draft_tokens=aux.draft_tokens,
    )


def aux_from_wire(message: pb.AuxRecord) -> AuxRecord:
    checks.present(message, "usage")
    for field, values, low in (("first_tokens", message.first_tokens, 1), ("draft_tokens", message.draft_tokens, 0)):
        checks.sized(f"AuxRecord.{field}", values, low=low, high=MAX_FIRST_TOKENS)
    checks.same_length("AuxRecord.first_logprobs", message.first_logprobs, "first_tokens", message.first_tokens)
    return AuxRecord(
        first_tokens=common.tokens_from_wire("AuxRecord.first_tokens", message.first_tokens),
        first_logprobs=common.logprobs_from_wire("AuxRecord.first_logprobs", message.first_logprobs),
        usage=common.usage_from_wire(message.usage),
        draft_tokens=common.tokens_from_wire("AuxRecord.draft_tokens", message.draft_tokens),
    )


def _failure_to_wire(failure: Failure) -> pb.Failure:
    return pb.Failure(
        code=failure.code,
        phase=common.phase_to_wire(failure.phase),
        message=checks.clipped(failure.message, max_chars=MAX_FAILURE_CHARS),
        hint=checks.clipped(failure.hint, max_chars=MAX_FAILURE_CHARS),
        layer_groups=failure.layer_groups,
    )


def _failure_from_wire(message: pb.Failure) -> Failure:
    checks.sized("Failure.layer_groups", message.layer_groups, high=MAX_LAYER_GROUPS)
    return Failure(
        code=checks.name("Failure.code", message.code),
        phase=common.phase_from_wire("Failure.phase", message.phase),
        message=checks.text("Failure.message", message.message, max_chars=MAX_FAILURE_CHARS),
        hint=checks.text("Failure.hint", message.hint, max_chars=MAX_FAILURE_CHARS),
        layer_groups=tuple(
            checks.count("Failure.layer_groups", group, high=MAX_LAYER_GROUPS - 1) for group in message.layer_groups
        ),
    )


def cancel_to_wire(cancel: Cancel) -> pb.Cancel:
    return pb.Cancel(
        key=common.key_to_wire(cancel.key),
        origin=common.worker_to_wire(cancel.origin),
        failure=_failure_to_wire(cancel.failure),
        fence=cancel.fence,
        quiet=cancel.quiet,
    )


def cancel_from_wire(message: pb.Cancel) -> Cancel:
    for field in ("key", "origin", "failure"):
        checks.present(message, field)
    return Cancel(
        key=common.key_from_wire(message.key),
        origin=common.worker_from_wire(message.origin),
        failure=_failure_from_wire(message.failure),
        fence=message.fence,
        quiet=message.quiet,
    )


def renewal_to_wire(renewal: Renewal) -> pb.Renewal:
    return pb.Renewal(
        origin=common.worker_to_wire(renewal.origin),
        side=_SIDE_NUMBERS[renewal.side],
        keys=[common.key_to_wire(key) for key in renewal.keys],
        lease_seconds=renewal.lease_seconds,
    )


def renewal_from_wire(message: pb.Renewal) -> Renewal:
    checks.present(message, "origin")
    checks.sized("Renewal.keys", message.keys, low=1, high=MAX_RENEWED)
    return Renewal(
        origin=common.worker_from_wire(message.origin),
        side=checks.known("Renewal.side", message.side, _SIDES),
        keys=tuple(common.key_from_wire(key) for key in message.keys),
        lease_seconds=checks.seconds("Renewal.lease_seconds", message.lease_seconds),
    )
