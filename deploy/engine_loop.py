"""The thread that computes: it prefills chunk by chunk, hands pages over, takes pages in and decodes.

One turn: take new requests, hear from the transceiver, drop what is cancelled or late, admit, run one prefill chunk,
then one decode step of every running request, each alone so that its tokens do not depend on its neighbours.
"""

import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from kvferry.cache import cursors
from kvferry.cache.errors import (
    CapacityError,
    ComputeError,
    DeadlineExceeded,
    InvariantError,
    KVError,
    TransferCancelled,
    TransferError,
    TransportError,
    Unavailable,
)
from kvferry.cache.lifecycle import ceil_div
from kvferry.cache.protocol import CacheManager
from kvferry.cache.sequence import SequenceCache
from kvferry.deploy.admission import Admission
from kvferry.deploy.inbox import Inbox
from kvferry.deploy.request_checks import check_request, outside_vocabulary
from kvferry.deploy.requests import Request
from kvferry.transfer.calls import answer
from kvferry.transfer.engines.base import Engine
from kvferry.transfer.engines.sampling import finish_reason, sample
from kvferry.transfer.engines.text import IncrementalText
from kvferry.transfer.inference import GenerateSummary, PrefillReply, TokenChunk
from kvferry.transfer.outcomes import TransferOutcome
from kvferry.transfer.session import Side
from kvferry.transfer.transceiver import Transceiver
from kvferry.transfer.types import AuxRecord, PromptId, TransferKey, Usage, WorkerId

log = logging.getLogger(__name__)

IDLE_SECONDS = 0.05


@contextmanager
def _library(doing: str) -> Iterator[None]:
    """What the model's library raises, of whatever class, ends this request and no other."""
    try:
        yield
    except KVError:
        raise
    except Exception as error:
        raise ComputeError(f"cannot {doing}: {type(error).__name__}: {error}") from error


Result = TypeVar("Result")


@dataclass(frozen=True)
class LoopSettings:
    """Bounds of one engine loop.

    Attributes:
        max_waiting: requests that may wait for their turn; more are refused.
        max_running: requests that decode at once.
        max_held: finished prompts that may wait for, or be in, a transfer out; prefill pauses at the bound.
        hold_seconds: how long a finished prompt may wait for its grant; its request's deadline may come first.
        stall_seconds: how long a request may wait for room while nothing is under way that could make any.
    """

    prefill_chunk_tokens: int
    max_seq_len_tokens: int
    max_waiting: int
    max_running: int
    max_held: int
    transfer_timeout_seconds: float
    hold_seconds: float
    stall_seconds: float = 10.0


class EngineLoop:
    """Runs one engine over one manager and one transceiver.

    Concurrency: `submit`, `call` and `wake` from any thread; the rest happens on the loop's own thread, which is the
    manager's and the engine's.
    """

    def __init__(
        self,
        worker: WorkerId,
        engine: Engine,
        manager: CacheManager,
        settings: LoopSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._worker = worker
        self._engine = engine
        self._manager = manager
        self._settings = settings
        self._clock = clock
        self._inbox = Inbox(settings.max_waiting + 64)
        self._stopping = False
        self._transceiver: Transceiver | None = None
        self._on_failure: Callable[[], None] = lambda: None
        self._requests: set[Request] = set()
        self._to_prefill: deque[Request] = deque()
        self._to_receive: deque[Request] = deque()
        self._receiving: dict[TransferKey, Request] = {}
        self._running: list[Request] = []
        self._admission = Admission(
            manager, settings.prefill_chunk_tokens, settings.stall_seconds, lambda: self._required().quarantined_slots()
        )
        self._thread = threading.Thread(target=self._run, name="kvferry-engine", daemon=True)

    # ---- any thread

    def start(self, transceiver: Transceiver, on_failure: Callable[[], None]) -> None:
        """Begin. `on_failure` is called, on the loop's thread, when it ends by an error."""
        self._transceiver = transceiver
        self._on_failure = on_failure
        self._thread.start()

    def wake(self) -> None:
        """Something happened that the loop should look at."""
        self._inbox.wake()

    def submit(self, request: Request) -> None:
        """Queue a request. Raises CapacityError when too many wait, Unavailable when the loop ended."""
        self._inbox.put(lambda: self._arrive(request))

    def cancel(self, key: TransferKey, reason: str) -> None:
        """Stop an attempt offered or received here; unknown keys change nothing."""
        self._inbox.put(lambda: self._cancel(key, reason))

    def call(self, function: Callable[[], Result]) -> "Future[Result]":
        """Run a function between two turns; the future carries its result or error."""
        future: Future[Result] = Future()
        self._inbox.put(lambda: answer(future, function))
        return future

    def stop(self, timeout_seconds: float) -> bool:
        """End the loop after its present turn, failing what is left. False: it did not end in time."""
        self._stopping = True
        self._inbox.close(lambda: Unavailable("the worker is shutting down", peer=str(self._worker)))
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    # ---- counts, for status (read between turns)

    @property
    def num_waiting(self) -> int:
        return len(self._to_prefill) + len(self._to_receive)

    @property
    def num_running(self) -> int:
        return len(self._running)

    # ---- the loop

    def _run(self) -> None:
        story = "the worker is shutting down"
        try:
            self._run_turns()
        except Exception as error:
            log.exception("engine loop failed")
            story = f"the engine loop failed: {error}"
            self._on_failure()
        self._inbox.close(lambda: Unavailable(story, peer=str(self._worker)))
        self._fail_all(Unavailable(story, peer=str(self._worker)))

    @torch.inference_mode()
    def _run_turns(self) -> None:
        while not self._stopping:
            if not self._turn():
                self._inbox.wait(IDLE_SECONDS)

    def _turn(self) -> bool:
        """One turn. Returns whether there is more to do at once."""
        self._inbox.run()
        for outcome in self._required().poll():
            self._hear(outcome)
        failure = self._required().failure
        if failure is not None:
            raise failure
        self._drop_ended()
        self._admit_receives()
        worked = self._prefill_step()
        self._grow_running()
        for request in tuple(self._running):
            self._guard(request, self._decode_step)
        self._end_stalled()
        return worked or bool(self._running) or not self._inbox.empty

    def _check_line(self) -> None:
        """Raise CapacityError when too many requests wait."""
        limit = self._settings.max_waiting
        if self.num_waiting >= limit:
            raise CapacityError(
                f"{limit} requests wait already: retry later, or raise max_waiting_requests",
                requested=(1,),
                available=(0,),
            )

    def _required(self) -> Transceiver:
        assert self._transceiver is not None, "start() gives the loop its transceiver"
        return self._transceiver

    def _guard(self, request: Request, step: Callable[[Request], None]) -> None:
        """Run one step of one request; its own failure ends that request only.

        Broken books end the loop. The request that found them hears just that, so that nobody tries it elsewhere.
        """
        try:
            step(request)
        except InvariantError as error:
            self._requests.discard(request)
            request.sink.finish(error)
            raise
        except KVError as error:
            self._end(request, error)

    # ---- arrival and admission

    def _arrive(self, request: Request) -> None:
        self._guard(request, self._check_and_queue)

    def _check_and_queue(self, request: Request) -> None:
        check_request(request, self._engine, self._settings.max_seq_len_tokens)
        self._admission.check_fits_ever(request)
        self._check_line()
        self._requests.add(request)
        (self._to_receive if request.decode else self._to_prefill).append(request)

    def _admit(self, request: Request) -> bool:
        return self._admission.admit(request, self._clock())

    def _admit_receives(self) -> None:
        """First come, first served: a request that does not fit now blocks those behind it."""
        while self._to_receive and len(self._running) + len(self._receiving) < self._settings.max_running:
            request = self._to_receive[0]
            self._guard(request, self._receive)
            if request.sequence is None and request in self._requests:
                return

    # ---- transfers

    def _receive(self, request: Request) -> None:
        """Admit the first in line and grant its pages; it stays in line while there are not enough."""
        if not self._admit(request):
            return
        self._to_receive.remove(request)
        assert request.decode is not None
        sequence = request.sequence
        assert sequence is not None
        tokens = len(request.prompt)
        start = cursors.decode_start(sequence.capacity, tokens)
        sequence.resize(capacity=start.capacity, history=start.history)
        timeout = min(self._settings.transfer_timeout_seconds, request.deadline - self._clock())
        pages = sequence.pages(tokens, skip_blocks=sequence.reused_tokens // self._manager.layout.tokens_per_block)
        prompt = PromptId.of(request.prompt)
        self._required().request(request.decode.key, request.decode.sender, pages, prompt, max(timeout, 0.001))
        self._receiving[request.decode.key] = request

    def _hear(self, outcome: TransferOutcome) -> None:
        if outcome.side is Side.SENDER:
            if outcome.error is not None:
                log.warning("%s", outcome.error)
            return
        request = self._receiving.pop(outcome.key, None)
        if request is not None:
            self._guard(request, lambda request: self._take_over(request, outcome))

    def _take_over(self, request: Request, outcome: TransferOutcome) -> None:
        if outcome.error is not None:
            raise outcome.error
        assert outcome.aux is not None, "a transfer without error carries its aux record"
        assert request.decode is not None
        wrong = outside_vocabulary(outcome.aux.first_tokens, self._engine)
        if wrong:
            message = f"first token {wrong[0]} is outside the vocabulary of {self._engine.vocab_size}"
            sender = str(request.decode.sender)
            raise TransferError(message, transfer_id=outcome.key.transfer_id, peer=sender, phase="result")
        request.transfer_seconds = outcome.seconds
        request.wire = outcome.wire
        request.prefill_cached_tokens = outcome.aux.usage.cached_tokens
        self._computed(request, len(request.prompt))
        self._begin(request, list(outcome.aux.first_tokens), list(outcome.aux.first_logprobs))

    def _offer(self, request: Request, token: int, logprob: float) -> None:
        assert request.sequence is not None
        key = TransferKey(uuid.uuid4().hex, 1)
        tokens = len(request.prompt)
        aux = AuxRecord((token,), (logprob,), Usage(tokens, request.reused_tokens))
        timeout = min(self._settings.hold_seconds, request.deadline - self._clock())
        self._required().offer(
            key, request.sequence.pages(tokens), PromptId.of(request.prompt), aux, max(timeout, 0.001)
        )
        timings = request.timings()
        reply = PrefillReply(
            key,
            self._worker,
            request.prompt,
            timings.queue_seconds,
            timings.prefill_seconds,
            request.reused_tokens,
        )
        request.sink.put(reply)
        self._end(request, None)

    # ---- computing

    def _prefill_step(self) -> bool:
        """One chunk of the first prompt in line. Returns whether a chunk ran."""
        if not self._to_prefill:
            return False
        request = self._to_prefill[0]
        self._guard(request, self._prefill_chunk)
        return request.sequence is not None or request not in self._requests

    def _may_start(self, request: Request) -> bool:
        if request.hand_over and self._required().num_sending >= self._settings.max_held:
            return False
        if not request.hand_over and len(self._running) >= self._settings.max_running:
            return False
        return self._admit(request)

    def _prefill_chunk(self, request: Request) -> None:
        if request.sequence is None and not self._may_start(request):
            return
        sequence = request.sequence
        assert sequence is not None
        start = sequence.history
        end = min(start + self._settings.prefill_chunk_tokens, len(request.prompt))
        sequence.resize(capacity=cursors.context_capacity(sequence.capacity, start, end - start))
        logits = self._compute(request, end)
        self._computed(request, end, snapshot=True)
        if end == len(request.prompt):
            token, logprob = sample(logits, request.sampling, end)
            request.first_token_at = self._clock()
            self._to_prefill.popleft()
            if request.hand_over:
                self._offer(request, token, logprob)
            else:
                self._begin(request, [token], [logprob])

    def _begin(self, request: Request, tokens: list[int], logprobs: list[float]) -> None:
        """The first tokens are known: publish them and decode on, unless they are the last."""
        request.text = IncrementalText(self._engine.tokenizer)
        self._running.append(request)
        self._publish(request, tokens, logprobs)

    def _decode_step(self, request: Request) -> None:
        sequence = request.sequence
        assert sequence is not None
        started = self._clock()
        end = sequence.history + 1
        logits = self._compute(request, end)
        self._computed(request, end)
        token, logprob = sample(logits, request.sampling, end)
        if len(request.new_tokens) == 1:
            request.first_step_seconds = self._clock() - started
        self._publish(request, [token], [logprob])

    def _grow_running(self) -> None:
        """Room for one more token of every running request, in one step."""
        sequences = [request.sequence for request in self._running if request.sequence is not None]
        if sequences:
            capacity = [cursors.generation_capacity(sequence.history) for sequence in sequences]
            try:
                self._manager.resize_many(sequences, capacity=np.array(capacity))
            except CapacityError as error:
                # What was promised does not hold: some can go on all the same.
                log.error("not all running requests can grow: %s", error)
                for request in tuple(self._running):
                    self._guard(request, self._grow)

    def _grow(self, request: Request) -> None:
        assert request.sequence is not None
        request.sequence.resize(capacity=cursors.generation_capacity(request.sequence.history))

    def _compute(self, request: Request, end: int) -> torch.Tensor:
        """Compute the tokens from the sequence's history up to `end`. Returns the logits after them."""
        sequence = request.sequence
        assert sequence is not None
        with _library(f"compute tokens {sequence.history} to {end}"):
            return self._engine.forward(sequence, request.tokens[:end])

    def _computed(self, request: Request, end: int, *, snapshot: bool = False) -> None:
        """The first `end` tokens are in the pages: declare them history, and final as far as the policy says so now."""
        sequence = request.sequence
        assert sequence is not None
        if self._manager.options.commit_policy == "all_reusable":
            sequence.commit(request.tokens[sequence.committed : end], snapshot=snapshot)
        elif end > sequence.history:
            sequence.resize(history=end)

    def _publish(self, request: Request, tokens: list[int], logprobs: list[float]) -> None:
        assert request.text is not None
        request.append(tokens)
        reason = finish_reason(request.new_tokens, request.sampling, self._engine.tokenizer.eos_token_ids)
        with _library(f"turn tokens {tokens} into text"):
            text = request.text.push(tokens) + (request.text.flush() if reason else "")
        request.sink.put(TokenChunk(tuple(tokens), tuple(logprobs), text))
        if reason:
            request.sink.put(self._summary(request, reason))
            self._end(request, None)

    def _summary(self, request: Request, reason: str) -> GenerateSummary:
        reused = request.reused_tokens
        return GenerateSummary(
            finish_reason=reason,
            usage=Usage(len(request.prompt), request.prefill_cached_tokens if request.decode else reused),
            new_tokens=len(request.new_tokens),
            num_blocks=ceil_div(len(request.prompt), self._manager.layout.tokens_per_block),
            timings=request.timings(),
            wire=request.wire,
            sender=request.decode.sender if request.decode else self._worker,
            receiver=self._worker,
            prompt_token_ids=request.prompt,
            decode_cached_tokens=reused if request.decode else 0,
        )

    # ---- the end of requests

    def _drop_ended(self) -> None:
        now = self._clock()
        for request in [*self._to_prefill, *self._to_receive, *self._receiving.values(), *self._running]:
            if request.cancelled.is_set():
                self._end(request, self._cancellation(request))
            elif now >= request.deadline:
                waited = now - request.arrived_at
                self._end(request, DeadlineExceeded(f"not finished after {waited:.1f} s", peer=str(self._worker)))

    def _cancellation(self, request: Request) -> KVError:
        if request.decode is None:
            return TransferCancelled("the caller went away", transfer_id="", peer="", phase="prefill")
        call = request.decode
        return TransferCancelled(
            "the caller went away", transfer_id=call.key.transfer_id, peer=str(call.sender), phase="decode"
        )

    def _end(self, request: Request, error: KVError | None) -> None:
        """Forget a request, give its pages back and tell its sink. Pages under transfer stay held until quiet."""
        self._requests.discard(request)
        for line in (self._to_prefill, self._to_receive, self._running):
            if request in line:
                line.remove(request)
        try:
            if request.sequence is not None:
                self._leave(request, request.sequence, complete=error is None)
        finally:
            request.sink.finish(error)
            if request.key is not None and self._receiving.get(request.key) is request:
                del self._receiving[request.key]
                self._cancel(request.key, str(error))

    def _leave(self, request: Request, sequence: SequenceCache, *, complete: bool) -> None:
        """Close a sequence. Where the policy leaves publishing to the end, a complete request publishes now."""
        if complete and not sequence.closed:
            sequence.commit(request.tokens[sequence.committed : sequence.history])
        sequence.close()

    def _end_stalled(self) -> None:
        """End the requests at the head of the lines when they wait for room that nothing under way can make."""
        transceiver = self._required()
        heads = [line[0] for line in (self._to_prefill, self._to_receive) if line and line[0].sequence is None]
        moving = transceiver.num_sending + transceiver.num_receiving
        busy = moving > 0 or any(request.sequence is not None for request in self._requests)
        error = self._admission.stalled(heads, self._clock(), busy=busy)
        if error is not None:
            log.error("%s", error)
            for request in heads:
                self._end(request, error)

    def _cancel(self, key: TransferKey, reason: str) -> None:
        try:
            self._required().cancel(key, reason)
        except (TransportError, CapacityError) as error:
            log.warning("transfer %s was not cancelled: %s", key, error)

    def _fail_all(self, error: KVError) -> None:
        """Tell every request, also those still in the inbox, that the loop is gone. Pages are not touched any more."""
        self._inbox.run()
        left = tuple(self._requests)
        for line in (self._requests, self._to_prefill, self._to_receive, self._receiving, self._running):
            line.clear()
        for request in left:
            request.sink.finish(error)
