import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cache.errors import RemoteProtocolError
from kvferry.transfer.notice import Notice
from kvferry.transfer.types import TransferKey

notices = st.builds(
    Notice,
    st.builds(TransferKey, st.binary(min_size=16, max_size=16).map(bytes.hex), st.integers(0, 2**32 - 1)),
    st.integers(0, 2**63 - 1),
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
    notice = Notice(TransferKey("00" * 16, 1), 5, 3, 3)
    with pytest.raises(RemoteProtocolError, match="slice 3 of 3"):
        Notice.unpack(notice.pack())
