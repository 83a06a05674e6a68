"""Text that grows token by token is the text of all tokens, and no half character is ever shown."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from kvferry.transfer.engines.base import Tokenizer as TokenizerContract
from kvferry.transfer.engines.hf_tokenizer import HfTokenizer
from kvferry.transfer.engines.text import ByteTokenizer, IncrementalText

CORPUS = ["the cat sat on the mat, the dog did not 中文字符 日本語 émigré naïve 😀😃🎉 " * 3]
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def byte_level_bpe() -> Tokenizer:
    """The family of GPT-2, Llama 3 and SmolLM2: tokens are runs of bytes, cut anywhere."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def sentencepiece_like() -> Tokenizer:
    """The family of Llama 2 and Gemma: a mark for the space, bytes for what is not in the vocabulary."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyz"]
    tokenizer = Tokenizer(
        models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def wrapped(backend: Tokenizer) -> HfTokenizer:
    return HfTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


TOKENIZERS: dict[str, TokenizerContract] = {
    "bytes": ByteTokenizer(),
    "byte-level": wrapped(byte_level_bpe()),
    "sentencepiece": wrapped(sentencepiece_like()),
}
ALL = pytest.mark.parametrize("name", TOKENIZERS)


def grow(tokenizer: TokenizerContract, token_ids: Sequence[int]) -> list[str]:
    text = IncrementalText(tokenizer)
    return [*(text.push([token]) for token in token_ids), text.flush()]


class Counting(ByteTokenizer):
    """Remembers the most tokens it was ever asked to decode at once."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def decode(self, token_ids: Sequence[int]) -> str:
        self.most = max(self.most, len(token_ids))
        return super().decode(token_ids)


@ALL
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters=["▁", "\0"]), max_size=120))
def test_pieces_of_any_text_join_to_the_text_of_all_tokens(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    token_ids = tokenizer.encode(text, chat=False)
    pieces = grow(tokenizer, token_ids)
    assert "".join(pieces) == tokenizer.decode(token_ids)
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in piece for piece in pieces)


@pytest.mark.parametrize("name", ["bytes", "byte-level"])
@given(token_ids=st.lists(st.integers(3, 258), max_size=150))
def test_pieces_of_random_bytes_join_to_the_text_of_all_tokens(name: str, token_ids: list[int]) -> None:
    tokenizer = TOKENIZERS[name]
    assert "".join(grow(tokenizer, token_ids)) == tokenizer.decode(token_ids)


@ALL
def test_text_that_can_be_shown_is_not_held_back(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    token_ids = tokenizer.encode("the cat 中", chat=False)
    pieces = grow(tokenizer, token_ids)
    assert pieces[-1] == ""
    assert pieces[-2].endswith("中")


def test_character_cut_off_at_the_end_comes_out_on_flush() -> None:
    tokenizer = ByteTokenizer()
    assert grow(tokenizer, tokenizer.encode("a中", chat=False)[:-1]) == ["a", "", "", REPLACEMENT]


@pytest.mark.parametrize("token", [3 + ord("a"), 3 + 0xFF, 3 + 0xF0, 3 + 0x80, 0, 300])
def test_work_per_token_is_bounded_whatever_the_text(token: int) -> None:
    tokenizer = Counting()
    text = IncrementalText(tokenizer)
    text.push([token] * 500)
    assert tokenizer.most <= 32 + 3


def test_pushing_several_tokens_equals_pushing_them_one_by_one() -> None:
    tokenizer = ByteTokenizer()
    token_ids = tokenizer.encode("héllo 😀 wörld " * 6, chat=False)
    text = IncrementalText(tokenizer)
    pieces = [text.push(token_ids[start : start + 7]) for start in range(0, len(token_ids), 7)]
    assert "".join([*pieces, text.flush()]) == "héllo 😀 wörld " * 6


@given(st.text(max_size=50))
def test_byte_tokenizer_round_trip(text: str) -> None:
    tokenizer = ByteTokenizer()
    wanted = text.encode(errors="ignore").decode()
    assert tokenizer.decode(tokenizer.encode(wanted, chat=True)) == wanted


def test_byte_tokenizer_leaves_out_what_is_no_byte() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode([0, 1, 2, 3 + ord("x"), 259, 383]) == "x"
    assert tokenizer.eos_token_ids == {1}


def test_hf_tokenizer_chat_uses_the_template_once() -> None:
    backend = byte_level_bpe()
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("<end>", special=True)])
    inner = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="<end>")
    inner.chat_template = (
        "{% for m in messages %}<s>{{ m.role }}:{{ m.content }}<end>{% endfor %}"
        "{% if add_generation_prompt %}<s>{% endif %}"
    )
    tokenizer = HfTokenizer(inner, extra_eos_token_ids=[7])
    chat = tokenizer.encode("the cat", chat=True)
    bos, eos = inner.bos_token_id, inner.eos_token_id
    assert (chat[0], chat[-2:], chat.count(bos)) == (bos, [eos, bos], 2)
    assert tokenizer.decode(chat) == "user:the cat"
    assert tokenizer.encode("the cat", chat=False) == inner("the cat")["input_ids"]
    assert tokenizer.eos_token_ids == {eos, 7}


def test_hf_tokenizer_without_template_or_end_token_still_works() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    assert tokenizer.encode("the cat", chat=True) == tokenizer.encode("the cat", chat=False)
    assert tokenizer.eos_token_ids == frozenset()
