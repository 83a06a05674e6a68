"""Every byte of synthetic KV says where it belongs, so any wrong one is found."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cache.errors import ConfigError, InvariantError, LocalProtocolError
from kvferry.cache.ids import LayerId
from kvferry.cache.layout import SlotOrder
from kvferry.cache.manager import KVCacheManager
from kvferry.cache.sequence import SequenceCache
from kvferry.cache.spec import BufferSpec, LayerSpec, ModelSpec
from kvferry.transfer.engines.synthetic import SyntheticEngine, expected
from tests.engines import helpers


def spec(dtype: str = "float32", windows: tuple[int | None, ...] = (64, None, 64, None), dim: int = 16) -> ModelSpec:
    buffers = (BufferSpec("key", 2, dim), BufferSpec("value", 2, dim))
    layers = tuple(LayerSpec(LayerId(index), window, buffers) for index, window in enumerate(windows))
    return ModelSpec("synthetic", dtype, layers)


def bound(order: SlotOrder = "layer_major", **changes: object) -> tuple[SyntheticEngine, KVCacheManager]:
    engine = SyntheticEngine(spec(**changes))  # type: ignore[arg-type]
    manager = helpers.make_manager(engine.spec, order=order)
    engine.bind(manager)
    return engine, manager


class Moved:
    """A prompt computed in one pool and copied to another, with one more step taken nowhere yet."""

    def __init__(self, num_tokens: int = 200) -> None:
        engine, source = bound()
        prompt = helpers.random_prompt(num_tokens)
        sent = helpers.open_sequence(source, num_tokens)
        helpers.prefill(engine, sent, prompt, 90)
        self.engine, self.manager = bound()
        helpers.receive(self.manager, 40, name="takes the first slots")
        self.sequence: SequenceCache = helpers.receive(self.manager, num_tokens)
        self.pages = helpers.copy_pages(source, sent, self.manager, self.sequence)

    def step(self) -> torch.Tensor:
        return helpers.step(self.engine, self.sequence, np.array([50]))

    def page(self, index: int) -> torch.Tensor:
        group, _, slot = self.pages[index]
        return helpers.slot_bytes(self.manager, self.manager.layout.life_cycles[group].pool_group)[slot]


def test_decode_from_copied_pages_verifies() -> None:
    moved = Moved()
    for _ in range(70):
        moved.step()
    moved.manager.check_integrity()


@given(st.data())
def test_any_flipped_bit_of_a_live_token_is_found(data: st.DataObject) -> None:
    moved = Moved(128)  # blocks are full; the window of 64 covers its two pages but for one token
    index = data.draw(st.integers(0, len(moved.pages) - 1))
    group = moved.manager.layout.life_cycles[moved.pages[index][0]]
    view = data.draw(st.sampled_from(group.buffers))
    head, token, byte = (data.draw(st.integers(0, top - 1)) for top in (2, 32, 64))
    position = moved.pages[index][1] * 32 + token
    moved.page(index)[_offset(view, head, token) + byte] ^= 1 << data.draw(st.integers(0, 7))
    if group.life_cycle.window is not None and position < 128 + 1 - 64:
        moved.step()  # out of every window: nobody reads it
        return
    with pytest.raises(InvariantError) as caught:
        moved.step()
    where = f"request r, layer {view.layer_id}, {view.role}, head {head}, token {position}, byte {byte}: expected "
    assert where in caught.value.story
    assert "1 wrong bytes" in caught.value.story


def _offset(view: object, head: int, token: int) -> int:
    return int(view.offset_bytes + head * view.head_stride_bytes + token * view.token_stride_bytes)  # type: ignore[attr-defined]


def _zero_page(moved: Moved) -> None:
    moved.page(0).zero_()


def _swap_two_pages(moved: Moved) -> None:
    kept = moved.page(-1).clone()
    moved.page(-1).copy_(moved.page(-2))
    moved.page(-2).copy_(kept)


def _shift_by_one_layer(moved: Moved) -> None:
    page = moved.page(-1)
    page.copy_(page.roll(page.numel() // 2))


def _swap_key_and_value(moved: Moved) -> None:
    page = moved.page(-1).view(2, 2, -1)
    page.copy_(page.flip(1))


def _pages_of_another_request(moved: Moved) -> None:
    moved.sequence.request_id = "another"


@pytest.mark.parametrize(
    "damage",
    [_zero_page, _swap_two_pages, _shift_by_one_layer, _swap_key_and_value, _pages_of_another_request],
)
def test_misplaced_pages_are_found(damage: Callable[[Moved], None]) -> None:
    moved = Moved()
    damage(moved)
    with pytest.raises(InvariantError, match="wrong bytes in this buffer"):
        moved.step()


@pytest.mark.parametrize("order", ["layer_major", "head_major"])
@pytest.mark.parametrize("dtype, dim", [("float32", 16), ("bfloat16", 7), ("float8_e4m3fn", 5), ("uint8", 3)])
def test_every_dtype_and_order_verifies(dtype: str, dim: int, order: SlotOrder) -> None:
    engine, manager = bound(order, dtype=dtype, dim=dim)
    sequence = helpers.open_sequence(manager, 150, chunk_tokens=60)
    helpers.prefill(engine, sequence, helpers.random_prompt(150), 60)
    # Each step reads back and compares every live byte, and raises at the first that differs.
    assert len(helpers.decode_greedily(engine, sequence, 5, 10)) == 10
    assert sequence.history == 150 + 9


def test_logits_do_not_depend_on_chunks_or_layout_but_on_request_position_and_token() -> None:
    prompt = helpers.random_prompt(150)

    def last(chunk: int, name: str = "r", tokens: helpers.Tokens = prompt, order: SlotOrder = "layer_major") -> bytes:
        engine, manager = bound(order)
        sequence = helpers.open_sequence(manager, len(tokens), chunk_tokens=chunk, name=name)
        logits = helpers.prefill(engine, sequence, tokens, chunk)[-1]
        assert logits.shape == (384,)
        assert logits.dtype == torch.float32
        return logits.numpy().tobytes()

    wanted = last(150)
    assert wanted == last(32) == last(7) == last(150, order="head_major")
    assert (
        len({wanted, last(150, name="q"), last(149, tokens=prompt[:149]), last(150, tokens=prompt[::-1].copy())}) == 4
    )


def test_step_that_overwrites_another_sequence_is_found_by_it() -> None:
    engine, manager = bound()
    first, second = (helpers.open_sequence(manager, 40, name=name) for name in ("a", "b"))
    helpers.prefill(engine, first, helpers.random_prompt(40), 40)
    second.resize(capacity=40)
    second.slots(manager.layout.life_cycles[0].id)[:] = first.slots(manager.layout.life_cycles[0].id)
    engine.forward(second, helpers.random_prompt(40))
    with pytest.raises(InvariantError, match="request a, layer 0, key, head 0, token 0"):
        helpers.step(engine, first, np.array([5]))


def test_expected_is_a_slice_of_the_whole() -> None:
    """Heads and tokens are global: any part can be computed alone."""
    whole = expected("r", 3, "key", range(4), range(100), 20)
    part = expected("r", 3, "key", range(1, 3), range(40, 60), 20)
    assert np.array_equal(whole[1:3, 40:60], part)
    assert np.array_equal(whole[:, :, :8], expected("r", 3, "key", range(4), range(100), 8))


def test_expected_bytes_are_spread_evenly_and_rows_are_distinct() -> None:
    rows = np.concatenate(
        [expected("r", layer, role, range(4), range(64), 16) for layer in range(4) for role in ("key", "value")]
    ).reshape(-1, 16)
    assert len(np.unique(rows, axis=0)) == len(rows) == 4 * 2 * 4 * 64
    counts = np.bincount(rows.reshape(-1), minlength=256)
    assert counts.min() > 0.5 * rows.size / 256
    assert counts.max() < 1.5 * rows.size / 256


def test_expected_is_the_same_in_every_version() -> None:
    """Workers of different hosts must agree: pin a few bytes."""
    found = expected("pinned", 1, "value", range(1, 2), range(33, 34), 12).tobytes().hex()
    assert found == "8cf6440635615954341afa5b"


def test_bind_and_forward_out_of_order_raise() -> None:
    engine, manager = bound()
    with pytest.raises(LocalProtocolError):
        engine.bind(manager)
    sequence = helpers.open_sequence(manager, 10)
    with pytest.raises(LocalProtocolError):
        SyntheticEngine(spec()).forward(sequence, np.array([1]))
    with pytest.raises(ConfigError, match="laid out for"):
        SyntheticEngine(spec(windows=(32, None))).bind(manager)


def test_forward_without_pages_raises() -> None:
    engine, manager = bound()
    sequence = helpers.open_sequence(manager, 40)
    sequence.resize(capacity=32)
    with pytest.raises(InvariantError, match="need pages"):
        engine.forward(sequence, helpers.random_prompt(33))


def test_digest_tells_specs_apart() -> None:
    digests = {SyntheticEngine(spec(dim=dim)).model_digest for dim in (8, 16)}
    assert len(digests) == 2
    assert SyntheticEngine(spec()).model_digest in digests
