"""What a worker refuses before it queues a request."""

from collections.abc import Sequence

from kvferry.cache.errors import ConfigError
from kvferry.deploy.requests import Request
from kvferry.transfer.engines.base import Engine
from kvferry.transfer.engines.sampling import check_sampling


def check_request(request: Request, engine: Engine, max_seq_len_tokens: int) -> None:
    """Raise ConfigError unless the engine can hold the prompt and its answer, and knows every token."""
    tokens, new_tokens = len(request.prompt), request.sampling.max_new_tokens
    if not tokens:
        raise ConfigError("the prompt is empty: give at least one token")
    check_sampling(request.sampling)
    if tokens + new_tokens > max_seq_len_tokens:
        raise ConfigError(
            f"{tokens} prompt tokens and {new_tokens} new ones exceed max_seq_len_tokens {max_seq_len_tokens}: shorten "
            "the prompt or ask for fewer tokens"
        )
    wrong = outside_vocabulary(request.prompt, engine)
    if wrong:
        raise ConfigError(f"token ids {wrong[:5]} are outside the vocabulary of {engine.vocab_size}")


def outside_vocabulary(tokens: Sequence[int], engine: Engine) -> list[int]:
    """Those of the tokens that the engine does not know."""
    return [token for token in tokens if not 0 <= token < engine.vocab_size]
