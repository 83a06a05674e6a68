"""What a simulation reports when a promise was broken."""

from collections.abc import Sequence


class SimulationFailure(AssertionError):
    """A promise was broken in a simulated run; says which, and how it came to that.

    Attributes:
        seed: names the run.
        broken: which promise, with the numbers.
        transcript: one line per step, the last ones last.
    """

    def __init__(self, seed: object, broken: str, transcript: Sequence[str]) -> None:
        self.seed = seed
        self.broken = broken
        self.transcript = tuple(transcript)
        super().__init__(f"seed {seed}: {broken}\n" + "\n".join(self.transcript))
