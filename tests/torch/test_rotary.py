"""RotaryPositions on torch: values, bitwise equality of all paths, gradients, compile."""

import threading
from itertools import cycle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import forward_ad

from firstlayer import kernels
from firstlayer.numpy.rotary import RotaryPositions as NumpyRotary
from firstlayer.positions.axial import qwen_axial_frequencies
from firstlayer.positions.scaling import DynamicNTK, Linear, Llama3, LongRoPE, YaRN
from firstlayer.torch.rotary import RotaryPositions
from tests.support.run_alone import run_alone
from tests.support.torch_round_trips import (
    ROUND_TRIPS,
    forget_graphs,
    graphs,
    plain_operators,
)

# Inductor and forward-mode AD import deprecated parts of torch.
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


def expected_rotation(x, positions, *, base=10_000.0, layout="half"):
    """Return the rotation as a complex product in float64."""
    x, size = x.double().numpy(), x.shape[-1]
    angles = np.asarray(positions)[..., None] * base ** (-np.arange(0, size, 2) / size)
    halves = np.split(x, 2, axis=-1)
    a, b = halves if layout == "half" else (x[..., 0::2], x[..., 1::2])
    z = (a + 1j * b) * np.exp(1j * angles)
    if layout == "interleaved":
        return torch.from_numpy(np.stack([z.real, z.imag], -1).reshape(x.shape))
    return torch.from_numpy(np.concatenate([z.real, z.imag], -1))


# ------------------------------------------------------------------------------- values


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rotation_is_a_complex_product(layout):
    x, positions = draw(2, 3, 4, 8), torch.tensor([0, -7, 300, 70_000])
    got = RotaryPositions(8, base=500.0, layout=layout)(x, positions)
    want = expected_rotation(x, positions, base=500.0, layout=layout)
    torch.testing.assert_close(got.double(), want, atol=1e-6, rtol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_depend_on_relative_position_only(layout):
    layer = RotaryPositions(8, layout=layout)
    q, k = draw(2, 1, 8)

    def score(m, n):
        return (layer(q, [m]) * layer(k, [n])).sum().item()

    assert score(7, 3) == pytest.approx(score(10_000_007, 10_000_003), abs=1e-5)
    assert score(7, 3) == pytest.approx(score(-1, -5), abs=1e-5)


def test_phases_are_accurate_at_large_positions():
    positions = torch.tensor([0, 255, 256, 65_536, 2**24 - 1, -9_999_999])
    cos, sin = RotaryPositions(8, base=500_000.0).phases(positions)
    angles = positions.numpy()[:, None].astype(np.longdouble)
    angles = angles * 500_000.0 ** (-np.arange(0, 8, 2) / 8)
    np.testing.assert_allclose(cos, np.cos(angles).astype(float), atol=2.5e-7)
    np.testing.assert_allclose(sin, np.sin(angles).astype(float), atol=2.5e-7)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_output_is_bitwise_equal_to_numpy(options, dtype):
    reference, layer = NumpyRotary(8, **options), RotaryPositions(8, **options)
    plain = RotaryPositions(8)
    x = draw(2, 5, 5, 8, dtype=dtype)
    for positions in (None, [[3, 1, 4, 1, 5], [9, 2, 70_000, 5, -3]]):
        tensor = None if positions is None else torch.tensor(positions)
        got = layer(x, tensor)
        np.testing.assert_array_equal(got, reference(x.numpy(), positions))
        # A second layer with other options gives another output.
        assert not torch.equal(got, plain(x, tensor))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_float_positions_match_the_formula_and_numpy(dtype):
    positions = torch.tensor([0.5, -3.25, 1000.75]).to(dtype)
    x = draw(3, 8)
    got = RotaryPositions(8, base=500.0)(x, positions)
    want = expected_rotation(x, positions.double().numpy(), base=500.0)
    torch.testing.assert_close(got.double(), want, atol=1e-6, rtol=0)
    reference = NumpyRotary(8, base=500.0)(x.numpy(), positions.double().numpy())
    np.testing.assert_allclose(got, reference, atol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
def test_sections_match_numpy(interleaved):
    arguments = {"sections": [2, 1, 1], "interleaved_sections": interleaved}
    reference, layer = NumpyRotary(8, **arguments), RotaryPositions(8, **arguments)
    x, positions = draw(2, 3, 4, 8), torch.arange(24).reshape(3, 2, 4)
    np.testing.assert_array_equal(
        layer(x, positions), reference(x.numpy(), positions.numpy())
    )
    np.testing.assert_array_equal(layer(x, offset=3), reference(x.numpy(), offset=3))
    cos, _ = layer.phases(positions)
    np.testing.assert_array_equal(cos, reference.phases(positions.numpy())[0])


def test_axial_frequencies_match_numpy():
    frequencies = qwen_axial_frequencies(8)
    layer = RotaryPositions(8, frequencies=frequencies)
    x, positions = draw(6, 8), torch.tensor([[0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2]])
    reference = NumpyRotary(8, frequencies=frequencies)
    np.testing.assert_array_equal(
        layer(x, positions), reference(x.numpy(), positions.numpy())
    )


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
def test_scaling_rules_match_numpy_at_every_length(rule):
    layer, reference = RotaryPositions(8, scaling=rule), NumpyRotary(8, scaling=rule)
    x = draw(20, 8)
    np.testing.assert_array_equal(layer(x), reference(x.numpy()))
    got = layer.at_length(40)
    np.testing.assert_array_equal(got(x), reference.at_length(40)(x.numpy()))
    depends_on_length = isinstance(rule, DynamicNTK | LongRoPE)
    assert torch.equal(got(x), layer(x)) is not depends_on_length


@pytest.mark.parametrize("delta", [-5, torch.tensor([4, -1])], ids=["all", "rows"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rerotate_equals_rotation_at_shifted_positions(layout, delta):
    layer = RotaryPositions(8, layout=layout, scaling=YaRN(factor=4.0, original_length=64))
    k = draw(2, 3, 5, 8)
    moved = layer.rerotate(layer(k, offset=7), delta)
    torch.testing.assert_close(moved, layer(k, offset=7 + delta), atol=2e-6, rtol=0)


def test_rerotate_shifts_every_coordinate():
    layer, k = RotaryPositions(8, sections=[2, 2]), draw(3, 8)
    moved = layer.rerotate(layer(k, offset=7), -3)
    torch.testing.assert_close(moved, layer(k, offset=4), atol=2e-6, rtol=0)


@pytest.mark.parametrize(
    "offset",
    [1000, torch.tensor(1000), torch.tensor([1000, 1000], dtype=torch.uint16)],
    ids=["int", "scalar", "rows"],
)
def test_offset_is_the_first_position(offset):
    layer, x = RotaryPositions(8), draw(2, 3, 5, 8)
    want = layer(x, torch.arange(1000, 1005))
    assert torch.equal(layer(x, offset=offset), want)
    assert not torch.equal(layer(x), want)


def test_half_precision_offset_is_added_in_float32():
    layer, x = RotaryPositions(8, heads_axis=-3), draw(1, 3000, 8)
    got = layer(x, offset=torch.tensor([0.5], dtype=torch.bfloat16))
    torch.testing.assert_close(got, layer(x, torch.arange(3000) + 0.5), atol=0, rtol=0)


def test_batched_positions_belong_to_rows_even_if_all_sizes_are_equal():
    layer = RotaryPositions(8)
    x, positions = draw(3, 3, 3, 8), torch.arange(9).reshape(3, 3)
    assert torch.equal(layer(x, positions)[1, 2], layer(x[1, 2], positions[1]))


INTEGERS = (
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_positions_may_have_any_integer_dtype(dtype):
    layer, x = RotaryPositions(8), draw(3, 8)
    positions = torch.tensor([0, 5, 127])
    assert torch.equal(layer(x, positions.to(dtype)), layer(x, positions))
    with plain_operators():
        assert torch.equal(layer(x, positions.to(dtype)), layer(x, positions))


# ---------------------------------------------------------------- kernels and operators


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernels_and_operators_are_equal(dtype, layout):
    layer = RotaryPositions(8, layout=layout, rotary_dim=6)
    heads = draw(2, 5, 3, 8, dtype=dtype).transpose(1, 2)
    for x in (heads, heads[..., 1:4, :], heads.contiguous(), heads[:, :, :0]):
        got = layer(x, offset=torch.tensor([3, 70_000]))
        with plain_operators():
            want = layer(x, offset=torch.tensor([3, 70_000]))
        # In float64, kernels multiply phases of digits, and operators compute cosines.
        bound = 4e-15 if dtype == torch.float64 else 0.0
        torch.testing.assert_close(got, want, rtol=0.0, atol=bound)


def test_kernels_run_in_eager_mode_only(monkeypatch):
    calls, original = [], kernels.rotate_pairs

    def spy(*args, **options):
        calls.append(1)
        return original(*args, **options)

    monkeypatch.setattr(kernels, "rotate_pairs", spy)
    layer, x = RotaryPositions(8), draw(3, 8).requires_grad_()
    layer(x).sum().backward()
    assert len(calls) == 2
    with plain_operators():
        layer(x)
    torch.func.vmap(layer)(x[None])
    assert len(calls) == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_half_precision_is_the_float32_rotation_rounded_once(layout, dtype):
    layer, x = (
        RotaryPositions(8, layout=layout, heads_axis=-3),
        draw(4, 3000, 8, dtype=dtype),
    )
    x.requires_grad_()
    upcast = x.detach().float().requires_grad_()
    y, want = layer(x, offset=100_000), layer(upcast, offset=100_000)
    assert torch.equal(y.view(torch.int16), want.to(dtype).view(torch.int16))
    dy = draw(4, 3000, 8, dtype=dtype, seed=1)
    (dx,) = torch.autograd.grad(y, x, dy)
    (want_dx,) = torch.autograd.grad(want, upcast, dy.float())
    assert torch.equal(dx, want_dx.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_autocast_does_not_change_the_output(dtype):
    layer, x = RotaryPositions(8, heads_axis=-3), draw(2, 4096, 8, dtype=dtype)
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
def test_any_shape_and_offset_matches_numpy(lead, length, dtype, offset, layout):
    x = draw(*lead, length, 4, dtype=dtype)
    got = RotaryPositions(4, layout=layout, heads_axis=-3)(x, offset=offset)
    upcast = x if dtype == torch.float64 else x.float()
    want = NumpyRotary(4, layout=layout, heads_axis=-3)(upcast.numpy(), offset=offset)
    assert got.shape == x.shape and torch.equal(got, torch.from_numpy(want).to(dtype))


def test_output_has_the_strides_of_the_input():
    x = draw(2, 5, 3, 8).transpose(1, 2)
    assert RotaryPositions(8)(x).stride() == x.stride()


# --------------------------------------------------------------------- gradients


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("path", ["kernels", "operators"])
def test_first_and_second_gradients_pass_gradcheck(layout, path):
    layer = RotaryPositions(6, layout=layout, rotary_dim=4)
    x = draw(2, 2, 3, 6, dtype=torch.float64).requires_grad_()

    def run(x):
        if path == "kernels":
            return layer(x, offset=torch.tensor([5, 0]))
        with plain_operators():
            return layer(x, offset=torch.tensor([5, 0]))

    assert torch.autograd.gradcheck(run, (x,))
    assert torch.autograd.gradgradcheck(lambda x: run(x) ** 2, (x,))


def test_float_positions_get_a_gradient():
    layer, x = RotaryPositions(4, base=20.0), draw(3, 4, dtype=torch.float64)
    positions = torch.tensor([0.3, 7.6, -2.5], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(layer, (x.requires_grad_(), positions))
    assert torch.autograd.gradgradcheck(layer, (x, positions))


def test_gradients_of_kernels_and_operators_are_bitwise_equal():
    layer, dy = RotaryPositions(8), draw(2, 3, 5, 8, seed=1)
    grads = []
    for use_operators in (False, True):
        x = draw(2, 3, 5, 8).requires_grad_()
        if use_operators:
            with plain_operators():
                grads += torch.autograd.grad(layer(x), x, dy)
        else:
            grads += torch.autograd.grad(layer(x), x, dy)
    assert torch.equal(*grads)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_jacobian_apis_agree(layout):
    layer, x = RotaryPositions(4, layout=layout), draw(3, 4, dtype=torch.float64)

    def run(x):
        return layer(x, offset=9)

    want = torch.autograd.functional.jacobian(run, x)
    batched = torch.autograd.functional.jacobian(run, x, vectorize=True)
    for got in (batched, torch.func.jacrev(run)(x), torch.func.jacfwd(run)(x)):
        torch.testing.assert_close(got, want, atol=1e-12, rtol=0)


def test_vmap_grad_and_jvp_match_eager_calls():
    layer, x = RotaryPositions(4, heads_axis=-3), draw(3, 2, 5, 4)
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


def test_positions_beyond_the_limit_give_nan_under_vmap():
    layer, x = RotaryPositions(4), draw(2, 4)
    positions = torch.tensor([[1, 2], [3, 2**24]])
    got = torch.func.vmap(lambda p: layer(x, p))(positions)
    assert torch.equal(got[0], layer(x, positions[0]))
    assert got[1, 1].isnan().all() and not got[1, 0].isnan().any()


# ---------------------------------------------------------------- casts, moves, threads


@pytest.mark.parametrize("round_trip", ROUND_TRIPS)
@pytest.mark.parametrize("path", ["kernels", "operators"])
def test_tables_survive_casts_moves_and_checkpoints(round_trip, path):
    def build():
        rule = DynamicNTK(factor=2.0, original_length=8).at_length(64)
        return RotaryPositions(
            8, base=500.0, scaling=rule, layout="interleaved", heads_axis=-3
        )

    x, positions = draw(1, 3, 8), torch.tensor([5_000_000, 4095, 17])
    want = build()(x, positions)
    layer = ROUND_TRIPS[round_trip](build)
    if path == "operators":
        with plain_operators():
            got = layer(x, positions)
    else:
        got = layer(x, positions)
    assert torch.equal(got, want)
    assert not layer.state_dict() and not list(layer.parameters())
    assert torch.equal(layer.at_length(64)(x, positions), want)


def test_precomputed_tables_are_integer_buffers():
    buffers = dict(RotaryPositions(8).named_buffers())
    assert {name: buffer.dtype for name, buffer in buffers.items()} == {
        "bits": torch.int32,
        "rate_bits": torch.int32,
        "turns": torch.int64,
    }


def test_meta_device_gives_shapes():
    x = torch.empty(2, 3, 5, 8, device="meta", dtype=torch.bfloat16)
    y = RotaryPositions(8).to("meta")(x, offset=3)
    assert y.is_meta and y.shape == x.shape and y.dtype == x.dtype


def test_concurrent_threads_get_the_same_output():
    layer, x = RotaryPositions(64, heads_axis=-3), draw(4, 2048, 64)
    want, got = layer(x), [None] * 8

    def run(i):
        got[i] = layer(x)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(y is not None and torch.equal(y, want) for y in got)


def test_forked_child_gets_the_same_output():
    run_alone("""
        import os
        import torch
        from firstlayer.torch import RotaryPositions

        layer, x = RotaryPositions(64), torch.randn(1, 4, 2048, 64)
        want = layer(x)  # Starts the thread pool before the fork.
        child = os.fork()
        if child == 0:
            os._exit(0 if torch.equal(layer(x), want) else 3)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    """)


def test_kernels_use_as_many_threads_as_torch(monkeypatch):
    from firstlayer.kernels import rotate
    from firstlayer.kernels.runtime import threads

    seen, before, original = [], torch.get_num_threads(), rotate.run

    def spy(*args, **options):
        seen.append(getattr(threads._here, "size", None))
        original(*args, **options)

    monkeypatch.setattr(rotate, "run", spy)
    layer, x = RotaryPositions(64, heads_axis=-3), draw(4, 2048, 64)
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
        positions = torch.arange(length) + offset[:, None, None]
        want = expected_rotation(x, positions, base=500.0)
        # Compiled code cannot raise: positions beyond the limit give NaN.
        valid = min(length, 20)
        assert got[1, :, valid:].isnan().all()
        torch.testing.assert_close(got[0].double(), want[0], atol=2e-6, rtol=0)
        last = got[1, :, :valid].double()
        torch.testing.assert_close(last, want[1, :, :valid], atol=3e-6, rtol=0)
    assert graphs() == 1


@pytest.mark.parametrize("dtype, layout", [*zip(DTYPES, cycle(LAYOUTS), strict=False)])
def test_compiled_output_is_bitwise_equal_to_eager(dtype, layout):
    forget_graphs()
    layer, x = RotaryPositions(8, layout=layout), draw(2, 3, 5, 8, dtype=dtype)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    positions = torch.arange(10).reshape(2, 5)
    assert torch.equal(compiled(x, positions), layer(x, positions))
    assert torch.equal(compiled(x, positions + 0.5), layer(x, positions + 0.5))


def test_decoding_steps_do_not_recompile():
    forget_graphs()
    layer = RotaryPositions(8)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="eager")
    for offset in (3, 4, 5, 1000):
        x = draw(2, 3, 4, 8)
        assert torch.equal(compiled(x, offset=offset), layer(x, offset=offset))
    assert graphs() == 1


def test_length_dependent_rule_compiles_once_per_length():
    forget_graphs()
    layer = RotaryPositions(
        8, scaling=DynamicNTK(factor=2.0, original_length=4), heads_axis=-3
    )
    compiled = torch.compile(
        lambda layer, x: layer(x), fullgraph=True, dynamic=True, backend="eager"
    )
    for copies, length in enumerate((5, 9, 12), start=1):
        copy, x = layer.at_length(length), draw(3, length, 8)
        for _ in range(2):
            assert torch.equal(compiled(copy, x), copy(x))
        assert 1 <= graphs() <= copies


def test_compiled_gradient_is_correct():
    forget_graphs()
    layer = RotaryPositions(8)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for run in (layer, compiled):
        x = draw(2, 3, 5, 8).requires_grad_()
        run(x, offset=3).square().sum().backward()
        torch.testing.assert_close(x.grad, 2 * x.detach(), atol=2e-6, rtol=0)


@pytest.mark.parametrize("strict", [False, True])
def test_exported_program_runs_at_other_lengths_on_aten_operators(strict):
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


def test_repr_shows_arguments_that_are_not_default():
    rule = Linear(factor=2.0)
    assert repr(RotaryPositions(8)) == "RotaryPositions(8)"
    got = repr(RotaryPositions(8, base=5e5, scaling=rule, heads_axis=-2))
    want = "8, base=500000.0, scaling={'rule': 'Linear', 'factor': 2.0}, heads_axis=-2"
    assert got == f"RotaryPositions({want})"


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_config_rebuilds_the_layer_and_a_subclass(options):
    class Subclass(RotaryPositions):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)

    layer, x = Subclass(8, **options), draw(2, 5, 5, 8)
    assert layer.config() == RotaryPositions(8, **options).config()
    for other in (RotaryPositions(**layer.config()), layer.at_length(16)):
        assert other.config() == layer.config()
        assert torch.equal(other(x), layer(x))
    assert repr(layer).startswith("Subclass(")


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
def test_invalid_positions_are_rejected(positions, message):
    with pytest.raises(ValueError, match=message):
        RotaryPositions(4)(torch.ones(2, 4), positions)


@pytest.mark.rejects
@pytest.mark.parametrize("name", ["positions", "offset"])
def test_bool_positions_are_rejected(name):
    mask = {name: torch.tensor([True, False])}
    with pytest.raises(TypeError, match=f"{name} must be integers or reals, got bool"):
        RotaryPositions(4)(torch.ones(2, 1, 2, 4), **mask)


@pytest.mark.rejects
def test_positions_and_offset_are_mutually_exclusive():
    with pytest.raises(ValueError, match="give positions or offset, not both"):
        RotaryPositions(4)(torch.ones(2, 4), [0, 1], offset=1)


@pytest.mark.rejects
def test_offset_beyond_the_limit_is_rejected():
    with pytest.raises(ValueError, match="in size, got 16777216"):
        RotaryPositions(4)(torch.ones(9, 4), offset=2**24 - 3)


@pytest.mark.rejects
def test_inputs_of_wrong_width_or_type_are_rejected():
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
def test_missing_or_too_few_coordinates_are_rejected():
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
def test_invalid_arguments_are_rejected(options, message):
    with pytest.raises(ValueError, match=message):
        RotaryPositions(8, **options)
