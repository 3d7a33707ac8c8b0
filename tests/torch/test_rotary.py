"""RotaryPositions on torch: right numbers, one set of bits, a gradient, a whole life."""

import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import forward_ad

from firstlayer import kernels
from firstlayer.numpy.rotary import RotaryPositions as NumpyRotary
from firstlayer.positions.rotary import qwen_axial_frequencies
from firstlayer.positions.scaling import DynamicNTK, Linear, Llama3, LongRoPE, YaRN
from firstlayer.torch.rotary import RotaryPositions
from tests.support.run_alone import run_alone
from tests.support.torch_lives import LIVES, forget_graphs, graphs, plain_operators

# Inductor and forward-mode AD import what torch itself has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")

LAYOUTS = ["half", "interleaved", "interleaved_to_half"]
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
LONGROPE = LongRoPE(
    short_factors=[1.0, 1.5, 2.0, 3.0],
    long_factors=[1.0, 4.0, 8.0, 9.0],
    original_length=16,
    factor=4.0,
)
# Every argument at a value that is not its default.
OPTIONS = {
    "base": {"base": 500_000.0},
    "layout": {"layout": "interleaved"},
    "to half": {"layout": "interleaved_to_half"},
    "scaling": {"scaling": YaRN(factor=4.0, original_length=64)},
    "part": {"rotary_dim": 4},
    "frequencies": {"frequencies": [1.0, 0.5, 0.0]},
    "heads last": {"heads_axis": -2},
}


def draw(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def turned(x, positions, *, base=10_000.0, layout="half"):
    """The definition in float64, one complex number a pair."""
    x, size = x.double().numpy(), x.shape[-1]
    angles = np.asarray(positions)[..., None] * base ** (-np.arange(0, size, 2) / size)
    halves = np.split(x, 2, axis=-1)
    a, b = halves if layout == "half" else (x[..., 0::2], x[..., 1::2])
    z = (a + 1j * b) * np.exp(1j * angles)
    if layout == "interleaved":
        return torch.from_numpy(np.stack([z.real, z.imag], -1).reshape(x.shape))
    return torch.from_numpy(np.concatenate([z.real, z.imag], -1))


# ---------------------------------------------------------------- right numbers


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rotation_is_a_complex_product(layout):
    x, positions = draw(2, 3, 4, 8), torch.tensor([0, -7, 300, 70_000])
    got = RotaryPositions(8, base=500.0, layout=layout)(x, positions)
    want = turned(x, positions, base=500.0, layout=layout)
    torch.testing.assert_close(got.double(), want, atol=1e-6, rtol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_depend_on_relative_position_only(layout):
    layer = RotaryPositions(8, layout=layout)
    q, k = draw(2, 1, 8)

    def score(m, n):
        return (layer(q, [m]) * layer(k, [n])).sum().item()

    assert score(7, 3) == pytest.approx(score(10_000_007, 10_000_003), abs=1e-5)
    assert score(7, 3) == pytest.approx(score(-1, -5), abs=1e-5)


def test_turns_are_right_far_out():
    positions = torch.tensor([0, 255, 256, 65_536, 2**24 - 1, -9_999_999])
    cos, sin = RotaryPositions(8, base=500_000.0).phases(positions)
    angles = positions.numpy()[:, None].astype(np.longdouble)
    angles = angles * 500_000.0 ** (-np.arange(0, 8, 2) / 8)
    np.testing.assert_allclose(cos, np.cos(angles).astype(float), atol=2.5e-7)
    np.testing.assert_allclose(sin, np.sin(angles).astype(float), atol=2.5e-7)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_numpy_and_torch_give_the_same_bits(options, dtype):
    theirs, layer = NumpyRotary(8, **options), RotaryPositions(8, **options)
    plain = RotaryPositions(8)
    x = draw(2, 5, 5, 8, dtype=dtype)
    for positions in (None, [[3, 1, 4, 1, 5], [9, 2, 70_000, 5, -3]]):
        given_ = None if positions is None else torch.tensor(positions)
        got = layer(x, given_)
        np.testing.assert_array_equal(got, theirs(x.numpy(), positions))
        # Another layer alive beside it is another layer.
        assert not torch.equal(got, plain(x, given_))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_real_positions_are_turned_to_as_on_numpy(dtype):
    positions = torch.tensor([0.5, -3.25, 1000.75]).to(dtype)
    x = draw(3, 8)
    got = RotaryPositions(8, base=500.0)(x, positions)
    want = turned(x, positions.double().numpy(), base=500.0)
    torch.testing.assert_close(got.double(), want, atol=1e-6, rtol=0)
    theirs = NumpyRotary(8, base=500.0)(x.numpy(), positions.double().numpy())
    np.testing.assert_allclose(got, theirs, atol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
def test_sections_turn_by_their_coordinate(interleaved):
    arguments = {"sections": [2, 1, 1], "interleaved_sections": interleaved}
    theirs, layer = NumpyRotary(8, **arguments), RotaryPositions(8, **arguments)
    x, positions = draw(2, 3, 4, 8), torch.arange(24).reshape(3, 2, 4)
    np.testing.assert_array_equal(layer(x, positions), theirs(x.numpy(), positions.numpy()))
    np.testing.assert_array_equal(layer(x, offset=3), theirs(x.numpy(), offset=3))
    cos, _ = layer.phases(positions)
    np.testing.assert_array_equal(cos, theirs.phases(positions.numpy())[0])


def test_axial_frequencies_turn_images():
    frequencies = qwen_axial_frequencies(8)
    layer = RotaryPositions(8, frequencies=frequencies)
    x, positions = draw(6, 8), torch.tensor([[0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2]])
    theirs = NumpyRotary(8, frequencies=frequencies)
    np.testing.assert_array_equal(layer(x, positions), theirs(x.numpy(), positions.numpy()))


@pytest.mark.parametrize(
    "rule",
    [
        Linear(factor=3.0),
        Llama3(factor=8.0, original_length=64),
        DynamicNTK(factor=2.0, original_length=16),
        LONGROPE,
    ],
    ids=lambda rule: type(rule).__name__,
)
def test_scaling_rules_are_those_of_numpy_at_every_length(rule):
    layer, theirs = RotaryPositions(8, scaling=rule), NumpyRotary(8, scaling=rule)
    x = draw(20, 8)
    np.testing.assert_array_equal(layer(x), theirs(x.numpy()))
    got = layer.at_length(40)
    np.testing.assert_array_equal(got(x), theirs.at_length(40)(x.numpy()))
    depends = isinstance(rule, DynamicNTK | LongRoPE)
    assert torch.equal(got(x), layer(x)) is not depends


@pytest.mark.parametrize("delta", [-5, torch.tensor([4, -1])], ids=["all", "rows"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rerotate_moves_cached_keys(layout, delta):
    layer = RotaryPositions(8, layout=layout, scaling=YaRN(factor=4.0, original_length=64))
    k = draw(2, 3, 5, 8)
    moved = layer.rerotate(layer(k, offset=7), delta)
    torch.testing.assert_close(moved, layer(k, offset=7 + delta), atol=2e-6, rtol=0)


def test_rerotate_moves_all_coordinates_alike():
    layer, k = RotaryPositions(8, sections=[2, 2]), draw(3, 8)
    moved = layer.rerotate(layer(k, offset=7), -3)
    torch.testing.assert_close(moved, layer(k, offset=4), atol=2e-6, rtol=0)


@pytest.mark.parametrize(
    "offset",
    [1000, torch.tensor(1000), torch.tensor([1000, 1000], dtype=torch.uint16)],
    ids=["int", "scalar", "rows"],
)
def test_offset_is_how_many_came_before(offset):
    layer, x = RotaryPositions(8), draw(2, 3, 5, 8)
    want = layer(x, torch.arange(1000, 1005))
    assert torch.equal(layer(x, offset=offset), want)
    assert not torch.equal(layer(x), want)


def test_a_real_offset_in_half_precision_is_not_added_in_it():
    layer, x = RotaryPositions(8), draw(1, 3000, 8)
    got = layer(x, offset=torch.tensor([0.5], dtype=torch.bfloat16))
    torch.testing.assert_close(got, layer(x, torch.arange(3000) + 0.5), atol=0, rtol=0)


def test_batched_positions_skip_the_heads_axis_even_when_sizes_coincide():
    layer = RotaryPositions(8)
    x, positions = draw(3, 3, 3, 8), torch.arange(9).reshape(3, 3)
    assert torch.equal(layer(x, positions)[1, 2], layer(x[1, 2], positions[1]))


INTEGERS = (
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_positions_of_every_integer_dtype(dtype):
    layer, x = RotaryPositions(8), draw(3, 8)
    positions = torch.tensor([0, 5, 127])
    assert torch.equal(layer(x, positions.to(dtype)), layer(x, positions))
    with plain_operators():
        assert torch.equal(layer(x, positions.to(dtype)), layer(x, positions))


# ------------------------------------------------- one set of bits on every road


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernels_and_operators_give_the_same_bits(dtype, layout):
    layer = RotaryPositions(8, layout=layout, rotary_dim=6)
    heads = draw(2, 5, 3, 8, dtype=dtype).transpose(1, 2)
    for x in (heads, heads[..., 1:4, :], heads.contiguous(), heads[:, :, :0]):
        got = layer(x, offset=torch.tensor([3, 70_000]))
        with plain_operators():
            want = layer(x, offset=torch.tensor([3, 70_000]))
        assert got.dtype == dtype and torch.equal(got, want)


def test_the_kernels_run_eagerly_and_not_when_watched(monkeypatch):
    calls = []
    kept = kernels.rotate_pairs
    monkeypatch.setattr(
        kernels,
        "rotate",
        lambda *args, **options: calls.append(1) or kept(*args, **options),
    )
    layer, x = RotaryPositions(8), draw(3, 8).requires_grad_()
    layer(x).sum().backward()
    assert len(calls) == 2
    with plain_operators():
        layer(x)
    torch.func.vmap(layer)(x[None])
    assert len(calls) == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_half_precision_is_the_rotation_in_float32_rounded_once(layout, dtype):
    layer, x = RotaryPositions(8, layout=layout), draw(4, 3000, 8, dtype=dtype)
    x.requires_grad_()
    wide = x.detach().float().requires_grad_()
    y, want = layer(x, offset=100_000), layer(wide, offset=100_000)
    assert torch.equal(y.view(torch.int16), want.to(dtype).view(torch.int16))
    dy = draw(4, 3000, 8, dtype=dtype, seed=1)
    (dx,) = torch.autograd.grad(y, x, dy)
    (wide_dx,) = torch.autograd.grad(want, wide, dy.float())
    assert torch.equal(dx, wide_dx.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_autocast_changes_nothing(dtype):
    layer, x = RotaryPositions(8), draw(2, 4096, 8, dtype=dtype)
    want = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x), want)
        with plain_operators():
            got = layer(x, torch.arange(4096))
    assert got.dtype == dtype and torch.equal(got, want)


@given(
    lead=st.lists(st.integers(0, 3), max_size=3),
    length=st.integers(0, 5),
    dtype=st.sampled_from(DTYPES),
    offset=st.integers(-(2**23), 2**23),
    layout=st.sampled_from(LAYOUTS),
)
def test_any_shape_and_any_offset_as_on_numpy(lead, length, dtype, offset, layout):
    x = draw(*lead, length, 4, dtype=dtype)
    got = RotaryPositions(4, layout=layout)(x, offset=offset)
    wide = x if dtype == torch.float64 else x.float()
    want = NumpyRotary(4, layout=layout)(wide.numpy(), offset=offset)
    assert got.shape == x.shape and torch.equal(got, torch.from_numpy(want).to(dtype))


def test_the_output_lies_in_memory_as_the_input_does():
    x = draw(2, 5, 3, 8).transpose(1, 2)
    assert RotaryPositions(8)(x).stride() == x.stride()


# --------------------------------------------------------------------- gradients


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("road", ["kernels", "operators"])
def test_first_and_second_gradient_are_right(layout, road):
    layer = RotaryPositions(6, layout=layout, rotary_dim=4)
    x = draw(2, 2, 3, 6, dtype=torch.float64).requires_grad_()

    def run(x):
        if road == "kernels":
            return layer(x, offset=torch.tensor([5, 0]))
        with plain_operators():
            return layer(x, offset=torch.tensor([5, 0]))

    assert torch.autograd.gradcheck(run, (x,))
    assert torch.autograd.gradgradcheck(lambda x: run(x) ** 2, (x,))


def test_a_gradient_reaches_real_positions():
    layer, x = RotaryPositions(4, base=20.0), draw(3, 4, dtype=torch.float64)
    positions = torch.tensor([0.3, 7.6, -2.5], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(layer, (x.requires_grad_(), positions))
    assert torch.autograd.gradgradcheck(layer, (x, positions))


def test_a_gradient_of_the_kernels_is_that_of_the_operators_to_the_bit():
    layer, dy = RotaryPositions(8), draw(2, 3, 5, 8, seed=1)
    grads = []
    for watched in (False, True):
        x = draw(2, 3, 5, 8).requires_grad_()
        if watched:
            with plain_operators():
                grads += torch.autograd.grad(layer(x), x, dy)
        else:
            grads += torch.autograd.grad(layer(x), x, dy)
    assert torch.equal(*grads)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_jacobians_by_every_road(layout):
    layer, x = RotaryPositions(4, layout=layout), draw(3, 4, dtype=torch.float64)

    def run(x):
        return layer(x, offset=9)

    want = torch.autograd.functional.jacobian(run, x)
    batched = torch.autograd.functional.jacobian(run, x, vectorize=True)
    for got in (batched, torch.func.jacrev(run)(x), torch.func.jacfwd(run)(x)):
        torch.testing.assert_close(got, want, atol=1e-12, rtol=0)


def test_vmap_grad_and_jvp_are_as_without_them():
    layer, x = RotaryPositions(4), draw(3, 2, 5, 4)
    positions = torch.arange(15).reshape(3, 5)
    assert torch.equal(torch.func.vmap(layer)(x), layer(x))
    assert torch.equal(torch.func.vmap(layer)(x, positions), layer(x, positions))
    want = torch.autograd.grad(layer(y := x.clone().requires_grad_()).square().sum(), y)[0]
    got = torch.func.grad(lambda x: layer(x).square().sum())(x)
    torch.testing.assert_close(got, want)
    assert torch.equal(torch.func.jvp(layer, (x,), (x,))[1], layer(x))
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, x))).tangent
    assert tangent is not None and torch.equal(tangent, layer(x))


def test_vmap_over_positions_out_of_reach_is_nan():
    layer, x = RotaryPositions(4), draw(2, 4)
    positions = torch.tensor([[1, 2], [3, 2**24]])
    got = torch.func.vmap(lambda p: layer(x, p))(positions)
    assert torch.equal(got[0], layer(x, positions[0]))
    assert got[1, 1].isnan().all() and not got[1, 0].isnan().any()


# -------------------------------------------------------------------------- life


@pytest.mark.parametrize("life", LIVES)
@pytest.mark.parametrize("road", ["kernels", "operators"])
def test_tables_survive_the_life_of_a_model(life, road):
    def build():
        rule = DynamicNTK(factor=2.0, original_length=8).at_length(64)
        return RotaryPositions(8, base=500.0, scaling=rule, layout="interleaved")

    x, positions = draw(1, 3, 8), torch.tensor([5_000_000, 4095, 17])
    want = build()(x, positions)
    layer = LIVES[life](build)
    if road == "operators":
        with plain_operators():
            got = layer(x, positions)
    else:
        got = layer(x, positions)
    assert torch.equal(got, want)
    assert not layer.state_dict() and not list(layer.parameters())
    assert torch.equal(layer.at_length(64)(x, positions), want)


def test_what_is_precomputed_is_a_visible_field_of_integers():
    buffers = dict(RotaryPositions(8).named_buffers())
    assert set(buffers) == {"bits", "rate_bits"}
    assert all(bits.dtype == torch.int32 for bits in buffers.values())


def test_a_layer_on_the_meta_device_gives_shapes():
    x = torch.empty(2, 3, 5, 8, device="meta", dtype=torch.bfloat16)
    y = RotaryPositions(8).to("meta")(x, offset=3)
    assert y.is_meta and y.shape == x.shape and y.dtype == x.dtype


def test_threads_at_once_get_the_same_numbers():
    layer, x = RotaryPositions(64), draw(4, 2048, 64)
    want, got = layer(x), [None] * 8

    def run(i):
        got[i] = layer(x)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(y is not None and torch.equal(y, want) for y in got)


def test_a_forked_child_gets_the_same_numbers():
    run_alone("""
        import os
        import torch
        from firstlayer.torch import RotaryPositions

        layer, x = RotaryPositions(64), torch.randn(4, 2048, 64)
        want = layer(x)  # the helpers of the pool exist before the fork
        child = os.fork()
        if child == 0:
            os._exit(0 if torch.equal(layer(x), want) else 3)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    """)


def test_kernels_use_as_many_threads_as_torch(monkeypatch):
    from firstlayer.kernels import _rotate, _threads

    seen, before = [], torch.get_num_threads()
    kept = _rotate.run

    def spy(*args, **options):
        seen.append(getattr(_threads._here, "size", None))
        kept(*args, **options)

    monkeypatch.setattr(_rotate, "run", spy)
    layer, x = RotaryPositions(64), draw(4, 2048, 64)
    try:
        results = []
        for n in (1, 3):
            torch.set_num_threads(n)
            results.append(layer(x))
    finally:
        torch.set_num_threads(before)
    assert seen == [1, 3] and torch.equal(*results)


# ------------------------------------------------------------ compile and export


def test_inductor_compiles_once_for_five_lengths():
    forget_graphs()
    layer = RotaryPositions(8, base=500.0)

    def run(x, offset):
        return layer(x, offset=offset)

    compiled = torch.compile(run, fullgraph=True, dynamic=True)
    for length in (5, 9, 16, 24, 33):
        x, offset = draw(2, 3, length, 8), torch.tensor([length, 2**24 - 20])
        got = compiled(x, offset)
        want = turned(x, torch.arange(length) + torch.tensor([[[length]], [[2**24 - 20]]]),
                      base=500.0)  # fmt: skip
        # Where nothing can be raised, what is out of reach is NaN.
        reached = min(length, 20)
        assert got[1, :, reached:].isnan().all()
        torch.testing.assert_close(got[0].double(), want[0], atol=2e-6, rtol=0)
        near = got[1, :, :reached].double()
        torch.testing.assert_close(near, want[1, :, :reached], atol=3e-6, rtol=0)
    assert graphs() == 1


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_compiled_operators_are_the_eager_ones(layout, dtype):
    forget_graphs()
    layer, x = RotaryPositions(8, layout=layout), draw(2, 3, 5, 8, dtype=dtype)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    positions = torch.arange(10).reshape(2, 5)
    assert torch.equal(compiled(x, positions), layer(x, positions))
    assert torch.equal(compiled(x, positions + 0.5), layer(x, positions + 0.5))


def test_a_step_of_decoding_does_not_compile_anew():
    forget_graphs()
    layer = RotaryPositions(8)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="eager")
    for offset in (3, 4, 5, 1000):
        x = draw(2, 3, 4, 8)
        assert torch.equal(compiled(x, offset=offset), layer(x, offset=offset))
    assert graphs() == 1


def test_a_rule_of_the_length_compiles_once_for_each_length():
    forget_graphs()
    layer = RotaryPositions(8, scaling=DynamicNTK(factor=2.0, original_length=4))
    compiled = torch.compile(
        lambda layer, x: layer(x), fullgraph=True, dynamic=True, backend="eager"
    )
    for copies, length in enumerate((5, 9, 12), start=1):
        copy, x = layer.at_length(length), draw(3, length, 8)
        for _ in range(2):
            assert torch.equal(compiled(copy, x), copy(x))
        assert 1 <= graphs() <= copies


def test_gradients_compile():
    forget_graphs()
    layer = RotaryPositions(8)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for run in (layer, compiled):
        x = draw(2, 3, 5, 8).requires_grad_()
        run(x, offset=3).square().sum().backward()
        torch.testing.assert_close(x.grad, 2 * x.detach(), atol=2e-6, rtol=0)


@pytest.mark.parametrize("strict", [False, True])
def test_export_runs_at_other_lengths_on_plain_operators(strict):
    layer = RotaryPositions(8, layout="interleaved").to(torch.bfloat16)
    shapes = {"x": {2: torch.export.Dim("length", min=2, max=64)}}
    program = torch.export.export(
        layer, (draw(2, 3, 5, 8),), dynamic_shapes=shapes, strict=strict
    )
    x = draw(2, 3, 33, 8)
    torch.testing.assert_close(program.module()(x), layer(x), atol=0, rtol=0)
    assert not program.state_dict
    called = {n.target for n in program.graph.nodes if n.op == "call_function"}
    assert all(str(target).startswith(("aten.", "<built-in")) for target in called)


# ------------------------------------------------------------------------ errors


def test_repr_says_what_is_not_the_default():
    rule = Linear(factor=2.0)
    assert repr(RotaryPositions(8)) == "RotaryPositions(8)"
    got = repr(RotaryPositions(8, base=5e5, scaling=rule, heads_axis=-2))
    want = "8, base=500000.0, scaling={'rule': 'Linear', 'factor': 2.0}, heads_axis=-2"
    assert got == f"RotaryPositions({want})"


@pytest.mark.rejects
@pytest.mark.parametrize(
    "positions, message",
    [
        ([1, -(2**24)], "smaller than 16777216 in size, got -16777216"),
        (torch.tensor([0.0, float("nan")]), "in size, got nan"),
        (torch.tensor([1, 2**64 - 1], dtype=torch.uint64), "got 18446744073709551615"),
        (torch.zeros(3, dtype=torch.int64), r"fit x of shape \(2, 4\) with heads_axis -3"),
    ],
)
def test_positions_that_cannot_be_are_refused(positions, message):
    with pytest.raises(ValueError, match=message):
        RotaryPositions(4)(torch.ones(2, 4), positions)


@pytest.mark.rejects
@pytest.mark.parametrize("name", ["positions", "offset"])
def test_bools_are_no_positions(name):
    mask = {name: torch.tensor([True, False])}
    with pytest.raises(TypeError, match=f"{name} must be integers or reals, got bool"):
        RotaryPositions(4)(torch.ones(2, 1, 2, 4), **mask)


@pytest.mark.rejects
def test_positions_and_offset_exclude_each_other():
    with pytest.raises(ValueError, match="give positions or offset, not both"):
        RotaryPositions(4)(torch.ones(2, 4), [0, 1], offset=1)


@pytest.mark.rejects
def test_offset_beyond_reach_is_refused():
    with pytest.raises(ValueError, match="in size, got 16777216"):
        RotaryPositions(4)(torch.ones(9, 4), offset=2**24 - 3)


@pytest.mark.rejects
def test_inputs_of_another_width_or_type_are_refused():
    layer = RotaryPositions(4)
    with pytest.raises(ValueError, match=r"x must have shape \(..., length, 4\), got"):
        layer(torch.ones(2, 6))
    with pytest.raises(TypeError, match="x must be real, got int64"):
        layer(torch.ones(2, 4, dtype=torch.int64))
    with pytest.raises(TypeError, match="x must be a tensor, got list"):
        layer([[1.0, 2.0, 3.0, 4.0]])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"keys must have shape \(..., length, heads, 4\)"):
        RotaryPositions(4, heads_axis=-2).rerotate(torch.ones(2, 4), 1)
    with pytest.raises(ValueError, match=r"one per row of keys of shape \(3, 2, 4\), got"):
        layer.rerotate(torch.ones(3, 2, 4), torch.tensor([1, 2]))


@pytest.mark.rejects
def test_coordinates_must_be_given_one_for_each_axis():
    layer = RotaryPositions(8, frequencies=qwen_axial_frequencies(8))
    with pytest.raises(ValueError, match="positions must be given for 2 axes, got None"):
        layer(torch.ones(2, 8))
    with pytest.raises(ValueError, match=r"must have shape \(2, ...\), one coordinate"):
        layer(torch.ones(3, 8), torch.arange(3))
    with pytest.raises(ValueError, match=r"must have shape \(2, ...\), one coordinate"):
        layer.phases(torch.arange(3))


@pytest.mark.rejects
@pytest.mark.parametrize(
    "options, message",
    [
        ({"heads_axis": 1}, "heads_axis must be -3 or -2, got 1"),
        ({"layout": "neox"}, "'interleaved_to_half', got 'neox'"),
        ({"base": 1.0}, "base must be greater than 1, got 1.0"),
        ({"rotary_dim": 10}, "rotary_dim must be at most head_dim 8, got 10"),
    ],
)
def test_arguments_that_cannot_be_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        RotaryPositions(8, **options)
