import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cache.errors import RemoteProtocolError
from kvferry.transfer.notice import Landing, Notice
from kvferry.transfer.types import TransferKey

notices = st.builds(
    Notice,
    st.builds(TransferKey, st.binary(min_size=16, max_size=16).map(bytes.hex), st.integers(0, 2**32 - 1)),
    st.integers(0, 2**63 - 1),
    st.integers(0, 2**64 - 1),
    st.integers(0, 999),
    st.integers(1000, 2**32 - 1),
)


@given(notices)
def test_notice_round_trip(notice: Notice) -> None:
    assert Notice.unpack(notice.pack()) == notice


@given(st.binary(max_size=60))
def test_notice_other_bytes_are_refused_or_mean_themselves(payload: bytes) -> None:
    try:
        notice = Notice.unpack(payload)
    except RemoteProtocolError:
        notice = None
    assert notice is None or notice.pack() == payload


def test_notice_index_beyond_the_count_is_refused() -> None:
    notice = Notice(TransferKey("00" * 16, 1), 5, 9, 3, 3)
    with pytest.raises(RemoteProtocolError, match="slice 3 of 3"):
        Notice.unpack(notice.pack())


def slice_notice(index: int, count: int) -> Notice:
    return Notice(TransferKey("00" * 16, 1), 5, 9, index, count)


def test_landing_is_complete_when_every_slice_was_named_once_or_more() -> None:
    landing = Landing()
    for index in (2, 0, 2):
        landing.note(slice_notice(index, 3))
        assert not landing.complete
    landing.note(slice_notice(1, 3))
    assert landing.complete


def test_landing_contradicting_counts_are_refused_and_change_nothing() -> None:
    landing = Landing()
    landing.note(slice_notice(0, 3))
    with pytest.raises(RemoteProtocolError, match="2 slices now, 3 before"):
        landing.note(slice_notice(1, 2))
    assert landing.landed == {0}
