"""When a worker gives a request its pages."""

from collections.abc import Callable, Sequence

from kvferry.cache.admission import StallWatch
from kvferry.cache.block_keys import ReuseScope
from kvferry.cache.errors import CapacityError
from kvferry.cache.protocol import CacheManager
from kvferry.cache.reservation import reserved_slots
from kvferry.deploy.requests import Request


class Admission:
    """Admits requests to the pools of one worker.

    Args:
        quarantined_slots: slots per pool group that come back on proof only.

    Concurrency: the engine's thread.
    """

    def __init__(
        self,
        manager: CacheManager,
        prefill_chunk_tokens: int,
        stall_seconds: float,
        quarantined_slots: Callable[[], Sequence[int]],
    ) -> None:
        self._manager = manager
        self._prefill_chunk_tokens = prefill_chunk_tokens
        self._quarantined_slots = quarantined_slots
        self._stall = StallWatch(stall_seconds)

    def check_fits_ever(self, request: Request) -> None:
        """Raise CapacityError (permanent) when not even empty pools could hold the request."""
        self._manager.fits_ever(self._need(request)).require(request.request_id)

    def admit(self, request: Request, now: float) -> bool:
        """Give a request its sequence, ACTIVE, with what it can reuse; False: there is no room for it now.

        The last prompt token is never reused: its logits are needed.

        Raises:
            CapacityError: waiting cannot help, with the numbers.
        """
        try:
            sequence = self._manager.create_sequence(
                request.request_id,
                self._need(request),
                token_ids=request.tokens[: len(request.prompt) - 1],
                scope=ReuseScope.of(cache_salt=request.cache_salt),
                for_transfer=request.decode is not None,
            )
        except CapacityError as error:
            if error.permanent:
                raise
            self._check_fits_beside_quarantine(request)
            return False
        try:
            sequence.resume()
        except CapacityError:
            sequence.close()
            return False
        request.sequence = sequence
        request.started_at = now
        return True

    def stalled(
        self, waiting: Sequence[Request], now: float, *, busy: bool, forbidden: str = ""
    ) -> CapacityError | None:
        """The error of the requests that wait for room, once nothing has happened for too long that could make any.

        Args:
            busy: something is under way that will give pages back.
            forbidden: why nothing is admitted at all; empty while that is not so.
        """
        books = tuple(usage.free + usage.cached for usage in self._manager.usage()) if waiting else ()
        seconds = self._stall.stalled_seconds(now, books, waiting=bool(waiting) and not busy)
        if seconds is None:
            return None
        verdict = self._manager.can_admit(self._need(waiting[0]))
        story = f"it {verdict.reason or 'is not resumed: max_util_for_resume forbids it'}"
        return CapacityError(
            f"request {waiting[0].request_id} has waited {seconds:.1f} s and nothing moves: {forbidden or story}; "
            "nothing under way will change that: restart the worker",
            requested=verdict.requested,
            available=verdict.available,
        )

    def _need(self, request: Request) -> tuple[int, ...]:
        """The most slots per pool group that a request can hold on this worker."""
        tokens, new_tokens = len(request.prompt), request.sampling.max_new_tokens
        total = tokens if request.hand_over else tokens + new_tokens - 1
        headroom = 1 if request.decode else self._prefill_chunk_tokens
        options = self._manager.options
        rewind = options.max_rewind_tokens if options.window_scratch else None
        return reserved_slots(self._manager.layout, total, headroom, max_rewind_tokens=rewind)

    def _check_fits_beside_quarantine(self, request: Request) -> None:
        """Raise CapacityError when pages in quarantine leave too little room: proof may take longer than any wait."""
        need, lost = self._need(request), self._quarantined_slots()
        left = [usage.num_slots - slots for usage, slots in zip(self._manager.usage(), lost, strict=True)]
        if any(slots > room for slots, room in zip(need, left, strict=True)):
            raise CapacityError(
                f"request {request.request_id} needs {list(need)} slots per pool group, {left} are left beside "
                f"{list(lost)} in quarantine: retry once proof brought them back, or shorten the request",
                requested=need,
                available=left,
            )
