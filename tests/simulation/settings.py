"""What kind of world a run takes place in."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """The fixed traits of one world.

    Attributes:
        kind: lane of every pair, "cma" or "tcp".
        lagging, lets_go: see `Wire`.
        num_senders: prefill workers, named p0, p1, ...
        num_receivers: decode workers, named d0, d1, ...
        num_slots: per pool group.
        slice_bytes: of the transceivers.
        pieces_per_run: parts that a page moves in.
        max_remembered: ended attempts that a transceiver remembers, per side.
    """

    kind: str = "cma"
    lagging: bool = False
    lets_go: bool = False
    num_senders: int = 1
    num_receivers: int = 1
    num_slots: tuple[int, ...] = (8,)
    slice_bytes: int = 32
    pieces_per_run: int = 2
    lease_seconds: float = 10.0
    max_remembered: int = 4096
