"""Every byte of synthetic KV says where it belongs, so any wrong one is found."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cache.admission import PoolOptions
from kvferry.cache.errors import ConfigError, InvariantError, LocalProtocolError
from kvferry.cache.ids import LayerId
from kvferry.cache.layout import SlotOrder, build_layout
from kvferry.cache.manager import KVCacheManager
from kvferry.cache.sequence import SequenceCache
from kvferry.cache.spec import BufferSpec, LayerSpec, ModelSpec, StateSpec
from kvferry.transfer.engines.synthetic import SyntheticEngine, expected, expected_state, prefix_words
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
        self.tokens = helpers.random_prompt(num_tokens)
        sent = helpers.open_sequence(source, num_tokens)
        helpers.prefill(engine, sent, self.tokens, 90)
        self.engine, self.manager = bound()
        helpers.receive(self.manager, 40, name="takes the first slots")
        self.sequence: SequenceCache = helpers.receive(self.manager, num_tokens)
        self.pages = helpers.copy_pages(source, sent, self.manager, self.sequence)

    def step(self) -> torch.Tensor:
        self.tokens = np.append(self.tokens, 50)
        return helpers.step(self.engine, self.sequence, self.tokens)

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


def _pages_of_another_prompt(moved: Moved) -> None:
    """One token differs, before all windows: every page after it is another."""
    moved.tokens[0] += 1


@pytest.mark.parametrize(
    "damage",
    [_zero_page, _swap_two_pages, _shift_by_one_layer, _swap_key_and_value, _pages_of_another_prompt],
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
    prompt = helpers.random_prompt(150)
    helpers.prefill(engine, sequence, prompt, 60)
    # Each step reads back and compares every live byte, and raises at the first that differs.
    assert len(helpers.decode_greedily(engine, sequence, prompt, 5, 10)) == 10
    assert sequence.history == 150 + 9


def test_logits_do_not_depend_on_chunks_layout_or_request_but_on_the_tokens() -> None:
    prompt = helpers.random_prompt(150)

    def last(chunk: int, name: str = "r", tokens: helpers.Tokens = prompt, order: SlotOrder = "layer_major") -> bytes:
        engine, manager = bound(order)
        sequence = helpers.open_sequence(manager, len(tokens), chunk_tokens=chunk, name=name)
        logits = helpers.prefill(engine, sequence, tokens, chunk)[-1]
        assert logits.shape == (384,)
        assert logits.dtype == torch.float32
        return logits.numpy().tobytes()

    wanted = last(150)
    assert wanted == last(32) == last(7) == last(150, order="head_major") == last(150, name="q")
    others = [prompt[:149], prompt[::-1].copy(), np.append(prompt[:1] + 1, prompt[1:])]
    assert len({wanted, *(last(150, tokens=tokens) for tokens in others)}) == 4


def test_step_that_overwrites_another_sequence_is_found_by_it() -> None:
    engine, manager = bound()
    prompts = [helpers.random_prompt(40, seed=seed) for seed in (0, 1)]
    first, second = (helpers.open_sequence(manager, 40, name=name) for name in ("a", "b"))
    helpers.prefill(engine, first, prompts[0], 40)
    second.resize(capacity=40)
    second.slots(manager.layout.life_cycles[0].id)[:] = first.slots(manager.layout.life_cycles[0].id)
    engine.forward(second, prompts[1])
    with pytest.raises(InvariantError, match="request a, layer 0, key, head 0, token 0"):
        helpers.step(engine, first, np.append(prompts[0], 5))


def test_expected_is_a_slice_of_the_whole() -> None:
    """Heads and tokens are global: any part can be computed alone."""
    prefixes = prefix_words(helpers.random_prompt(100))
    whole = expected(prefixes, 3, "key", range(4), 20)
    part = expected(prefixes[40:60], 3, "key", range(1, 3), 20)
    assert np.array_equal(whole[1:3, 40:60], part)
    assert np.array_equal(whole[:, :, :8], expected(prefixes, 3, "key", range(4), 8))


def test_prefix_words_depend_on_every_token_up_to_theirs_and_on_none_after() -> None:
    prompt = helpers.random_prompt(100)
    for position in (0, 41, 99):
        other = prompt.copy()
        other[position] += 1
        same = prefix_words(other) == prefix_words(prompt)
        assert same.tolist() == [token < position for token in range(100)]
    swapped = prompt.copy()
    swapped[[3, 4]] = [1, 2]
    reverse = prompt.copy()
    reverse[[3, 4]] = [2, 1]
    assert not (prefix_words(swapped) == prefix_words(reverse))[3:].any()


def test_expected_bytes_are_spread_evenly_and_rows_are_distinct() -> None:
    prefixes = prefix_words(np.zeros(64, np.int64))
    rows = np.concatenate(
        [expected(prefixes, layer, role, range(4), 16) for layer in range(4) for role in ("key", "value")]
    ).reshape(-1, 16)
    assert len(np.unique(rows, axis=0)) == len(rows) == 4 * 2 * 4 * 64
    counts = np.bincount(rows.reshape(-1), minlength=256)
    assert counts.min() > 0.5 * rows.size / 256
    assert counts.max() < 1.5 * rows.size / 256


def test_expected_is_the_same_in_every_version() -> None:
    """Workers of different hosts must agree: pin a few bytes."""
    prefixes = prefix_words(np.arange(34))
    assert expected(prefixes[33:], 1, "value", range(1, 2), 12).tobytes().hex() == "a883b4ed1892bdedebb4f74c"
    assert expected_state(prefixes[33], 1, "ssm_state", 12).tobytes().hex() == "ccdf5ae823ea1978d02b9171"


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


STATES = (StateSpec("conv_state", (6, 3)), StateSpec("ssm_state", (2, 4, 5), "float32"))


def recurrent(dtype: str = "bfloat16") -> tuple[SyntheticEngine, KVCacheManager]:
    """A recurrent layer, one of attention, and one with both."""
    buffers = (BufferSpec("key", 2, 8), BufferSpec("value", 2, 8))
    layers = (
        LayerSpec(LayerId(0), None, (), STATES),
        LayerSpec(LayerId(1), None, buffers),
        LayerSpec(LayerId(3), None, buffers, STATES),
    )
    engine = SyntheticEngine(ModelSpec("synthetic", dtype, layers))
    manager = helpers.make_manager(engine.spec)
    engine.bind(manager)
    return engine, manager


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e4m3fn", "uint8"])
def test_states_verify_step_by_step_in_every_dtype(dtype: str) -> None:
    engine, manager = recurrent(dtype)
    prompt = helpers.random_prompt(100)
    sequence = helpers.open_sequence(manager, 100, chunk_tokens=30)
    helpers.prefill(engine, sequence, prompt, 30)
    assert len(helpers.decode_greedily(engine, sequence, prompt, 5, 10)) == 10


def test_first_step_never_reads_what_the_slot_of_the_state_held() -> None:
    engine, manager = recurrent()
    for pool in manager.storage.pools:
        pool.fill_(0xFF)
    sequence = helpers.open_sequence(manager, 40)
    assert len(helpers.prefill(engine, sequence, helpers.random_prompt(40), 20)) == 2


def _earlier(prompt: helpers.Tokens) -> helpers.Tokens:
    return prompt[:-1]


def _of_another_prompt(prompt: helpers.Tokens) -> helpers.Tokens:
    return np.append(prompt[:-1], prompt[-1] + 1)


@pytest.mark.parametrize("other", [_earlier, _of_another_prompt])
@pytest.mark.parametrize("layer, role", [(0, "conv_state"), (0, "ssm_state"), (3, "conv_state"), (3, "ssm_state")])
def test_state_of_another_position_or_prompt_is_found(
    other: Callable[[helpers.Tokens], helpers.Tokens], layer: int, role: str
) -> None:
    engine, manager = recurrent()
    prompt = helpers.random_prompt(50)
    right, wrong = (helpers.open_sequence(manager, 50, name=name) for name in ("right", "wrong"))
    helpers.prefill(engine, right, prompt, 50)
    helpers.prefill(engine, wrong, other(prompt), 50)
    states = manager.state(layer, role)
    states[right.state_slot] = states[wrong.state_slot]
    with pytest.raises(InvariantError, match=f"request right, layer {layer}, {role} after 50 tokens: .* wrong bytes"):
        helpers.step(engine, right, np.append(prompt, 5))


def test_one_flipped_bit_of_a_state_is_found() -> None:
    engine, manager = recurrent()
    prompt = helpers.random_prompt(50)
    sequence = helpers.open_sequence(manager, 50)
    helpers.prefill(engine, sequence, prompt, 50)
    group = manager.layout.recurrent
    assert group is not None
    helpers.slot_bytes(manager, group.pool_group)[sequence.state_slot, group.states[-1].offset_bytes + 7] ^= 16
    with pytest.raises(InvariantError, match="1 wrong bytes"):
        helpers.step(engine, sequence, np.append(prompt, 5))


def test_scratch_pages_of_windows_verify() -> None:
    """Blocks that leave the window within the step share memory between layers."""
    engine = SyntheticEngine(spec(windows=(64, 64, 64, None)))
    layout = build_layout(engine.spec)
    manager = KVCacheManager(layout, [60] * len(layout.pool_groups), options=PoolOptions(window_scratch=True))
    engine.bind(manager)
    sequence = manager.create_sequence("r")
    sequence.resume()
    prompt = helpers.random_prompt(400)
    logits = helpers.prefill(engine, sequence, prompt, 250)
    assert (sequence.slots(manager.layout.life_cycles[0].id) >= 0).sum() <= 4
    plain, other = bound(windows=(64, 64, 64, None))
    wanted = helpers.prefill(plain, helpers.open_sequence(other, 400, chunk_tokens=250), prompt, 250)
    assert all(torch.equal(*pair) for pair in zip(wanted, logits, strict=True))
    assert len(helpers.decode_greedily(engine, sequence, prompt, 5, 10)) == 10


def test_digest_tells_specs_apart() -> None:
    digests = {SyntheticEngine(spec(dim=dim)).model_digest for dim in (8, 16)}
    assert len(digests) == 2
    assert SyntheticEngine(spec()).model_digest in digests
