"""The V1 KV-cache manager: pools divided once and for all, reuse by whole blocks."""

from collections.abc import Sequence
from typing import ClassVar

from kvferry.cache.admission import DEFAULT_OPTIONS, PoolOptions
from kvferry.cache.errors import ConfigError
from kvferry.cache.layout import CacheLayout
from kvferry.cache.manager import KVCacheManager
from kvferry.cache.published import ReuseRules


class StaticKVCacheManager(KVCacheManager):
    """Pools laid out by `build_static_layout` and sized by static shares: nothing is shared between windows.

    A block is reused only when its pages of every window are still there, partial blocks never; recurrent states are
    not kept, so a model that has them reuses nothing but what a transfer would bring otherwise.

    Raises: as `KVCacheManager`; ConfigError also for a commit policy that keeps no page outside the window.
    """

    version: ClassVar[str] = "V1"
    rules: ClassVar[ReuseRules] = ReuseRules(partial_blocks=False, window_aware=False, snapshots=False)

    def __init__(
        self,
        layout: CacheLayout,
        num_slots: Sequence[int],
        device: str = "cpu",
        *,
        options: PoolOptions = DEFAULT_OPTIONS,
    ) -> None:
        if len(layout.pool_groups) != len(layout.life_cycles):
            raise ConfigError("life cycles share a pool in this layout: V1 pools are laid out by build_static_layout")
        windowed = [str(group.life_cycle) for group in layout.life_cycles if group.life_cycle.window is not None]
        if windowed and options.commit_policy in ("per_request", "per_conversation"):
            raise ConfigError(
                f"commit_policy {options.commit_policy} keeps only the pages inside a window, and V1 reuses a block "
                f"only with its pages of every window ({', '.join(windowed)}): use all_reusable or off, or V2 pools"
            )
        super().__init__(layout, num_slots, device, options=options)
