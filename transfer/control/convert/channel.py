"""What travels on a transfer channel: hello, grant, result, cancel."""

import numpy as np

from kvferry.cache.page_table import BlockLists, EpochList, SlotList
from kvferry.transfer.control.convert import checks, common
from kvferry.transfer.control.handlers import ChannelBody, Envelope, Hello
from kvferry.transfer.types import AuxRecord, Cancel, Failure, Grant, PromptId, ResultStatus, TransferResult
from kvferry.v1 import transfer_pb2 as pb

MAX_LAYER_GROUPS = 256
MAX_BLOCKS = 1 << 21
ENTRY_BYTES = 4
MAX_FIRST_TOKENS = 1024
DIGEST_BYTES = 32

_STATUSES = {
    pb.RESULT_STATUS_OK: ResultStatus.OK,
    pb.RESULT_STATUS_FAILED: ResultStatus.FAILED,
    pb.RESULT_STATUS_CANCELLED: ResultStatus.CANCELLED,
}
_STATUS_NUMBERS = {status: number for number, status in _STATUSES.items()}


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
        case TransferResult():
            return pb.ChannelMessage(result=result_to_wire(body))
        case Cancel():
            return pb.ChannelMessage(cancel=cancel_to_wire(body))


def envelope_from_wire(message: pb.ChannelMessage) -> Envelope:
    return Envelope(message.sequence, _body_from_wire(message))


def _body_from_wire(message: pb.ChannelMessage) -> ChannelBody:
    match checks.one_of(message, "body"):
        case "hello":
            return hello_from_wire(message.hello)
        case "grant":
            return grant_from_wire(message.grant)
        case "result":
            return result_from_wire(message.result)
        case _:
            return cancel_from_wire(message.cancel)


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
        layer_groups=[
            _blocks_to_wire(slots, epochs) for slots, epochs in zip(grant.pages.slots, grant.pages.epochs, strict=True)
        ],
        timeout_seconds=grant.timeout_seconds,
    )


def grant_from_wire(message: pb.Grant) -> Grant:
    for field in ("key", "sender", "receiver"):
        checks.present(message, field)
    return Grant(
        key=common.key_from_wire(message.key),
        sender=common.worker_from_wire(message.sender),
        receiver=common.worker_from_wire(message.receiver),
        prompt=_prompt_from_wire(message),
        pages=_pages_from_wire(message),
        timeout_seconds=checks.seconds("Grant.timeout_seconds", message.timeout_seconds),
    )


def _blocks_to_wire(slots: SlotList, epochs: EpochList) -> pb.LayerGroupBlocks:
    return pb.LayerGroupBlocks(slot_ids=slots.astype("<i4").tobytes(), slot_epochs=epochs.astype("<u4").tobytes())


def _pages_from_wire(message: pb.Grant) -> BlockLists:
    checks.sized("Grant.layer_groups", message.layer_groups, low=1, high=MAX_LAYER_GROUPS)
    lists = [_blocks_from_wire(blocks) for blocks in message.layer_groups]
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
        slot_epochs=result.epochs,
        quiet=result.quiet,
        wire=common.wire_report_to_wire(result.wire),
        aux=None if result.aux is None else aux_to_wire(result.aux),
        failure=None if result.failure is None else _failure_to_wire(result.failure),
    )


def result_from_wire(message: pb.Result) -> TransferResult:
    for field in ("key", "sender", "receiver", "wire"):
        checks.present(message, field)
    checks.sized("Result.slot_epochs", message.slot_epochs, high=MAX_LAYER_GROUPS)
    for packed in message.slot_epochs:
        _check_packed("Result.slot_epochs", packed)
    status = checks.known("Result.status", message.status, _STATUSES)
    _check_outcome(message, status)
    return TransferResult(
        key=common.key_from_wire(message.key),
        sender=common.worker_from_wire(message.sender),
        receiver=common.worker_from_wire(message.receiver),
        status=status,
        epochs=tuple(message.slot_epochs),
        quiet=message.quiet,
        wire=common.wire_report_from_wire(message.wire),
        aux=aux_from_wire(message.aux) if message.HasField("aux") else None,
        failure=_failure_from_wire(message.failure) if message.HasField("failure") else None,
    )


def _check_outcome(message: pb.Result, status: ResultStatus) -> None:
    succeeded, has_failure = status is ResultStatus.OK, message.HasField("failure")
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
        code=failure.code, phase=common.phase_to_wire(failure.phase), message=checks.clipped(failure.message)
    )


def _failure_from_wire(message: pb.Failure) -> Failure:
    return Failure(
        code=checks.name("Failure.code", message.code),
        phase=common.phase_from_wire("Failure.phase", message.phase),
        message=checks.text("Failure.message", message.message),
    )


def cancel_to_wire(cancel: Cancel) -> pb.Cancel:
    return pb.Cancel(
        key=common.key_to_wire(cancel.key),
        origin=common.worker_to_wire(cancel.origin),
        reason=checks.clipped(cancel.reason),
    )


def cancel_from_wire(message: pb.Cancel) -> Cancel:
    checks.present(message, "key")
    checks.present(message, "origin")
    return Cancel(
        key=common.key_from_wire(message.key),
        origin=common.worker_from_wire(message.origin),
        reason=checks.text("Cancel.reason", message.reason),
    )
