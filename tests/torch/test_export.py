"""ONNX, ``torch.jit.trace`` and ``torch.export``: every layer, against eager calls."""

import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from firstlayer import NTK, DynamicNTK, Linear, Llama3, LongRoPE, YaRN
from firstlayer.torch import (
    AlibiBias,
    CopeBias,
    Embedding,
    EmbeddingBag,
    EmbeddingLayer,
    FireBias,
    FourierFeatures,
    KerpleBias,
    LearnedPositions,
    PartlyFrozenEmbedding,
    RotaryPositions,
    ShawScores,
    SinusoidalPositions,
    T5Bias,
    Time2Vec,
    TransformerXLScores,
    XPosRotary,
    replace_rotary,
)
from firstlayer.torch._tensors.buffers import constant_result

pytestmark = [
    # Shapes are checked in Python, which a trace cannot record.
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:# The axis name:UserWarning"),
    pytest.mark.filterwarnings("ignore:Constant folding:UserWarning"),
    pytest.mark.filterwarnings("ignore:The feature will be removed:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:You are using the legacy:DeprecationWarning"),
]
LONGROPE = LongRoPE(
    short_factors=[1.0, 1.5, 2.0, 3.0],
    long_factors=[4.0, 5.0, 6.0, 7.0],
    original_length=64,
    factor=4.0,
)
SCALINGS = [
    Linear(factor=2.0),
    NTK(factor=2.0),
    DynamicNTK(factor=2.0, original_length=16).at_length(40),
    YaRN(factor=4.0, original_length=64),
    Llama3(factor=8.0, original_length=64),
    LONGROPE,
]


class Inputs(NamedTuple):
    """Inputs of one batch size and length."""

    ids: Tensor
    positions: Tensor
    reals: Tensor
    x: Tensor
    q: Tensor


def inputs_of(batch: int, length: int, dtype: Any = torch.float32) -> Inputs:
    generator = torch.Generator().manual_seed(length)
    return Inputs(
        torch.randint(0, 20, (batch, length), generator=generator),
        torch.randint(0, 900, (batch, length), generator=generator),
        torch.rand(batch, length, generator=generator) * 50 - 10,
        torch.randn(batch, length, 8, generator=generator).to(dtype),
        torch.randn(batch, 3, length, 8, generator=generator).to(dtype),
    )


class Model(nn.Module):
    """Calls of layers: each a layer and a function of the layer and the inputs."""

    def __init__(self, calls: dict[str, tuple[nn.Module, Callable[..., Tensor]]]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: layer for name, (layer, _) in calls.items()})
        self.calls = {name: call for name, (_, call) in calls.items()}

    def forward(self, ids: Tensor, positions: Tensor, reals: Tensor, x: Tensor, q: Tensor):
        at = Inputs(ids, positions, reals, x, q)
        return tuple(call(self.layers[name], at) for name, call in self.calls.items())


def by_offsets(bag: nn.Module, at: Inputs) -> Tensor:
    starts = torch.arange(at.ids.shape[0]) * at.ids.shape[1]
    return bag(at.ids.reshape(-1), starts, at.reals.reshape(-1))


def tables() -> dict[str, Any]:
    """Return calls of every layer with a table of tokens."""
    learned = EmbeddingLayer(
        20, 8, max_positions=900, scale=True, segments=2, layer_norm=True, padding_idx=0,
        zero_padding=True,
    )  # fmt: skip
    frozen = PartlyFrozenEmbedding(20, 8, frozen=range(5), padding_idx=7)
    return {
        "embedding": (Embedding(20, 8, padding_idx=1), lambda f, at: f(at.ids)),
        "max_norm": (Embedding(20, 8, max_norm=0.5), lambda f, at: f(at.ids.int())),
        "partly_frozen": (frozen, lambda f, at: f(at.ids)),
        "bag": (EmbeddingBag(20, 8, padding_idx=3), lambda f, at: f(at.ids)),
        "bag_sum": (EmbeddingBag(20, 8, mode="sum"), by_offsets),
        "bag_max": (EmbeddingBag(20, 8, mode="max", padding_idx=3), by_offsets),
        "learned": (
            learned,
            lambda f, at: f(at.ids, positions=at.positions, segments=at.ids % 2),
        ),
        "sinusoidal": (
            EmbeddingLayer(20, 8, position="sinusoidal"),
            lambda f, at: f(at.ids, offset=100_000),
        ),
        "no_positions": (EmbeddingLayer(20, 8, position=None), lambda f, at: f(at.ids)),
        "logits": (Embedding(20, 8), lambda f, at: f.logits(at.x)),
    }


def positions() -> dict[str, Any]:
    """Return calls of every position layer."""
    calls: dict[str, Any] = {
        "learned": (
            LearnedPositions(900, 8, row_offset=2, scale=0.5),
            lambda f, at: f(at.x, at.positions),
        ),
        "learned_real": (
            LearnedPositions(60, 8),
            lambda f, at: f(at.x, at.reals.abs()),
        ),
        "sinusoidal_real": (
            SinusoidalPositions(8, layout="half", scale=2.0),
            lambda f, at: f(at.x, at.reals),
        ),
        "sinusoidal_axes": (
            SinusoidalPositions(8, axes=2, shift=1.0),
            lambda f, at: f(at.x, torch.stack([at.positions, at.positions + 1])),
        ),
        "rotary": (RotaryPositions(8), lambda f, at: f(at.q)),
        "rotary_real": (
            RotaryPositions(8, layout="interleaved", base=500.0),
            lambda f, at: f(at.q, at.reals),
        ),
        "rotary_offset": (
            RotaryPositions(8, layout="interleaved_to_half", rotary_dim=4),
            lambda f, at: f(at.q, offset=at.positions[:, 0]),
        ),
        "rotary_heads": (
            RotaryPositions(8, heads_axis=-2),
            lambda f, at: f(at.q.transpose(1, 2), at.positions),
        ),
        "rotary_axes": (
            RotaryPositions(8, sections=[2, 1, 1]),
            lambda f, at: f(at.q, torch.stack([at.positions] * 3)),
        ),
        "fourier": (
            FourierFeatures.gaussian(5, axes=1, std=3.0, rng=0),
            lambda f, at: f(at.x[..., :1]),
        ),
        "alibi": (
            AlibiBias(3, symmetric=True),
            lambda f, at: f(at.positions, at.positions),
        ),
        "t5": (T5Bias(3), lambda f, at: f(at.positions, at.positions)),
        "t5_real": (T5Bias(3), lambda f, at: f(at.reals, at.reals)),
        "kerple": (KerpleBias(3), lambda f, at: f(at.positions, at.positions)),
        "fire": (FireBias(3), lambda f, at: f(at.reals, at.reals)),
        "shaw": (
            ShawScores(8, max_left=4, max_right=2),
            lambda f, at: f(at.q, at.q, at.positions, at.positions),
        ),
        "xpos": (XPosRotary(8, scale_base=30.0), lambda f, at: f(at.q, at.positions)),
        "xpos_keys": (
            XPosRotary(8, scale_base=99.0, center=9, layout="interleaved", rotary_dim=6),
            lambda f, at: f(at.q, at.reals, keys=True),
        ),
        "transformer_xl": (
            TransformerXLScores(3, 8, embedding_dim=10, max_distance=4),
            lambda f, at: f(at.q[:, :, 2:], at.q),
        ),
        "cope": (
            CopeBias(8, max_positions=4, weight=torch.arange(32.0).view(4, 8) / 40),
            lambda f, at: f(at.q, at.q @ at.q.transpose(-1, -2)),
        ),
        "time2vec": (Time2Vec(5), lambda f, at: f(at.reals)),
        "dinov3": (
            RotaryPositions.dinov3(8),
            lambda f, at: f(at.q, torch.stack([at.reals, -at.reals]) / 50),
        ),
        "pixtral": (
            RotaryPositions.pixtral(8),
            lambda f, at: f(at.q, torch.stack([at.positions, at.positions // 7])),
        ),
    }
    for scaling in SCALINGS:
        layer = RotaryPositions(8, scaling=scaling)
        calls[type(scaling).__name__] = layer, lambda f, at: f(at.q, at.positions)
    return calls


GROUPS = {"tables": tables, "positions": positions}
# The default exporter of ONNX takes seconds per layer. These record every operator.
ONNX_POSITIONS = ("xpos_keys", "transformer_xl", "cope")
# Layers with phases have other constants in float64.
FLOAT64_POSITIONS = ("YaRN", "sinusoidal_axes", "rotary_real", "fourier")


def built(group: str, names: Iterable[str] = (), dtype: Any = torch.float32) -> Model:
    torch.manual_seed(0)
    calls = GROUPS[group]()
    model = Model({name: calls[name] for name in names or calls}).eval()
    return model.to(dtype)


def agree(model: Model, got: Any, given: Inputs, *, atol: float = 2e-6) -> None:
    """Compare outputs for inputs of another shape than the recorded one."""
    wanted = model(*given)
    assert len(got) == len(wanted) == len(model.calls) > 0
    for name, a, b in zip(model.calls, got, wanted, strict=True):
        error = (torch.as_tensor(a).double() - b.double()).abs().max().item()
        assert error <= atol, (name, error)


@dataclass(frozen=True)
class OnnxGraph:
    """An exported model that ONNX Runtime runs."""

    program: bytes

    @classmethod
    def by_default(cls, model: nn.Module, inputs: tuple[Any, ...], **options: Any) -> Self:
        program: Any = torch.onnx.export(model, inputs, verbose=False, **options)
        file = io.BytesIO()
        program.save(file)
        return cls(file.getvalue())

    @classmethod
    def by_torchscript(cls, model: nn.Module, given: Inputs) -> Self:
        axes = {name: {0: "batch", 1: "length"} for name in Inputs._fields}
        axes["q"] = {0: "batch", 2: "length"}
        file: Any = io.BytesIO()
        torch.onnx.export(
            model, tuple(given), file, dynamo=False, verbose=False,
            input_names=list(Inputs._fields), dynamic_axes=axes,
        )  # fmt: skip
        return cls(file.getvalue())

    def __call__(self, **inputs: Tensor) -> Any:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(self.program, options)
        used = [x.name for x in session.get_inputs()]
        return session.run(None, {name: inputs[name].numpy() for name in used})


def dynamic_shapes() -> tuple[Any, ...]:
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length")
    flat = {0: batch, 1: length}
    return flat, flat, flat, flat, {0: batch, 2: length}


# The older exporter of ONNX traces too, the positions in float32.
@pytest.mark.parametrize(
    "group, names, dtype",
    [
        ("tables", (), torch.float32),
        ("positions", (), torch.bfloat16),
        ("positions", FLOAT64_POSITIONS, torch.float64),
    ],
)
def test_traced_layers_equal_eager(group, names, dtype):
    model = built(group, names, dtype)
    # Torch's check traces again without gradients, which only tables depend on.
    inputs, check = tuple(inputs_of(2, 7, dtype)), group == "tables"
    traced: Any = torch.jit.trace(model, inputs, check_trace=check)
    other = inputs_of(3, 5, dtype)
    agree(model, traced(*other), other, atol=1e-14 if dtype.itemsize == 8 else 2e-6)


@pytest.mark.parametrize("group, names", [("tables", ()), ("positions", ONNX_POSITIONS)])
def test_onnx_graphs_equal_eager(group, names):
    model = built(group, names)
    options = {"dynamic_shapes": dynamic_shapes(), "opset_version": 18}
    graph = OnnxGraph.by_default(model, tuple(inputs_of(2, 7)), **options, optimize=False)
    other = inputs_of(3, 5)
    agree(model, graph(**other._asdict()), other)


@pytest.mark.parametrize("positions", [[2**24 - 1, -9_876_543], [2.0**23 + 0.3, -0.7]])
def test_recorded_float64_phases_are_accurate_at_large_positions(positions):
    at = torch.tensor(positions, dtype=None if type(positions[0]) is int else torch.float64)
    frequencies = np.array([[1.0, 0.01, 90.0, 0.0], [0.0, 2.5, 1e-4, 7.0]])
    layers = RotaryPositions(8, scaling=SCALINGS[3]), SinusoidalPositions(8, scale=3.0)
    axial = RotaryPositions(8, frequencies=frequencies)
    fourier = FourierFeatures(np.array([[0.37, -4.1], [30.0, 1e-3]]))
    x, pair = torch.randn(2, 8, dtype=torch.float64), torch.stack([at, at.flip(0)])

    class Calls(nn.Module):
        def forward(self, x, at, pair):
            return (
                *(layer(x, at) for layer in layers),
                axial(x, pair),
                fourier(pair.double()),
            )

    inputs = x, at[:1].expand(2), pair[:, :1].expand(2, 2)
    traced: Any = torch.jit.trace(Calls(), inputs, check_trace=False)
    for got, want in zip(traced(x, at, pair), Calls()(x, at, pair), strict=True):
        torch.testing.assert_close(got, want, atol=3e-14, rtol=0)


@pytest.mark.parametrize(
    "group, dtype", [("tables", torch.float16), ("positions", torch.float32)]
)
def test_onnx_graphs_of_torchscript_equal_eager(group, dtype):
    # This exporter looks for parameters in the state dict, which has other names there.
    model = built(group, dtype=dtype)
    for layer in model.modules():
        if isinstance(layer, PartlyFrozenEmbedding):
            layer.requires_grad_(False)
    graph, other = (
        OnnxGraph.by_torchscript(model, inputs_of(2, 7, dtype)),
        inputs_of(3, 5, dtype),
    )
    agree(
        model, graph(**other._asdict()), other, atol=2e-6 if dtype.itemsize == 4 else 2e-3
    )


@pytest.mark.parametrize("strict", [False, True])
def test_exported_programs_equal_eager_and_hold_floats(strict):
    model, given = built("positions", ("sinusoidal_axes", "YaRN")), inputs_of(2, 7)
    program = torch.export.export(
        model, tuple(given), dynamic_shapes=dynamic_shapes(), strict=strict
    )
    other = inputs_of(3, 5)
    agree(model, program.module()(*other), other)
    tables = [*program.constants.values(), *dict(program.named_buffers()).values()]
    assert torch.float32 in {table.dtype for table in tables}
    for layer in model.layers.values():
        assert not any(buffer.is_floating_point() for buffer in layer.buffers())


def test_casts_do_not_round_exported_tables():
    layer, at = RotaryPositions(8), inputs_of(2, 7)
    given = {"q": at.q, "positions": at.positions}
    want, wide = layer(*given.values()), layer(at.q.double(), at.positions)
    layer = layer.to(torch.bfloat16).half()

    class Rotate(nn.Module):
        def forward(self, q, positions):
            half = layer(q.bfloat16(), positions)
            return layer(q, positions), half.float(), layer(q.double(), positions)

    graph = OnnxGraph.by_default(Rotate().eval(), (at.q, at.positions))
    full, half, double = map(torch.from_numpy, graph(**given))
    torch.testing.assert_close(double, wide, atol=1e-14, rtol=0)
    torch.testing.assert_close(full, want, atol=1e-6, rtol=0)
    assert torch.equal(half, layer(at.q.bfloat16(), at.positions).float())


def test_llama_with_replaced_rotary_exports():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=32, use_cache=False,
    )  # fmt: skip
    llama = LlamaForCausalLM(config).eval()

    class Logits(nn.Module):
        def __init__(self):
            super().__init__()
            self.llama = llama

        def forward(self, ids):
            return self.llama(input_ids=ids).logits

    model, first, other = Logits().eval(), inputs_of(2, 7).ids, inputs_of(3, 5).ids
    plain = model(other)
    assert replace_rotary(llama) == 1
    want = model(other)
    torch.testing.assert_close(want, plain)
    shapes = (dynamic_shapes()[0],)
    graph = OnnxGraph.by_default(model, (first,), dynamic_shapes=shapes)
    torch.testing.assert_close(torch.from_numpy(graph(ids=other)[0]), want)


@pytest.mark.rejects
def test_ids_and_positions_out_of_range_in_exported_graphs():
    class Lookups(nn.Module):
        def __init__(self):
            super().__init__()
            self.token, self.position = Embedding(20, 8), LearnedPositions(6, 8)
            self.rotary = RotaryPositions(8)

        def forward(self, ids, x, positions):
            return self.token(ids), self.position(x, positions), self.rotary(x, positions)

    model, x = Lookups().eval(), torch.ones(2, 8)
    inputs = torch.tensor([1, 19]), x, torch.tensor([0, 1])
    graph = OnnxGraph.by_default(model, inputs)
    program = torch.export.export(model, inputs).module()
    far = torch.tensor([5, 2**24])
    for _, learned, rotated in (
        graph(ids=inputs[0], x=x, positions=far), program(inputs[0], x, far),
    ):  # fmt: skip
        assert np.isnan(np.asarray(learned.tolist())).any(1).tolist() == [False, True]
        assert np.isnan(np.asarray(rotated.tolist())).any(1).tolist() == [False, True]
    for wrong in (20, -1):
        ids = torch.tensor([1, wrong])
        with pytest.raises(IndexError, match="out of range"):
            program(ids, x, inputs[2])
        with pytest.raises(Exception, match="indices element out of data bounds, idx=20"):
            graph(ids=ids, x=x, positions=inputs[2])


def test_constant_results_have_the_mark_of_torch():
    def constant() -> int:
        return 1

    def reference() -> int:
        return 1

    marks = vars(torch.compiler.assume_constant_result(reference))
    assert marks and vars(constant_result(constant)) == marks
