"""One NewType per integer that must not be confused with another."""

from typing import NewType

LayerId = NewType("LayerId", int)
"""Global index of a layer in the model, the same on every rank."""

LifeCycleId = NewType("LifeCycleId", int)
"""Index of a life cycle (= layer group) in the layout, in order of first appearance."""

PoolGroupId = NewType("PoolGroupId", int)
"""Index of a pool group in the layout, in order of first appearance."""

SlotId = NewType("SlotId", int)
"""Index of a slot inside its pool."""

NO_SLOT = SlotId(-1)
"""Entry of a positional block list whose page does not exist (out of the window, or never allocated)."""
