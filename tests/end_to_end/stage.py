"""A small cluster with workers that fail when told to."""

import contextlib
import itertools
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvferry.deploy.cluster import Child
from kvferry.transfer.inference import GenerateCall, WorkerStatus
from tests.end_to_end import direct
from tests.end_to_end.direct import Reply
from tests.end_to_end.faulty_worker import Moment, arm
from tests.end_to_end.serving import START_SECONDS, Service, call_for, prompt_of, serving
from tests.helpers import wait_until

MODEL = "tiny-gpt-oss"
STOPPED_SECONDS = 20.0
LONG_TOKENS = 4000
"""Prompt tokens of the request whose transfer fails: four slices of one MiB."""
NUM_SLOTS = 200
"""Of every pool. The failing request has about two thirds of them."""
SLOT_BYTES = 24576
SHORT_TOKENS, NUM_SHORT = 1000, 3
"""Two such requests never fit beside the pages of the failing one; all three do when these are free."""

_SETTINGS: dict[str, Any] = {
    "model": MODEL,
    # It checks every byte it reads, so that a foreign one cannot hide.
    "engine": "synthetic",
    "num_threads": 1,
    "prefill_chunk_tokens": 256,
    "max_seq_len_tokens": 4608,
    "lease_seconds": 60.0,
    "pools": {"quota_bytes": NUM_SLOTS * SLOT_BYTES},
}
_TRANSFER = {"lease_seconds": 3.0, "slice_bytes": "1MiB", "quarantine_limit": 1.0}


@dataclass
class Stage:
    """prefill-0 and decode-0 behave; late-writer prefills and late-reader decodes, by reads, and both can be stopped.

    Attributes:
        lane: what every transfer goes over.
    """

    service: Service
    folder: Path
    lane: str
    salts: Iterator[int] = field(default_factory=itertools.count)

    def start(self, name: str, role: str, **transfer: str) -> Child:
        """Start a worker that fails when it is armed. Returns at once."""
        cluster = self.service.cluster
        proper, cluster.program = cluster.program, self._program(name)
        try:
            settings = {**_SETTINGS, "name": name, "role": role, "directory": self.service.endpoint}
            return cluster.start("worker", name, {**settings, "transfer": {**_TRANSFER, **transfer}})
        finally:
            cluster.program = proper

    @contextlib.contextmanager
    def victim(self, role: str, **transfer: str) -> Iterator[str]:
        """A worker that may be killed inside; one that was is forgotten. Each time it is another life of its name."""
        child = self.start(f"victim-{role}", role, **transfer)
        try:
            self.wait_started(child)
            yield child.name
        finally:
            child.process.terminate()
            child.process.wait(STOPPED_SECONDS)
            self.service.cluster.children.remove(child)
            # The next life has another address.
            child.endpoint_file.unlink(missing_ok=True)

    def wait_started(self, *children: Child) -> None:
        """Wait until these workers are paired with the one that behaves, of the other role."""
        for child in children:
            self.service.cluster.wait_endpoint(child, START_SECONDS)
            role = self.status(child.name).role
            partner = "decode-0" if role.prefills else "prefill-0"
            wait_until(lambda a=child.name, b=partner: self._are_paired(a, b), START_SECONDS, f"{child.name} is paired")

    def arm(self, name: str, number: signal.Signals, moment: Moment) -> None:
        arm(self._fault(name), number, moment)

    def wait_stopped(self, name: str) -> None:
        """Wait until the fault that was armed stopped the worker."""
        wait_until(lambda: _state(self.service.worker(name)) == "T", STOPPED_SECONDS, f"{name} is stopped")
        assert not self._fault(name).exists()

    def resume(self, name: str) -> None:
        self.service.worker(name).process.send_signal(signal.SIGCONT)

    def check_killed(self, name: str) -> None:
        assert self.service.worker(name).process.wait(STOPPED_SECONDS) == -signal.SIGKILL
        assert not self._fault(name).exists()

    # ---- requests

    def long_call(self, timeout_seconds: float = 60.0) -> GenerateCall:
        return self._fresh(LONG_TOKENS, 0, 16, timeout_seconds)

    def short_calls(self) -> list[GenerateCall]:
        return [self._fresh(SHORT_TOKENS, seed, 150, 60.0) for seed in range(NUM_SHORT)]

    def ask(self, call: GenerateCall, prefill: str = "prefill-0", decode: str = "decode-0") -> Reply:
        """Over two workers of choice."""
        computed = direct.prefill(self.service, prefill, call)
        return direct.decode(self.service, decode, direct.decode_call(call, computed))

    def status(self, name: str) -> WorkerStatus:
        return direct.status(self.service, name)

    def num_taken(self, name: str) -> tuple[int, int]:
        """Slots of a worker that nobody may be given: in use, and in quarantine."""
        (group,) = self.status(name).pool_groups
        return group.in_use, group.quarantined

    def wait_idle(self, timeout_seconds: float = 15.0) -> float:
        """Wait until no worker has any work or any page in use. Returns the seconds it took."""
        started = time.monotonic()
        wait_until(self.service.is_idle, timeout_seconds, "every page of every worker came back")
        return time.monotonic() - started

    # ---- private

    def _are_paired(self, one: str, other: str) -> bool:
        ends = [self.status(name) for name in (one, other)]
        return all(b.worker in {peer.worker for peer in a.peers} for a, b in (ends, reversed(ends)))

    def _fresh(self, num_tokens: int, seed: int, max_new_tokens: int, timeout_seconds: float) -> GenerateCall:
        """A prompt that no worker has any page of: tokens do not depend on the salt, reuse does."""
        salt = f"salt-{next(self.salts)}"
        call = call_for(prompt_of(num_tokens, seed), max_new_tokens, salt=salt)
        return GenerateCall(
            request_id=f"request-{salt}",
            prompt_token_ids=call.prompt_token_ids,
            sampling=call.sampling,
            timeout_seconds=timeout_seconds,
            cache_salt=salt,
        )

    def _fault(self, name: str) -> Path:
        return self.folder / f"{name}.fault"

    def _program(self, name: str) -> tuple[str, ...]:
        return (sys.executable, "-m", "tests.end_to_end.faulty_worker", str(self._fault(name)))


@contextlib.contextmanager
def staged(folder: Path, lane: str) -> Iterator[Stage]:
    """A stage whose workers are all started and paired. The lane is left to the library, or forced to be tcp."""
    with pytest.MonkeyPatch.context() as environment:
        if lane == "tcp":
            environment.setenv("UCX_TLS", "tcp")
        yield from _staged(folder, lane)


def _staged(folder: Path, lane: str) -> Iterator[Stage]:
    with serving(transfer=_TRANSFER, **_SETTINGS) as service:
        stage = Stage(service, folder, lane)
        stage.wait_started(
            stage.start("late-writer", "prefill"), stage.start("late-reader", "decode", direction="pull")
        )
        yield stage


def _state(child: Child) -> str:
    """Of the process, as /proc has it: T is stopped."""
    return Path(f"/proc/{child.process.pid}/stat").read_text().rpartition(")")[2].split()[0]
