"""Runs that are trained further, and tables with n-grams, from text to an open folder."""

import json
import re

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from firstlayer import open_vectors
from firstlayer.word_vectors.encode import encode
from firstlayer.word_vectors.neighbors import neighbors
from firstlayer.word_vectors.train import MoreEpochs, TrainingOptions, train
from firstlayer.word_vectors.word2vec import Word2VecOptions
from tests.support.command import error_message, file_contents, stdout_of

SETTING = Word2VecOptions(embedding_dim=12, epochs=3, window=2, batch=128, sample=1.0)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a folder with two texts, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    for name, seed in (("a.txt", 0), ("b.txt", 1)):
        (tmp_path / name).write_text(text_of(seed))
    return tmp_path


def text_of(seed, count=700):
    """Return sentences in which the ending of a word tells where it is used."""
    rng = np.random.default_rng(seed)
    stems = rng.choice(["walk", "talk", "jump", "paint", "climb", "sail"], count)
    forms = {"ing": "now here today", "ed": "then there before"}
    endings = rng.choice(list(forms), count)
    pairs = zip(stems, endings, strict=True)
    return ".\n".join(f"{stem}{ending} {forms[ending]}" for stem, ending in pairs)


def options(**changes):
    keep = changes.pop("keep_state", False)
    lower = changes.pop("lower", False)
    setting = Word2VecOptions(**{**vars(SETTING), **changes})
    return TrainingOptions(keep_state=keep, lower=lower, setting=setting)


def setting_in(folder):
    return json.loads((folder / "config.json").read_text())["firstlayer"]["setting"]


def test_finished_run_is_trained_for_more_epochs(folder):
    train(["a.txt"], "v", recipe=options(keep_state=True))
    first = open_vectors("v").weight
    rates = []
    trained = train(
        ["a.txt"], "v", more=MoreEpochs(2), report=lambda now: rates.append(now.done)
    )
    assert trained.finished and trained.progress.done == 1
    assert (
        setting_in(folder / "v")["epochs"],
        setting_in(folder / "v")["earlier_epochs"],
    ) == (2, 3)
    second = open_vectors("v").weight
    assert not np.allclose(first, second, atol=1e-2)
    # Once more, interrupted in the middle: the same bits as at once.
    train(["a.txt"], "w", recipe=options(keep_state=True))
    left = iter(range(7))
    stopped = train(
        ["a.txt"], "w", more=MoreEpochs(2), stop=lambda: next(left, None) is None
    )
    assert not stopped.finished
    with pytest.raises(ValueError, match="w holds an interrupted run: resume it before"):
        train(["a.txt"], "w", more=MoreEpochs(2))
    train(["a.txt"], "w")
    assert file_contents(folder / "v") == file_contents(folder / "w")
    train(["a.txt"], "w", more=MoreEpochs(1, lr=0.2))
    assert setting_in(folder / "w")["lr"] == 0.2
    assert setting_in(folder / "w")["earlier_epochs"] == 5


def test_learning_rate_starts_again_and_decays(folder, monkeypatch):
    from firstlayer import kernels

    step, rates = kernels.word2vec_step, []

    def recorded(*args, lr, **rest):
        rates.append(lr)
        return step(*args, lr=lr, **rest)

    train(["a.txt"], "v", recipe=options(keep_state=True, lr=0.04))
    monkeypatch.setattr(kernels, "word2vec_step", recorded)
    train(["a.txt"], "v", more=MoreEpochs(2))
    assert rates[0] == 0.04 and rates[-1] < 0.002 and rates == sorted(rates, reverse=True)


def test_finished_run_is_trained_on_another_text(folder):
    train(["a.txt"], "v", recipe=options(keep_state=True))
    (folder / "b.txt").write_text("walking jumped talking unseen " * 50)
    said, before = [], open_vectors("v")
    train(["b.txt"], "v", more=MoreEpochs(1), tell=said.append)
    assert said[1] == "the text differs from the one v was trained on"
    after = open_vectors("v")
    assert after.words == before.words and "unseen" not in after
    assert not np.array_equal(after["walking"], before["walking"])
    np.testing.assert_array_equal(after["sailed"], before["sailed"])


@pytest.mark.rejects
def test_runs_that_cannot_be_trained_further_are_rejected(folder):
    train(["a.txt"], "v", recipe=options())
    before = file_contents(folder)
    want = "v has no state to train further from: it was trained without --keep-state"
    with pytest.raises(FileNotFoundError, match=want):
        train(["a.txt"], "v", more=MoreEpochs(2))
    train(["a.txt"], "w", recipe=options(keep_state=True))
    with pytest.raises(ValueError, match="w is finished: give a number of epochs"):
        train(["a.txt"], "w")
    with pytest.raises(ValueError, match="epochs must be positive, got 0"):
        train(["a.txt"], "w", more=MoreEpochs(0))
    assert before.items() <= file_contents(folder).items()


def test_command_trains_further(folder):
    fast = ["--dim", "12", "--batch", "128", "--sample", "1", "--window", "2", "-q"]
    stdout_of("train", "a.txt", *fast, "--epochs", "3", "--keep-state", "-o", "cli")
    train(["a.txt"], "v", recipe=options(keep_state=True))
    assert file_contents(folder / "cli") == file_contents(folder / "v")
    stdout_of(
        "train", "--resume", "a.txt", "--epochs", "2", "--lr", "0.1", "-q", "-o", "cli"
    )
    train(["a.txt"], "v", more=MoreEpochs(2, lr=0.1))
    assert file_contents(folder / "cli") == file_contents(folder / "v")
    want = "--lr with --resume needs --epochs"
    got = error_message("train", "--resume", "a.txt", "--lr", "0.1", "-o", "cli", code=2)
    assert got.startswith(want)


@pytest.mark.parametrize("method", ["skipgram", "cbow"])
def test_words_never_seen_have_vectors_from_their_ngrams(folder, method):
    changes = {"method": method, "buckets": 500, "min_n": 2, "epochs": 10, "lower": True}
    trained = train(["a.txt"], "v", recipe=options(**changes))
    assert trained.finished and sorted(path.name for path in (folder / "v").iterdir()) == [
        "config.json",
        "model.safetensors",
        "modules.json",
        "subwords.safetensors",
        "tokenizer.json",
    ]
    vectors = open_vectors("v")
    assert vectors.subwords is not None and vectors.subwords.table.shape == (500, 12)
    found = vectors.find("Snoring")
    assert re.fullmatch(r"Snoring is the mean of \d+ character n-grams", found.note)
    np.testing.assert_array_equal(vectors["Snoring"], vectors["snoring"])
    near = neighbors(vectors, [[(1, "snoring")]], count=6)[0].found
    assert all(one.word.endswith("ing") for one in near)
    # A text is the mean of its words, whether they are in the vocabulary or not.
    text = vectors["walking"] + vectors["snoring"] + vectors["jumped"]
    got = np.concatenate(list(encode(vectors, ["Walking, Snoring jumped!", "snoring"])))
    want = np.stack([text, vectors["snoring"]])
    want /= np.linalg.norm(want, axis=1, keepdims=True)
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_vector_of_a_word_is_the_mean_of_its_rows_in_the_files(folder):
    recipe = options(keep_state=True, buckets=100, min_n=2, max_n=3, method="cbow")
    train(["a.txt"], "v", recipe=recipe)
    vectors, state = open_vectors("v"), load_file(folder / "v" / "training.safetensors")
    words = len(vectors)
    assert vectors.subwords is not None
    np.testing.assert_array_equal(vectors.subwords.table, state["table"][words:])
    # Fourteen n-grams: those of two and three characters of <walked>.
    of_word = vectors.subwords.means([b"walked"], np.array([-1]))[0][0]
    row = state["table"][vectors.rows["walked"]]
    want = (row + 13 * of_word) / 14
    np.testing.assert_allclose(vectors["walked"], want, atol=1e-6)
    assert not vectors["[UNK]"].any()
    # A folder is converted with its n-grams.
    stdout_of("convert", "v", "copy", "--to", "folder", "-q")
    copy = open_vectors("copy")
    np.testing.assert_array_equal(copy["snored"], vectors["snored"])
    np.testing.assert_array_equal(copy.weight, vectors.weight)


@pytest.mark.rejects
def test_damaged_rows_of_ngrams_are_rejected(folder):
    train(["a.txt"], "v", recipe=options(buckets=10))
    path = folder / "v" / "subwords.safetensors"
    good = path.read_bytes()
    path.write_bytes(good.replace(b"[3, 6]", b"[6, 3]").replace(rb"[3, 6]", rb"[6, 3]"))
    with pytest.raises(
        ValueError, match=re.escape("n-grams of 1 to 64 characters, got [6, 3]")
    ):
        open_vectors("v")
    path.write_bytes(good.replace(b'"shape":[10,12]', b'"shape":[12,10]'))
    with pytest.raises(ValueError, match="rows of n-grams of width 12, got .12, 10"):
        open_vectors("v")
    save_file({"ngrams": np.zeros((10, 12), np.float32)}, path)
    with pytest.raises(ValueError, match="has no config in its metadata"):
        open_vectors("v")


@pytest.mark.rejects
def test_ngrams_of_pieces_are_rejected():
    with pytest.raises(
        ValueError, match="buckets must be 0 with kind 'bpe', got 7: its pieces"
    ):
        TrainingOptions(kind="bpe", setting=Word2VecOptions(buckets=7))
