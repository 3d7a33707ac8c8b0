"""Lines of text with a word and numbers: parse the numbers.

A number of at most 19 digits with a decimal exponent within ±22 is the quotient or product
of two numbers that float64 holds (exactly, or as the sum of two), so it is rounded once to
float64, as Python's ``float`` does. Lines with any other number are left to the caller.
"""

import numpy as np

from .runtime.compile import internal, kernel
from .runtime.pool import grain_for, pieces, run

#: Powers of ten that float64 holds exactly.
MAX_EXPONENT = 22
POWERS = tuple(10.0**i for i in range(MAX_EXPONENT + 1))
MAX_DIGITS = 19
#: Minimum number of numbers per thread.
GRAIN = 1 << 14
SPACE, TAB, RETURN, PLUS, MINUS, POINT, ZERO, NINE = b" \t\r+-.09"
SMALL_E, LARGE_E = b"eE"
#: Factor that splits a float64 into two halves of 26 bits (Dekker 1971).
SPLIT = 134217729.0
#: Above the relative error of a quotient of sums of two numbers.
ERROR = 2.0**-90


def parse_text_rows(
    text: np.ndarray, bounds: np.ndarray, out: np.ndarray, word_ends: np.ndarray
) -> None:
    """Parse the numbers of lines, each a word followed by ``out.shape[1]`` numbers.

    Args:
        text: Bytes, uint8.
        bounds: First byte of each line and end of the last, int64.
        out: Row of float32 numbers for each line.
        word_ends: Offset at which the word of each line ends, int64; -1 for a line that is
            malformed or has a number that is not parsed here.
    """
    grain = grain_for(GRAIN, out.shape[1])
    powers = np.array(POWERS)
    run(_parse, len(out), text, bounds, powers, out, word_ends, grain=grain)


@kernel()
def _parse(ticket, text, bounds, powers, out, word_ends):
    width = out.shape[1]
    for lo, hi in pieces(ticket):
        for line in range(lo, hi):
            end, start = bounds[line + 1], bounds[line]
            word_ends[line] = -1
            is_valid = True
            for k in range(width - 1, -1, -1):
                while end > start and _is_blank(text[end - 1]):
                    end -= 1
                first = end
                while first > start and not _is_blank(text[first - 1]):
                    first -= 1
                number, is_valid = _number(text, first, end, powers)
                if not is_valid:
                    break
                out[line, k] = np.float32(number)
                end = first
            while end > start and _is_blank(text[end - 1]):
                end -= 1
            if is_valid and end > start:
                word_ends[line] = end


@internal
def _is_blank(byte):
    return byte == SPACE or byte == TAB or byte == RETURN or byte == 10


@internal
def _number(text, at, end, powers):
    """Return a number in text, and whether it could be parsed exactly."""
    is_negative = at < end and text[at] == MINUS
    if at < end and (text[at] == MINUS or text[at] == PLUS):
        at += 1
    digits, significant, exponent = np.uint64(0), 0, 0
    count, after_point = 0, False
    while at < end:
        byte = text[at]
        if ZERO <= byte <= NINE:
            count += 1
            if significant > 0 or byte != ZERO:
                significant += 1
            if significant > MAX_DIGITS:
                return 0.0, False
            digits = digits * np.uint64(10) + np.uint64(byte - ZERO)
            if after_point:
                exponent -= 1
        elif byte == POINT and not after_point:
            after_point = True
        else:
            break
        at += 1
    if count == 0:
        return 0.0, False
    if at < end and (text[at] == SMALL_E or text[at] == LARGE_E):
        at += 1
        sign = 1
        if at < end and (text[at] == MINUS or text[at] == PLUS):
            sign = -1 if text[at] == MINUS else 1
            at += 1
        shift, first = 0, at
        while at < end and ZERO <= text[at] <= NINE and shift < 10000:
            shift = shift * 10 + np.int64(text[at] - ZERO)
            at += 1
        if at == first:
            return 0.0, False
        exponent += sign * shift
    if at != end:
        return 0.0, False
    value, is_exact = _scaled(digits, exponent, powers)
    return (-value if is_negative else value), is_exact


@internal
def _scaled(digits, exponent, powers):
    """Return ``digits * 10**exponent`` rounded to float64, and whether that is certain."""
    if digits == 0:
        return 0.0, True
    if exponent < -MAX_EXPONENT or exponent > MAX_EXPONENT:
        return 0.0, False
    power = powers[abs(exponent)]
    if digits < np.uint64(1) << np.uint64(53):
        # Both are exact, so the result is rounded once.
        exact = np.float64(digits)
        return (exact * power if exponent > 0 else exact / power), True
    high = np.float64(digits >> np.uint64(11)) * 2048.0
    low = np.float64(digits & np.uint64(2047))
    if exponent > 0:
        return 0.0, False
    value = (high + low) / power
    product, error = _product(value, power)
    rest = (((high - product) - error) + low) / power
    # The bounds of the exact value round to the same number.
    slack = value * ERROR
    return value + rest, value + (rest - slack) == value + (rest + slack)


@internal
def _product(a, b):
    """Return a product and its rounding error."""
    product = a * b
    x = a * SPLIT
    a_high = x - (x - a)
    a_low = a - a_high
    y = b * SPLIT
    b_high = y - (y - b)
    b_low = b - b_high
    error = ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low
    return product, error
