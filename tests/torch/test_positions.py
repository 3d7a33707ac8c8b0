"""Sinusoidal, learned and Fourier positions on torch: values, gradients, compile."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from firstlayer.numpy.fourier import FourierFeatures as NumpyFourier
from firstlayer.numpy.learned import LearnedPositions as NumpyLearned
from firstlayer.numpy.sinusoidal import SinusoidalPositions as NumpySinusoidal
from firstlayer.torch.fourier import FourierFeatures
from firstlayer.torch.learned import LearnedPositions
from firstlayer.torch.rotary import RotaryPositions
from firstlayer.torch.sinusoidal import SinusoidalPositions
from tests.support.torch_round_trips import (
    ROUND_TRIPS,
    built,
    forget_graphs,
    graphs,
    plain_operators,
)

# Inductor and forward-mode AD import deprecated parts of torch.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")

HALVES = [torch.float16, torch.bfloat16]
# Every argument at a value that is not its default.
OPTIONS = {
    "base": {"base": 500.0},
    "layout": {"layout": "half"},
    "shift": {"shift": 1.0},
    "cos_first": {"cos_first": True},
    "scale": {"scale": 0.25},
    "odd": {"odd": "zero"},
    "frequency_scale": {"frequency_scale": 30.0},
}


def draw(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def learned():
    return LearnedPositions(9, 6, row_offset=2, padding_idx=1, scale=0.5)


def sinusoidal():
    return SinusoidalPositions(6, base=500.0, layout="half")


LAYERS = {"learned": learned, "sinusoidal": sinusoidal}


# -------------------------------------------------------------------- sinusoidal


def test_encodings_are_accurate_at_large_positions():
    positions = np.array([0, 1, 4095, 1_000_003, 2**24 - 1, -77])
    got = SinusoidalPositions(8, base=500.0).encode(torch.from_numpy(positions))
    angles = positions[:, None].astype(np.longdouble) * 500.0 ** (-np.arange(0, 8, 2) / 8)
    np.testing.assert_allclose(got[:, 0::2], np.sin(angles).astype(float), atol=2.5e-7)
    np.testing.assert_allclose(got[:, 1::2], np.cos(angles).astype(float), atol=2.5e-7)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_sinusoidal_output_is_bitwise_equal_to_numpy(options, dtype):
    layer, reference = SinusoidalPositions(7, **options), NumpySinusoidal(7, **options)
    x, positions = draw(2, 3, 7, dtype=dtype), torch.tensor([[0, 5, 70_000], [1, -3, 9]])
    got = layer(x, positions)
    np.testing.assert_array_equal(got, reference(x.numpy(), positions.numpy()))
    assert not torch.equal(got, SinusoidalPositions(7)(x, positions))


@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_encodings_at_float_positions(scale):
    layer = SinusoidalPositions(6, frequency_scale=scale)
    positions = np.array([0.125, -3.75, 1000.5, 0.3])
    angles = positions[:, None] * scale * 10_000.0 ** (-np.arange(0, 6, 2) / 6)
    got = layer.encode(torch.from_numpy(positions), dtype=torch.float64)
    np.testing.assert_allclose(got[:, 0::2], np.sin(angles), atol=5e-7)
    reference = NumpySinusoidal(6, frequency_scale=scale).encode(
        positions, dtype=np.float64
    )
    np.testing.assert_allclose(got, reference, atol=1e-7)


@pytest.mark.parametrize("name", ["tensor2tensor", "marian", "timestep"])
def test_conventions_match_numpy(name):
    layer = getattr(SinusoidalPositions, name)(7, scale=2.0)
    reference = getattr(NumpySinusoidal, name)(7, scale=2.0)
    positions = [0, 3, 100]
    np.testing.assert_array_equal(layer.encode(positions), reference.encode(positions))


def test_several_axes_match_numpy():
    layer, reference = SinusoidalPositions(8, axes=2), NumpySinusoidal(8, axes=2)
    x, positions = draw(2, 3, 8), torch.arange(12).reshape(2, 2, 3)
    np.testing.assert_array_equal(
        layer(x, positions), reference(x.numpy(), positions.numpy())
    )
    np.testing.assert_array_equal(
        layer.encode(positions[:, 0]), reference.encode(positions[:, 0].numpy())
    )


def test_sinusoidal_gradients_of_vectors_and_float_positions():
    for scale in (1.0, 5.0):
        layer = SinusoidalPositions(4, frequency_scale=scale)
        x = draw(2, 3, 4, dtype=torch.float64).requires_grad_()
        # Away from integers, where the float32 tables make finite differences inexact.
        positions = torch.tensor([0.3, 7.6, -2.4], dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(layer, (x, positions))


# ----------------------------------------------------------------------- learned


def test_rows_are_added_by_position():
    layer = built(lambda: LearnedPositions(5, 3, row_offset=2, scale=0.5))
    x, positions = draw(2, 3, 3), torch.tensor([[4, 0, -2], [-1, 1, 3]])
    torch.testing.assert_close(
        layer(x, positions), x + 0.5 * layer.weight[positions + 2], atol=0, rtol=0
    )


@pytest.mark.parametrize("positions", [[0, 6, -2, 3], [0.25, 5.5, -1.75, 6.0]])
def test_learned_output_matches_numpy(positions):
    layer = built(lambda: LearnedPositions(7, 4, row_offset=2, scale=3.0))
    reference = NumpyLearned(7, 4, row_offset=2, scale=3.0, weight=layer.weight.detach())
    x = draw(2, 4, 4)
    got = layer(x, positions).detach()
    np.testing.assert_allclose(got, reference(x.numpy(), positions), atol=1e-6)
    np.testing.assert_allclose(
        layer.encode(positions).detach(), reference.encode(positions), atol=1e-6
    )


@pytest.mark.parametrize("path", ["eager", "operators"])
def test_learned_gradients_pass_gradcheck(path):
    layer = LearnedPositions(5, 3, row_offset=1, scale=2.0, dtype=torch.float64)
    x = draw(2, 3, 3, dtype=torch.float64).requires_grad_()

    def run(weight, x, positions):
        with torch.nn.utils.stateless._reparametrize_module(layer, {"weight": weight}):
            if path == "eager":
                return layer(x, positions)
            with plain_operators():
                return layer(x, positions)

    weight = layer.weight.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(run, (weight, x, torch.tensor([[4, 0, -1], [0, 0, 2]])))
    real = torch.tensor([0.5, 3.25, -0.75], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(run, (weight, x, real))
    assert torch.autograd.gradgradcheck(run, (weight, x, real))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("given_as", ["integers", "none", "floats"])
def test_gradients_of_a_row_are_summed_in_float32(dtype, given_as):
    layer = LearnedPositions(4, 2, dtype=dtype)
    x = torch.zeros(3000, 3, 2, dtype=dtype)
    positions = {
        "none": None,
        "integers": torch.tensor([[1, 0, 1]]).expand(3000, 3),
        "floats": torch.tensor([[1.0, 0.0, 1.0]]).expand(3000, 3),
    }[given_as]
    layer(x, positions).sum().backward()
    want = [3000, 3000, 3000, 0] if positions is None else [3000, 6000, 0, 0]
    assert layer.weight.grad is not None
    assert torch.equal(layer.weight.grad[:, 0], torch.tensor(want).to(dtype))


def test_padding_row_is_zero_at_first_and_gets_no_gradient():
    layer = built(learned)
    x = torch.zeros(2, 3, 6)
    positions = torch.tensor([[-1, 0, 1], [2, -1, -1]])
    assert not layer.weight[1].any() and not layer(x, positions)[0, 0].any()
    layer(x, positions).sum().backward()
    assert layer.weight.grad is not None and not layer.weight.grad[1].any()
    assert layer.weight.grad[2].all()


def test_written_padding_row_is_read():
    layer, x = built(learned), torch.zeros(1, 6)
    with torch.no_grad():
        layer.weight += 1.0
    assert (layer(x, [-1]) == 0.5).all() and (layer.state_dict()["weight"][1] == 1.0).all()
    layer.set_padding(4.0)
    assert (layer(x, [-1]) == 2.0).all()
    layer.reset_parameters()
    assert not layer.weight[1].any()


def test_optimizer_treats_the_padding_row_as_a_row_without_gradient():
    layer = built(learned)
    layer.set_padding(4.0)
    layer(torch.zeros(1, 6), [-1]).sum().backward()
    torch.optim.AdamW(layer.parameters(), 0.1, weight_decay=0.5).step()
    torch.testing.assert_close(layer.weight[1].detach(), torch.full((6,), 4.0 * 0.95))


def test_checkpoint_keeps_its_padding_row():
    layer, other = built(learned), built(learned, seed=1)
    other.set_padding(7.0)
    layer.load_state_dict(other.state_dict())
    assert (layer(torch.zeros(1, 6), [-1]) == 3.5).all()


@pytest.mark.parametrize("align", ["ends", "centres", "starts"])
def test_resize_interpolates_positions_and_keeps_the_rows_before_them(align):
    layer = built(lambda: LearnedPositions(5, 3, row_offset=2, padding_idx=1))
    parameter, before = layer.weight, layer.weight.detach().clone()
    reference = NumpyLearned(
        5, 3, row_offset=2, padding_idx=1, weight=before.numpy().copy()
    )
    reference.resize(8, align=align)
    layer.resize(8, align=align)
    assert layer.weight is parameter and layer.max_positions == 8
    np.testing.assert_array_equal(layer.weight.detach(), reference.weight)
    assert torch.equal(layer.weight[:2], before[:2])
    if align == "centres":
        old = before[2:].T[None]
        want = F.interpolate(old, size=8, mode="linear", align_corners=False)[0].T
        torch.testing.assert_close(layer.weight[2:].detach(), want)
    layer(torch.zeros(8, 3)).sum().backward()


def test_resize_grid_matches_vit():
    layer = built(lambda: LearnedPositions(1 + 4 * 3, 5))
    old = layer.weight.detach().clone()
    layer.resize_grid((6, 5), grid=(4, 3))
    patches = old[1:].reshape(1, 4, 3, 5).permute(0, 3, 1, 2)
    want = F.interpolate(patches, size=(6, 5), mode="bicubic", align_corners=False)
    want = want.permute(0, 2, 3, 1).reshape(30, 5)
    torch.testing.assert_close(layer.weight.detach(), torch.cat([old[:1], want]))
    assert layer.max_positions == 31


def test_given_table_is_not_copied():
    weight = draw(4, 3)
    layer = LearnedPositions(4, 3, weight=weight)
    weight[2] = 5.0
    assert torch.equal(layer.encode([2])[0], torch.full((3,), 5.0))
    assert LearnedPositions(4, 3, weight=weight, dtype=torch.float64).weight.dtype == (
        torch.float64
    )


def test_initial_table_follows_the_seed_and_gpt2_std():
    layer, same = _seeded(), _seeded()
    assert torch.equal(layer.weight, same.weight)
    assert layer.weight.std().item() == pytest.approx(0.02, rel=0.02)
    layer.reset_parameters()
    assert not torch.equal(layer.weight, same.weight)


def _seeded():
    torch.manual_seed(3)
    return LearnedPositions(500, 64)


# ----------------------------------------------------------------------- Fourier


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("cos_first", [False, True])
def test_fourier_features_match_the_formula_and_numpy(layout, cos_first):
    matrix = np.array([[1.0, 0.5], [30.0, -2.0], [0.0, 500.0]])
    layer = FourierFeatures(matrix, layout=layout, cos_first=cos_first)
    points = draw(4, 2, dtype=torch.float64)
    angles = 2 * np.pi * points.numpy() @ matrix.T
    phases = [np.cos(angles), np.sin(angles)][:: 1 if cos_first else -1]
    want = np.concatenate(phases, -1) if layout == "half" else np.stack(phases, -1)
    np.testing.assert_allclose(layer(points), want.reshape(4, 6), atol=2e-6)
    reference = NumpyFourier(matrix, layout=layout, cos_first=cos_first)
    np.testing.assert_allclose(layer(points), reference(points.numpy()), atol=1e-7)


def test_gaussian_frequencies_follow_rng_or_the_torch_seed():
    layer = FourierFeatures.gaussian(5, axes=2, std=3.0, rng=4)
    reference = NumpyFourier.gaussian(5, axes=2, std=3.0, rng=4)
    np.testing.assert_array_equal(layer.matrix, reference.matrix)
    draws = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        draws.append(FourierFeatures.gaussian(5, axes=2, std=3.0).matrix)
    np.testing.assert_array_equal(draws[0], draws[1])
    assert (draws[0] != draws[2]).all()


def test_octaves_match_nerf():
    x = draw(3, 2, dtype=torch.float64)
    got = FourierFeatures.octaves(2, axes=2)(x)
    phases = [(a, k, f) for a in (0, 1) for k in (0, 1) for f in (torch.sin, torch.cos)]
    want = [f(2**k * torch.pi * x[:, [a]]) for a, k, f in phases]
    torch.testing.assert_close(got, torch.cat(want, dim=1), atol=2e-6, rtol=0)


@pytest.mark.parametrize("std", [0.05, 4.0])
def test_coordinates_get_a_gradient(std):
    layer = FourierFeatures.gaussian(3, axes=2, std=std, rng=0)
    points = torch.tensor([[0.2, 0.7], [-0.4, 1.3]], dtype=torch.float64)
    assert torch.autograd.gradcheck(layer, (points.requires_grad_(),), atol=1e-4)
    assert torch.autograd.gradgradcheck(layer, (points,), atol=1e-3)


def test_state_dict_contains_the_frequencies():
    torch.manual_seed(0)
    layer, other = (FourierFeatures.gaussian(3, axes=2, std=9.0) for _ in range(2))
    points = draw(4, 2)
    assert not torch.equal(layer(points), other(points))
    state = nn.Sequential(other).state_dict()
    assert [value.dtype for value in state.values()] == [torch.int64]
    nn.Sequential(layer).load_state_dict(state)
    assert torch.equal(layer(points), other(points))
    np.testing.assert_array_equal(layer.matrix, other.matrix)


@pytest.mark.parametrize("round_trip", ROUND_TRIPS)
def test_fourier_output_survives_casts_moves_and_checkpoints(round_trip):
    def build():
        return FourierFeatures.gaussian(4, axes=3, std=20.0)

    points = draw(5, 3)
    assert torch.equal(ROUND_TRIPS[round_trip](build)(points), built(build)(points))


# --------------------------------------------------------------------------- all layers


@pytest.mark.parametrize("round_trip", ROUND_TRIPS)
@pytest.mark.parametrize("name", LAYERS)
def test_output_survives_casts_moves_and_checkpoints(name, round_trip):
    x, positions = draw(2, 3, 6), torch.tensor([[3, -1, 0], [8, 2, 2]])
    layer = ROUND_TRIPS[round_trip](LAYERS[name])
    assert torch.equal(layer(x, positions), built(LAYERS[name])(x, positions))
    assert list(layer.state_dict()) == (["weight"] if name == "learned" else [])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_half_precision_is_the_float32_sum_rounded_once(name, dtype):
    layer, x = built(LAYERS[name]), draw(500, 9, 6, dtype=dtype)
    want = (x.float() + layer.encode(torch.arange(9), dtype=torch.float32)).to(dtype)
    assert torch.equal(layer(x).view(torch.int16), want.view(torch.int16))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x), want)


def test_half_precision_keeps_positions_distinct():
    layer = SinusoidalPositions(8)
    x = torch.zeros(4096, 8, dtype=torch.bfloat16)
    assert len(layer(x).unique(dim=0)) > 4000
    with torch.autocast("cpu", torch.bfloat16):
        assert len(layer.encode(torch.arange(4096)).unique(dim=0)) == 4096


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_autocast_does_not_change_fourier_features(dtype):
    layer, points = FourierFeatures.gaussian(4, axes=2, std=9.0, rng=0), draw(50, 2)
    points = points.to(dtype)
    want = layer(points.float()).to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        got = layer(points)
    assert got.dtype == dtype and torch.equal(got, want)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(
    "offset", [3, torch.tensor(3), torch.tensor([3, 3], dtype=torch.int8)], ids=str
)
def test_offset_is_the_first_position(name, offset):
    layer, x = built(LAYERS[name]), draw(2, 4, 6)
    want = layer(x, torch.arange(3, 7))
    assert torch.equal(layer(x, offset=offset), want) and not torch.equal(layer(x), want)


@given(
    lead=st.lists(st.integers(0, 3), max_size=2),
    length=st.integers(0, 9),
    name=st.sampled_from(sorted(LAYERS)),
    dtype=st.sampled_from([torch.float64, torch.float32, *HALVES]),
)
def test_any_shape_matches_calls_for_single_positions(lead, length, name, dtype):
    layer, x = built(LAYERS[name]), draw(*lead, length, 6, dtype=dtype)
    got = layer(x)
    assert got.shape == x.shape and got.dtype == dtype
    for position in range(length):
        want = layer(x[..., position : position + 1, :], offset=position)
        assert torch.equal(got[..., position : position + 1, :], want)


@pytest.mark.parametrize("name", LAYERS)
def test_torch_func_matches_eager_calls(name):
    layer, x = built(LAYERS[name]), draw(3, 2, 4, 6)
    positions = torch.arange(24).reshape(3, 2, 4) % 9
    assert torch.equal(torch.func.vmap(layer)(x, positions), layer(x, positions))
    assert torch.equal(torch.func.vmap(layer)(x), layer(x))
    gradient = torch.func.grad(lambda x: layer(x).square().sum())(x)
    torch.testing.assert_close(gradient, 2 * layer(x))
    parameters = dict(layer.named_parameters())
    loss = torch.func.grad(lambda p: torch.func.functional_call(layer, p, (x,)).sum())
    for parameter_name, value in loss(parameters).items():
        (want,) = torch.autograd.grad(layer(x).sum(), layer.get_parameter(parameter_name))
        torch.testing.assert_close(value, want)
    layer, real = layer.double(), positions[0, 0].double() + 0.4
    tangent = torch.func.jvp(lambda p: layer(x.double(), p), (real,), (torch.ones(4),))[1]
    step = 1e-6
    with torch.no_grad():
        above, below = (layer(x.double(), real + s) for s in (step, -step))
    torch.testing.assert_close(tangent, (above - below) / (2 * step), atol=1e-5, rtol=1e-4)


def test_meta_device_gives_shapes():
    x = torch.empty(2, 3, 6, device="meta")
    for build in LAYERS.values():
        y = build().to("meta")(x)
        assert y.is_meta and y.shape == x.shape
    assert FourierFeatures([[1.0] * 6]).to("meta")(x).shape == (2, 3, 2)


# ------------------------------------------------------------ compile and export


class Stack(nn.Module):
    """All layers in one module, because a compilation by Inductor takes seconds."""

    def __init__(self):
        super().__init__()
        self.sinusoidal, self.fourier = sinusoidal(), FourierFeatures([[0.1]])
        self.learned = LearnedPositions(40, 6, row_offset=2, padding_idx=1)

    def forward(self, x, positions):
        x = self.learned(x, positions)
        phases = self.sinusoidal(x, offset=3)
        return self.fourier(phases[..., :1]), self.learned(x, positions + 0.5)


def test_inductor_compiles_once_for_five_lengths():
    forget_graphs()
    layer = built(Stack).requires_grad_(False)
    layer.learned.set_padding(2.0)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for length in (5, 9, 16, 24, 33):
        x, positions = draw(2, length, 6), torch.arange(length).expand(2, length) - 1
        got = compiled(x, positions)
        for actual, want in zip(got, layer(x, positions), strict=True):
            torch.testing.assert_close(actual, want, atol=2e-5, rtol=0)
    assert graphs() == 1
    # Compiled code cannot raise: a position without a row gives NaN.
    got = compiled(x, positions + 30)[1]
    assert got[:, 11:].isnan().all() and not got[:, :10].isnan().any()


class StoredPositions(nn.Module):
    """Layers called with positions of static size, from a buffer."""

    def __init__(self):
        super().__init__()
        rotary = RotaryPositions(6, heads_axis=-3)
        self.layers = nn.ModuleList([learned(), sinusoidal(), rotary])
        self.positions = nn.Buffer(torch.tensor([[3, 1, 2, 5], [0, 1, 2, 3]]))

    def forward(self, x, offset):
        for layer in self.layers:
            x = layer(layer(x, self.positions), self.positions[0])
            x = layer(layer(x, range(1, 9, 2)), offset=offset)
        return x


def test_static_positions_fit_vectors_of_symbolic_size():
    forget_graphs()
    layer, x = built(StoredPositions), draw(2, 4, 6)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="eager")
    torch.testing.assert_close(compiled(x, [2, 0]), layer(x, [2, 0]))


@pytest.mark.parametrize("strict", [False, True])
def test_exported_program_runs_at_other_lengths(strict):
    layer, length = built(Stack), torch.export.Dim("length", min=2, max=30)
    program = torch.export.export(
        layer,
        (draw(2, 5, 6), torch.arange(5)),
        dynamic_shapes={"x": {1: length}, "positions": {0: length}},
        strict=strict,
    )
    x, positions = draw(2, 13, 6), torch.arange(13)
    for got, want in zip(program.module()(x, positions), layer(x, positions), strict=True):
        torch.testing.assert_close(got, want, atol=1e-6, rtol=0)
    assert list(program.state_dict) == ["learned.weight"]


# ------------------------------------------------------------------------ errors


def test_repr_shows_arguments_that_are_not_default():
    assert repr(learned()) == (
        "LearnedPositions(9, 6, row_offset=2, padding_idx=1, scale=0.5)"
    )
    assert repr(sinusoidal()) == "SinusoidalPositions(6, base=500.0, layout='half')"
    assert "<1 pairs of 2 axes>" in repr(FourierFeatures([[1.0, 2.0]]))


def test_config_rebuilds_the_layer():
    layer = learned().to(torch.float16)
    other = LearnedPositions(**layer.config())
    assert other.config() == layer.config() and other.weight.dtype == torch.float16


@pytest.mark.rejects
@pytest.mark.parametrize(
    "positions, message",
    [
        ([0, 9], "positions must be smaller than max_positions 9, got 9"),
        ([0.0, 8.5], "positions must be at most 8, the last of max_positions 9, got 8.5"),
        ([-3, 0], "positions must be at least -2 for row_offset 2, got -3"),
        ([0, 1, 2], r"positions must have shape \(2,\) or \(4, 2\), got \(3,\)"),
    ],
)
def test_invalid_learned_positions_are_rejected(positions, message):
    with pytest.raises(ValueError, match=message):
        learned()(torch.ones(4, 2, 6), positions)


@pytest.mark.rejects
def test_positions_beyond_the_limit_or_missing_are_rejected():
    with pytest.raises(ValueError, match="smaller than 16777216 in size, got 16777216"):
        sinusoidal()(torch.ones(2, 6), [2**24, 0])
    with pytest.raises(ValueError, match="coordinates must be smaller than 16777216 in"):
        FourierFeatures([[1.0]])(torch.tensor([[1e9]]))
    with pytest.raises(
        ValueError, match="positions must be given when axes is 2, got None"
    ):
        SinusoidalPositions(4, axes=2)(torch.ones(2, 4))
    with pytest.raises(ValueError, match=r"positions must have shape \(2, ...\), one"):
        SinusoidalPositions(4, axes=2).encode([0])


@pytest.mark.rejects
def test_inputs_of_wrong_width_or_type_are_rejected():
    for build in LAYERS.values():
        with pytest.raises(ValueError, match=r"x must have shape \(..., length, 6\), got"):
            build()(torch.ones(2, 5))
        with pytest.raises(TypeError, match="x must be real, got int64"):
            build()(torch.ones(2, 6, dtype=torch.int64))
        with pytest.raises(
            TypeError, match="positions must be integers or reals, got bool"
        ):
            build().encode(torch.tensor([True]))
    with pytest.raises(TypeError, match="coordinates must be real, got int64"):
        FourierFeatures([[1.0]])(torch.ones(1, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"coordinates must have shape \(..., 1\), got"):
        FourierFeatures([[1.0]])(torch.ones(2))


WRONG: dict[str, Any] = {"layout": "x"}


@pytest.mark.rejects
@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: LearnedPositions(0, 4), "max_positions must be positive, got 0"),
        (lambda: LearnedPositions(4, 4, padding_idx=0), "one of the 0 rows before"),
        (
            lambda: LearnedPositions(4, 4, weight=torch.ones(3, 4)),
            r"weight must have shape \(4, 4\), got \(3, 4\)",
        ),
        (lambda: SinusoidalPositions(5, axes=2), "must be a multiple of axes 2, got 5"),
        (lambda: SinusoidalPositions(4, base=-1.0), "base must be positive and finite"),
        (lambda: SinusoidalPositions(4, **WRONG), "'half', got 'x'"),
        (lambda: FourierFeatures([1.0]), r"matrix must have shape \(pairs, axes\), got"),
        (lambda: FourierFeatures([[np.nan]]), "matrix must be finite, got NaN"),
        (lambda: FourierFeatures([[1.0]], **WRONG), "'half', got 'x'"),
        (
            lambda: FourierFeatures([[1.0]]).load_state_dict(
                FourierFeatures([[1.0, 2.0]]).state_dict()
            ),
            r"matrix must have shape \(1, 1\), got \(1, 2\)",
        ),
    ],
)
def test_invalid_arguments_are_rejected(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.rejects
def test_integer_table_is_rejected():
    with pytest.raises(TypeError, match="weight must be real, got int64"):
        LearnedPositions(1, 1, weight=torch.ones(1, 1, dtype=torch.int64))
