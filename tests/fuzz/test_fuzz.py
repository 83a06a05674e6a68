"""Whatever is said on any rpc: typed errors, no crash, no growth.

A failure prints the seed and all messages of the case in hex. Another seed: KVFERRY_FUZZ_SEED=7 make test ...
"""

import asyncio
import os
from collections import Counter

import pytest

from tests.fuzz import verdict
from tests.fuzz.runs import fuzz

SEED = int(os.environ.get("KVFERRY_FUZZ_SEED", "1"))
DEEP = {
    *(("Channel", outcome) for outcome in ("Permit", "Renewal", "result ok", "result failed fuzzed")),
    *(("Channel", f"result failed {code}") for code in ("unknown_transfer", "cancelled")),
    *((method, "GenerateSummary") for method in ("Generate", "Decode")),
    *(("Decode", error) for error in ("TransferError", "PeerLost", "TransferTimeout")),
    *(("Prefill", "PrefillReply"), ("Register", "RankInfo"), ("Register", "IncompatiblePeer")),
    *(("Renew", "RenewResponse"), ("Renew", "UnknownMember"), ("Join", "ConfigError"), ("Watch", "Snapshot")),
    *(("Cancel", "CancelResponse"), ("Tokenize", "tuple"), ("GetStatus", "WorkerStatus")),
}
"""Answers that show how far the messages got: without them they were all refused at the door."""


def check_depth(tally: Counter[tuple[str, str]]) -> None:
    """Every method refused something, and the deeper layers were reached."""
    refused = {method for method, outcome in tally if outcome == "RemoteProtocolError"}
    assert refused == {method.name for method in verdict.METHODS}
    assert DEEP <= set(tally), sorted(DEEP - set(tally))


def test_anything_said_is_answered_and_forgotten() -> None:
    check_depth(asyncio.run(fuzz(10_000, SEED)))


@pytest.mark.full
@pytest.mark.timeout(1500)
def test_anything_said_for_long_is_answered_and_forgotten() -> None:
    check_depth(asyncio.run(fuzz(100_000, SEED + 1)))
