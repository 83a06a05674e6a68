"""What a worker refuses before it queues a request, and what it takes."""

import pytest

from kvferry.cache.errors import ConfigError
from kvferry.deploy.request_checks import check_request, outside_vocabulary
from kvferry.deploy.requests import Request
from kvferry.transfer.engines.synthetic import SyntheticEngine
from kvferry.transfer.inference import SamplingParams
from tests.cache.specs import spec
from tests.deploy.loops import Sink

ENGINE = SyntheticEngine(spec([8, None]))
LIMIT = 20


def request_of(*prompt: int, **sampling: float) -> Request:
    return Request("r", prompt, SamplingParams(**{"max_new_tokens": 4, **sampling}), Sink(), 0.0, 1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("request_", [request_of(0), request_of(383), request_of(*range(16)), request_of(1, seed=7)])
def test_request_within_all_bounds_is_taken(request_: Request) -> None:
    check_request(request_, ENGINE, LIMIT)
    assert outside_vocabulary(request_.prompt, ENGINE) == []


@pytest.mark.parametrize(
    "request_, story",
    [
        (request_of(), "the prompt is empty"),
        (request_of(*range(17)), "17 prompt tokens and 4 new ones exceed max_seq_len_tokens 20"),
        (request_of(1, max_new_tokens=20), "1 prompt tokens and 20 new ones exceed max_seq_len_tokens 20"),
        (request_of(1, max_new_tokens=0), "max_new_tokens is 0"),
        (request_of(1, temperature=-1.0), "temperature is -1"),
        (request_of(3, 384, -1), r"token ids \[384, -1\] are outside the vocabulary of 384"),
        (request_of(*range(380, 394)), r"token ids \[384, 385, 386, 387, 388\] are outside"),
    ],
)
def test_request_outside_a_bound_is_refused_with_the_numbers(request_: Request, story: str) -> None:
    with pytest.raises(ConfigError, match=story):
        check_request(request_, ENGINE, LIMIT)
