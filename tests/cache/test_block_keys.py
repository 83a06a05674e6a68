"""Names of blocks and who shares them."""

import hashlib

import numpy as np
import pytest

from kvferry.cache.block_keys import MAX_TOKEN_ID, KeyChain, ReuseScope, as_token_ids, chain, partial_key
from kvferry.cache.errors import ConfigError

ROOT = ReuseScope().key


def test_root_key_of_no_scope_is_the_hash_of_an_empty_mask() -> None:
    assert hashlib.sha256(b"\x00").digest() == ROOT


def test_root_key_holds_the_mask_and_the_fields_as_little_endian_64_bits() -> None:
    both = ReuseScope(adapter_id=7, salt=11)
    assert both.key == hashlib.sha256(b"\x03" + (7).to_bytes(8, "little") + (11).to_bytes(8, "little")).digest()
    assert ReuseScope(salt=7).key == hashlib.sha256(b"\x02" + (7).to_bytes(8, "little")).digest()
    assert ReuseScope(adapter_id=7).key == hashlib.sha256(b"\x01" + (7).to_bytes(8, "little")).digest()


def test_salt_text_is_the_first_64_bits_of_its_hash() -> None:
    salt = int.from_bytes(hashlib.sha256(b"tenant").digest()[:8], "little")
    assert ReuseScope.of(cache_salt="tenant", adapter_id=3) == ReuseScope(3, salt)
    assert ReuseScope.of(cache_salt="") == ReuseScope()


@pytest.mark.parametrize("field", ["adapter_id", "salt"])
@pytest.mark.parametrize("value", [-1, 1 << 64])
def test_scope_of_more_than_64_bits_is_refused(field: str, value: int) -> None:
    with pytest.raises(ConfigError, match=rf"{field} is {value}"):
        ReuseScope(**{field: value})


def test_chain_names_full_blocks_by_parent_and_tokens() -> None:
    tokens = as_token_ids([1, 2, 3, 4, 5])
    first = hashlib.sha256(ROOT + np.array([1, 2], "<u4").tobytes()).digest()
    second = hashlib.sha256(first + np.array([3, 4], "<u4").tobytes()).digest()
    assert chain(ROOT, tokens, 2) == [first, second]
    assert partial_key(second, tokens[4:]) == hashlib.sha256(second + np.array([5], "<u4").tobytes()).digest()


def test_keys_of_a_prompt_are_those_of_the_chain_however_they_are_asked_for() -> None:
    tokens = as_token_ids(list(range(23)))
    expected = chain(ROOT, tokens, 3)
    asked = KeyChain(ROOT, tokens, 3)
    assert [key for first in range(7) for key in asked.keys(first, first + 1)] == expected
    assert KeyChain(ROOT, tokens, 3).keys(4, 7) == expected[4:]
    assert KeyChain(ROOT, tokens, 3, expected[:2]).keys(0, 7) == expected
    assert KeyChain(ROOT, tokens, 3, [*expected, b"beyond"]).keys(0, 7) == expected


def test_keys_of_a_prompt_tell_whether_given_blocks_go_on_like_it() -> None:
    asked = KeyChain(ROOT, as_token_ids([1, 2, 3, 4, 5]), 2)
    assert asked.names(1, as_token_ids([3, 4]))
    assert not asked.names(1, as_token_ids([3, 5]))
    assert asked.names(1, as_token_ids([3, 4, 5, 6]))
    assert not asked.names(1, as_token_ids([3, 4, 6, 6]))
    assert asked.names(3, as_token_ids([9, 9]))


def test_one_token_changes_the_keys_of_its_block_and_all_after() -> None:
    one, other = (chain(ROOT, as_token_ids(tokens), 2) for tokens in ([1, 2, 3, 4, 5, 6], [1, 2, 9, 4, 5, 6]))
    assert [a == b for a, b in zip(one, other, strict=True)] == [True, False, False]


@pytest.mark.parametrize("kind", [list, tuple, np.array, lambda ids: np.array(ids, np.uint32)])
def test_token_ids_of_any_integers_become_the_same_array(kind: type) -> None:
    ids = as_token_ids(kind([0, 5, MAX_TOKEN_ID]))
    assert (ids.dtype, ids.tolist()) == (np.dtype("<u4"), [0, 5, MAX_TOKEN_ID])


@pytest.mark.parametrize(
    "wrong, why",
    [
        ([3, -1], "-1 to 3"),
        ([1 << 31], "between 0 and 2147483647"),
        (np.array([1 << 31], np.uint32), "between 0 and 2147483647"),
        ([1 << 70], "must be one row of integers"),
        ([1.0, 2.0], "float64"),
        ([True], "bool"),
        (["1"], "integers"),
        ([[1, 2], [3, 4]], r"shape \[2, 2\]"),
        (7, "one row"),
    ],
)
def test_token_ids_out_of_range_or_not_integers_are_refused(wrong: list[int], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        as_token_ids(wrong)


def test_no_token_ids_are_fine() -> None:
    assert as_token_ids([]).tolist() == []
