"""Formats of rows: golden bytes, exact decoding, and the error of encoding."""

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from firstlayer.kernels.quantized_rows import E4M3, UE8M0
from firstlayer.stores.formats import RowFormat, format_by_name
from firstlayer.stores.formats.affine import Affine
from tests.support.quantized import (
    FLOATS,
    GGUF,
    MANIFEST,
    MLX,
    QUANTIZED,
    WRITABLE,
    golden,
    random_table,
    widths_of,
)

USED = (
    *("fp8_codes", "fp8_ue8m0_0", "gguf_q8_0", "gguf_q4_0", "gguf_q4_k"),
    *("mlx_4bit_g32", "mlx_6bit_g32"),
)


def decoded(format_: RowFormat, parts: dict[str, np.ndarray], width: int) -> np.ndarray:
    """Return all rows of a table."""
    out = np.empty((len(parts["weight"]), width), format_.dtype)
    format_.decode(parts, out)
    return out


def round_trip(name: str, rows: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return encoded rows, and the numbers that they stand for."""
    format_ = format_by_name(name)
    parts = format_.encode(rows)
    return parts, decoded(format_, parts, rows.shape[1])


# ------------------------------------------------------------------------------ reading


def test_every_golden_file_is_in_the_manifest():
    assert {f"{name}.npz" for name in USED} == MANIFEST.keys()


def test_every_code_of_fp8():
    codes = golden("fp8_codes")
    np.testing.assert_array_equal(E4M3, codes["e4m3fn"])
    np.testing.assert_array_equal(UE8M0, codes["e8m0fnu"])
    assert (
        UE8M0[0] == 2.0**-127 and np.isnan(UE8M0[255]) and np.isnan(E4M3[[127, 255]]).all()
    )
    every = np.arange(256, dtype=np.uint8)
    # Each scale with each number, in blocks of 32 of one number.
    weight = np.tile(np.repeat(every, 32), (256, 1))
    parts = {"weight": weight, "scale": np.repeat(every[:, None], 256, axis=1)}
    got = decoded(format_by_name("fp8_block"), parts, 256 * 32)[:, ::32]
    with np.errstate(over="ignore", invalid="ignore"):
        want = codes["e8m0fnu"][:, None] * codes["e4m3fn"]
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.signbit(got[:255]), np.signbit(want[:255]))
    with_one_scale = {"weight": every[None], "scale": np.array([[-0.5]], np.float16)}
    got = decoded(format_by_name("fp8"), with_one_scale, 256)
    np.testing.assert_array_equal(got[0], codes["e4m3fn"] * np.float32(-0.5))


def test_fp8_with_block_scales():
    arrays = golden("fp8_ue8m0_0")
    parts = {"weight": arrays["weight"], "scale": arrays["scale"]}
    got = decoded(format_by_name("fp8_block"), parts, 256)
    np.testing.assert_array_equal(got, arrays["float32"])
    assert got.astype(ml_dtypes.bfloat16).tobytes() == arrays["bfloat16"].tobytes()


@pytest.mark.parametrize("name", GGUF)
def test_gguf(name):
    arrays = golden(f"gguf_{name}")
    width = arrays["float32"].shape[1]
    got = decoded(format_by_name(name), {"weight": arrays["raw"]}, width)
    assert got.tobytes() == arrays["float32"].tobytes()


@pytest.mark.parametrize("bits", [4, 6])
def test_mlx(bits):
    arrays = golden(f"mlx_{bits}bit_g32")
    parts = {
        "weight": arrays["weight"],  # words, not bytes
        "scale": arrays["scales"].view(ml_dtypes.bfloat16),
        "bias": arrays["biases"].view(ml_dtypes.bfloat16),
    }
    got = decoded(format_by_name(f"mlx{bits}_g32"), parts, 160)
    np.testing.assert_array_equal(got, arrays["float32"])


@pytest.mark.parametrize("bits", range(2, 9))
def test_values_cross_the_borders_of_words(bits):
    """Each value is in the bits that follow those of the value before."""
    rng = np.random.default_rng(bits)
    values = rng.integers(0, 2**bits, (5, 64))
    numbers = [sum(int(v) << bits * i for i, v in enumerate(row)) for row in values]
    weight = [list(number.to_bytes(8 * bits, "little")) for number in numbers]
    parts = {
        "weight": np.array(weight, np.uint8),
        "scale": np.full((5, 1), 2, ml_dtypes.bfloat16),
        "bias": np.full((5, 1), -3, ml_dtypes.bfloat16),
    }
    np.testing.assert_array_equal(decoded(Affine(bits, 64), parts, 64), 2.0 * values - 3)


def test_int8_rounds_as_torch_does():
    rng = np.random.default_rng(0)
    packed = rng.integers(0, 256, (500, 72), np.uint8)
    packed[:, 64:] = rng.standard_normal((500, 2)).astype(np.float32).view(np.uint8)
    format_ = format_by_name("int8")
    got = decoded(format_, format_.split(packed, 64), 64)
    want = torch.ops.quantized.embedding_bag_byte_unpack(torch.from_numpy(packed))
    np.testing.assert_array_equal(got, want.numpy())


@pytest.mark.parametrize("name", [*FLOATS, *QUANTIZED])
def test_interleaved_parts_are_the_same_table(name):
    rng = np.random.default_rng(0)
    width = widths_of(name)[-1]
    if name in FLOATS:
        format_ = format_by_name(name)
        parts = format_.encode(rng.standard_normal((9, width)).astype(np.float32))
    else:
        format_, parts = random_table(name, 9, width, rng)
    apart = {part: array.copy() for part, array in parts.items()}
    joined = format_.join(apart)
    assert joined.shape == (9, format_.row_bytes(width)) and joined.dtype == np.uint8
    for part, array in format_.split(joined, width).items():
        assert np.shares_memory(array, joined)
        assert array.tobytes() == apart[part].tobytes()
    ids, outs = np.array([8, 0, 0, 3]), np.empty((2, 4, width), format_.dtype)
    assert format_.gather(apart, ids, outs[0]) and format_.gather(parts, ids, outs[1])
    assert outs[0].tobytes() == outs[1].tobytes()
    table = format_.bind(parts, width)
    sums = table.sum_bags(ids, np.array([0, 1, 4]))
    other = format_.bind(apart, width).sum_bags(ids, np.array([0, 1, 4]))
    assert sums is not None and other is not None
    np.testing.assert_array_equal(sums, other)
    assert sums.dtype == format_.dtype
    assert not table.gather(np.array([9]), outs[0, :1])


# ------------------------------------------------------------------------------ writing

DIMENSIONS = st.tuples(st.integers(0, 4), st.sampled_from([32, 64, 1, 5, 31, 33, 100]))
MAGNITUDES = st.sampled_from([
    0.0,
    1e-45,
    1e-42,
    1e-38,
    1e-20,
    1e-6,
    1e-3,
    1,
    300,
    1e30,
    8e37,
])


@st.composite
def tables(draw, multiple: int = 1):
    """Return rows of very different magnitudes: constant, shifted, tiny, huge, zero."""
    rows, width = draw(DIMENSIONS)
    width = -(-width // multiple) * multiple
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    scale = np.array([draw(MAGNITUDES) for _ in range(rows)]).reshape(rows, 1)
    shift = np.array([draw(st.sampled_from([0, 0, 1, -900])) for _ in range(rows)])
    noise = draw(st.sampled_from([0.0, 1e-6, 1.0]))
    table = scale * noise * rng.uniform(-1, 1, (rows, width))
    return np.clip(table + scale * shift[:, None] / 900, -8e37, 8e37).astype(np.float32)


@settings(max_examples=150, deadline=None)
@given(tables())
def test_int8_is_within_half_a_step(rows):
    parts, got = round_trip("int8", rows)
    steps = parts["scale"].astype(np.float64)
    # A thousandth of a step is what torch's constant costs, and rounding a number.
    rounding = np.abs(rows.astype(np.float64)) * 2.0**-23 + 2.0**-149
    assert (np.abs(got - rows.astype(np.float64)) <= 0.501 * steps + rounding).all()


@settings(max_examples=150, deadline=None)
@given(tables())
def test_int4_is_within_half_a_step_of_its_group(rows):
    parts, got = round_trip("int4", rows)
    steps = np.repeat(parts["scale"].astype(np.float64), 32, axis=1)[:, : rows.shape[1]]
    rounding = np.abs(rows.astype(np.float64)) * 2.0**-23 + 2.0**-149
    assert (np.abs(got - rows.astype(np.float64)) <= 0.5 * steps + rounding).all()
    # A step is 1/15 of the group's range, but for the rounding of bias and scale.
    padded = np.pad(rows, ((0, 0), (0, -rows.shape[1] % 32)), mode="edge").astype(float)
    groups = padded.reshape(len(rows), padded.shape[1] // 32, 32)
    span, size = np.ptp(groups, axis=-1), np.abs(groups).max(axis=-1)
    limit = (span + size * 2.0**-7) / 15 * (1 + 2.0**-7) + 2.0**-132
    assert (parts["scale"].astype(np.float64) <= limit).all()


def half_spacing(numbers: np.ndarray) -> np.ndarray:
    """Return half the distance between the e4m3fn numbers around each number."""
    _, exponent = np.frexp(np.abs(numbers))
    return np.ldexp(0.5, np.maximum(exponent - 1, -6) - 3)


@settings(max_examples=100, deadline=None)
@given(tables())
def test_fp8_is_within_half_a_step(rows):
    parts, got = round_trip("fp8", rows)
    scale = float(parts["scale"][0, 0])
    exact = rows.astype(np.float64) / scale
    error = np.abs(got.astype(np.float64) - rows)
    assert (error <= half_spacing(exact) * scale * (1 + 1e-12) + 2.0**-149).all()
    largest = np.abs(rows).max(initial=0)
    assert scale == 1 if largest == 0 else scale * 448 >= largest
    assert largest < 1e-35 or scale * 448 <= largest * (1 + 2.0**-7)


@settings(max_examples=100, deadline=None)
@given(tables(multiple=32))
def test_fp8_with_block_scales_is_within_half_a_step(rows):
    parts, got = round_trip("fp8_block", rows)
    scale = np.repeat(UE8M0[parts["scale"]].astype(np.float64), 32, axis=1)
    exact = rows / scale
    error = np.abs(got.astype(np.float64) - rows)
    assert (np.abs(exact) <= 448).all()
    assert (error <= half_spacing(exact) * scale + 2.0**-149).all()
    # Half the scale would not do, unless there is none.
    largest = np.abs(exact).reshape(len(rows), rows.shape[1] // 32, 32).max(axis=-1)
    assert ((largest > 224) | (largest == 0) | (parts["scale"] == 0)).all()


@settings(max_examples=100, deadline=None)
@given(tables())
@pytest.mark.parametrize("name", FLOATS)
def test_floats_are_rounded_to_nearest(name, rows):
    rows = np.clip(rows, -6e4, 6e4)
    _, got = round_trip(name, rows)
    assert got.dtype.name == name and got.tobytes() == rows.astype(got.dtype).tobytes()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 80), st.floats(-1.5, 30))
def test_int8_writes_the_bytes_of_torch(seed, width, exponent):
    rng = np.random.default_rng(seed)
    rows = (rng.standard_normal((20, width)) * 10.0**exponent).astype(np.float32)
    rows[0] = rows[0, 0]
    rows = rows[(np.ptp(rows, axis=1) >= 2**-8) | (np.ptp(rows, axis=1) == 0)]
    format_ = format_by_name("int8")
    want = torch.ops.quantized.embedding_bag_byte_prepack(torch.from_numpy(rows))
    assert format_.join(format_.encode(rows)).tobytes() == want.numpy().tobytes()
    assert format_.encode_table(rows).tobytes() == want.numpy().tobytes()


def test_narrow_rows_are_more_accurate_than_torch():
    rows = np.array([[0, 1e-10, 2e-10]], np.float32)
    packed = torch.ops.quantized.embedding_bag_byte_prepack(torch.from_numpy(rows))
    theirs = torch.ops.quantized.embedding_bag_byte_unpack(packed).numpy()
    _, ours = round_trip("int8", rows)
    assert np.abs(ours - rows).max() < 4e-13 < 1e-10 < np.abs(theirs - rows).max()


@pytest.mark.parametrize("name", WRITABLE)
def test_zeros_stay_zeros(name):
    _, got = round_trip(name, np.zeros((3, 32), np.float32))
    assert not got.any()


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_constant_rows_and_extremes_are_exact(name):
    """A number that bfloat16 holds is not changed where it is alone or the smallest."""
    rows = np.full((2, 64), 1.5, np.float32)
    rows[1, 40] = -2.0
    _, got = round_trip(name, rows)
    np.testing.assert_array_equal(got[0], rows[0])
    assert got[1, 40] == -2.0


def test_tables_are_encoded_in_chunks(monkeypatch):
    from firstlayer.stores.formats import row_format

    rows = np.random.default_rng(0).standard_normal((11, 40)).astype(np.float32)
    format_ = format_by_name("int4")
    want = format_.encode_table(rows)
    monkeypatch.setattr(row_format, "_CHUNK", 80)
    assert format_.encode_table(rows).tobytes() == want.tobytes()
    rows[7, 3] = np.nan
    with pytest.raises(ValueError, match=r"rows\[7, 3\] is nan, but int4 holds numbers"):
        format_.encode_table(rows)


def test_rows_are_encoded_with_the_scale_of_their_table():
    format_ = format_by_name("fp8")
    shared = format_.shared_for(896.0)
    assert shared["scale"].shape == (1, 1) and float(shared["scale"][0, 0]) == 2.0
    parts = format_.encode(np.array([[2.0, -896.0]], np.float32), shared)
    assert parts["weight"].tolist() == [[56, 254]] and parts["scale"] is shared["scale"]
    with pytest.raises(
        ValueError, match=r"rows\[0, 1\] is 900.0, but fp8 with the scale 2"
    ):
        format_.encode(np.array([[1.0, 900.0]], np.float32), shared)
    assert format_by_name("int8").shared_for(896.0) == {}


# ----------------------------------------------------------------------------- refusals


@pytest.mark.rejects
@pytest.mark.parametrize("name", ["int8", "int4", "fp8", "fp8_block"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_are_refused(name, bad):
    rows = np.zeros((3, 32), np.float32)
    rows[1, 30] = bad
    with pytest.raises(ValueError, match=rf"^rows\[1, 30\] is {bad}, but {name} holds "):
        format_by_name(name).encode(rows)


@pytest.mark.rejects
def test_numbers_that_do_not_fit_are_refused():
    huge = np.array([[1.0, -(2.0**127)]], np.float32)
    for name in ("int8", "int4"):
        rule = rf"^rows\[0, 1\] is -1.7014\d*e\+38, but {name} holds numbers below 2\*\*126"
        with pytest.raises(ValueError, match=rule):
            format_by_name(name).encode(huge)
    rule = r"^rows\[0, 1\] is -1.7014\d*e\+38, but float16 ends at 65504$"
    with pytest.raises(ValueError, match=rule):
        format_by_name("float16").encode(huge)
    kept = np.array([[np.inf, -np.inf, np.nan]], np.float32)
    _, got = round_trip("float16", kept)
    np.testing.assert_array_equal(got, kept)


@pytest.mark.rejects
@pytest.mark.parametrize("name", [*MLX, *GGUF])
def test_formats_that_are_only_read(name):
    format_ = format_by_name(name)
    assert not format_.writable
    with pytest.raises(
        TypeError, match=f"rows of format {format_.name} can be read but not"
    ):
        format_.encode(np.zeros((1, 256), np.float32))


@pytest.mark.rejects
def test_rows_of_the_wrong_kind_are_refused():
    for rows in (np.zeros((2, 3), np.int64), np.zeros(3, np.float32)):
        with pytest.raises(TypeError, match="rows must be a 2-D array of floats, got"):
            format_by_name("int8").encode(rows)


@pytest.mark.rejects
def test_widths_that_do_not_fit_are_refused():
    for name, multiple in (("fp8_block", 32), ("q8_0", 32), ("q4_0", 32), ("q4_k", 256)):
        rule = f"rows of format {name} must have a multiple of {multiple} values, got 100"
        with pytest.raises(ValueError, match=rule):
            format_by_name(name).row_bytes(100)


@pytest.mark.rejects
def test_parts_that_do_not_fit_are_refused():
    format_, parts = random_table("mlx4_g32", 3, 64, np.random.default_rng(0))
    out, ids = np.empty((1, 64), np.float32), np.array([0])
    with pytest.raises(ValueError, match="needs a part 'bias', got"):
        format_.gather({name: parts[name] for name in ("weight", "scale")}, ids, out)
    short = {**parts, "scale": parts["scale"][:2]}
    with pytest.raises(
        ValueError, match=r"part 'scale' of rows of 64 .*\(3, 2\), got \(2, 2\)"
    ):
        format_.gather(short, ids, out)
    apart = {**parts, "weight": np.zeros((3, 64), np.uint8)[:, ::2]}
    with pytest.raises(ValueError, match="part 'weight' must be contiguous along its last"):
        format_.gather(apart, ids, out)
    with pytest.raises(ValueError, match=r"must have shape \(rows, 40\), got \(3, 41\)"):
        format_.split(np.zeros((3, 41), np.uint8), 64)
    with pytest.raises(ValueError, match="parts must have 4 rows, as out, got 3"):
        format_.decode(parts, np.empty((4, 64), np.float32))
    fp8, parts = random_table("fp8", 3, 64, np.random.default_rng(0))
    with pytest.raises(ValueError, match="part 'scale' must be one number, got shape"):
        fp8.gather({**parts, "scale": np.ones((3, 1))}, ids, out)
    with pytest.raises(ValueError, match="format fp8 needs a part 'scale', got"):
        fp8.gather({"weight": parts["weight"]}, ids, out)


# --------------------------------------------------------------------------------- names


@pytest.mark.parametrize("name", [*FLOATS, *QUANTIZED])
def test_a_name_gives_the_format_of_that_name(name):
    format_ = format_by_name(name)
    assert format_by_name(format_.name) == format_ == format_by_name(format_)
    assert format_.dtype == (np.dtype(np.float32) if name not in FLOATS else format_.dtype)


def test_formats_with_other_options_differ():
    formats = [format_by_name(name) for name in (*FLOATS, *QUANTIZED)]
    assert len({*formats}) == len(formats)
    assert format_by_name("mlx4") == Affine(4, 64) != Affine(4, 32)
    assert format_by_name("int4") != Affine(4, 32)


@pytest.mark.rejects
def test_unknown_formats_are_refused():
    rule = "^format must be float32, .* q4_k or mlx2 to mlx8, got 'int5'$"
    with pytest.raises(ValueError, match=rule):
        format_by_name("int5")
    for name, rule in (
        ("mlx1", "bits must be 2 to 8, got 1"),
        ("mlx4_g48", "group_size must be a positive multiple of 32, got 48"),
        ("mlx4_g0", "group_size must be a positive multiple of 32, got 0"),
    ):
        with pytest.raises(ValueError, match=rule):
            format_by_name(name)
