"""Parquet files with columns ``word`` and ``vector``."""

import json
import re

import numpy as np
import pyarrow
import pyarrow.parquet as parquet
import pytest

from firstlayer.numpy import Embedding
from firstlayer.vector_files import parquet as parquet_module
from firstlayer.vector_files.reading import read_vectors
from firstlayer.vector_files.table import VectorTable
from firstlayer.vector_files.writing import write_vectors
from tests.support.command import call, stdout_of


def test_a_table_is_read_back_in_batches_bit_for_bit(tmp_path, monkeypatch):
    rows = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)
    rows[2] = np.nan, -np.inf, -0.0
    words = ["a", "b c", "日本", "a\nb", ""]
    path = tmp_path / "a.parquet"
    write_vectors(VectorTable(words, rows), path, "parquet")
    monkeypatch.setattr(parquet_module, "CHUNK_NUMBERS", 6)
    for need_words in (True, False):
        found = read_vectors(path, need_words=need_words)
        assert found.words == words and found.weight.tobytes() == rows.tobytes()
    stdout_of("convert", path, tmp_path / "b.bin")
    found = read_vectors(tmp_path / "b.bin")
    assert found.words == ["a", "日本"]
    assert found.weight.tobytes() == rows[[0, 2]].tobytes()


EMPTY = pyarrow.array([], pyarrow.list_(pyarrow.float32()))
COLUMN_TYPES = [
    pyarrow.list_(pyarrow.float64()),
    pyarrow.large_list(pyarrow.float32()),
    pyarrow.list_(pyarrow.float16()),
    pyarrow.list_(pyarrow.float16(), 2),
]


@pytest.mark.parametrize("type", COLUMN_TYPES, ids=str)
@pytest.mark.parametrize("compression", ["zstd", "none"])
@pytest.mark.parametrize("words", [pyarrow.large_string(), pyarrow.string_view()], ids=str)
def test_parquet_of_other_types_is_read(type, compression, words, tmp_path):
    rows = np.array([[1.5, -2], [0.25, 3], [7, 8]], np.float16)
    # Other columns, before and between, are not read.
    columns = {"id": [1, 2, 3], "vector": list(rows), "word": ["a", None, "a"]}
    columns["x"] = [[1], [], [2]]
    schema = pyarrow.schema([
        ("id", pyarrow.int64()),
        ("vector", type),
        ("word", words),
        ("x", pyarrow.list_(pyarrow.int64())),
    ])
    table = pyarrow.table(columns, schema=schema)
    path = tmp_path / "a.parquet"
    parquet.write_table(table, path, compression=compression, row_group_size=2)
    found = read_vectors(path)
    assert found.words == ["a", "", "a"] and found.weight.dtype == np.float32
    np.testing.assert_array_equal(found.weight, rows)
    parquet.write_table(table.drop_columns(["word"]), path)
    np.testing.assert_array_equal(Embedding.from_pretrained(path).weight, rows)
    done = call("inspect", path, "--json")
    assert json.loads(done.stdout)["tables"][0]["shape"] == [3, 2]


@pytest.mark.rejects
@pytest.mark.parametrize(
    "columns, message",
    [
        ({"token": ["a"], "vector": [[1.0]]}, "must have one column 'word', got the colu"),
        ({"word": ["a"], "embedding": [[1.0]]}, "must have one column 'vector', got the"),
        ({"word": [1], "vector": [[1.0]]}, "must have words of type string, got int64"),
        ({"word": ["a"], "vector": [1.0]}, "must have vectors of lists of floats, got do"),
        ({"word": ["a"], "vector": [[1]]}, r"of lists of floats, got list<element: int64>"),
        ({"word": ["a", "b"], "vector": [[1.0], None]}, "in each row, got null"),
        ({"word": ["a"], "vector": [[1.0, None]]}, "in each row, got null"),
        (
            {"word": ["a", "b"], "vector": [[1.0], [1.0, 2.0]]},
            "must have vectors of one length, got 1 and 2",
        ),
        (
            {
                "word": ["a"],
                "vector": pyarrow.array([[]], pyarrow.list_(pyarrow.float32())),
            },
            "rows and a width, got none",
        ),
        (
            {"word": pyarrow.array([], "string"), "vector": EMPTY},
            "rows and a width, got none",
        ),
    ],
)
def test_parquet_of_another_schema_is_refused(columns, message, tmp_path):
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table(columns), path)
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))} must have .*"):
        read_vectors(path)
    with pytest.raises(ValueError, match=message):
        read_vectors(path)


@pytest.mark.rejects
def test_parquet_that_claims_too_many_numbers_for_its_size_is_refused(
    tmp_path, monkeypatch
):
    path = tmp_path / "a.parquet"
    vectors = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(np.zeros(1 << 16)), 64)
    words = pyarrow.array(["a"] * len(vectors))
    parquet.write_table(pyarrow.table({"word": words, "vector": vectors}), path)
    assert read_vectors(path).weight.shape == (1 << 10, 64)
    monkeypatch.setattr(parquet_module, "MAX_NUMBERS_PER_BYTE", 1)
    with pytest.raises(ValueError, match="claims to hold more than it can"):
        read_vectors(path)
