"""Call every layer with random arguments: documented errors only, and a usable layer after.

Each call replaces one or two arguments of a valid call. A layer may return a result or
raise one of :data:`DOCUMENTED`. From time to time the valid call is made again on the same
layer and compared with its first result.
"""

import importlib
import random
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

#: Errors that the layers document. Those of the torch front end are subclasses of these.
DOCUMENTED = (ValueError, TypeError, IndexError)
#: Number of random calls between two valid calls.
VALID_EVERY = 50


class Call(NamedTuple):
    """A layer and the arguments of a valid call."""

    name: str
    options: dict[str, Any]
    method: str
    arguments: dict[Any, Any]


def _reals(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


IDS = np.array([[1, 2, 3], [4, 8, 0]])
AT = np.array([3, 0, 7])
PAIR = {"q_positions": np.arange(3), "k_positions": np.arange(4)}
QK = {"q": _reals(2, 2, 3, 6), "k": _reals(2, 2, 4, 6)}
SIZES = {"num_embeddings": 9, "embedding_dim": 4}
CALLS = [
    Call("Embedding", {**SIZES, "padding_idx": 1}, "", {0: IDS}),
    Call("Embedding", {**SIZES, "max_norm": 1.5}, "", {0: IDS}),
    Call("Embedding", SIZES, "logits", {"x": _reals(2, 4)}),
    Call("EmbeddingBag", {**SIZES, "mode": "sum"}, "", {0: IDS}),
    Call(
        "EmbeddingBag",
        {**SIZES, "padding_idx": 2},
        "",
        {0: IDS.ravel(), "offsets": np.array([0, 2, 2]), "per_sample_weights": _reals(6)},
    ),
    Call("EmbeddingBag", {**SIZES, "mode": "max"}, "", {0: IDS}),
    Call(
        "EmbeddingLayer",
        {**SIZES, "max_positions": 9, "segments": 2, "layer_norm": True},
        "",
        {0: IDS, "positions": AT, "segments": IDS % 2},
    ),
    Call(
        "EmbeddingLayer",
        {**SIZES, "position": "sinusoidal", "padding_idx": 0, "zero_padding": True},
        "",
        {0: IDS, "mask": IDS > 0, "offset": 2},
    ),
    Call(
        "EmbeddingLayer",
        {**SIZES, "position": None},
        "",
        {0: None, "inputs_embeds": _reals(2, 3, 4)},
    ),
    Call(
        "LearnedPositions",
        {"max_positions": 9, "embedding_dim": 4},
        "",
        {0: _reals(2, 3, 4), 1: AT},
    ),
    Call(
        "SinusoidalPositions",
        {"embedding_dim": 4},
        "",
        {0: _reals(2, 3, 4), 1: AT, "offset": 0},
    ),
    Call("SinusoidalPositions", {"embedding_dim": 6}, "encode", {0: AT}),
    Call("FourierFeatures", {"matrix": _reals(3, 2)}, "", {0: _reals(3, 2)}),
    Call("Time2Vec", {"embedding_dim": 5}, "", {0: _reals(3, 2)}),
    Call(
        "RotaryPositions", {"head_dim": 8}, "", {0: _reals(2, 2, 3, 8), 1: AT, "offset": 0}
    ),
    Call(
        "RotaryPositions",
        {"head_dim": 8, "layout": "interleaved"},
        "rerotate",
        {0: _reals(2, 3, 8), "delta": -2},
    ),
    Call("XPosRotary", {"head_dim": 8}, "", {0: _reals(2, 2, 3, 8), 1: AT}),
    *(
        Call(name, {"num_heads": 3}, "", PAIR)
        for name in ("AlibiBias", "T5Bias", "KerpleBias", "FireBias")
    ),
    Call(
        "ShawScores",
        {"head_dim": 6, "max_left": 5, "max_right": 2},
        "scores",
        {**QK, **PAIR},
    ),
    Call("TransformerXLScores", {"num_heads": 2, "head_dim": 6}, "scores", QK),
    Call(
        "CopeBias",
        {"head_dim": 6, "max_positions": 4},
        "bias",
        {"q": _reals(2, 2, 3, 6), "scores": _reals(2, 2, 3, 9)},
    ),
]


def random_value(draw: random.Random, valid: Any, *, few_shapes: bool) -> Any:
    """Return an argument that is rarely valid.

    Args:
        draw: Source of randomness.
        valid: Valid value of the argument, which may be changed a little.
        few_shapes: Use few shapes, because every shape is compiled.
    """
    array = np.asarray(0 if valid is None else valid)
    shape = (
        array.shape
        if few_shapes
        else draw.choice([
            (),
            (0,),
            (1,),
            (3,),
            (2, 3),
            (0, 3),
            (2, 3, 4),
            (1, 1, 1, 1),
            (2, 0, 4),
            array.shape,
        ])
    )
    number = draw.choice([0, 1, -1, 8, 9, 2**31, 2**40, 2**62, -(2**63), 255])
    dtype = draw.choice([
        np.int64,
        np.int32,
        np.uint8,
        np.int8,
        np.uint64,
        np.float32,
        np.float64,
        np.float16,
        bool,
        complex,
        np.float128,
        object,
    ])
    plain: list[Callable[[], Any]] = [
        lambda: None,
        lambda: draw.choice(["", "ids", b"x", ...]),
        lambda: draw.choice([{}, {"a": 1}, set(), object(), int, lambda: 0]),
        lambda: draw.choice([
            [],
            [[]],
            [[1], [2, 3]],
            [None],
            ["a"],
            [1.5],
            [True],
            (1, 2),
        ]),
        lambda: draw.choice([
            float("nan"),
            float("inf"),
            -1.5,
            10**30,
            2**63,
            -1,
            3,
            True,
            1j,
        ]),
        lambda: np.full(shape, number, np.int64),
        lambda: np.random.default_rng(draw.randrange(9)).integers(0, 9, shape),
        lambda: np.full(shape, number % 100).astype(dtype),
        lambda: np.full(shape, draw.choice([np.nan, np.inf, -np.inf, 1e300, 1e-320])),
        lambda: array.astype(array.dtype.newbyteorder(">")),
        lambda: np.ma.masked_equal(array, 0),
        lambda: np.broadcast_to(array.ravel()[:1].sum(), shape),
        lambda: _read_only(array),
        lambda: np.repeat(array, 2, axis=-1)[..., ::2] if array.ndim else array,
        lambda: np.asfortranarray(array),
        lambda: array.tolist(),
        lambda: array.astype(str),
        lambda: np.array(["2020-01-01"], "datetime64[D]"),
        lambda: np.zeros(shape, [("a", "i4")]),
        lambda: array[None],
        lambda: array[..., :1] if array.ndim else array,
    ]
    return draw.choice(plain)()


def _read_only(array: np.ndarray) -> np.ndarray:
    array = array.copy()
    array.flags.writeable = False
    return array


def converted(front_end: str, value: Any, draw: random.Random | None = None) -> Any:
    """Return an array as the front end's own, or, sometimes, as it is or as another's."""
    if not isinstance(value, np.ndarray) or isinstance(value, np.ma.MaskedArray):
        return value
    choice = front_end
    if draw is not None:
        others = ["numpy", "torch"] + (["equinox"] if front_end == "equinox" else [])
        choice = draw.choice([front_end] * 4 + others)
    try:
        if choice == "torch":
            import torch

            return torch.from_numpy(value.copy())
        if choice == "equinox":
            import jax.numpy as jnp

            return jnp.asarray(value)
    except (TypeError, ValueError, OverflowError):
        pass  # a dtype that the library does not have
    return value


def check_random_inputs(front_end: str, count: int, *, seed: int = 0) -> dict[str, int]:
    """Make ``count`` random calls; return how many gave a result, and how many an error."""
    draw, counts = random.Random(seed), {"results": 0, "errors": 0}
    module = importlib.import_module(f"firstlayer.{front_end}")
    layers = [_built(module, front_end, call) for call in CALLS]
    functions = [
        getattr(layer, call.method) if call.method else layer
        for layer, call in zip(layers, CALLS, strict=True)
    ]
    valid = [
        {key: converted(front_end, value) for key, value in call.arguments.items()}
        for call in CALLS
    ]
    expected = [_result(f, given) for f, given in zip(functions, valid, strict=True)]
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        for number in range(count):
            index = draw.randrange(len(CALLS))
            call, given = CALLS[index], dict(valid[index])
            for key in draw.sample(list(given), min(len(given), draw.choice([1, 1, 2]))):
                value = random_value(
                    draw, call.arguments[key], few_shapes=front_end == "equinox"
                )
                given[key] = converted(front_end, value, draw)
            try:
                _result(functions[index], given)
                counts["results"] += 1
            except DOCUMENTED as error:
                assert not isinstance(error, UnicodeError), _words(call, given, error)
                counts["errors"] += 1
            except Exception as error:
                raise AssertionError(_words(call, given, error)) from error
            if number % VALID_EVERY == 0:
                got = _result(functions[index], valid[index])
                np.testing.assert_array_equal(got, expected[index])
    for function, given, want in zip(functions, valid, expected, strict=True):
        np.testing.assert_array_equal(_result(function, given), want)
    return counts


def _built(module: Any, front_end: str, call: Call) -> Any:
    options = dict(call.options)
    if front_end == "torch" and "matrix" in options:
        options["matrix"] = converted("torch", options["matrix"])
    if front_end == "equinox":
        import inspect

        import jax

        if "key" in inspect.signature(getattr(module, call.name)).parameters:
            options["key"] = jax.random.key(0)
    return getattr(module, call.name)(**options)


def _result(function: Any, given: dict[Any, Any]) -> np.ndarray:
    """Call with positional arguments (numbers) and keywords; return a NumPy array."""
    args = [given[key] for key in sorted(key for key in given if isinstance(key, int))]
    result = function(*args, **{k: v for k, v in given.items() if isinstance(k, str)})
    if hasattr(result, "detach"):
        result = result.detach()
        return result.float().numpy() if "bfloat16" in str(result.dtype) else result.numpy()
    return np.asarray(result)


def _words(call: Call, given: dict[Any, Any], error: Exception) -> str:
    return f"{call.name}.{call.method} {call.options}: {given!r}: {type(error)} {error}"
