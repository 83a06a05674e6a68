"""The thread that computes: it prefills chunk by chunk, hands pages over, takes pages in and decodes.

One turn: take new requests, hear from the transceiver, drop what is cancelled or late, admit, run one prefill chunk,
then one decode step of every running request, each alone so that its tokens do not depend on its neighbours.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import islice
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
    Unavailable,
)
from kvferry.cache.lifecycle import ceil_div
from kvferry.cache.protocol import CacheManager
from kvferry.cache.sequence import SequenceCache
from kvferry.deploy.admission import Admission
from kvferry.deploy.inbox import Inbox
from kvferry.deploy.loop_settings import LoopSettings
from kvferry.deploy.quarantine import QuarantineBound
from kvferry.deploy.request_checks import check_request, outside_vocabulary
from kvferry.deploy.requests import Request
from kvferry.deploy.transfers import Transfers
from kvferry.transfer.calls import answer
from kvferry.transfer.engines.base import Engine
from kvferry.transfer.engines.sampling import finish_reason, sample
from kvferry.transfer.engines.text import IncrementalText
from kvferry.transfer.inference import GenerateSummary, PrefillReply, TokenChunk
from kvferry.transfer.outcomes import TransferOutcome
from kvferry.transfer.transceiver import Transceiver
from kvferry.transfer.types import AuxRecord, TransferKey, Usage, WorkerId

log = logging.getLogger(__name__)

IDLE_SECONDS = 0.05
OK = "ok"
"""The condition of a worker that takes requests."""


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


class EngineLoop:
    """Runs one engine over one manager and one transceiver.

    Attributes:
        condition: "ok", or why no new request is admitted now.

    Concurrency: `submit`, `call` and `wake` from any thread; the rest happens on the loop's own thread, which is the
    manager's and the engine's. `condition` may be read from any thread.
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
        self.condition = OK
        self._transfers: Transfers | None = None
        self._on_failure: Callable[[], None] = lambda: None
        self._on_condition: Callable[[], None] = lambda: None
        self._requests: set[Request] = set()
        self._to_prefill: deque[Request] = deque()
        self._to_receive: deque[Request] = deque()
        self._running: list[Request] = []
        self._admission = Admission(
            manager, settings.prefill_chunk_tokens, settings.stall_seconds, lambda: self._required().quarantined_slots()
        )
        self._quarantine = QuarantineBound(manager, settings.quarantine_limit)
        self._thread = threading.Thread(target=self._run, name="kvferry-engine", daemon=True)

    # ---- any thread

    def start(
        self,
        transceiver: Transceiver,
        on_failure: Callable[[], None],
        on_condition: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin.

        Args:
            on_failure: called, on the loop's thread, when it ends by an error.
            on_condition: called there, with or without requests, when `condition` changed.
        """
        self._transfers = Transfers(transceiver, self._manager, self._settings, self._clock)
        self._on_failure = on_failure
        self._on_condition = on_condition
        self._thread.start()

    def wake(self) -> None:
        """Something happened that the loop should look at."""
        self._inbox.wake()

    def submit(self, request: Request) -> None:
        """Queue a request. Raises CapacityError when too many wait, Unavailable when the loop ended."""
        self._inbox.put(lambda: self._arrive(request))

    def cancel(self, key: TransferKey, reason: str) -> None:
        """Stop an attempt offered or received here, and the request it is part of.

        An unknown key is remembered for a while by the transceiver, in case its attempt has yet to arrive.
        """
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
        for request, outcome in self._required().hear():
            self._hear(request, outcome)
        self._look_at_quarantine()
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

    def _look_at_quarantine(self) -> None:
        """Say when the worker ceases or begins again to take requests; nobody has to send one for that."""
        condition = self._quarantine.story(self._required().quarantined_slots()) or OK
        if condition != self.condition:
            if OK in (condition, self.condition):
                log.log(logging.INFO if condition == OK else logging.ERROR, "condition: %s", condition)
            self.condition = condition
            self._on_condition()

    def _check_condition(self) -> None:
        if self.condition != OK:
            raise self._quarantine.refusal(self.condition)

    def _required(self) -> Transfers:
        assert self._transfers is not None, "start() gives the loop its transceiver"
        return self._transfers

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
        # First, so that whoever waits at the other end hears of a refusal too.
        self._required().open(request)
        check_request(request, self._engine, self._settings.max_seq_len_tokens)
        self._admission.check_fits_ever(request)
        self._check_line()
        self._check_condition()
        self._requests.add(request)
        (self._to_receive if request.decode else self._to_prefill).append(request)

    def _admit(self, request: Request) -> bool:
        return self._admission.admit(request, self._clock())

    def _admit_receives(self) -> None:
        """First come, first served: a request that does not fit now blocks those behind it."""
        seats = self._settings.max_running - len(self._running) - self._required().num_granted
        if not self._to_receive or seats <= 0 or self.condition != OK:
            return
        for request in self._required().receivable(islice(tuple(self._to_receive), seats)):
            self._guard(request, self._receive)
            if request.sequence is None and request in self._requests:
                return

    # ---- transfers

    def _receive(self, request: Request) -> None:
        """Admit the first in line and grant its pages; it stays in line while there are not enough."""
        if self._admit(request):
            self._to_receive.remove(request)
            self._required().grant(request)

    def _hear(self, request: Request, outcome: TransferOutcome) -> None:
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
        aux = AuxRecord((token,), (logprob,), Usage(len(request.prompt), request.reused_tokens))
        key = self._required().offer(request, aux)
        timings = request.timings()
        reply = PrefillReply(
            key,
            self._worker,
            request.prompt,
            timings.queue_seconds,
            timings.prefill_seconds,
            self._settings.hold_seconds,
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
        if self.condition != OK:
            return False
        if request.hand_over and not self._required().may_hold(request):
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
        for request in tuple(self._requests):
            if request.cancelled.is_set():
                self._end(request, self._cancellation(request))
            elif now >= request.deadline:
                waited = now - request.arrived_at
                self._end(request, DeadlineExceeded(f"not finished after {waited:.1f} s", peer=str(self._worker)))

    def _cancellation(self, request: Request, reason: str = "the caller went away") -> KVError:
        transfer_id = request.key.transfer_id if request.key else ""
        peer, phase = (str(request.decode.sender), "decode") if request.decode else ("", "prefill")
        return TransferCancelled(reason, transfer_id=transfer_id, peer=peer, phase=phase)

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
            self._required().end(request, error)

    def _leave(self, request: Request, sequence: SequenceCache, *, complete: bool) -> None:
        """Close a sequence. Where the policy leaves publishing to the end, a complete request publishes now."""
        if complete and not sequence.closed:
            sequence.commit(request.tokens[sequence.committed : sequence.history])
        sequence.close()

    def _end_stalled(self) -> None:
        """End the requests at the head of the lines when they wait for room that nothing under way can make."""
        heads = [line[0] for line in (self._to_prefill, self._to_receive) if line and line[0].sequence is None]
        computing = any(request.sequence is not None for request in self._requests)
        busy = computing or self._required().num_moving > 0
        forbidden = "" if self.condition == OK else self.condition
        error = self._admission.stalled(heads, self._clock(), busy=busy, forbidden=forbidden)
        if error is not None:
            log.error("%s", error)
            for request in heads:
                self._end(request, error)

    def _cancel(self, key: TransferKey, reason: str) -> None:
        request = next((request for request in self._requests if request.key == key), None)
        if request is not None:
            self._end(request, self._cancellation(request, reason))
        else:
            self._required().cancel(key, reason)

    def _fail_all(self, error: KVError) -> None:
        """Tell every request, also those still in the inbox, that the loop is gone. Pages are not touched any more."""
        self._inbox.run()
        left = tuple(self._requests)
        for line in (self._requests, self._to_prefill, self._to_receive, self._running):
            line.clear()
        for request in left:
            request.sink.finish(error)
