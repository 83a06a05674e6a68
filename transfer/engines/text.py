"""Bytes as tokens, and text from a growing list of tokens. Pure: needs no library and no files."""

from collections.abc import Sequence

from kvferry.transfer.engines.base import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_LONGEST_PREFIX = 3
"""A UTF-8 character has at most four bytes, so at most three of them, in at most three tokens, wait for the rest."""


class ByteTokenizer(Tokenizer):
    """One token per UTF-8 byte. Ids 0, 1, 2 are padding, end of sequence and unknown; byte b is token b + 3."""

    _OFFSET = 3

    def __init__(self) -> None:
        self.eos_token_ids = frozenset({1})

    def encode(self, text: str, *, chat: bool) -> list[int]:
        """UTF-8 bytes of the text. There is no chat template, so `chat` changes nothing."""
        return [byte + self._OFFSET for byte in text.encode()]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the byte tokens; broken UTF-8 becomes U+FFFD, other tokens are left out."""
        values = (token - self._OFFSET for token in token_ids)
        return bytes(value for value in values if 0 <= value < 256).decode(errors="replace")


class IncrementalText:
    """Turns tokens that arrive one by one into pieces of text whose concatenation is the text of them all.

    A character split over tokens is held back until it is whole; bytes that are no text come out as U+FFFD once it is
    certain that nothing can complete them. The work per token is bounded: only the last few tokens are decoded again,
    and they are cut off where the text that follows does not depend on them.
    """

    _LONGEST_WINDOW = 32
    _LEAST_CONTEXT = 4

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._emitted = 0  # characters of the window's text that were returned
        self._broken = 0  # tokens in a row after which the text ended in U+FFFD

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens and return the text that became certain."""
        return "".join(self._push_one(token) for token in token_ids)

    def flush(self) -> str:
        """Return what is still held back. Call once, after the last token."""
        held_back = self._tokenizer.decode(self._window)[self._emitted :]
        self._restart([], 0)
        return held_back

    def _push_one(self, token: int) -> str:
        self._window.append(token)
        text = self._tokenizer.decode(self._window)
        self._broken = self._broken + 1 if text.endswith(_REPLACEMENT) else 0
        if 0 < self._broken <= _LONGEST_PREFIX:
            return ""  # some tokenizers now show the whole run of bytes as broken: the text says nothing yet
        certain = max(self._emitted, len(text) - _num_trailing(text))
        piece, self._emitted = text[self._emitted : certain], certain
        return piece + self._shorten(text)

    def _shorten(self, text: str) -> str:
        """Cut tokens off the front of a long window. Returns text only when no cut is clean and all is let go."""
        if len(self._window) < self._LONGEST_WINDOW:
            return ""
        held_back = len(text) - self._emitted
        for start in range(len(self._window) // 2, len(self._window) - self._LEAST_CONTEXT):
            tail = self._tokenizer.decode(self._window[start:])
            if len(tail) >= max(held_back, 1) and text.endswith(tail):
                self._restart(self._window[start:], len(tail) - held_back)
                return ""
        self._restart([], 0)
        return text[len(text) - held_back :]

    def _restart(self, window: list[int], emitted: int) -> None:
        self._window, self._emitted = window, emitted


def _num_trailing(text: str) -> int:
    """Trailing U+FFFD that a later token may still turn into a character."""
    return min(len(text) - len(text.rstrip(_REPLACEMENT)), _LONGEST_PREFIX)
