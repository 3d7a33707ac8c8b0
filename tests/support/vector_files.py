"""Small files with vectors and words, in every format that is read."""

import gzip
import json
import pickle
import struct
from pathlib import Path

import numpy as np

from tests.support.table_files import gguf_bytes, gguf_string, word2vec_bytes

WORDS = ["king", "queen", "naïve", "漢字", "red"]


def table(width: int = 6) -> np.ndarray:
    """Return one row for each of :data:`WORDS`."""
    rng = np.random.default_rng(0)
    return rng.standard_normal((len(WORDS), width)).astype(np.float32)


def text_lines(rows: np.ndarray, *, separator: str = " ") -> str:
    """Return a word and its numbers per line."""
    return "".join(
        separator.join([word, *map(str, row)]) + "\n"
        for word, row in zip(WORDS, rows, strict=True)
    )


def fasttext_bytes(
    words: list[str],
    rows: np.ndarray,
    *,
    buckets: int,
    lengths: tuple[int, int] = (2, 4),
    pruned: int = -1,
    version: int = 12,
) -> bytes:
    """Return a model of fastText; the last ``buckets`` rows are those of n-grams."""
    width = rows.shape[1]
    options = (width, 5, 1, 1, 5, 1, 2, 2, buckets, *lengths, 100)
    head = struct.pack("<2i12id", 793712314, version, *options, 1e-4)
    entries = b"".join(word.encode() + b"\0" + struct.pack("<qb", 1, 0) for word in words)
    counts = struct.pack("<3i2q", len(words), len(words), 0, 99, pruned)
    matrix = struct.pack("<?2q", False, *rows.shape) + rows.tobytes()
    return head + counts + entries + matrix + struct.pack("<?2q", False, 0, width)


def quantized_fasttext_bytes(
    words: list[str],
    codes: np.ndarray,
    centroids: list[np.ndarray],
    *,
    buckets: int,
    kept: list[tuple[int, int]] | None = None,
    norms: tuple[np.ndarray, np.ndarray] | None = None,
    lengths: tuple[int, int] = (2, 4),
) -> bytes:
    """Return a quantized model of fastText (``.ftz``).

    Args:
        words: The words.
        codes: Codes of each row, those of n-grams last.
        centroids: 256 centroids of each part of a row.
        buckets: Number of hashes of n-grams.
        kept: Hash and row of each n-gram; None if all have a row.
        norms: Code of each row, and 256 norms; None without norms.
        lengths: Shortest and longest n-gram.
    """
    width = sum(part.shape[1] for part in centroids)
    options = (width, 5, 1, 1, 5, 1, 2, 2, buckets, *lengths, 100)
    head = struct.pack("<2i12id", 793712314, 12, *options, 1e-4)
    entries = b"".join(word.encode() + b"\0" + struct.pack("<qb", 1, 0) for word in words)
    pruned = -1 if kept is None else len(kept)
    counts = struct.pack("<3i2q", len(words), len(words), 0, 99, pruned)
    pairs = b"".join(struct.pack("<2i", *pair) for pair in kept or ())
    each, last = centroids[0].shape[1], centroids[-1].shape[1]
    matrix = struct.pack("<??2qi", True, norms is not None, len(codes), width, codes.size)
    matrix += codes.tobytes() + struct.pack("<4i", width, len(centroids), each, last)
    matrix += b"".join(part.astype("<f4").tobytes() for part in centroids)
    if norms is not None:
        matrix += norms[0].tobytes() + struct.pack("<4i", 1, 1, 1, 1)
        matrix += norms[1].astype("<f4").tobytes()
    return head + counts + entries + pairs + matrix


def _quantized(rows: np.ndarray) -> bytes:
    """Return a quantized model whose centroids are the rows."""
    codes = np.arange(len(rows), dtype=np.uint8)[:, None]
    centroids = np.zeros((256, rows.shape[1]))
    centroids[: len(rows)] = rows
    return quantized_fasttext_bytes(WORDS, codes, [centroids], buckets=9, kept=[])


def gguf_vocabulary(rows: np.ndarray, words: list[str]) -> bytes:
    """Return a GGUF file with a float32 token table and its tokens."""
    tokens = b"".join(gguf_string(word.encode()) for word in words)
    values = (
        gguf_string(b"general.name") + struct.pack("<I", 8) + gguf_string(b"x"),
        gguf_string(b"tokenizer.ggml.tokens")
        + struct.pack("<IIQ", 9, 8, len(words))
        + tokens,
    )
    tensors = {"token_embd.weight": (0, rows.shape, rows.tobytes())}
    return gguf_bytes(tensors, values=values)


def write_all(folder: Path) -> dict[str, Path]:
    """Write one file of each format with :func:`table`; return them by format.

    Files of gensim, torch and pyarrow are written by those libraries.
    """
    import pyarrow
    import pyarrow.parquet
    import torch
    from gensim.models import KeyedVectors
    from safetensors.numpy import save_file

    rows, lines = table(), text_lines(table())
    files = {
        "word2vec text": ("a.txt", f"5 6\n{lines}".encode()),
        "word2vec with tabs": ("tabs.txt", f"5\t6\n{lines}".replace(" ", "\t").encode()),
        "word2vec binary": ("a.bin", word2vec_bytes(WORDS, rows, newline=True)),
        "glove": ("glove.txt", lines.encode()),
        "glove with CRLF": ("crlf.txt", lines.replace("\n", "\r\n").encode()),
        "words in TSV": ("words.tsv", text_lines(rows, separator="\t").encode()),
        "gzip": ("a.txt.gz", gzip.compress(f"5 6\n{lines}".encode())),
        "gzip of binary": (
            "b.bin.gz",
            gzip.compress(word2vec_bytes(WORDS, rows, newline=False)),
        ),
        "gguf": ("a.gguf", gguf_vocabulary(rows, WORDS)),
        "fasttext without n-grams": (
            "ft.bin",
            fasttext_bytes(WORDS, rows, buckets=0, lengths=(0, 0)),
        ),
        "quantized fasttext": ("ft.ftz", _quantized(rows)),
    }
    found = {}
    for kind, (name, content) in files.items():
        found[kind] = folder / name
        found[kind].write_bytes(content)
    np.save(folder / "a.npy", rows)
    (folder / "a.vocab.txt").write_text("\n".join(WORDS) + "\n")
    np.savez_compressed(folder / "a.npz", table=rows, words=np.array(WORDS))
    vectors = "".join("\t".join(map(str, row)) + "\n" for row in rows)
    (folder / "v.tsv").write_text(vectors)
    metadata = "word\tcount\n" + "".join(f"{word}\t1\n" for word in WORDS)
    (folder / "v.metadata.tsv").write_text(metadata)
    kv = KeyedVectors(6)
    kv.add_vectors(WORDS, rows)
    kv.save(str(folder / "a.kv"))
    kv.save(str(folder / "side.kv"), sep_limit=1)
    columns = {"word": WORDS, "vector": list(rows)}
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "a.parquet")
    found |= {
        "parquet": folder / "a.parquet",
        "npy": folder / "a.npy",
        "npz": folder / "a.npz",
        "tsv": folder / "v.tsv",
        "gensim": folder / "a.kv",
        "gensim with side files": folder / "side.kv",
    }
    vocabulary = "\n".join(WORDS) + "\n"
    for kind, name in (("torch", "pytorch_model.bin"), ("vocab.txt", "model.safetensors")):
        inner = folder / kind
        inner.mkdir()
        (inner / "vocab.txt").write_text(vocabulary)
        if kind == "torch":
            torch.save({"wte.weight": torch.from_numpy(rows)}, inner / name)
        else:
            save_file({"wte.weight": rows}, inner / name)
        found[kind] = inner
    sharded = folder / "sharded"
    sharded.mkdir()
    save_file({"x": rows}, sharded / "m-1.safetensors")
    save_file({"wte.weight": rows}, sharded / "m-2.safetensors")
    index = {"weight_map": {"x": "m-1.safetensors", "wte.weight": "m-2.safetensors"}}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    (sharded / "vocab.txt").write_text(vocabulary)
    return found | {"sharded": sharded}


class Command:
    """A pickle of this object runs a command where it is loaded."""

    def __init__(self, function: object, *args: object) -> None:
        self.call = function, args

    def __reduce__(self):
        return self.call


def pickled(value: object, protocol: int) -> bytes:
    """Return a pickle, with the version of the protocol in its first bytes."""
    return pickle.dumps(value, protocol)
