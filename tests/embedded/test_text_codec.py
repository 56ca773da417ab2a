"""The text codec gives the tokens of the whole text, also if the tokenizer's file limits the length."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from kvbm.engines.embedded.http.text_codec import TextCodec

LETTERS = "abcdefgh"


def words() -> PreTrainedTokenizerFast:
    """Pairs of letters are merged, `[B]` comes first, and its file limits the length."""
    tokens = ["[U]", "[B]", *LETTERS, *(one + one for one in LETTERS)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [(one, one) for one in LETTERS], unk_token="[U]", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken("[B]", special=True)])
    tokenizer.post_processor = processors.TemplateProcessing(single="[B] $A", special_tokens=[("[B]", 1)])
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("special", [[], [1]], ids=["alone", "with special tokens"])
def test_a_text_is_neither_truncated_nor_padded(special: list[int]) -> None:
    found = TextCodec(words()).encode("aa bb cc dd aab", add_special_tokens=bool(special))
    assert found == [*special, 10, 11, 12, 13, 10, 3]
