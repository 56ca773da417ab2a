"""The text codec gives the tokens that the Python tokenizer gives, and lets other threads run meanwhile."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from kvbm.engines.embedded.engine.tokenizer import byte_tokenizer
from kvbm.engines.embedded.http import openai_responses
from kvbm.engines.embedded.http.openai_requests import TextPrompt
from kvbm.engines.embedded.http.openai_responses import dumps, pieces
from kvbm.engines.embedded.http.prompt import encode
from kvbm.engines.embedded.http.request_fields import RequestError
from kvbm.engines.embedded.http.text_codec import TextCodec

LETTERS = "abcdefgh"


def words(kind: type[PreTrainedTokenizerFast] = PreTrainedTokenizerFast, **options: object) -> PreTrainedTokenizerFast:
    """Pairs of letters are merged, the text is changed before, `[B]` comes first, and its file limits the length."""
    tokens = ["[U]", "[B]", *LETTERS, *(one + one for one in LETTERS)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [(one, one) for one in LETTERS], unk_token="[U]", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken("<S>", special=True), AddedToken("[B]", special=True)])
    tokenizer.post_processor = processors.TemplateProcessing(single="[B] $A", special_tokens=[("[B]", 1)])
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    return kind(tokenizer_object=tokenizer, **options)


TOKENIZERS = {"bytes": byte_tokenizer(), "words": words(), "split": words(split_special_tokens=True)}
CODECS = {name: TextCodec(tokenizer) for name, tokenizer in TOKENIZERS.items()}
TEXTS = st.lists(st.sampled_from(["aa", "A", "b c", "<S>", "[B]", " ", "ﬁ", "Ü", "\n", "<|im_end|>"]) | st.text()).map(
    "".join
)


@given(text=TEXTS, name=st.sampled_from(sorted(TOKENIZERS)), is_alone=st.booleans())
def test_tokens_are_those_of_the_python_tokenizer(text: str, name: str, is_alone: bool) -> None:
    codec, expected = CODECS[name], TOKENIZERS[name].encode(text, add_special_tokens=not is_alone)
    assert codec._encodes_directly
    counts: list[int] = []
    assert codec.encode(text, add_special_tokens=not is_alone, check_count=counts.append) == expected
    assert counts == [len(expected)]


def test_a_class_that_encodes_in_its_own_way_is_asked() -> None:
    class Reversed(PreTrainedTokenizerFast):
        def _encode_plus(self, text, *arguments, **options):
            return super()._encode_plus(text[::-1], *arguments, **options)

    assert TextCodec(words(Reversed)).encode("aab", add_special_tokens=False) == [3, 10]


def test_a_prompt_with_too_many_tokens_is_refused_before_they_are_python_objects() -> None:
    class Encoding:
        def __len__(self) -> int:
            return 9

    class Backend:
        def encode_batch_fast(self, texts, *, add_special_tokens):
            return [Encoding()]

    def refuse(count: int) -> None:
        raise RequestError(f"{count} tokens")

    codec = TextCodec(byte_tokenizer())
    codec._backend = Backend()
    with pytest.raises(RequestError, match="9 tokens"):
        asyncio.run(encode(codec, TextPrompt("a" * 9, add_special_tokens=True), max_tokens=8, check_count=refuse))


@pytest.mark.parametrize("items", [0, 1, 9, 10, 11, 20, 25])
def test_an_answer_in_pieces_is_the_whole_answer(items: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_responses, "PIECE_ITEMS", 10)
    body = {"count": items, "tokens": [*range(items)], "token_strs": ["ä,]"] * items, "none": None}
    assert b"".join(pieces(body)) == dumps(body)
    assert json.loads(b"".join(pieces(body))) == body
