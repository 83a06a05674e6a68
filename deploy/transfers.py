"""What an engine loop has under way with other workers: attempts in and out, and what they may take."""

import itertools
import logging
import uuid
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from kvferry.cache import cursors
from kvferry.cache.errors import CapacityError, ConfigError, KVError, TransportError
from kvferry.cache.layout import CacheLayout
from kvferry.cache.page_table import BlockLists
from kvferry.cache.protocol import CacheManager
from kvferry.deploy.failures import failure_of
from kvferry.deploy.loop_settings import LoopSettings
from kvferry.deploy.requests import Request
from kvferry.transfer.budget import TransferBudget
from kvferry.transfer.outcomes import TransferOutcome, cancelled, error_of
from kvferry.transfer.transceiver import Transceiver
from kvferry.transfer.types import AuxRecord, Failure, PromptId, Side, TransferKey

log = logging.getLogger(__name__)

LEAST_SECONDS = 0.001
"""A timeout that is over already still has to be one."""


class Transfers:
    """Opens, grants, offers and ends the attempts of one engine loop's requests.

    From `open` until its attempt is over, a request stands for its key: when it ends before that, the worker at the
    other end hears so at once, whether it waits for a grant, for pages, or has not begun.

    Concurrency: the engine's thread.
    """

    def __init__(
        self, transceiver: Transceiver, manager: CacheManager, settings: LoopSettings, clock: Callable[[], float]
    ) -> None:
        self._transceiver = transceiver
        self._manager = manager
        self._settings = settings
        self._clock = clock
        self._open: dict[TransferKey, Request] = {}
        self._granted = TransferBudget(settings.max_receiving_bytes, settings.max_running)
        # Held pages are held however long it takes, so none of them is ever stale.
        self._held = TransferBudget(settings.max_held_bytes, settings.max_held, stale_seconds=None)

    @property
    def failure(self) -> Exception | None:
        """Why no transfer can run any more; None while all is well."""
        return self._transceiver.failure

    @property
    def num_granted(self) -> int:
        """Attempts in whose pages are granted and not yet complete."""
        return len(self._granted)

    @property
    def num_moving(self) -> int:
        """Attempts whose end gives pages back, or makes a request go on."""
        return len(self._granted) + len(self._held)

    def quarantined_slots(self) -> tuple[int, ...]:
        """Slots per pool group that come back on proof only."""
        return self._transceiver.quarantined_slots()

    def open(self, request: Request) -> None:
        """A request that names a key arrived; one that will receive is enlisted with its sender. Others change nothing.

        Raises:
            ConfigError: the key is in use. TransferError: its attempt was stopped before. CapacityError,
            TransportError: as `Transceiver.enlist`.
        """
        key = request.key
        if key is None:
            return
        if key in self._open or key in self._held:
            raise ConfigError(f"transfer {key} is open here already: a key serves one attempt")
        if request.decode is None:
            self._check_wanted(key)
        else:
            self._transceiver.enlist(key, (request.decode.sender,), self._rest(request))
        self._open[key] = request

    def end(self, request: Request, error: KVError | None) -> None:
        """A request is over: if its attempt is not, end it with the same error."""
        key = request.key
        if key is not None and self._open.get(key) is request:
            del self._open[key]
            self._granted.leave(key)
            self._fail(key, failure_of(request, error))

    def cancel(self, key: TransferKey, reason: str) -> None:
        """Stop an attempt on whichever side it is here. Never raises: what cannot be cancelled runs into its limits."""
        self._fail(key, cancelled(reason))

    def _fail(self, key: TransferKey, failure: Failure) -> None:
        try:
            self._transceiver.fail(key, failure)
        except (TransportError, CapacityError) as error:
            log.warning("transfer %s was not cancelled: %s", key, error)

    def hear(self) -> list[tuple[Request, TransferOutcome]]:
        """Attempts that ended since the last call, with the requests they concern here.

        These wait for their pages, or still compute a prompt that nobody will fetch any more.
        """
        heard = []
        for outcome in self._transceiver.poll():
            if outcome.side is Side.SENDER:
                self._held.leave(outcome.key)
                if outcome.error is not None:
                    log.warning("%s", outcome.error)
            else:
                self._granted.leave(outcome.key)
            request = self._open.get(outcome.key)
            if request is not None and (request.decode is None) == (outcome.side is Side.SENDER):
                del self._open[outcome.key]
                heard.append((request, outcome))
        return heard

    # ---- in

    def receivable(self, line: Iterable[Request]) -> list[Request]:
        """The head of a line of requests that wait for pages: as many as may be granted theirs together with the rest.

        What a request needs is reckoned as if nothing of its prompt were here already.
        """
        seen, needs = itertools.tee(line)
        count = self._granted.num_admissible((self._prompt_bytes(request) for request in needs), self._clock())
        return list(itertools.islice(seen, count))

    def grant(self, request: Request) -> None:
        """Grant the pages of a request that has its sequence. Raises as `Transceiver.request`."""
        call, sequence = request.decode, request.sequence
        assert call is not None
        assert sequence is not None
        tokens, layout = len(request.prompt), self._manager.layout
        start = cursors.decode_start(sequence.capacity, tokens)
        sequence.resize(capacity=start.capacity, history=start.history)
        pages = sequence.pages(tokens, skip_blocks=sequence.reused_tokens // layout.tokens_per_block)
        # Before the prompt is computed the pages wait for that too.
        limit = self._rest(request) if call.early else self._settings.transfer_timeout_seconds
        self._transceiver.request(
            call.key,
            (call.sender,),
            pages,
            PromptId.of(request.prompt),
            min(limit, self._rest(request)),
            request_id=request.request_id,
            direction=self._settings.direction,
            early=call.early,
        )
        self._granted.enter(call.key, page_bytes(layout, pages), self._clock())

    # ---- out

    def may_hold(self, request: Request) -> bool:
        """Whether the pages of one more prompt may be kept for a transfer out."""
        return bool(self._held.num_admissible((self._prompt_bytes(request),), self._clock()))

    def offer(self, request: Request, aux: AuxRecord) -> TransferKey:
        """Keep a computed prompt's pages for whoever asks with the key returned: the request's own, or a new one.

        Raises: as `Transceiver.offer`.
        """
        assert request.sequence is not None
        key = request.offer_key or TransferKey(uuid.uuid4().hex, 1)
        pages = request.sequence.pages(len(request.prompt))
        self._transceiver.offer(
            key,
            pages,
            PromptId.of(request.prompt),
            aux,
            self._rest(request),
            hold_seconds=self._settings.hold_seconds,
            request_id=request.request_id,
        )
        self._open.pop(key, None)
        self._held.enter(key, page_bytes(self._manager.layout, pages), self._clock())
        return key

    # ---- private

    def _check_wanted(self, key: TransferKey) -> None:
        """Computing a prompt for an attempt that is over already would be for nobody."""
        failure = self._transceiver.why_ended(key)
        if failure is not None:
            raise error_of(key, str(self._transceiver.info.worker), "", "", failure)

    def _rest(self, request: Request) -> float:
        return max(LEAST_SECONDS, request.deadline - self._clock())

    def _prompt_bytes(self, request: Request) -> int:
        if request.prompt_bytes is None:
            request.prompt_bytes = prompt_bytes(self._manager.layout, len(request.prompt))
        return request.prompt_bytes


def page_bytes(layout: CacheLayout, pages: BlockLists) -> int:
    """Bytes of the slots that these pages are in."""
    return _slot_bytes(layout, [int(np.count_nonzero(slots >= 0)) for slots in pages.slots])


def prompt_bytes(layout: CacheLayout, num_tokens: int) -> int:
    """Bytes of the slots of a prompt of this length once it is computed and none of it is reused."""
    return _slot_bytes(
        layout,
        [group.life_cycle.live_blocks(num_tokens, num_tokens, layout.tokens_per_block) for group in layout.life_cycles],
    )


def _slot_bytes(layout: CacheLayout, num_pages: Sequence[int]) -> int:
    """Args: num_pages: per life cycle."""
    sizes = (layout.pool_groups[group.pool_group].slot_bytes for group in layout.life_cycles)
    return sum(count * size for count, size in zip(num_pages, sizes, strict=True))
