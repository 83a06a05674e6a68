"""Identities, roles, keys, usage, wire reports and token lists."""

import math
from collections.abc import Iterable, Sequence

from kvferry.transfer.control.convert import checks
from kvferry.transfer.types import Phase, Role, TransferKey, Usage, WireReport, WorkerId
from kvferry.v1 import common_pb2 as pb

MAX_WORKER_NAME_CHARS = 128
MAX_REQUEST_ID_CHARS = 256
MAX_INCARNATION = (1 << 63) - 1
TRANSFER_ID_BYTES = 16
MAX_ATTEMPT = (1 << 31) - 1
MAX_TOKENS = 1 << 21
MAX_TOKEN_ID = (1 << 31) - 1

_ROLES = {pb.ROLE_PREFILL: Role.PREFILL, pb.ROLE_DECODE: Role.DECODE, pb.ROLE_BOTH: Role.BOTH}
_ROLE_NUMBERS = {role: number for number, role in _ROLES.items()}
_PHASES = {
    pb.PHASE_ADMISSION: Phase.ADMISSION,
    pb.PHASE_PREFILL: Phase.PREFILL,
    pb.PHASE_GRANT: Phase.GRANT,
    pb.PHASE_POST: Phase.POST,
    pb.PHASE_WIRE: Phase.WIRE,
    pb.PHASE_RESULT: Phase.RESULT,
    pb.PHASE_DECODE: Phase.DECODE,
}
_PHASE_NUMBERS = {phase: number for number, phase in _PHASES.items()}


def role_to_wire(role: Role) -> pb.Role.ValueType:
    return _ROLE_NUMBERS[role]


def role_from_wire(field: str, number: pb.Role.ValueType) -> Role:
    return checks.known(field, number, _ROLES)


def phase_to_wire(phase: Phase) -> pb.Phase.ValueType:
    return _PHASE_NUMBERS[phase]


def phase_from_wire(field: str, number: pb.Phase.ValueType) -> Phase:
    return checks.known(field, number, _PHASES)


@checks.outgoing
def worker_to_wire(worker: WorkerId) -> pb.WorkerId:
    return pb.WorkerId(name=worker.name, incarnation=worker.incarnation)


def worker_from_wire(message: pb.WorkerId) -> WorkerId:
    name = checks.name("WorkerId.name", message.name, max_chars=MAX_WORKER_NAME_CHARS)
    checks.require(" " not in name, "WorkerId.name", name, "it must not contain spaces")
    return WorkerId(name, checks.count("WorkerId.incarnation", message.incarnation, low=1, high=MAX_INCARNATION))


@checks.outgoing
def key_to_wire(key: TransferKey) -> pb.TransferKey:
    return pb.TransferKey(transfer_id=bytes.fromhex(key.transfer_id), attempt=key.attempt)


def key_from_wire(message: pb.TransferKey) -> TransferKey:
    raw = message.transfer_id
    rule = f"it must be {TRANSFER_ID_BYTES} bytes"
    checks.require(len(raw) == TRANSFER_ID_BYTES, "TransferKey.transfer_id", raw, rule)
    return TransferKey(raw.hex(), checks.count("TransferKey.attempt", message.attempt, low=1, high=MAX_ATTEMPT))


def request_id(field: str, value: str) -> str:
    """Empty, or short and printable: it stands in log lines."""
    return checks.name(field, value, max_chars=MAX_REQUEST_ID_CHARS) if value else value


def usage_to_wire(usage: Usage) -> pb.Usage:
    return pb.Usage(prompt_tokens=usage.prompt_tokens, cached_tokens=usage.cached_tokens)


def usage_from_wire(message: pb.Usage) -> Usage:
    prompt = checks.count("Usage.prompt_tokens", message.prompt_tokens, low=1, high=MAX_TOKENS)
    return Usage(prompt, checks.count("Usage.cached_tokens", message.cached_tokens, high=prompt))


def wire_report_to_wire(report: WireReport) -> pb.WireReport:
    return pb.WireReport(
        num_slices=report.num_slices,
        num_pages=report.num_pages,
        num_bytes=report.num_bytes,
        num_descriptors=report.num_descriptors,
        seconds=report.seconds,
        lane=report.lane,
    )


def wire_report_from_wire(message: pb.WireReport) -> WireReport:
    return WireReport(
        num_slices=message.num_slices,
        num_pages=checks.count("WireReport.num_pages", message.num_pages),
        num_bytes=checks.count("WireReport.num_bytes", message.num_bytes),
        num_descriptors=checks.count("WireReport.num_descriptors", message.num_descriptors),
        seconds=checks.seconds("WireReport.seconds", message.seconds, zero=True),
        lane=checks.name("WireReport.lane", message.lane),
    )


def tokens_from_wire(field: str, token_ids: Sequence[int], *, low: int = 0) -> tuple[int, ...]:
    """A list of token ids, `low` of them at least."""
    checks.sized(field, token_ids, low=low, high=MAX_TOKENS)
    if token_ids:
        checks.count(f"largest of {field}", max(token_ids), high=MAX_TOKEN_ID)
    return tuple(token_ids)


def logprobs_from_wire(field: str, logprobs: Iterable[float]) -> tuple[float, ...]:
    """Logarithms of probabilities: minus infinity is one, NaN and plus infinity are not."""
    values = tuple(logprobs)
    for value in values:
        checks.require(not math.isnan(value) and value != math.inf, field, value, "it must be a number below infinity")
    return values
