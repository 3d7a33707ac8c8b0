"""Masked arrays, which the newer schemes refuse instead of dropping the mask."""

from functools import partial

import jax
import numpy as np
import pytest

import firstlayer.equinox
import firstlayer.numpy

X = np.ma.masked_less(np.ones((1, 2, 3, 8), np.float32), 0)
KEY = {"key": jax.random.key(0)}
CALLS = {
    "XPosRotary": (lambda make: make(8), lambda f: f(X), "x"),
    "CopeBias": (lambda make: make(8, max_positions=3), lambda f: f(X, X), "q"),
    "Time2Vec": (lambda make: make(3, init="zeros"), lambda f: f(X), "times"),
    "TransformerXLScores": (lambda make: make(2, 8, init="zeros"), lambda f: f(X, X), "q"),
}


@pytest.mark.rejects
@pytest.mark.parametrize("library", [firstlayer.numpy, firstlayer.equinox])
@pytest.mark.parametrize("name", CALLS)
def test_masked_arrays_are_refused(library, name):
    build, call, argument = CALLS[name]
    options = {} if name == "XPosRotary" or library is firstlayer.numpy else KEY
    layer = build(partial(getattr(library, name), **options))
    with pytest.raises(TypeError, match=f"{argument} must not be a masked array: fill it"):
        call(layer)
