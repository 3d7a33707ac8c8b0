"""Learned positions: rows, resizing, gradients, padding, other libraries, errors."""

import copy
import json
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import interpolate
from transformers import Dinov2Config, OPTConfig, RobertaConfig, ViTConfig
from transformers.models.dinov2.modeling_dinov2 import Dinov2Embeddings
from transformers.models.opt.modeling_opt import OPTLearnedPositionalEmbedding
from transformers.models.roberta.modeling_roberta import RobertaEmbeddings
from transformers.models.vit.modeling_vit import ViTEmbeddings

from firstlayer import positions as ids
from firstlayer.numpy.learned import LearnedPositions
from firstlayer.optim import RowAdamW
from firstlayer.positions import learned
from tests.support.gradients import central_difference

rng = np.random.default_rng(0)
CORNERS: Any = "corners"


def table(rows, dim=4, dtype: Any = "float64"):
    return rng.standard_normal((rows, dim)).astype(dtype)


# Rows and positions


@pytest.mark.parametrize("row_offset", [0, 2])
def test_position_p_is_row_p_plus_row_offset(row_offset):
    weight = table(9 + row_offset)
    layer = LearnedPositions(9, 4, row_offset=row_offset, weight=weight)
    x = rng.standard_normal((2, 3, 4))
    for positions in ([4, 0, 8], [[1, 2, 3], [8, 8, 0]]):
        rows = weight[np.array(positions) + row_offset]
        np.testing.assert_array_equal(layer.encode(positions), rows)
        np.testing.assert_array_equal(layer(x, positions), x + rows)
    np.testing.assert_array_equal(layer(x), x + weight[row_offset : row_offset + 3])
    if row_offset:
        np.testing.assert_array_equal(layer.encode([-1, -2]), weight[[1, 0]])


def test_offset_is_a_number_or_one_per_row():
    layer, x = LearnedPositions(20, 4, rng=0), rng.standard_normal((2, 3, 4))
    np.testing.assert_array_equal(layer(x, offset=7), layer(x, [7, 8, 9]))
    rows = layer(x, offset=[0, 17])
    np.testing.assert_array_equal(rows, layer(x, [[0, 1, 2], [17, 18, 19]]))
    assert np.abs(rows[1] - layer(x)[1]).max() > 1e-3


def test_left_padding_and_packing_do_not_change_tokens():
    layer, x = LearnedPositions(20, 4, rng=0), rng.standard_normal((9, 4))
    padded = layer(x, ids.from_mask(np.array([0, 0, 0, 1, 1, 1, 1, 1, 1])))
    np.testing.assert_array_equal(padded[3:], layer(x[3:]))
    packed = layer(x, ids.from_documents(np.repeat([5, 3, 5], [4, 2, 3])))
    parts = [layer(part) for part in np.split(x, [4, 6])]
    np.testing.assert_array_equal(packed, np.concatenate(parts))


@given(st.floats(0, 9, width=32))
def test_real_positions_are_interpolated_linearly(position):
    weight = np.array([[0.0, 1.0], [3.0, -2.0]] * 5)
    got = LearnedPositions(10, 2, weight=weight).encode([position])
    places = np.arange(10)
    want = [np.interp(position, places, weight[:, d]) for d in range(2)]
    np.testing.assert_allclose(got[0], want, atol=1e-12)


def test_integral_real_positions_give_exact_rows():
    weight = table(11, dtype="float32")
    layer = LearnedPositions(9, 4, row_offset=2, weight=weight)
    for dtype in ("float16", "float32", "float64", ml_dtypes.bfloat16):
        positions = np.array([-2, -1, 0, 3, 8], dtype)
        np.testing.assert_array_equal(layer.encode(positions), weight[[0, 1, 2, 5, 10]])


def test_real_positions_equal_a_resized_table():
    layer = LearnedPositions(8, 4, rng=0, dtype="float64")
    interpolated = layer.encode(np.arange(15) * 7 / 14)
    layer.resize(15)
    np.testing.assert_allclose(interpolated, layer.weight, atol=1e-12)


def test_scale_multiplies_the_rows():
    weight, x = table(5), rng.standard_normal((3, 4))
    layer = LearnedPositions(5, 4, weight=weight, scale=0.5)
    np.testing.assert_allclose(layer(x), x + 0.5 * weight[:3])
    np.testing.assert_allclose(layer.encode([1.5]), [(weight[1] + weight[2]) / 4])


def test_layers_do_not_share_tables():
    a, b = LearnedPositions(5, 4, rng=0), LearnedPositions(5, 4, rng=1)
    before = a.encode([2]).copy()
    b.weight[:] = 7
    assert (b.encode([2]) == 7).all() and (a.encode([2]) == before).all()


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint64", "int64"])
def test_positions_have_any_integer_dtype(dtype):
    layer = LearnedPositions(300, 2, row_offset=100, rng=0)
    got = layer.encode(np.array([0, 120], dtype))
    np.testing.assert_array_equal(got, layer.weight[[100, 220]])


def test_lists_empty_and_single_positions_are_accepted():
    layer = LearnedPositions(5, 2, rng=0)
    np.testing.assert_array_equal(layer.encode(3), layer.weight[3])
    assert layer.encode(np.zeros((2, 0), int)).shape == (2, 0, 2)
    np.testing.assert_array_equal(layer([[0.0, 0.0]], [4]), layer.weight[4:].astype(float))


# Dtypes


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_is_rounded_once(dtype):
    layer = LearnedPositions(64, 4, dtype=dtype, rng=0, init="normal", scale=0.3)
    x = rng.standard_normal((64, 4)).astype(dtype)
    full = x.astype(np.float32) + layer.weight.astype(np.float32) * np.float32(0.3)
    np.testing.assert_array_equal(layer(x), full.astype(dtype))
    # Rounding twice would give other values.
    twice = x + (layer.weight.astype(np.float32) * np.float32(0.3)).astype(dtype)
    assert (twice != layer(x)).any()
    assert layer.encode([0]).dtype == dtype
    assert layer.encode([0], dtype="float32").dtype == np.float32
    between = layer.encode([0.5], dtype="float32")
    want = layer.weight[:2].astype(np.float32).mean(0) * np.float32(0.3)
    np.testing.assert_allclose(between[0], want, rtol=1e-6)


def test_output_has_the_dtype_of_x_and_float64_tables_are_added_in_float64():
    layer = LearnedPositions(3, 2, dtype="float64", rng=0)
    x = np.full((3, 2), -0.015, np.float32)
    want = (x.astype(np.float64) + layer.weight).astype(np.float32)
    assert layer(x).dtype == np.float32
    np.testing.assert_array_equal(layer(x), want)


# Other libraries


def test_matches_opt():
    """transformers 5.22.2: padding is position -1, whose row is 1."""
    theirs = OPTLearnedPositionalEmbedding(OPTConfig().max_position_embeddings, 6)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 0]])
    want = theirs(mask).detach().numpy()
    layer = LearnedPositions(2048, 6, row_offset=2, weight=theirs.weight.detach().numpy())
    got = layer.encode(ids.from_mask(mask.numpy(), at_padding=-1))
    np.testing.assert_array_equal(got, want)


def test_matches_roberta_and_its_gradient():
    """transformers 5.22.2, position embeddings and their gradient."""
    config = RobertaConfig(vocab_size=9, hidden_size=6, max_position_embeddings=20)
    theirs = RobertaEmbeddings(config).position_embeddings
    tokens = torch.tensor([[1, 1, 5, 6, 7], [5, 6, 7, 8, 1]])
    rows = RobertaEmbeddings.create_position_ids_from_input_ids(tokens, 1)
    out = theirs(rows)
    dy = torch.from_numpy(rng.standard_normal(out.shape).astype(np.float32))
    out.backward(dy)
    weight = theirs.weight.detach().numpy().copy()
    layer = LearnedPositions(18, 6, row_offset=2, padding_idx=1, weight=weight)
    positions = ids.from_mask(tokens.numpy() != 1, at_padding=-1)
    y, pullback = layer.vjp(np.zeros((2, 5, 6), np.float32), positions)
    np.testing.assert_array_equal(y, out.detach().numpy())
    grad = pullback(dy.numpy())["weight"].dense(20)
    assert theirs.weight.grad is not None
    np.testing.assert_allclose(grad, theirs.weight.grad.numpy(), atol=1e-6)
    assert (grad[1] == 0).all()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_matches_x_transformers():
    """x-transformers 2.31.10: rows times embedding_dim ** -0.5."""
    from x_transformers.x_transformers import AbsolutePositionalEmbedding

    theirs = AbsolutePositionalEmbedding(6, 12)
    want = theirs(torch.zeros(1, 5, 6), offset=3).detach().numpy()
    weight = theirs.emb.weight.detach().numpy()
    layer = LearnedPositions(12, 6, weight=weight, scale=6**-0.5)
    np.testing.assert_allclose(layer.encode(np.arange(5) + 3), want, atol=1e-7)


# Resizing


@pytest.mark.parametrize(
    ("old", "new"), [(5, 9), (9, 5), (6, 6), (7, 1), (1, 4), (12, 400)]
)
@pytest.mark.parametrize("align", ["ends", "centres"])
def test_resize_linear_matches_torch(old, new, align):
    weight = table(old, 3)
    moved = torch.from_numpy(weight).T[None]
    want = interpolate(moved, size=new, mode="linear", align_corners=align == "ends")
    got = learned.resize_linear(weight, new, align=align)
    np.testing.assert_allclose(got, want[0].T.numpy(), atol=1e-12)


@pytest.mark.parametrize(("old", "new"), [(5, 10), (10, 5), (4, 7)])
def test_resize_linear_by_starts_matches_position_interpolation(old, new):
    weight = table(old, 3)
    places = np.arange(new) * old / new
    want = [np.interp(places, np.arange(old), weight[:, d]) for d in range(3)]
    got = learned.resize_linear(weight, new, align="starts")
    np.testing.assert_allclose(got, np.transpose(want), atol=1e-12)


def test_resize_linear_keeps_straight_lines_and_coinciding_rows():
    line = np.linspace(-1, 5, 7)[:, None]
    np.testing.assert_allclose(
        learned.resize_linear(line, 20), np.linspace(-1, 5, 20)[:, None], atol=1e-12
    )
    weight = table(7, 3, "float32")
    got = learned.resize_linear(weight, 13)
    np.testing.assert_array_equal(got[::2], weight)
    assert got.dtype == np.float32


GRIDS = [((3, 3), (5, 7)), ((14, 14), (7, 9)), ((6, 9), (2, 20)), ((8, 5), (8, 3))]
GRIDS += [((16, 16), (2, 2)), ((1, 1), (3, 2)), ((14, 14), (37, 37)), ((2, 2), (1, 1))]


@pytest.mark.parametrize(("grid", "new_grid"), GRIDS)
@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize("class_tokens", [0, 1, 3])
def test_resize_grid_matches_torch(grid, new_grid, antialias, class_tokens):
    weight = table(class_tokens + grid[0] * grid[1], 3)
    cells = torch.from_numpy(weight[class_tokens:]).reshape(1, *grid, 3)
    want = interpolate(
        cells.permute(0, 3, 1, 2), size=new_grid, mode="bicubic", antialias=antialias
    )
    got = learned.resize_grid(
        weight, new_grid, grid=grid, class_tokens=class_tokens, antialias=antialias
    )
    np.testing.assert_array_equal(got[:class_tokens], weight[:class_tokens])
    np.testing.assert_allclose(
        got[class_tokens:], want.permute(0, 2, 3, 1).reshape(-1, 3).numpy(), atol=1e-12
    )


@pytest.mark.parametrize(("grid", "new_grid"), GRIDS)
@pytest.mark.parametrize("antialias", [False, True])
def test_resize_grid_with_a_nudge_matches_torch_with_a_scale_factor(
    grid, new_grid, antialias
):
    """The first DINOv2 uses (new + 0.1) / old as the scale factor of each axis."""
    weight = table(1 + grid[0] * grid[1], 3)
    cells = torch.from_numpy(weight[1:]).reshape(1, *grid, 3).permute(0, 3, 1, 2)
    factors = [(new + 0.1) / old for old, new in zip(grid, new_grid, strict=True)]
    want = interpolate(cells, scale_factor=factors, mode="bicubic", antialias=antialias)
    assert want.shape[-2:] == new_grid
    same = learned.resize_grid(weight, list(grid), grid=grid, nudge=0.1)  # pyright: ignore
    np.testing.assert_array_equal(same, weight)
    got = learned.resize_grid(weight, new_grid, grid=grid, antialias=antialias, nudge=0.1)
    np.testing.assert_allclose(
        got[1:], want.permute(0, 2, 3, 1).reshape(-1, 3).numpy(), atol=1e-12
    )


@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize("nudge", [0.0, 0.1])
def test_resizing_to_the_same_grid_gives_an_equal_table(antialias, nudge):
    for dtype in ("float64", "float32", "float16", ml_dtypes.bfloat16):
        weight = table(1 + 12, 3, dtype)
        got = learned.resize_grid(
            weight, (3, 4), grid=(3, 4), antialias=antialias, nudge=nudge
        )
        np.testing.assert_array_equal(got, weight)
        assert got.dtype == weight.dtype and got is not weight


@pytest.mark.parametrize("antialias", [False, True])
def test_resize_grid_keeps_constants_and_symmetry(antialias):
    ones = learned.resize_grid(
        np.ones((36, 1)), (4, 11), grid=(6, 6), class_tokens=0, antialias=antialias
    )
    np.testing.assert_allclose(ones, 1.0, atol=1e-12)
    weight = table(36, 2).reshape(6, 6, 2)
    options = {"grid": (6, 6), "class_tokens": 0, "antialias": antialias}
    one, other = (
        learned.resize_grid(w.reshape(36, 2), (9, 4), **options).reshape(9, 4, 2)
        for w in (weight, weight[::-1, ::-1])
    )
    np.testing.assert_allclose(one, other[::-1, ::-1], atol=1e-12)


@pytest.mark.parametrize("size", [(48, 80), (16, 32), (64, 64)])
@pytest.mark.parametrize("which", ["vit", "dinov2"])
def test_matches_vit_and_dinov2(which, size):
    """transformers 5.22.2, interpolate_pos_encoding, which works in float32."""
    classes = {
        "vit": (ViTConfig, ViTEmbeddings),
        "dinov2": (Dinov2Config, Dinov2Embeddings),
    }
    make_config, make = classes[which]
    config = make_config(image_size=64, patch_size=8, hidden_size=6, num_attention_heads=2)
    theirs = make(config)
    with torch.no_grad():
        theirs.position_embeddings.copy_(torch.from_numpy(table(65, 6)))
    new_grid = size[0] // 8, size[1] // 8
    patches = torch.zeros(1, 1 + new_grid[0] * new_grid[1], 6)
    want = theirs.interpolate_pos_encoding(patches, *size)[0].detach().numpy()
    weight = theirs.position_embeddings[0].detach().numpy()
    layer = LearnedPositions(65, 6, weight=weight.copy())
    layer.resize_grid(new_grid, grid=(8, 8))
    assert layer.max_positions == len(want)
    np.testing.assert_array_equal(layer.weight[0], weight[0])
    np.testing.assert_allclose(layer.weight, want, atol=1e-5)


def test_half_precision_tables_are_resized_in_float64_and_rounded_once():
    weight = table(17, 3, "float16")
    got = learned.resize_grid(weight, (7, 3), grid=(4, 4))
    full = learned.resize_grid(weight.astype(np.float64), (7, 3), grid=(4, 4))
    np.testing.assert_array_equal(got, full.astype(np.float16))
    got = learned.resize_linear(weight, 40)
    full = learned.resize_linear(weight.astype(np.float64), 40)
    np.testing.assert_array_equal(got, full.astype(np.float16))


def test_resizing_keeps_the_rows_before_position_0():
    layer = LearnedPositions(6, 4, row_offset=2, padding_idx=1, rng=0)
    layer.set_padding(np.array([1.0, 2.0, 3.0, 4.0]))
    before = layer.weight.copy()
    layer.resize(11, align="centres")
    np.testing.assert_array_equal(layer.weight[:2], before[:2])
    want = learned.resize_linear(before[2:], 11, align="centres")
    np.testing.assert_array_equal(layer.weight[2:], want)
    assert layer.config()["max_positions"] == 11
    np.testing.assert_array_equal(layer.encode([-1]), [[1, 2, 3, 4]])
    layer.weight[1] = 9
    np.testing.assert_array_equal(layer.encode([-1]), [[9, 9, 9, 9]])
    assert layer(np.zeros((11, 4))).shape == (11, 4)


def test_layer_resize_grid_passes_every_option():
    options = {"grid": (3, 5), "class_tokens": 2, "antialias": True, "nudge": 0.1}
    layer = LearnedPositions(17, 4, rng=0)
    want = learned.resize_grid(layer.weight, (2, 4), **options)
    layer.resize_grid((2, 4), **options)
    np.testing.assert_array_equal(layer.weight, want)
    assert layer.max_positions == 10


# Gradients


@pytest.mark.parametrize("row_offset", [0, 2])
@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize(
    "positions",
    [
        None,
        [3, 3, 0],
        [[0, 1, 1], [6, 1, 0]],
        [[6, 6, 2]],
        [0.25, 6.0, 2.5],
        [[0.5, 0.5, 1.75], [5.9, 0.0, 3.0]],
    ],
    ids=str,
)
def test_gradients_match_finite_differences(row_offset, scale, positions):
    layer = LearnedPositions(
        7, 3, row_offset=row_offset, scale=scale, dtype="float64", rng=0
    )
    x, dy = rng.standard_normal((2, 2, 3, 3))
    y, pullback = layer.vjp(x, positions)
    np.testing.assert_array_equal(y, layer(x, positions))
    grads = pullback(dy)

    def loss():
        return float((layer(x, positions) * dy).sum())

    want = central_difference(loss, layer.weight)
    dense = grads["weight"].dense(7 + row_offset)
    np.testing.assert_allclose(dense, want, atol=1e-8)
    np.testing.assert_allclose(grads["x"], central_difference(loss, x), atol=1e-8)
    assert (np.diff(grads["weight"].ids) > 0).all()


def test_gradient_with_an_offset_is_of_the_rows_read():
    layer = LearnedPositions(9, 2, rng=0)
    _, pullback = layer.vjp(np.zeros((2, 2, 2)), offset=[0, 6])
    grad = pullback(np.ones((2, 2, 2)))["weight"]
    assert grad.ids.tolist() == [0, 1, 6, 7]


@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16])
def test_gradient_of_a_repeated_position_is_summed_in_float32(dtype):
    layer = LearnedPositions(2, 1, dtype=dtype, rng=0)
    x = np.zeros((3000, 1, 1), dtype)
    for positions in (None, np.zeros((3000, 1), int), np.zeros((3000, 1))):
        grad = layer.vjp(x, positions)[1](np.ones_like(x))["weight"].dense(2)
        np.testing.assert_array_equal(grad, [[3000.0], [0.0]])
        assert grad.dtype == np.float32


def test_pullback_uses_the_positions_of_the_forward():
    layer, positions = LearnedPositions(9, 2, rng=0), np.array([4, 5])
    _, pullback = layer.vjp(np.zeros((2, 2)), positions)
    positions[:] = 0
    assert pullback(np.ones((2, 2)))["weight"].ids.tolist() == [4, 5]


def test_gradient_of_x_has_the_dtype_of_x():
    layer = LearnedPositions(9, 2, rng=0)
    x = rng.standard_normal((2, 2)).astype(np.float16)
    dy = rng.standard_normal((2, 2))
    got = layer.vjp(x)[1](dy)["x"]
    np.testing.assert_array_equal(got, dy.astype(np.float16))
    assert got.dtype == np.float16


# Padding


def test_padding_row_is_zero_in_a_new_table_and_can_be_written():
    layer = LearnedPositions(5, 3, row_offset=2, padding_idx=1, rng=0)
    assert (layer.weight[1] == 0).all() and (layer.weight[0] != 0).all()
    layer.weight[:] = 5
    assert (layer.encode([-1, 0]) == 5).all() and (layer.encode([-1.0]) == 5).all()
    layer.set_padding([1.0, 2.0, 3.0])
    np.testing.assert_array_equal(layer.encode([-1]), [[1, 2, 3]])
    np.testing.assert_array_equal(layer.state_dict()["weight"][:2], [[5] * 3, [1, 2, 3]])


def test_a_given_table_keeps_its_padding_row():
    weight = table(7, 3, "float32")
    layer = LearnedPositions(5, 3, row_offset=2, padding_idx=1, weight=weight.copy())
    np.testing.assert_array_equal(layer.weight, weight)
    np.testing.assert_array_equal(layer.encode([-1]), weight[1:2])


def test_an_optimizer_decays_the_padding_row_like_a_row_without_gradient():
    options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.5}
    layer = LearnedPositions(5, 3, row_offset=2, padding_idx=1, rng=0)
    layer.set_padding(2.0)
    theirs = torch.nn.Embedding(7, 3, padding_idx=1, _weight=torch.tensor(layer.weight))
    ours, adamw = (
        RowAdamW(layer, **options),
        torch.optim.AdamW(theirs.parameters(), **options),
    )
    for _ in range(3):
        _, pullback = layer.vjp(np.zeros((2, 3), np.float32), [-1, 0])
        ours.step(pullback(np.ones((2, 3), np.float32)))
        adamw.zero_grad()
        theirs(torch.tensor([1, 2])).sum().backward()
        adamw.step()
    want = theirs.weight.detach().numpy()
    np.testing.assert_allclose(layer.state_dict()["weight"], want, rtol=1e-5)


def test_padding_row_gets_no_gradient_from_a_lookup():
    layer = LearnedPositions(5, 3, row_offset=2, padding_idx=1, rng=0)
    for positions in ([-1, 0, 1], [-1.0, 0.0, 1.0]):
        _, pullback = layer.vjp(np.zeros((3, 3)), positions)
        grad = pullback(np.ones((3, 3)))["weight"]
        assert 1 not in grad.ids and {2, 3} <= set(grad.ids.tolist())


def test_loading_writes_the_padding_row():
    state = {"weight": table(7, 3, "float32")}
    layer = LearnedPositions(5, 3, row_offset=2, padding_idx=1, rng=0)
    layer.load_state_dict(state)
    np.testing.assert_array_equal(layer.encode([-1, 0]), state["weight"][1:3])
    np.testing.assert_array_equal(layer.state_dict()["weight"], state["weight"])


# Configs and copies


def test_config_is_plain_and_rebuilds_the_layer():
    layer = LearnedPositions(
        9, 4, row_offset=2, padding_idx=0, scale=0.5, dtype="float16", rng=0
    )
    config = json.loads(json.dumps(layer.config()))
    assert config == {
        "max_positions": 9,
        "embedding_dim": 4,
        "row_offset": 2,
        "padding_idx": 0,
        "scale": 0.5,
        "dtype": "float16",
    }
    rebuilt = LearnedPositions(**config)
    rebuilt.load_state_dict(layer.state_dict())
    np.testing.assert_array_equal(rebuilt.encode([0, 8, 0.5]), layer.encode([0, 8, 0.5]))
    assert list(layer.parameters()) == ["weight"]
    assert layer.parameters()["weight"] is layer.weight


def test_copies_are_independent_and_equal():
    layer = LearnedPositions(9, 4, row_offset=2, padding_idx=0, scale=0.5, rng=0)
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        np.testing.assert_array_equal(copied.encode([0, 8]), layer.encode([0, 8]))
        copied.weight[:] = 1
        assert (layer.encode([0]) != 0.5).any()


def test_new_tables_have_standard_deviation_002_and_follow_their_seed():
    a, b, c = (LearnedPositions(400, 50, rng=seed).weight for seed in (1, 1, 2))
    np.testing.assert_allclose([a.std(), a.mean()], [0.02, 0], atol=3e-4)
    assert (a == b).all() and (a != c).any()
    assert (LearnedPositions(4, 5, init="zeros").weight == 0).all()
    custom = LearnedPositions(4, 5, init=lambda shape, rng: np.full(shape, 3.0)).weight
    assert (custom == 3).all()


# NumPy, torch and JAX


@pytest.mark.parametrize("row_offset", [0, 2])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("real", [False, True])
def test_numpy_torch_and_jax_agree_eager_and_compiled(row_offset, dtype, real):
    weight = table(9 + row_offset, 4, dtype)
    positions = np.array([[0, 5, 8], [3, 3, 1]], np.float32 if real else np.int64)
    if real:
        positions = positions - np.array([[0, 0.25, 0], [0.5, 0, 0.875]], np.float32)

    def run(weight, positions):
        return learned.rows_at(weight, positions, row_offset=row_offset)

    want = run(weight, positions)
    layer = LearnedPositions(9, 4, row_offset=row_offset, weight=weight)
    np.testing.assert_array_equal(layer.encode(positions, dtype=want.dtype), want)
    compiled = torch.compile(run, fullgraph=True, backend="eager")
    for make, function in [
        (torch.from_numpy, run),
        (torch.from_numpy, compiled),
        (jnp.asarray, run),
        (jnp.asarray, jax.jit(run)),
    ]:
        got = np.asarray(function(make(weight), make(positions)))
        assert got.dtype == want.dtype
        np.testing.assert_allclose(got, want, atol=1e-6 if real else 0)


@pytest.mark.parametrize("row_offset", [0, 2])
def test_positions_out_of_range_are_nan_without_gradient_under_jit(row_offset):
    weight = jnp.asarray(table(5 + row_offset, 3, "float32"))

    def loss(weight, positions):
        rows = learned.rows_at(weight, positions, row_offset=row_offset)
        return jnp.where(jnp.isnan(rows), 0.0, rows).sum(), rows

    last = 4
    for bad in (last + 1, -row_offset - 1, 2**31 - 1, -(2**31), last + 0.5, np.inf, np.nan):
        positions = jnp.asarray([1, bad])
        step = jax.jit(jax.value_and_grad(loss, has_aux=True))
        (_, rows), grad = step(weight, positions)
        assert np.isnan(rows[1]).all() and np.isfinite(rows[0]).all()
        want = np.zeros(weight.shape)
        want[1 + row_offset] = 1
        np.testing.assert_array_equal(grad, want)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint16", "uint32"])
def test_narrow_and_unsigned_positions_do_not_wrap(dtype):
    weight = table(400, 2, "float32")
    positions = np.array([0, 120], dtype)
    want = weight[[200, 320]]
    for make in (np.asarray, jnp.asarray):
        got = learned.rows_at(make(weight), make(positions), row_offset=200)
        np.testing.assert_array_equal(np.asarray(got), want)


# Errors


@pytest.mark.rejects
@pytest.mark.parametrize(
    ("positions", "want"),
    [
        ([0, 600], "positions must be smaller than max_positions 512, got 600"),
        ([512], "positions must be smaller than max_positions 512, got 512"),
        ([2**40], "smaller than max_positions 512, got 1099511627776"),
        ([float("nan")], "smaller than max_positions 512, got nan"),
        ([float("inf")], "smaller than max_positions 512, got inf"),
        ([511.5], "at most 511, the last of max_positions 512, got 511.5"),
        ([3, -3], "positions must be at least -2 for row_offset 2, got -3"),
        ([-2.5], "positions must be at least -2 for row_offset 2, got -2.5"),
    ],
)
def test_rejects_positions_without_a_row(positions, want):
    layer = LearnedPositions(512, 4, row_offset=2)
    with pytest.raises(ValueError, match=want):
        layer.encode(positions)


@pytest.mark.rejects
def test_rejects_sequences_that_are_too_long():
    layer = LearnedPositions(512, 4)
    want = "positions must be smaller than max_positions 512, got 599"
    with pytest.raises(ValueError, match=want):
        layer(np.zeros((2, 600, 4)))
    with pytest.raises(ValueError, match="max_positions 512, got 513"):
        layer.vjp(np.zeros((2, 4, 4)), offset=[0, 510])
    with pytest.raises(ValueError, match="at least 0 for row_offset 0, got -1"):
        layer(np.zeros((1, 4)), [-1])


@pytest.mark.rejects
@pytest.mark.parametrize(
    ("arguments", "options", "error", "want"),
    [
        ((0, 4), {}, ValueError, "max_positions must be positive, got 0"),
        ((4, 0), {}, ValueError, "embedding_dim must be positive, got 0"),
        ((4.0, 4), {}, TypeError, "max_positions must be an integer, got float"),
        ((4, 4), {"row_offset": -1}, ValueError, "row_offset must be at least 0, got -1"),
        (
            (4, 4),
            {"row_offset": 2, "padding_idx": 2},
            ValueError,
            "padding_idx must be one of the 2 rows before position 0, got 2",
        ),
        (
            (4, 4),
            {"row_offset": 2, "weight": np.zeros((4, 4))},
            ValueError,
            r"weight must have shape \(6, 4\), got \(4, 4\)",
        ),
        ((4, 4), {"init": "he"}, ValueError, "init must be 'normal', .* got 'he'"),
    ],
)
def test_rejects_bad_arguments(arguments, options, error, want):
    with pytest.raises(error, match=want):
        LearnedPositions(*arguments, **options)


@pytest.mark.rejects
@pytest.mark.parametrize(
    ("x", "positions", "error", "want"),
    [
        (np.zeros((3, 5)), None, ValueError, r"shape \(..., length, 4\), got \(3, 5\)"),
        (np.zeros((3, 4), int), None, TypeError, "x must be real, got int64"),
        (np.zeros((3, 4)), [True] * 3, TypeError, "integers or reals, got bool"),
        (np.zeros((3, 4)), [1], ValueError, r"shape \(3,\), got \(1,\)"),
    ],
)
def test_rejects_bad_input(x, positions, error, want):
    with pytest.raises(error, match=want):
        LearnedPositions(4, 4)(x, positions)


@pytest.mark.rejects
def test_rejects_a_gradient_of_another_shape_and_padding_without_padding_idx():
    layer = LearnedPositions(4, 4)
    with pytest.raises(ValueError, match=r"dy must have shape \(2, 4\), got \(4,\)"):
        layer.vjp(np.zeros((2, 4)))[1](np.zeros(4))
    with pytest.raises(ValueError, match="set_padding needs a layer with padding_idx"):
        layer.set_padding(0.0)


@pytest.mark.rejects
@pytest.mark.parametrize(
    ("call", "want"),
    [
        (lambda w: learned.resize_linear(w, 0), "length must be positive, got 0"),
        (lambda w: learned.resize_linear(w, 3, align=CORNERS), "got 'corners'"),
        (
            lambda w: learned.resize_grid(w, (2, 2), grid=(3, 4)),
            r"weight must have 13 rows for grid \(3, 4\) and class_tokens 1, got 10",
        ),
        (
            lambda w: learned.resize_grid(w, (2, 0), grid=(3, 3)),
            "new_grid must be positive",
        ),
        (lambda w: learned.resize_grid(w, (2, 2), grid=(0, 3)), "grid must be positive"),
        (
            lambda w: learned.resize_grid(w, (2, 2), grid=(3, 3), class_tokens=-1),
            "class_tokens must be at least 0, got -1",
        ),
    ],
)
def test_resizing_rejects_bad_sizes(call, want):
    with pytest.raises(ValueError, match=want):
        call(np.zeros((10, 2)))


@pytest.mark.rejects
def test_a_failed_resize_does_not_change_the_layer():
    layer = LearnedPositions(10, 2, rng=0)
    before = layer.weight.copy()
    for call in (lambda: layer.resize(0), lambda: layer.resize_grid((2, 2), grid=(4, 4))):
        with pytest.raises(ValueError, match="got"):
            call()
    np.testing.assert_array_equal(layer.weight, before)
    assert layer.max_positions == 10
