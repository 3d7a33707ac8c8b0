"""Numbers in text are parsed exactly as Python parses them."""

import io

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from firstlayer.vector_files.text import read_text

DIGITS = st.text("0123456789", min_size=1, max_size=24)
NUMBERS = st.builds(
    lambda sign, whole, point, rest, exponent: sign + whole + point + rest + exponent,
    st.sampled_from(["", "-", "+"]),
    DIGITS,
    st.sampled_from(["", "."]),
    st.text("0123456789", max_size=24),
    st.sampled_from(["", "e0", "E-5", "e+21", "e-22", "e-23", "e-38", "e39", "e-400"]),
)


def parsed(fields: list[str], width: int) -> np.ndarray:
    lines = [fields[i : i + width] for i in range(0, len(fields), width)]
    text = "\n".join(" ".join(["w", *line]) for line in lines)
    return read_text(io.BytesIO(text.encode()), width, name="a", line_number=1).weight


@settings(max_examples=60, deadline=None)
@given(st.lists(NUMBERS, min_size=12, max_size=12), st.sampled_from([1, 3, 12]))
def test_numbers_equal_those_of_python(fields, width):
    with np.errstate(over="ignore"):
        want = np.array([np.float32(float(field)) for field in fields])
    assert parsed(fields, width).tobytes() == want.tobytes()


def test_random_numbers_equal_those_of_python():
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 6000, dtype=np.uint32).view(np.float32)
    doubles = rng.standard_normal(6000) * 10.0 ** rng.integers(-25, 25, 6000)
    ties = np.arange(2**53 - 500, 2**53 + 500, dtype=np.uint64) * 1024
    fields = [str(x) for x in bits] + [repr(float(x)) for x in doubles]
    fields += [str(int(x)) for x in ties] + [f"{int(x)}e-13" for x in ties]
    with np.errstate(over="ignore"):
        want = np.array([np.float32(float(field)) for field in fields])
    got = parsed(fields, 20)
    np.testing.assert_array_equal(
        got.ravel().view(np.uint32)[~np.isnan(want)], want.view(np.uint32)[~np.isnan(want)]
    )
    np.testing.assert_array_equal(np.isnan(got.ravel()), np.isnan(want))
