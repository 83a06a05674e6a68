"""The tokenizer that comes with a transformers model."""

from collections.abc import Iterable, Sequence

from transformers import PreTrainedTokenizerBase

from kvferry.transfer.engines.base import Tokenizer


class HfTokenizer(Tokenizer):
    """Wraps a transformers tokenizer.

    Args:
        extra_eos_token_ids: ends of sequence that the model's configuration names beside the tokenizer's own.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, extra_eos_token_ids: Iterable[int] = ()) -> None:
        self._tokenizer = tokenizer
        own = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
        self.eos_token_ids = frozenset([*own, *extra_eos_token_ids])

    def encode(self, text: str, *, chat: bool) -> list[int]:
        """Token ids of a prompt. A chat template brings its own special tokens; otherwise the tokenizer adds them."""
        templated = chat and self._tokenizer.chat_template is not None
        if templated:
            turn = [{"role": "user", "content": text}]
            text = str(self._tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False))
        encoded = self._tokenizer(text, add_special_tokens=not templated, verbose=False)
        return [int(token) for token in encoded["input_ids"]]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text exactly as the tokens spell it, special tokens left out."""
        return str(
            self._tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )
