"""Run very many random transfers: `python -m tests.simulation.soak --transfers 1000000`."""

import argparse
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor

from tests.simulation.failure import SimulationFailure
from tests.simulation.randomly import Report, run_many

TRANSFERS_PER_WORLD = 25
WORLDS_PER_BATCH = 40


def batch(first_seed: int) -> Report | str:
    """Some worlds; the story of the first that broke a promise, if any did."""
    try:
        return run_many(range(first_seed, first_seed + WORLDS_PER_BATCH), TRANSFERS_PER_WORLD)
    except SimulationFailure as failure:
        return str(failure)


def main() -> int:
    """Returns the exit status: 0 when every promise was kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transfers", type=int, default=1_000_000)
    parser.add_argument("--first-seed", type=int, default=10_000_000)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    per_batch = TRANSFERS_PER_WORLD * WORLDS_PER_BATCH
    seeds = range(
        options.first_seed, options.first_seed + -(-options.transfers // per_batch) * WORLDS_PER_BATCH, WORLDS_PER_BATCH
    )
    report, started = Report(), time.monotonic()
    with ProcessPoolExecutor(options.processes) as workers:
        for number, found in enumerate(workers.map(batch, seeds), 1):
            if isinstance(found, str):
                print(found, file=sys.stderr)
                workers.shutdown(wait=False, cancel_futures=True)
                return 1
            report.add(found)
            if number % 50 == 0 or number == len(seeds):
                print(f"{time.monotonic() - started:7.0f} s  {report}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
