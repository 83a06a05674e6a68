"""Calls to a frontend or a worker: inference, status, health."""

import asyncio
from collections.abc import AsyncGenerator
from types import TracebackType

from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from kvferry.cache.errors import ControlError, DeadlineExceeded
from kvferry.transfer.control.backoff import Backoff
from kvferry.transfer.control.convert import checks, common, inference, status
from kvferry.transfer.control.errors import calling
from kvferry.transfer.control.parsing import parsed, tolerant
from kvferry.transfer.control.wire import open_channel
from kvferry.transfer.inference import DecodeCall, GenerateCall, GenerateEvent, PrefillReply, WorkerStatus
from kvferry.transfer.types import TransferKey
from kvferry.v1 import inference_pb2, peer_pb2
from kvferry.v1.inference_pb2_grpc import InferenceStub
from kvferry.v1.peer_pb2_grpc import PeerStub


class InferenceClient:
    """One connection to one server, for many calls at once.

    Every call has a deadline. Raises the typed error the server raised, Unavailable when it cannot be reached or went
    away, DeadlineExceeded when it did not answer in time, RemoteProtocolError when its answer is malformed.

    Concurrency: made and used on one running loop.
    """

    def __init__(self, endpoint: str, *, allow_insecure: bool = False) -> None:
        self._endpoint = endpoint
        self._channel = open_channel(endpoint, allow_insecure=allow_insecure)
        self._inference = InferenceStub(tolerant(self._channel))
        self._peer = PeerStub(tolerant(self._channel))
        self._health = health_pb2_grpc.HealthStub(self._channel)

    async def __aenter__(self) -> "InferenceClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel what is running and disconnect. Idempotent."""
        await self._channel.close()

    async def generate(self, call: GenerateCall) -> AsyncGenerator[GenerateEvent, None]:
        """Chunks, then one summary. Closing the generator, or cancelling the task that reads it, cancels the call."""
        request = inference_pb2.GenerateRequest(call=inference.call_to_wire(call))
        with calling(self._endpoint):
            stream = self._inference.Generate(request, timeout=call.timeout_seconds)
        try:
            with calling(self._endpoint):
                async for response in stream:
                    checks.present(parsed(response), "event")
                    yield inference.event_from_wire(response.event)
        finally:
            stream.cancel()

    async def prefill(self, call: GenerateCall) -> PrefillReply:
        """Compute a prompt and leave its pages with the worker, under the key of the reply."""
        request = inference_pb2.PrefillRequest(call=inference.call_to_wire(call))
        with calling(self._endpoint):
            response = parsed(await self._inference.Prefill(request, timeout=call.timeout_seconds))
        return inference.prefill_reply_from_wire(response)

    async def decode(self, call: DecodeCall) -> AsyncGenerator[GenerateEvent, None]:
        """As `generate`, from pages another worker holds."""
        request = inference.decode_call_to_wire(call)
        with calling(self._endpoint):
            stream = self._inference.Decode(request, timeout=call.timeout_seconds)
        try:
            with calling(self._endpoint):
                async for response in stream:
                    checks.present(parsed(response), "event")
                    yield inference.event_from_wire(response.event)
        finally:
            stream.cancel()

    async def cancel(self, key: TransferKey, reason: str, timeout_seconds: float = 5.0) -> None:
        """Stop an attempt at this worker. Idempotent."""
        request = inference_pb2.CancelRequest(key=common.key_to_wire(key), reason=checks.clipped(reason))
        with calling(self._endpoint):
            parsed(await self._inference.Cancel(request, timeout=timeout_seconds))

    async def tokenize(self, prompt: str, chat: bool = False, timeout_seconds: float = 30.0) -> tuple[int, ...]:
        """Token ids of a text, as the model of this worker sees it."""
        request = inference.tokenize_to_wire(prompt, chat)
        with calling(self._endpoint):
            response = parsed(await self._inference.Tokenize(request, timeout=timeout_seconds))
        return inference.tokens_from_wire(response)

    async def get_status(self, timeout_seconds: float = 5.0) -> WorkerStatus:
        """Pools, queues and peers of the worker now."""
        with calling(self._endpoint):
            response = parsed(await self._peer.GetStatus(peer_pb2.GetStatusRequest(), timeout=timeout_seconds))
        checks.present(response, "status")
        return status.status_from_wire(response.status)

    async def is_serving(self, timeout_seconds: float = 5.0) -> bool:
        """What the health service says of the whole server."""
        with calling(self._endpoint):
            response = await self._health.Check(health_pb2.HealthCheckRequest(), timeout=timeout_seconds)
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    async def wait_serving(self, timeout_seconds: float) -> None:
        """Poll the health service until it says serving. Raises DeadlineExceeded with the last state."""
        backoff, state = Backoff(last_seconds=0.5), "no answer yet"
        try:
            async with asyncio.timeout(timeout_seconds):
                while True:
                    try:
                        if await self.is_serving():
                            return
                        state = "it answers, but does not serve yet"
                    except ControlError as error:
                        state = error.reason
                    await asyncio.sleep(backoff.next())
        except TimeoutError:
            raise DeadlineExceeded(f"not serving after {timeout_seconds:g} s: {state}", peer=self._endpoint) from None
