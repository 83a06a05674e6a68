import pytest

from kvferry.transfer.types import Direction


@pytest.fixture(params=Direction, ids=lambda direction: direction.value)
def direction(request: pytest.FixtureRequest) -> Direction:
    """Both ways to move pages."""
    assert isinstance(request.param, Direction)
    return request.param
