"""The V1 KV-cache manager: pools divided once and for all, reuse by whole blocks."""

from typing import ClassVar

from kvferry.cache.manager import KVCacheManager
from kvferry.cache.published import ReuseRules


class StaticKVCacheManager(KVCacheManager):
    """Pools laid out by `build_static_layout` and sized by static shares: nothing is shared between windows.

    A block is reused only when its pages of every window are still there, partial blocks never; recurrent states are
    not kept, so a model that has them reuses nothing but what a transfer would bring otherwise.
    """

    version: ClassVar[str] = "V1"
    rules: ClassVar[ReuseRules] = ReuseRules(partial_blocks=False, window_aware=False, snapshots=False)
