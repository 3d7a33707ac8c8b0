"""Damaged and hostile files with tables are refused with one sentence."""

import struct

import numpy as np
import pytest

from firstlayer.files.gguf import read_gguf
from firstlayer.files.npy import read_npy_header
from firstlayer.files.word2vec import read_word2vec
from firstlayer.stores import open_store
from tests.support.damaged_tables import open_damaged_tables
from tests.support.table_files import gguf_bytes, gguf_string


def test_damaged_tables_are_read_or_refused(tmp_path):
    counts = open_damaged_tables(tmp_path, 500)
    assert counts["read"] > 50 and counts["refused"] > 150


ALIGNMENT = gguf_string(b"general.alignment") + struct.pack("<I", 4)


def pair(kind, value):
    return gguf_string(b"key") + struct.pack("<I", kind) + value


@pytest.mark.rejects
@pytest.mark.parametrize(
    "content, message",
    [
        (b"GGUF" + bytes(8), "not a GGUF file or is cut short"),
        (b"GGML" + bytes(40), "is not a GGUF file"),
        (gguf_bytes({}, version=1), "must have GGUF version 2 or 3, got 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**40, 0), "at most 65536 tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63), "its header would be longer"),
        (gguf_bytes({}, values=(pair(13, b""),)), "unknown type 13"),
        (
            gguf_bytes({}, values=(pair(8, struct.pack("<Q", 2**62)),)),
            "string of length 4611686018427387904",
        ),
        (
            gguf_bytes({}, values=(pair(9, struct.pack("<IQ", 10, 2**61)),)),
            "array of length",
        ),
        (
            gguf_bytes({}, values=(pair(9, struct.pack("<IQ", 8, 2**61)),)),
            "its header would be longer|string of length",
        ),
        (
            gguf_bytes({}, values=(pair(9, struct.pack("<IQ", 9, 1) * 9),)),
            "nested deeper than 4",
        ),
        (gguf_bytes({}, values=(ALIGNMENT + struct.pack("<I", 0),)), "an alignment in"),
        (
            gguf_bytes({}, values=(ALIGNMENT + struct.pack("<I", 1 << 30),)),
            "an alignment in",
        ),
        (gguf_bytes({"a": (0, (1,) * 5, b"")}), "at most 4 axes, got 5"),
        (gguf_bytes({"a" * 300: (0, (1,), b"")}), "names of at most 256 bytes"),
        (gguf_bytes({"a": (0, (4, 4), b"")}), "tensor 'a' would end at byte"),
        (gguf_bytes({"a": (0, (2**60, 2**60), b"")}), "tensor 'a' would end at byte"),
        (gguf_bytes({"a": (8, (4, 33), bytes(999))}), "Q8_0 has blocks of 32"),
    ],
)
def test_a_hostile_gguf_header_is_refused(content, message, tmp_path):
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_gguf(path)


@pytest.mark.rejects
def test_a_gguf_table_of_another_type_says_so(tmp_path):
    path = tmp_path / "a.gguf"
    path.write_bytes(gguf_bytes({"a": (14, (1, 256), bytes(210)), "b": (99, (1,), b"")}))
    assert read_gguf(path)["b"].nbytes is None
    with pytest.raises(ValueError, match="'a' of type Q6_K, which no format of rows has"):
        open_store(path, "a")
    with pytest.raises(ValueError, match=r"'b' of shape \(1,\), but a table has 2 axes"):
        open_store(path, "b")
    with pytest.raises(ValueError, match="no tensor 'c': it has a, b"):
        open_store(path, "c")


@pytest.mark.rejects
@pytest.mark.parametrize(
    "header, message",
    [
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (9, 9)}", "end at byte"),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (-1, 9)}", "malformed shape"),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (2**99,)}", "Python literal"),
        ("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}", "Python objects"),
        ("{'descr': 'f99', 'fortran_order': False, 'shape': (1,)}", "malformed dtype"),
        ("{'descr': '<f4', 'fortran_order': 0, 'shape': (1,)}", "without dtype, order"),
        ("[" * 900, "Python literal"),
        ("[]", "without dtype, order and shape"),
        ("__import__('os')", "Python literal"),
    ],
)
def test_a_hostile_npy_header_is_refused(header, message, tmp_path):
    path = tmp_path / "a.npy"
    text = header.encode() + b"\n"
    path.write_bytes(b"\x93NUMPY\1\0" + struct.pack("<H", len(text)) + text + bytes(64))
    with pytest.raises(ValueError, match=message):
        read_npy_header(path)


@pytest.mark.rejects
def test_an_npy_header_longer_than_its_file_is_refused(tmp_path):
    path = tmp_path / "a.npy"
    path.write_bytes(b"\x93NUMPY\2\0" + struct.pack("<I", 2**32 - 1) + bytes(64))
    with pytest.raises(ValueError, match="header of at most 10000 bytes, got 4294967295"):
        read_npy_header(path)
    path.write_bytes(b"\x93NUMPY\7\0" + bytes(64))
    with pytest.raises(ValueError, match="version 1, 2 or 3, got 7"):
        read_npy_header(path)
    for dtype in (">f4", "f8", "i4"):
        np.save(path, np.zeros((2, 2), dtype))
        with pytest.raises(ValueError, match="must have float32 or float16 numbers"):
            open_store(path)


@pytest.mark.rejects
@pytest.mark.parametrize(
    "content, message",
    [
        (b"9000000000 4\n" + bytes(99), "is cut short: 9000000000 rows of 4 numbers"),
        (b"1 9223372036854775807\n" + bytes(99), "is cut short"),
        (b"0 4\n" + bytes(99), "must have rows, got 0 of width 4"),
        (b"4 0\n" + bytes(99), "must have rows, got 4 of width 0"),
        (b"3 4\n" + b"a " + bytes(99), "it has 1 of 3 rows"),
        (b"x 4\n" + bytes(99), "must begin with the number of rows"),
    ],
)
def test_a_hostile_word2vec_header_is_refused(content, message, tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_word2vec(path)
