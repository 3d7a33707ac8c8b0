"""Canonical ids: normal forms of all characters, of strings, and of vocabularies."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers
from transformers import PreTrainedTokenizerFast

from firstlayer.ngram import canonical_ids
from firstlayer.ngram.canonical import normal_forms, normalize
from tests.support.ngram import golden

# The steps of the references, with the library that they use.
REFERENCE = normalizers.Sequence([
    normalizers.NFKC(),
    normalizers.NFD(),
    normalizers.StripAccents(),
    normalizers.Lowercase(),
    normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
    normalizers.Replace(Regex(r"^ $"), "\ue000"),
    normalizers.Strip(),
    normalizers.Replace("\ue000", " "),
])
FORMS = normal_forms()


def strings(arrays: dict[str, np.ndarray], name: str) -> list[str]:
    """Return the strings of a golden file, which are one array of bytes and offsets."""
    data, offsets = arrays[f"{name}_utf8"].tobytes(), arrays[f"{name}_offsets"]
    bounds = zip(offsets[:-1], offsets[1:], strict=True)
    return [data[start:end].decode() for start, end in bounds]


def test_every_character_is_normalized_like_the_tokenizers_library():
    points = [p for p in range(0x110000) if not 0xD800 <= p < 0xE000]
    wrong = [
        hex(p)
        for p in points
        if normalize(chr(p), FORMS) != REFERENCE.normalize_str(chr(p))
    ]
    assert wrong == []


CHANGED = st.sampled_from(sorted(FORMS)).map(chr)


@given(
    st.lists(CHANGED | st.characters(exclude_categories=["Cs"]), max_size=6).map("".join)
)
@example("ΑΣ")
@example(" \x1c \x85")
@example("\ue000a \ue000")
@example("\u1112\u1161\u11ab \uac00\u11a8")
@example("q\u0307\u0323\u0d3e\u0afd")
def test_strings_are_normalized_like_the_tokenizers_library(text):
    assert normalize(text, FORMS) == REFERENCE.normalize_str(text)


def test_golden_strings():
    _, arrays = golden("canonical_strings_public")
    found = [normalize(text, FORMS) for text in strings(arrays, "in")]
    assert found == strings(arrays, "out") and len(found) == 259


def test_golden_vocabulary():
    _, arrays = golden("canonical_bytes2k")
    found = canonical_ids(strings(arrays, "text"), strings(arrays, "raw"))
    assert found.tolist() == arrays["canonical"].tolist()
    assert found.max() + 1 == arrays["size"]


def test_a_tokenizer_gives_the_ids_of_its_texts():
    words = ["<s>", "The", "the", "THÉ", "cat", "Cat", " ", "a .", "a."]
    vocab = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<s>"))
    tokenizer.add_special_tokens(["<s>", "<end>"])
    found = canonical_ids(tokenizer)
    assert found.tolist() == [0, 1, 1, 1, 2, 2, 3, 4, 5, 6]
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=True
    )
    assert canonical_ids(wrapped).tolist() == found.tolist()


def test_a_text_with_an_incomplete_character_is_its_raw_token():
    texts = ["\ufffd", "\ufffd", "a", "\u0301", "\u0301\u0301", "A"]
    assert canonical_ids(texts, ["x", "y", "a", "b", "c", "A"]).tolist() == [
        0,
        1,
        2,
        3,
        4,
        2,
    ]


@pytest.mark.rejects
def test_bad_arguments_are_named():
    with pytest.raises(TypeError, match="needs a tokenizer, or texts and raw_tokens, got"):
        canonical_ids(["a"])
    with pytest.raises(ValueError, match="one entry for each id, got 2 and 1"):
        canonical_ids(["a", "b"], ["a"])
    with pytest.raises(TypeError, match="tokenizer must be a fast tokenizer .* got object"):
        canonical_ids(object())
