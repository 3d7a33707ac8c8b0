"""Canonical ids: one id for all tokens whose normalized text is the same (Engram).

``"The"``, ``" the"`` and ``"THE"`` become one id, so that their n-grams share rows. The
number of canonical ids determines every multiplier of the hash: one token that is
normalized differently changes all rows. Python's ``unicodedata`` and ``str.lower`` differ
from the ``tokenizers`` library, which the references use, at several hundred characters,
and by version of Python. The normal form of every character is therefore in
``characters.txt``. Normalizing a string character by character is exact: characters that
would be reordered or composed with their neighbors are marks, which are dropped, and
Hangul letters, which are decomposed again.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
from jaxtyping import Int64

_REPLACEMENT = "\ufffd"
# Stands for a token of white space only while white space is stripped from both ends.
_SPACE = "\ue000"
# The characters with the property White_Space. ``str.strip`` also strips U+001C to U+001F.
_WHITE_SPACE = (
    "\t\n\v\f\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008"
    "\u2009\u200a\u2028\u2029\u202f\u205f\u3000"
)


@overload
def canonical_ids(texts: Any, /) -> Int64[np.ndarray, " vocab"]: ...


@overload
def canonical_ids(
    texts: Sequence[str], raw_tokens: Sequence[str | None]
) -> Int64[np.ndarray, " vocab"]: ...


def canonical_ids(
    texts: Any, raw_tokens: Sequence[str | None] | None = None
) -> Int64[np.ndarray, " vocab"]:
    """Return the canonical id of each token of a vocabulary, as Engram numbers them.

    Tokens whose text has the same normal form get the same id: compatibility characters,
    accents, case and runs of white space make no difference. Tokens that are not whole
    characters keep their own ids. Ids count from 0 in the order of the vocabulary.

    Args:
        texts: Text of each token, special tokens included. Alternatively a tokenizer of
            transformers (a fast one) or of tokenizers, whose library then decodes each id.
        raw_tokens: Token of each id as the vocabulary has it, for texts with U+FFFD.
            Leave it out for a tokenizer.

    Example:
        >>> canonical_ids(["The", "cat", " the", "thé"], ["The", "cat", "Ġthe", "thÃ©"])
        array([0, 1, 0, 0])
    """
    if raw_tokens is None:
        if isinstance(texts, str | Sequence):
            raise TypeError(
                "canonical_ids needs a tokenizer, or texts and raw_tokens, got texts only"
            )
        texts, raw_tokens = _decode(texts)
    if len(texts) != len(raw_tokens):
        raise ValueError(
            "texts and raw_tokens must have one entry for each id, "
            f"got {len(texts)} and {len(raw_tokens)}"
        )
    numbers: dict[str | None, int] = {}
    keys = _keys(texts, raw_tokens)
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)


def _keys(texts: Sequence[str], raw_tokens: Sequence[str | None]) -> Iterator[str | None]:
    """Yield the key of each token: its normal form, or its raw token."""
    forms = normal_forms()
    for text, raw in zip(texts, raw_tokens, strict=True):
        yield raw if _REPLACEMENT in text else normalize(text, forms) or text


def _decode(tokenizer: Any) -> tuple[list[str], list[str | None]]:
    """Return the text and the raw token of each id of a tokenizer."""
    # The wrapper of transformers may clean up spaces, which gives other texts.
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not hasattr(backend, "id_to_token"):
        raise TypeError(
            "tokenizer must be a fast tokenizer of transformers or one of tokenizers, "
            f"got {type(tokenizer).__name__}"
        )
    ids = range(backend.get_vocab_size(with_added_tokens=True))
    texts = [backend.decode([i], skip_special_tokens=False) for i in ids]
    return texts, [backend.id_to_token(i) for i in ids]


def normalize(text: str, forms: dict[int, str]) -> str:
    """Return the normal form of a text, which may be empty.

    Args:
        text: Text of a token.
        forms: Result of :func:`normal_forms`.

    Example:
        >>> normalize("  Ünï\\t\\ncode ", normal_forms()), normalize(" \\n", normal_forms())
        ('uni code', ' ')
    """
    spaced = re.sub("[ \t\r\n]+", " ", text.translate(forms))
    if spaced == " ":
        spaced = _SPACE
    return spaced.strip(_WHITE_SPACE).replace(_SPACE, " ")


def normal_forms() -> dict[int, str]:
    """Return the text that replaces each character, for ``str.translate``.

    Example:
        >>> forms = normal_forms()
        >>> forms[ord("Ǻ")], forms[ord("㎏")], forms[0x301], forms.get(ord("a"))
        ('a', 'kg', '', None)
    """
    # A Hangul syllable is two or three letters: 19 initials, 21 vowels, 27 finals or none.
    forms = {
        0xAC00 + s: chr(0x1100 + s // 588)
        + chr(0x1161 + s % 588 // 28)
        + (chr(0x11A7 + s % 28) if s % 28 else "")
        for s in range(19 * 21 * 28)
    }
    for line in Path(__file__).with_name("characters.txt").read_text("ascii").splitlines():
        if not line.startswith("#"):
            characters, *form = line.split(" ")
            first, _, last = characters.partition("..")
            text = "".join(chr(int(point, 16)) for point in form)
            for point in range(int(first, 16), int(last or first, 16) + 1):
                forms[point] = text
    return forms
