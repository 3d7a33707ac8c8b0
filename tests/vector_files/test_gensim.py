"""Files of gensim are read as data: real ones of many versions, and hostile ones."""

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gensim.models import FastText, KeyedVectors, Word2Vec
from gensim.test.utils import datapath

from firstlayer.vector_files.gensim import read_gensim
from firstlayer.word_vectors.vectors import open_vectors
from tests.support.vector_files import Command

SENTENCES = [["king", "queen", "naïve", "漢字"]] * 5


@pytest.mark.parametrize("sep_limit", [1, 10**9])
def test_models_equal_gensim(sep_limit, tmp_path):
    path = str(tmp_path / "a.model")
    options: dict[str, Any] = {"vector_size": 5, "min_count": 1, "epochs": 1, "workers": 1}
    words = Word2Vec(SENTENCES, **options)
    words.save(path, sep_limit=sep_limit)
    found = read_gensim(Path(path))
    assert found.words == words.wv.index_to_key
    assert found.weight.tobytes() == words.wv.vectors.tobytes()
    grams = FastText(SENTENCES, bucket=50, min_n=2, max_n=3, **options)
    for saved in (grams, grams.wv):
        saved.save(path, sep_limit=sep_limit)
        vectors = open_vectors(path)
        assert vectors.words == grams.wv.index_to_key
        assert vectors.weight.tobytes() == grams.wv.vectors.tobytes()
        for word in ("kings", "naïves", "字"):
            np.testing.assert_array_equal(vectors[word], grams.wv[word])


@pytest.mark.parametrize(
    "name",
    [
        "compatible-hash-true.model",
        "old_w2v_models/w2v_0.13.4.mdl",
        "old_w2v_models/w2v_2.0.0.mdl",
        "old_w2v_models/w2v_3.4.0.mdl",
        "word2vec_old_sep",
    ],
)
def test_old_files_equal_gensim(name):
    path = Path(datapath(name))
    theirs = (FastText if "hash" in name else Word2Vec).load(str(path)).wv
    found = read_gensim(path)
    assert found.words == theirs.index_to_key
    assert found.weight.tobytes() == theirs.vectors.tobytes()


def test_files_too_old_for_gensim_are_read():
    # gensim 4.4.0 refuses these: without KeyedVectors, of Python 2, of removed wrappers.
    words = {"word2vec_pre_kv_py2": "the", "word2vec_pre_kv_sep_py3_4": "the"}
    words |= {"fasttext_old": "system", "lee_fasttext": "the"}
    for name, first in words.items():
        found = read_gensim(Path(datapath(name)))
        assert found.words[0] == first and len(found.words) == len(found.weight)
        assert np.isfinite(found.weight).all() and found.weight.any()


@pytest.mark.rejects
@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize(
    "function, args",
    [
        (os.system, ("touch hacked",)),
        (eval, ("open('hacked', 'w')",)),
        (getattr, ("", "join")),
        (np.load, ("hacked",)),
        (__import__, ("antigravity",)),
    ],
)
def test_a_malicious_pickle_is_refused(protocol, function, args, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    vectors = KeyedVectors(2)
    vectors.add_vectors(["a"], np.ones((1, 2), np.float32))
    for value in (Command(function, *args), {"a": [vectors, Command(function, *args)]}):
        Path("a.kv").write_bytes(pickle.dumps(value, protocol))
        with pytest.raises(ValueError, match=r"names the Python object '[\w.]+', which is"):
            read_gensim(Path("a.kv"))
        assert os.listdir() == ["a.kv"]


@pytest.mark.rejects
@pytest.mark.parametrize(
    "content, message",
    [
        # A memo index of two billion, an object array, a huge length, deep nesting.
        (b"\x80\x04Nr\xff\xff\xff\x7f.", "pickle without gensim's vectors"),
        (pickle.dumps(np.array([{}], object), 4), "array of Python objects"),
        (b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x0f.", "is not read"),
        (b"\x80\x04\x96\xff\xff\xff\xff\xff\xff\xff\x7f.", "is not read"),
        (b"\x80\x02c__main__\nx\n.", "names the Python object '__main__.x'"),
        (b"\x80\x04\x8c\x01aQ.", "refers to objects outside of it"),
        (pickle.dumps(KeyedVectors(3), 4), "has no words"),
    ],
)
def test_hostile_pickles_are_refused(content, message, tmp_path):
    (tmp_path / "a.kv").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_gensim(tmp_path / "a.kv")


@pytest.mark.rejects
def test_missing_side_files_and_other_models_are_named(tmp_path):
    vectors = KeyedVectors(2)
    vectors.add_vectors(["a"], np.ones((1, 2), np.float32))
    vectors.save(str(tmp_path / "a.kv"), sep_limit=1)
    (tmp_path / "a.kv.vectors.npy").unlink()
    with pytest.raises(FileNotFoundError, match=r"keeps its vectors in a.kv.vectors.npy"):
        read_gensim(tmp_path / "a.kv")
    with pytest.raises(ValueError, match=r"'gensim.models.phrases.Phraser', which is not"):
        read_gensim(Path(datapath("phraser-3.6.0.model")))
