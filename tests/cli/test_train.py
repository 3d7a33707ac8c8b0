"""``firstlayer train``, from text to a folder, and its errors."""

import gzip
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
from safetensors.numpy import load_file

from firstlayer import kernels
from firstlayer.word_vectors import train as train_module
from firstlayer.word_vectors.text import standard_library
from firstlayer.word_vectors.vectors import open_vectors
from firstlayer.word_vectors.word2vec import Word2Vec
from tests.support.command import (
    call,
    call_alone,
    error_line,
    error_message,
    file_contents,
    stdout_of,
)

FAST = ["--dim", "8", "--epochs", "2", "--batch", "256", "--sample", "1", "-q"]
rng = np.random.default_rng(0)


def text_of(count=3000):
    words = "red green blue cat dog cow sees hears finds É_1 Ωmega".split()
    return " ".join(rng.choice(words, count)) + "\n"


TEXT = text_of()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a folder with a text file, which is the working directory."""
    (tmp_path / "a.txt").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def weight(folder, name="vectors"):
    return load_file(folder / name / "model.safetensors")["embeddings"]


def test_train_writes_a_folder_and_prints_neighbors(folder):
    text = stdout_of("train", "a.txt", *FAST)
    assert sorted(os.listdir(folder / "vectors")) == [
        "config.json",
        "model.safetensors",
        "modules.json",
        "tokenizer.json",
    ]
    rows = weight(folder)
    assert rows.shape == (12, 8) and rows.dtype == np.float32 and not rows[0].any()
    first, *others = text.splitlines()
    assert first.startswith("12 × 8 from 3,000 tokens in ") and "in vectors" in first
    assert others and all(len(line.split()) == 11 for line in others)
    assert sorted(os.listdir(folder)) == ["a.txt", "vectors"]


def test_train_json_equals_text(folder):
    found = json.loads(stdout_of("train", "a.txt", *FAST, "--json", "-o", "out"))
    assert found["folder"] == "out" and found["finished"] is True
    assert (found["num_embeddings"], found["embedding_dim"]) == (12, 8)
    assert (found["tokens"], found["documents"]) == (3000, 1)
    assert found["progress"]["done"] == 1 and found["progress"]["loss"] > 0
    assert found["progress"]["tokens"] == 6000
    for near in found["neighbors"]:
        cosines = [one["cosine"] for one in near["found"]]
        assert near["query"] not in {one["word"] for one in near["found"]}
        assert cosines == sorted(cosines, reverse=True) and len(cosines) == 5


def test_output_is_independent_of_threads(folder, monkeypatch):
    monkeypatch.setenv("RAYON_NUM_THREADS", "2")
    before = kernels.get_num_threads()
    for threads in (1, 2, 5):
        stdout_of("train", "a.txt", *FAST, "--threads", threads, "-o", f"by-{threads}")
    kernels.set_num_threads(before)
    assert (
        file_contents(folder / "by-1")
        == file_contents(folder / "by-2")
        == file_contents(folder / "by-5")
    )
    stdout_of("train", "a.txt", *FAST, "--seed", "1", "-o", "other")
    assert weight(folder, "other").tobytes() != weight(folder, "by-1").tobytes()


def test_standard_input_and_several_files_are_read(folder):
    stdout_of("train", "-", *FAST, "-o", "piped", text=TEXT)
    stdout_of("train", "a.txt", *FAST, "-o", "named")
    assert weight(folder, "piped").tobytes() == weight(folder, "named").tobytes()
    (folder / "b.txt").write_text("quite another text " * 20)
    found = json.loads(stdout_of("train", "a.txt", "b.txt", *FAST, "--json", "-o", "both"))
    assert (found["documents"], found["tokens"]) == (2, 3060)


def test_folders_json_lines_encodings_and_patterns_are_read(folder):
    (folder / "texts" / "sub").mkdir(parents=True)
    half = len(TEXT) // 2 + TEXT[len(TEXT) // 2 :].index(" ")
    (folder / "texts" / "a.txt").write_text(TEXT[:half], encoding="utf-16")
    (folder / "texts" / "b.txt.gz").write_bytes(gzip.compress(TEXT[half:].encode()))
    (folder / "texts" / "sub" / "x.png").write_bytes(b"PNG\0")
    done = call("train", "texts", *FAST[:-1], "-o", "texts-vectors")
    assert done.exit_code == 0, done.stderr
    assert done.stderr.startswith("reading 2 files (1 left out: binary or empty)\n")
    found = json.loads(stdout_of("train", "texts", *FAST, "--json", "-o", "again"))
    assert (found["documents"], found["tokens"]) == (2, 3000)
    lines = TEXT.replace(" ", "\n", 99).splitlines()
    pages = "".join(json.dumps({"body": line}) + "\n" for line in lines)
    (folder / "pages.jsonl").write_text(pages)
    options = ["pages.jsonl", "--text-field", "body", "-o", "pages"]
    found = json.loads(stdout_of("train", *options, *FAST, "--json"))
    assert (found["documents"], found["tokens"]) == (100, 3000)
    (folder / "lines.txt").write_text("\n".join(lines), encoding="utf-16-le")
    options = ["lines.txt", "--lines", "--encoding", "utf-16-le", "-o", "lines"]
    stdout_of("train", *options, *FAST, "--scratch", ".")
    assert weight(folder, "lines").tobytes() == weight(folder, "pages").tobytes()
    (folder / "b.txt").write_text("new-york is new-york, " * 9)
    stdout_of("train", "b.txt", *FAST, "--pattern", r"[\w-]+", "-o", "pattern")
    tokens = json.loads((folder / "pattern" / "tokenizer.json").read_text())
    assert set(tokens["model"]["vocab"]) == {"[UNK]", "new-york", "is"}
    texts = [
        json.loads(line)["text"]
        for line in stdout_of(
            "encode", "pattern", "pages.jsonl", "--text-field", "body"
        ).splitlines()
    ]
    assert texts == lines
    assert ".firstlayer" not in "".join(os.listdir(folder))


def test_phrases_are_rows_and_found_in_text(folder, interrupt_at, monkeypatch):
    words = [f"é{i}" for i in rng.integers(0, 20, 2000)]
    words[::33] = ["New York"] * len(words[::33])
    (folder / "b.txt").write_text(" ".join(words), encoding="latin-1")
    options = ["b.txt", *FAST[:-1], "--phrases", "1", "--phrase-threshold", "1", "--lower"]
    options += ["--encoding", "latin-1"]
    done = call("train", *options, "-o", "whole")
    assert done.exit_code == 0, done.stderr
    assert "joining phrases\nfound 1 phrase\n" in done.stderr
    vectors = open_vectors(folder / "whole")
    own = vectors.weight[vectors.rows["new_york"]]
    assert np.array_equal(vectors["new_york"], own)
    assert np.array_equal(vectors["New York"], own) and own.any()
    assert vectors.find("é1 é2").note == "é1 é2 is the mean of é1 and é2"
    line = stdout_of("encode", "whole", text="in New\tYork")
    want = own / np.linalg.norm(own)
    np.testing.assert_allclose(json.loads(line)["vector"], want, atol=1e-6)
    near = stdout_of("neighbors", "whole", "new_york", "-n", "30")
    quoted = stdout_of("neighbors", "whole", "New York", "-n", "30")
    assert quoted == f"New York\n{near}"
    # Words that occur in the phrase alone have no direction.
    assert near.count("\n") == 20 and not {"new", "york"} & set(near.split())
    stdout_of("convert", "whole", "copy")
    assert np.array_equal(open_vectors(folder / "copy")["new york"], own)
    options += ["--method", "cbow", "--buckets", "500"]
    stdout_of("train", *options, "-q", "-o", "at once")
    interrupt_at(3)
    assert call("train", *options, "-o", "parts").exit_code == 130
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    before = kernels.get_num_threads()
    kernels.set_num_threads(before + 1)
    stdout_of("train", "--resume", "b.txt", "-o", "parts", "-q")
    kernels.set_num_threads(before)
    assert file_contents(folder / "parts") == file_contents(folder / "at once")
    (folder / "whole" / "phrases.json").write_text('[[["new", "gone"]]]')
    want = "whole/phrases.json does not hold phrases of known words"
    assert error_message("neighbors", "whole", "new") == want
    done = call("train", *options, "--phrase-threshold", "1e9", "-o", "none")
    assert "found 0 phrases: a lower threshold joins more\n" in done.stderr
    want = "phrases are of words, but the tokenizer is bpe"
    assert want in error_message("train", *options, "--tokenizer", "bpe", "-o", "bpe")


def test_named_pipe_is_read_once(folder):
    os.mkfifo(folder / "pipe")
    writer = threading.Thread(target=(folder / "pipe").write_text, args=[TEXT])
    writer.start()
    stdout_of("train", "pipe", *FAST, "-o", "piped")
    writer.join()
    stdout_of("train", "a.txt", *FAST, "-o", "named")
    assert weight(folder, "piped").tobytes() == weight(folder, "named").tobytes()


@pytest.mark.rejects
def test_missing_file_is_rejected_before_reading(folder, monkeypatch):
    monkeypatch.setattr(train_module, "learn_tokenizer", lambda *args, **options: 1 / 0)
    want = "gone.txt: no such file or directory"
    assert error_message("train", "a.txt", "gone.txt", *FAST) == want


def test_every_option_changes_the_table(folder):
    stdout_of("train", "a.txt", *FAST, "-o", "plain")
    plain = weight(folder, "plain")
    options = ["--window=3", "--negatives=3", "--sample=0.01", "--lr=0.3", "--batch=100"]
    for option in [*options, "--epochs=3"]:
        stdout_of("train", "a.txt", *FAST, option, "--force", "-o", "other")
        assert weight(folder, "other").shape == plain.shape
        assert not np.allclose(weight(folder, "other"), plain, atol=1e-3)
    stdout_of(
        "train", "a.txt", *FAST, "--dim", "5", "--vocab", "7", "--force", "-o", "other"
    )
    assert weight(folder, "other").shape == (7, 5)
    (folder / "b.txt").write_text("Red RED red " * 3 + "few " * 6 + "fewer " * 2)
    stdout_of("train", "b.txt", *FAST, "--lower", "--min-count", "6", "-o", "lower")
    tokens = json.loads((folder / "lower" / "tokenizer.json").read_text())
    assert tokens["model"]["vocab"] == {"[UNK]": 0, "red": 1, "few": 2}


def test_bpe_encodes_any_text(folder):
    stdout_of("train", "a.txt", *FAST, "--tokenizer", "bpe", "--vocab", "280")
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "vectors" / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == len(weight(folder)) == 280
    never_seen = "Ωmega unseen 漢字 \t!"
    assert tokenizer.decode(tokenizer.encode(never_seen).ids) == never_seen
    # Words are looked up without the word-start prefix of their token.
    assert "Ġfinds" in tokenizer.get_vocab() and "finds" not in tokenizer.get_vocab()
    near = stdout_of("neighbors", "vectors", "finds", "-n", "3")
    assert near.count("\n") == 3 and "Ġ" not in near


def test_neighbors_are_shown_for_whole_words_with_bpe(folder):
    options = ["--tokenizer", "bpe", "--vocab", "320"]
    found = json.loads(stdout_of("train", "a.txt", *FAST, *options, "--json"))
    shown = [near["query"] for near in found["neighbors"]]
    assert shown and set(shown) <= set(TEXT.split())


def test_train_defaults_to_python_source(folder, monkeypatch):
    files = standard_library()
    names = {path.name for path in files}
    assert {"typing.py", "socket.py", "argparse.py"} <= names and len(files) > 300
    assert not any({"test", "site-packages"} & set(path.parts[-3:-1]) for path in files)
    few = [path for path in files if path.name in ("socket.py", "typing.py", "json.py")]
    monkeypatch.setattr(train_module, "standard_library", lambda: few)
    text = stdout_of("train", *FAST, "-o", "v")
    assert "\nTypeError  " in text and "\nsocket     " in text


def test_encode_equals_model2vec(folder):
    from model2vec import StaticModel

    stdout_of("train", "a.txt", *FAST)
    lines = ["red green É_1", "unknown words", "cat unknown dog", "", "cow " * 2000]
    rows = [
        json.loads(line)["vector"]
        for line in stdout_of("encode", "vectors", text="\n".join(lines)).splitlines()
    ]
    model = StaticModel.from_pretrained(folder / "vectors")
    np.testing.assert_allclose(model.encode(lines), rows, atol=1e-6)
    assert model.tokens == tuple(
        json.loads((folder / "vectors" / "tokenizer.json").read_text())["model"]["vocab"]
    )


def test_encode_equals_sentence_transformers(folder):
    stdout_of("train", "a.txt", *FAST)
    stdout_of("encode", "vectors", "a.txt", "-o", "a.npy")
    script = """
import numpy as np
from sentence_transformers import SentenceTransformer
model = SentenceTransformer("vectors", device="cpu", local_files_only=True)
kinds = [type(module).__name__ for module in model]
assert kinds == ["StaticEmbedding", "Normalize"], kinds
got = model.encode([open("a.txt").read(), "red green"])
np.testing.assert_allclose(got[:1], np.load("a.npy"), atol=1e-6)
assert abs(np.linalg.norm(got[1]) - 1) < 1e-6
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def interrupt_at(monkeypatch):
    """Return a function that raises SIGINT during the given batch."""
    step = Word2Vec._step

    def at(batch):
        left = iter(range(batch))

        def stepping(model):
            if next(left, None) is None:
                signal.raise_signal(signal.SIGINT)
            return step(model)

        monkeypatch.setattr(Word2Vec, "_step", stepping)

    yield at
    monkeypatch.undo()


def test_resume_after_ctrl_c_gives_the_same_bits(folder, interrupt_at, monkeypatch):
    handler = signal.getsignal(signal.SIGINT)
    stdout_of("train", "a.txt", *FAST, "-o", "whole")
    interrupt_at(5)
    done = call("train", "a.txt", *FAST, "-o", "parts")
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    resume = "firstlayer train --resume a.txt -o parts"
    want = rf"firstlayer: interrupted at \d+%; resume with: {resume}\n"
    assert done.exit_code == 130 and re.fullmatch(want, done.stderr)
    assert signal.getsignal(signal.SIGINT) is handler
    # The partial result can be used.
    assert (folder / "parts" / "training.safetensors").exists()
    assert stdout_of("neighbors", "parts", "red", "-n", "2").count("\n") == 2
    assert weight(folder, "parts").tobytes() != weight(folder, "whole").tobytes()
    stdout_of("train", "--resume", "a.txt", "-o", "parts", "-q")
    assert file_contents(folder / "parts") == file_contents(folder / "whole")


@pytest.mark.rejects
def test_resume_hint_quotes_file_names(folder, interrupt_at):
    (folder / "it's a text").write_text(TEXT)
    interrupt_at(3)
    done = call("train", "it's a text", *FAST, "-o", "a folder")
    typed = done.stderr.partition("resume with: ")[2].strip()
    want = ["firstlayer", "train", "--resume", "it's a text", "-o", "a folder"]
    assert done.exit_code == 130 and shlex.split(typed) == want


@pytest.mark.rejects
def test_ctrl_c_while_reading_exits_at_once(folder, monkeypatch):
    def tokenized(*args, **options):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(train_module, "tokenized", tokenized)
    done = call("train", "a.txt", *FAST)
    assert (done.exit_code, done.stdout) == (130, "")
    assert done.stderr.split() == ["firstlayer:", "interrupted"]
    assert os.listdir(folder) == ["a.txt"]


def test_progress_shows_speed_and_loss(folder):
    master, terminal = os.openpty()
    done = call_alone(
        "train", "a.txt", *FAST[:-1], folder=folder, stdout=subprocess.PIPE, stderr=terminal
    )
    os.close(terminal)
    drawn = os.read(master, 1 << 16).decode()
    os.close(master)
    assert done.returncode == 0 and done.stdout.startswith("12 × 8 from 3,000 tokens")
    assert re.search(r"training .*100 %.*\d tokens/s, loss \d+\.\d{3}", drawn)
    assert drawn.startswith("reading 1 file\r\ntraining 12 rows from 3,000 tokens\r\n")


@pytest.mark.rejects
def test_resume_rejects_a_different_text_and_options(folder, interrupt_at, monkeypatch):
    want = "no file or folder vectors"
    assert error_message("train", "--resume", "a.txt") == want
    interrupt_at(5)
    assert call("train", "a.txt", *FAST).exit_code == 130
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    before = file_contents(folder)
    (folder / "b.txt").write_text(TEXT + TEXT)
    assert "the text differs from the one vectors was started with" in error_message(
        "train", "--resume", "b.txt"
    )
    (folder / "b.txt").unlink()
    want = "--resume keeps the options of the first run: remove --dim (see firstlayer"
    assert error_message("train", "--resume", "a.txt", "--dim", "9", code=2).startswith(
        want
    )
    assert file_contents(folder) == before
    config = json.loads((folder / "vectors" / "config.json").read_text())
    for about in ({}, {**config["firstlayer"], "setting": {"window": 99}}, {"text": 1}):
        text = json.dumps({**config, "firstlayer": about})
        (folder / "vectors" / "config.json").write_text(text)
        error_message("train", "--resume", "a.txt")
    (folder / "vectors" / "config.json").write_text("{")
    assert error_message("train", "--resume", "a.txt").endswith("config.json is not JSON")
    stdout_of("train", "a.txt", *FAST, "--force")
    assert error_message("train", "--resume", "a.txt") == (
        "vectors has no run to resume: training.safetensors is missing; a finished run "
        "has it only after --keep-state"
    )


BAD = {
    "missing": (None, "bad.txt: no such file or directory"),
    "empty": (b"", "bad.txt is empty"),
    "spaces": (b" \n \t", "at least 2 different tokens in its vocabulary, got 0"),
    "binary": (b"some text\0more", "bad.txt is binary, not text: byte 9 is 0"),
    "late": (
        b"word\n" * 99_999 + b"\xff",
        "bad.txt is not UTF-8 text: byte 499995 (line 100000) is 0xff",
    ),
    "one word": (b"word " * 99, "at least 2 different tokens in its vocabulary, got 1"),
    "rare words": (b"each word is new", "got 0: give more text or a lower min_count"),
}


@pytest.mark.parametrize("content, want", BAD.values(), ids=BAD)
@pytest.mark.rejects
def test_invalid_text_is_rejected_and_nothing_is_written(folder, content, want):
    if content is not None:
        (folder / "bad.txt").write_bytes(content)
    before = file_contents(folder)
    assert want in error_message("train", "bad.txt", *FAST)
    assert file_contents(folder) == before and not (folder / "vectors").exists()


@pytest.mark.rejects
def test_empty_folder_and_empty_input_are_rejected(folder):
    (folder / "sub").mkdir()
    assert error_message("train", "sub") == "sub is a folder without text files"
    assert error_message("train", "-", text="") == "standard input is empty"


@pytest.mark.rejects
def test_only_word_vector_folders_are_replaced_by_force(folder):
    stdout_of("train", "a.txt", *FAST)
    before = file_contents(folder)
    assert (
        error_message("train", "a.txt", *FAST)
        == "vectors exists; use --force to replace it"
    )
    with pytest.raises(FileExistsError, match="vectors exists already"):
        train_module.train(["a.txt"], "vectors", recipe=train_module.TrainingOptions())
    assert file_contents(folder) == before
    stdout_of("train", "a.txt", *FAST, "--force", "--seed", "3")
    assert file_contents(folder).keys() == before.keys() and file_contents(folder) != before
    (folder / "vectors" / "notes.md").write_text("mine")
    before = file_contents(folder)
    want = "vectors holds 'notes.md', so it is not replaced"
    assert error_message("train", "a.txt", *FAST, "--force") == want
    assert error_message("train", "a.txt", "-o", "a.txt", "--force").endswith(
        "is not a folder"
    )
    assert "no folder" in error_message("train", "a.txt", "-o", "x/y/z")
    assert file_contents(folder) == before
    (folder / "bare").mkdir()
    stdout_of("train", "a.txt", *FAST, "-o", "bare")
    assert weight(folder, "bare").shape == (12, 8)


@pytest.mark.rejects
def test_unwritable_output_is_rejected_before_any_work(folder):
    # In sysfs, even root cannot create a folder.
    done = call("train", "a.txt", "-o", "/sys/vectors")
    assert (done.exit_code, done.stdout) == (1, "")
    assert re.fullmatch(r"firstlayer: nothing can be written in /sys: .*\n", done.stderr)


@pytest.mark.rejects
def test_diverged_training_writes_nothing(folder):
    want = "training diverged with lr 1e+30 (not finite): use a lower lr"
    assert error_message("train", "a.txt", *FAST, "--lr", "1e30") == want
    assert os.listdir(folder) == ["a.txt"]


FULL = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))
"""


@pytest.mark.rejects
def test_full_disk_keeps_the_old_folder(folder):
    stdout_of("train", "a.txt", *FAST)
    before = file_contents(folder)
    # One thread: a helper could not store its compiled loop in Numba's cache.
    args = ["train", "a.txt", *FAST, "--force", "--seed", "1", "--threads", "1"]
    done = call_alone(*args, folder=folder, before=FULL)
    assert done.returncode == 1
    assert error_line(done.stdout, done.stderr) == "file too large"
    done = call_alone(*args, "-o", "new", folder=folder, before=FULL)
    assert done.returncode == 1 and file_contents(folder) == before
    assert sorted(os.listdir(folder)) == ["a.txt", "vectors"]
