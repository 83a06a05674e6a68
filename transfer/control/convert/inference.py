"""Prompts, tokens and summaries."""

import math

from kvferry.transfer.control.convert import checks, common
from kvferry.transfer.inference import (
    DecodeCall,
    GenerateCall,
    GenerateEvent,
    GenerateSummary,
    PrefillReply,
    SamplingParams,
    Timings,
    TokenChunk,
)
from kvferry.v1 import inference_pb2 as pb

MAX_PROMPT_CHARS = 8 << 20
MAX_SALT_CHARS = 256
MAX_TEMPERATURE = 1000.0


def _sampling_to_wire(sampling: SamplingParams) -> pb.SamplingParams:
    return pb.SamplingParams(
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        seed=sampling.seed,
        ignore_eos=sampling.ignore_eos,
    )


def _sampling_from_wire(message: pb.SamplingParams) -> SamplingParams:
    heat = message.temperature
    checks.require(
        math.isfinite(heat) and 0 <= heat <= MAX_TEMPERATURE,
        "SamplingParams.temperature",
        heat,
        f"it must be between 0 and {MAX_TEMPERATURE:.0f}",
    )
    limit = checks.count("SamplingParams.max_new_tokens", message.max_new_tokens, low=1, high=common.MAX_TOKENS)
    return SamplingParams(limit, heat, message.seed, message.ignore_eos)


@checks.outgoing
def call_to_wire(call: GenerateCall) -> pb.GenerateCall:
    """Raises LocalProtocolError unless exactly one of prompt and prompt_token_ids is given."""
    if (call.prompt is None) == (call.prompt_token_ids is None):
        raise ValueError("give exactly one of prompt and prompt_token_ids")
    message = pb.GenerateCall(
        request_id=call.request_id,
        chat=call.chat,
        sampling=_sampling_to_wire(call.sampling),
        timeout_seconds=call.timeout_seconds,
        cache_salt=call.cache_salt,
    )
    if call.prompt is not None:
        message.text = call.prompt
    else:
        message.token_ids.CopyFrom(pb.TokenIds(ids=call.prompt_token_ids))
    if call.key is not None:
        message.key.CopyFrom(common.key_to_wire(call.key))
    return message


def call_from_wire(message: pb.GenerateCall) -> GenerateCall:
    checks.present(message, "sampling")
    prompt, token_ids = _prompt_from_wire(message)
    return GenerateCall(
        request_id=common.request_id("GenerateCall.request_id", message.request_id),
        prompt=prompt,
        prompt_token_ids=token_ids,
        chat=message.chat,
        sampling=_sampling_from_wire(message.sampling),
        timeout_seconds=checks.seconds("GenerateCall.timeout_seconds", message.timeout_seconds),
        cache_salt=checks.text("GenerateCall.cache_salt", message.cache_salt, max_chars=MAX_SALT_CHARS),
        key=common.key_from_wire(message.key) if message.HasField("key") else None,
    )


def _prompt_from_wire(message: pb.GenerateCall) -> tuple[str | None, tuple[int, ...] | None]:
    """Empty prompts pass: whether they make sense is for the engine to say."""
    if checks.one_of(message, "prompt") == "text":
        return checks.text("GenerateCall.text", message.text, max_chars=MAX_PROMPT_CHARS), None
    return None, common.tokens_from_wire("GenerateCall.token_ids", message.token_ids.ids)


@checks.outgoing
def prefill_reply_to_wire(reply: PrefillReply) -> pb.PrefillResponse:
    return pb.PrefillResponse(
        key=common.key_to_wire(reply.key),
        sender=common.worker_to_wire(reply.sender),
        prompt_token_ids=reply.prompt_token_ids,
        queue_seconds=reply.queue_seconds,
        prefill_seconds=reply.prefill_seconds,
        lease_seconds=reply.lease_seconds,
        cached_tokens=reply.cached_tokens,
    )


def prefill_reply_from_wire(message: pb.PrefillResponse) -> PrefillReply:
    checks.present(message, "key")
    checks.present(message, "sender")
    prompt = common.tokens_from_wire("PrefillResponse.prompt_token_ids", message.prompt_token_ids, low=1)
    return PrefillReply(
        key=common.key_from_wire(message.key),
        sender=common.worker_from_wire(message.sender),
        prompt_token_ids=prompt,
        queue_seconds=checks.seconds("PrefillResponse.queue_seconds", message.queue_seconds, zero=True),
        prefill_seconds=checks.seconds("PrefillResponse.prefill_seconds", message.prefill_seconds, zero=True),
        lease_seconds=checks.seconds("PrefillResponse.lease_seconds", message.lease_seconds),
        cached_tokens=checks.count("PrefillResponse.cached_tokens", message.cached_tokens, high=len(prompt)),
    )


@checks.outgoing
def decode_call_to_wire(call: DecodeCall) -> pb.DecodeRequest:
    return pb.DecodeRequest(
        request_id=call.request_id,
        key=common.key_to_wire(call.key),
        sender=common.worker_to_wire(call.sender),
        prompt_token_ids=call.prompt_token_ids,
        sampling=_sampling_to_wire(call.sampling),
        timeout_seconds=call.timeout_seconds,
        cache_salt=call.cache_salt,
        early=call.early,
    )


def decode_call_from_wire(message: pb.DecodeRequest) -> DecodeCall:
    for field in ("key", "sender", "sampling"):
        checks.present(message, field)
    return DecodeCall(
        request_id=common.request_id("DecodeRequest.request_id", message.request_id),
        key=common.key_from_wire(message.key),
        sender=common.worker_from_wire(message.sender),
        prompt_token_ids=common.tokens_from_wire("DecodeRequest.prompt_token_ids", message.prompt_token_ids, low=1),
        sampling=_sampling_from_wire(message.sampling),
        timeout_seconds=checks.seconds("DecodeRequest.timeout_seconds", message.timeout_seconds),
        cache_salt=checks.text("DecodeRequest.cache_salt", message.cache_salt, max_chars=MAX_SALT_CHARS),
        early=message.early,
    )


@checks.outgoing
def tokenize_to_wire(prompt: str, chat: bool) -> pb.TokenizeRequest:
    return pb.TokenizeRequest(prompt=prompt, chat=chat)


def tokenize_from_wire(message: pb.TokenizeRequest) -> tuple[str, bool]:
    """The text and whether it is a chat's turn. Empty passes, as in a call."""
    return checks.text("TokenizeRequest.prompt", message.prompt, max_chars=MAX_PROMPT_CHARS), message.chat


@checks.outgoing
def tokens_to_wire(token_ids: tuple[int, ...]) -> pb.TokenizeResponse:
    return pb.TokenizeResponse(token_ids=token_ids)


def tokens_from_wire(message: pb.TokenizeResponse) -> tuple[int, ...]:
    return common.tokens_from_wire("TokenizeResponse.token_ids", message.token_ids)


@checks.outgoing
def event_to_wire(event: GenerateEvent) -> pb.GenerateEvent:
    match event:
        case TokenChunk():
            return pb.GenerateEvent(
                chunk=pb.TokenChunk(token_ids=event.token_ids, logprobs=event.logprobs, text=event.text)
            )
        case GenerateSummary():
            return pb.GenerateEvent(summary=_summary_to_wire(event))


def event_from_wire(message: pb.GenerateEvent) -> GenerateEvent:
    if checks.one_of(message, "event") == "chunk":
        return _chunk_from_wire(message.chunk)
    return _summary_from_wire(message.summary)


def _chunk_from_wire(message: pb.TokenChunk) -> TokenChunk:
    checks.same_length("TokenChunk.logprobs", message.logprobs, "token_ids", message.token_ids)
    return TokenChunk(
        token_ids=common.tokens_from_wire("TokenChunk.token_ids", message.token_ids),
        logprobs=common.logprobs_from_wire("TokenChunk.logprobs", message.logprobs),
        text=checks.text("TokenChunk.text", message.text, max_chars=MAX_PROMPT_CHARS),
    )


def _summary_to_wire(summary: GenerateSummary) -> pb.GenerateSummary:
    timings = summary.timings
    return pb.GenerateSummary(
        finish_reason=summary.finish_reason,
        usage=common.usage_to_wire(summary.usage),
        new_tokens=summary.new_tokens,
        num_blocks=summary.num_blocks,
        timings=pb.Timings(
            queue_seconds=timings.queue_seconds,
            prefill_seconds=timings.prefill_seconds,
            transfer_seconds=timings.transfer_seconds,
            first_decode_step_seconds=timings.first_decode_step_seconds,
        ),
        wire=common.wire_report_to_wire(summary.wire),
        sender=common.worker_to_wire(summary.sender),
        receiver=common.worker_to_wire(summary.receiver),
        prompt_token_ids=summary.prompt_token_ids,
        decode_cached_tokens=summary.decode_cached_tokens,
    )


def _summary_from_wire(message: pb.GenerateSummary) -> GenerateSummary:
    for field in ("usage", "timings", "wire", "sender", "receiver"):
        checks.present(message, field)
    usage, cached = common.usage_from_wire(message.usage), message.decode_cached_tokens
    return GenerateSummary(
        finish_reason=checks.name("GenerateSummary.finish_reason", message.finish_reason),
        usage=usage,
        new_tokens=checks.count("GenerateSummary.new_tokens", message.new_tokens, high=common.MAX_TOKENS),
        num_blocks=checks.count("GenerateSummary.num_blocks", message.num_blocks, high=common.MAX_TOKENS),
        timings=_timings_from_wire(message.timings),
        wire=common.wire_report_from_wire(message.wire),
        sender=common.worker_from_wire(message.sender),
        receiver=common.worker_from_wire(message.receiver),
        prompt_token_ids=common.tokens_from_wire("GenerateSummary.prompt_token_ids", message.prompt_token_ids),
        decode_cached_tokens=checks.count("GenerateSummary.decode_cached_tokens", cached, high=usage.prompt_tokens),
    )


def _timings_from_wire(message: pb.Timings) -> Timings:
    return Timings(
        queue_seconds=checks.seconds("Timings.queue_seconds", message.queue_seconds, zero=True),
        prefill_seconds=checks.seconds("Timings.prefill_seconds", message.prefill_seconds, zero=True),
        transfer_seconds=checks.seconds("Timings.transfer_seconds", message.transfer_seconds, zero=True),
        first_decode_step_seconds=checks.seconds(
            "Timings.first_decode_step_seconds", message.first_decode_step_seconds, zero=True
        ),
    )
