"""The update of one position: a small matrix product of inputs and targets.

The rows are copies in the memory of a part. The inputs of a position are the rows of its
context words, or their mean; its targets are the center word, which is to be predicted, and
the negatives.
"""

import math

import numpy as np

from ..runtime.compile import inlined, internal
from ..runtime.lanes import evens, load, odds, short_zeros, store
from .workspace import LANE, TILE

# tanh(4.97) by Lambert's fraction is just below 1.
LARGEST_TANH = 4.97


@inlined
def write_mean(rows, near, mean):
    """Write the mean of the rows ``near`` to the slot ``mean``."""
    width, zero = rows.shape[1], short_zeros(np.float32(0))
    share = np.float32(1) / np.float32(near.size)
    for d in range(0, width, LANE):
        sum_ = zero
        for a in range(near.size):
            sum_ = sum_ + load(zero, rows, near[a] * width + d)
        store(sum_ * share, rows, mean * width + d)


@inlined
def _sigmoid(x):
    """Return the logistic function of ``x`` within 2e-5, without a call, for SIMD."""
    y = min(max(x * np.float32(0.5), np.float32(-LARGEST_TANH)), np.float32(LARGEST_TANH))
    s = y * y
    # Lambert's continued fraction of tanh.
    p = y * (np.float32(135135) + s * (np.float32(17325) + s * (np.float32(378) + s)))
    q = np.float32(135135) + s * (
        np.float32(62370) + s * (np.float32(3150) + s * np.float32(28))
    )
    return np.float32(0.5) + np.float32(0.5) * (p / q)


@internal
def loss(dots, count, far):
    """Return the logistic loss of the dot products of a position, in nats."""
    total = 0.0
    for a in range(count):
        for k in range(far.size):
            if k == 0 or far[k] != far[0]:
                x = np.float64(dots[a * far.size + k]) * (-1.0 if k == 0 else 1.0)
                total += max(x, 0.0) + math.log1p(math.exp(-abs(x)))
    return total


@inlined
def _pair_sums(a, b):
    return evens(a, b) + odds(a, b)


@inlined
def _six_totals(a, b, c, d, e, f):
    """Return lanes that begin with the sums of the lanes of six values."""
    ef = _pair_sums(e, f)
    abcd = _pair_sums(_pair_sums(a, b), _pair_sums(c, d))
    halves = _pair_sums(abcd, _pair_sums(ef, ef))
    return _pair_sums(halves, halves)


@inlined
def multiply(inputs, outputs, near, far, dots):
    """Write the dot product of input ``a`` and target ``k`` to ``a * n + k``."""
    width, n = inputs.shape[1], far.size
    zero = short_zeros(np.float32(0))
    for a in range(near.size):
        row = near[a] * width
        for k in range(0, n, TILE):
            o0, o1, o2 = far[k] * width, far[k + 1] * width, far[k + 2] * width
            o3, o4, o5 = far[k + 3] * width, far[k + 4] * width, far[k + 5] * width
            p0, p1, p2, p3, p4, p5 = zero, zero, zero, zero, zero, zero
            for d in range(0, width, LANE):
                x = load(zero, inputs, row + d)
                p0 = p0 + x * load(zero, outputs, o0 + d)
                p1 = p1 + x * load(zero, outputs, o1 + d)
                p2 = p2 + x * load(zero, outputs, o2 + d)
                p3 = p3 + x * load(zero, outputs, o3 + d)
                p4 = p4 + x * load(zero, outputs, o4 + d)
                p5 = p5 + x * load(zero, outputs, o5 + d)
            # The lanes after the sixth are overwritten by the next dot products.
            store(_six_totals(p0, p1, p2, p3, p4, p5), dots, a * n + k)


@internal
def slopes(dots, count, far, lr):
    """Replace dot products by their negative gradient, times the learning rate."""
    n = far.size
    for i in range(count * n):
        dots[i] = -lr * _sigmoid(dots[i])
    for a in range(count):
        dots[a * n] += lr
    for k in range(1, n):
        if far[k] == far[0]:
            for a in range(count):
                dots[a * n + k] = 0


@inlined
def update(inputs, outputs, near, far, slopes, sums):
    """Add the gradients of all inputs and targets, computed before either changes."""
    width, n = inputs.shape[1], far.size
    one, zero = np.float32(0), short_zeros(np.float32(0))
    for d in range(0, width, LANE):
        for k in range(0, n, TILE):
            p0, p1, p2, p3, p4, p5 = zero, zero, zero, zero, zero, zero
            for a in range(near.size):
                x, s = load(zero, inputs, near[a] * width + d), a * n + k
                p0 = p0 + x * load(one, slopes, s)
                p1 = p1 + x * load(one, slopes, s + 1)
                p2 = p2 + x * load(one, slopes, s + 2)
                p3 = p3 + x * load(one, slopes, s + 3)
                p4 = p4 + x * load(one, slopes, s + 4)
                p5 = p5 + x * load(one, slopes, s + 5)
            store(p0, sums, k * LANE)
            store(p1, sums, (k + 1) * LANE)
            store(p2, sums, (k + 2) * LANE)
            store(p3, sums, (k + 3) * LANE)
            store(p4, sums, (k + 4) * LANE)
            store(p5, sums, (k + 5) * LANE)
        for k in range(0, n, TILE):
            x0 = load(zero, outputs, far[k] * width + d)
            x1 = load(zero, outputs, far[k + 1] * width + d)
            x2 = load(zero, outputs, far[k + 2] * width + d)
            x3 = load(zero, outputs, far[k + 3] * width + d)
            x4 = load(zero, outputs, far[k + 4] * width + d)
            x5 = load(zero, outputs, far[k + 5] * width + d)
            for a in range(near.size):
                at, s = near[a] * width + d, a * n + k
                change = x0 * load(one, slopes, s)
                change = change + x1 * load(one, slopes, s + 1)
                change = change + x2 * load(one, slopes, s + 2)
                change = change + x3 * load(one, slopes, s + 3)
                change = change + x4 * load(one, slopes, s + 4)
                change = change + x5 * load(one, slopes, s + 5)
                # A word that occurs twice in the window gets both changes.
                store(load(zero, inputs, at) + change, inputs, at)
        for k in range(n):
            at = far[k] * width + d
            store(load(zero, outputs, at) + load(zero, sums, k * LANE), outputs, at)


@inlined
def update_mean(inputs, outputs, words, mean, far, slopes):
    """Add the gradients of targets, and of the words whose mean is their only input.

    The gradient of a word is that of the mean, divided by the number of words.
    """
    width, n = inputs.shape[1], far.size
    one, zero = np.float32(0), short_zeros(np.float32(0))
    share = np.float32(1) / np.float32(words.size)
    for d in range(0, width, LANE):
        change = zero
        for k in range(n):
            output = load(zero, outputs, far[k] * width + d)
            change = change + output * load(one, slopes, k)
        x, change = load(zero, inputs, mean * width + d), change * share
        # A target or word that occurs twice gets both changes.
        for k in range(n):
            at = far[k] * width + d
            new = load(zero, outputs, at) + x * load(one, slopes, k)
            store(new, outputs, at)
        for a in range(words.size):
            at = words[a] * width + d
            store(load(zero, inputs, at) + change, inputs, at)
