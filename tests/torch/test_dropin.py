"""Drop-in replacement of torch's layers: torch's samples, and code written for torch."""

# A gradient is None before the first backward.
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false

import copy
import inspect
import sys
import types
import unittest
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from firstlayer.torch import (
    AlibiBias,
    EmbeddingLayer,
    FireBias,
    FrequencyEmbedding,
    GrowingEmbedding,
    HashedEmbedding,
    LearnedPositions,
    QuotientRemainderEmbedding,
    RotaryPositions,
    SinusoidalPositions,
    Table,
    TableGroup,
)
from firstlayer.torch import functional as ours
from firstlayer.torch.bag import EmbeddingBag
from firstlayer.torch.frozen import PartlyFrozenEmbedding
from firstlayer.torch.optim import RowAdagrad, RowAdamW
from firstlayer.torch.token import Embedding

# torch's sample lists import a test helper that is not shipped with torch.
helper: Any = types.ModuleType("expecttest")
helper.TestCase = unittest.TestCase
sys.modules.setdefault("expecttest", helper)

from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402
from torch.testing._internal.common_modules import module_db  # noqa: E402

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
OPS = {op.name: op for op in op_db if op.name.startswith("nn.functional.embedding")}
FUNCTIONS: dict[str, tuple[Any, Any]] = {
    "nn.functional.embedding": (ours.embedding, F.embedding),
    "nn.functional.embedding_bag": (ours.embedding_bag, F.embedding_bag),
}
PAIRS = [(Embedding, nn.Embedding), (EmbeddingBag, nn.EmbeddingBag)]
by_torch = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def patched(monkeypatch):
    monkeypatch.setattr(torch.nn, "Embedding", Embedding)
    monkeypatch.setattr(torch.nn, "EmbeddingBag", EmbeddingBag)


# Signatures, attributes, state


def arguments(function):
    """Return name, kind and default of each argument."""
    results = inspect.signature(function).parameters.values()
    return [(p.name, p.kind, p.default) for p in results]


@pytest.mark.parametrize("mine, theirs", PAIRS)
def test_signatures_are_torchs(mine, theirs):
    *same, own = arguments(mine)
    assert same == arguments(theirs)
    assert own == ("output_device", inspect.Parameter.KEYWORD_ONLY, None)
    assert arguments(mine.forward) == arguments(theirs.forward)
    assert arguments(mine.from_pretrained) == arguments(theirs.from_pretrained)
    assert issubclass(mine, theirs) and mine.__constants__ == theirs.__constants__


@pytest.mark.parametrize("mine, theirs", FUNCTIONS.values())
def test_functional_signatures_are_torchs(mine, theirs):
    assert arguments(mine) == arguments(theirs)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"padding_idx": -2, "max_norm": 1.5, "norm_type": 3.0, "scale_grad_by_freq": True},
        {"sparse": True, "dtype": torch.float64, "device": "meta"},
    ],
)
@pytest.mark.parametrize("mine, theirs", PAIRS)
def test_attributes_repr_and_state_are_torchs(mine, theirs, options):
    torch.manual_seed(1)
    a = mine(6, 3, **options)
    torch.manual_seed(1)
    b = theirs(6, 3, **options)
    assert repr(a) == repr(b)
    for name in theirs.__constants__:
        assert getattr(a, name) == getattr(b, name), name
    assert list(a.state_dict()) == list(b.state_dict()) == ["weight"]
    assert dict(a.named_buffers()) == {} and list(dict(a.named_parameters())) == ["weight"]
    assert a.weight.device == b.weight.device and a.weight.dtype == b.weight.dtype
    if not a.weight.is_meta:
        assert torch.equal(a.weight, b.weight)
        b.load_state_dict(a.state_dict())
        a.load_state_dict(b.state_dict())


@pytest.mark.parametrize("mine, theirs", PAIRS)
def test_from_pretrained_is_torchs(mine, theirs):
    table = torch.randn(5, 2)
    for freeze in (True, False):
        a, b = (
            cls.from_pretrained(table, freeze=freeze, padding_idx=1, max_norm=9.0)
            for cls in (mine, theirs)
        )
        assert a.weight.data_ptr() == table.data_ptr()
        assert a.weight.requires_grad == b.weight.requires_grad == (not freeze)
        assert repr(a) == repr(b) and type(a) is mine
        ids = torch.tensor([[1, 2]])
        torch.testing.assert_close(a(ids), b(ids))
    with pytest.raises(AssertionError, match="2-dimensional"):
        mine.from_pretrained(torch.ones(3))


# torch's own samples


def run(function, sample):
    """Return the result and the gradients of all floating-point inputs."""
    given = [sample.input, *sample.args]
    kwargs = dict(sample.kwargs)
    leaves = []

    def fresh(x):
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            leaves.append(x.detach().clone().requires_grad_())
            return leaves[-1]
        return x

    weight, ids = (fresh(x) for x in given)
    y = function(ids, weight, **{name: fresh(x) for name, x in kwargs.items()})
    dy = torch.linspace(-1, 1, y.numel(), dtype=torch.float32).reshape(y.shape)
    y.backward(dy.to(y.dtype))
    return y.detach(), [leaf.grad.to_dense() for leaf in leaves]


def wanted(function, sample):
    """Return torch's result, with gradients divided by the counts if scaled by frequency.

    Torch has no scaled sparse gradients, and its dense bags divide by counts of other ids.
    """
    if not sample.kwargs.get("scale_grad_by_freq"):
        return run(function, sample)
    other, (ids,) = copy.copy(sample), sample.args
    other.kwargs = {**sample.kwargs, "scale_grad_by_freq": False}
    y, grads = run(function, other)
    counts = torch.bincount(ids.reshape(-1), minlength=len(grads[0])).clamp(min=1)
    return y, [grads[0] / counts[:, None].to(y.dtype), *grads[1:]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_agree_on_opinfo_samples(name, dtype):
    mine, theirs = FUNCTIONS[name]
    samples = [
        sample
        for requires_grad in (False, True)
        for sample in OPS[name].sample_inputs("cpu", dtype, requires_grad=requires_grad)
    ]
    assert len(samples) >= 12
    tolerance = 2e-2 if dtype in DTYPES[2:] else 1e-5
    for sample in samples:
        got, want = run(mine, sample), wanted(theirs, sample)
        torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


@pytest.mark.rejects
@pytest.mark.parametrize("name", FUNCTIONS)
def test_opinfo_error_samples_raise(name):
    mine, theirs = FUNCTIONS[name]
    op = OPS[name]
    if op.error_inputs_func is None:
        assert name == "nn.functional.embedding_bag"
        return
    for wrong in op.error_inputs("cpu"):
        sample = wrong.sample_input
        for function in (mine, theirs):
            with pytest.raises(wrong.error_type, match=wrong.error_regex):
                function(*sample.args, sample.input, **sample.kwargs)


INFO = next(info for info in module_db if info.module_cls is torch.nn.Embedding)


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("training", [False, True])
def test_results_agree_on_moduleinfo_samples(dtype, training):
    samples = INFO.module_inputs_func(
        INFO, device="cpu", dtype=dtype, requires_grad=True, training=training
    )
    for sample in samples:
        built, called = sample.constructor_input, sample.forward_input
        a, b = (
            cls(*built.args, **built.kwargs, dtype=dtype).train(training)
            for cls in (Embedding, nn.Embedding)
        )
        a.load_state_dict(b.state_dict())
        got, want = (m(*called.args, **called.kwargs) for m in (a, b))
        assert torch.equal(got, want)
        got.sum().backward()
        want.sum().backward()
        assert torch.equal(a.weight.grad.clone(), b.weight.grad.clone())


@pytest.mark.rejects
def test_moduleinfo_error_samples_raise():
    samples: Any = INFO.module_error_inputs_func
    wrong = samples(
        INFO, device="cpu", dtype=torch.float32, requires_grad=False, training=False
    )
    assert len(wrong) >= 3
    for error in wrong:
        built = error.module_error_input.constructor_input
        called = error.module_error_input.forward_input
        with pytest.raises(error.error_type):
            Embedding(*built.args, **built.kwargs)(*called.args, **called.kwargs)


# Code written for torch


def small_models():
    from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

    bert = BertConfig(
        vocab_size=60, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=20,
    )  # fmt: skip
    gpt2 = GPT2Config(vocab_size=60, n_embd=16, n_layer=1, n_head=2, n_positions=20)
    return [(BertModel, bert), (GPT2LMHeadModel, gpt2)]


def trained(cls, config):
    """Build a model from a seed, train it two steps, return its outputs and state."""
    torch.manual_seed(3)
    model = cls(config).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.randint(0, 60, (2, 7), generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        optimizer.zero_grad()
        (model(input_ids=ids)[0] ** 2).mean().backward()
        optimizer.step()
    return model, model(input_ids=ids)[0].detach()


@pytest.mark.parametrize("which", [0, 1])
def test_patched_transformers_train_as_before(which, monkeypatch, request):
    cls, config = small_models()[which]
    plain, want = trained(cls, config)
    request.getfixturevalue("patched")
    model, got = trained(cls, config)
    kinds = {type(m) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    assert kinds == {Embedding}
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)
    assert plain.state_dict().keys() == model.state_dict().keys()


def test_patched_transformers_save_load_and_resize(patched, tmp_path):
    cls, config = small_models()[0]
    torch.manual_seed(3)
    model = cls(config).eval()
    layer = model.get_input_embeddings()
    assert type(layer) is Embedding and layer.padding_idx == 0
    layer.set_padding(0.5)
    ids = torch.tensor([[0, 5, 7, 0]])
    want = model(input_ids=ids)[0]
    model.save_pretrained(tmp_path)
    loaded = cls.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded(input_ids=ids)[0], want)
    layer = loaded.get_input_embeddings()
    assert layer(torch.tensor([0])).tolist() == [[0.5] * 16]
    loaded.resize_token_embeddings(70, mean_resizing=False)
    layer = loaded.get_input_embeddings()
    assert layer.weight.shape == (70, 16) and layer.num_embeddings == 70
    assert layer(torch.tensor([0, 69])).tolist()[0] == [0.5] * 16


def test_subclasses_of_torchs_layers_work_when_patched(patched):
    class Positions(torch.nn.Embedding):
        def __init__(self, size, width):
            super().__init__(size + 2, width)

        def forward(self, ids):  # pyright: ignore
            return super().forward(torch.arange(ids.shape[1]) + 2)

    layer = Positions(5, 3)
    assert torch.equal(layer(torch.zeros(1, 4)), layer.weight[2:6])
    shared = torch.nn.Embedding(5, 3, padding_idx=1)
    head = torch.nn.Linear(3, 5, bias=False)
    head.weight = shared.weight
    head(shared(torch.tensor([0, 2]))).sum().backward()
    assert shared.weight.grad is head.weight.grad
    copied = copy.deepcopy(torch.nn.ModuleList([shared, head]))
    assert copied[0].weight is copied[1].weight
    model = torch.nn.utils.skip_init(torch.nn.Embedding, 5, 3, padding_idx=1)
    assert type(model) is Embedding and model(torch.tensor([1])).shape == (1, 3)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@by_torch
def test_scripted_and_traced_layers_give_the_same_output(patched):
    ids = torch.tensor([[2, 1, 0]])
    layer = torch.nn.Embedding(5, 3, padding_idx=1)
    bag = torch.nn.EmbeddingBag(5, 3, padding_idx=1)
    for module in (layer, bag):
        want = module(ids)
        assert torch.equal(torch.jit.script(torch.nn.Sequential(module))(ids), want)
        assert torch.equal(torch.fx.symbolic_trace(torch.nn.Sequential(module))(ids), want)
    assert torch.equal(torch.jit.trace(layer, ids)(ids[:, :2]), layer(ids[:, :2]))  # pyright: ignore


def test_parametrized_weights(patched):
    from torch.nn.utils import parametrize

    layer: Any = torch.nn.Embedding(5, 3, padding_idx=1)
    parametrize.register_parametrization(layer, "weight", nn.Sigmoid())
    y = layer(torch.tensor([0, 1]))
    assert (y[0] > 0).all() and y[1].tolist() == [0.5, 0.5, 0.5]
    y.sum().backward()
    grad = layer.parametrizations.weight.original.grad
    assert grad[1].tolist() == [0, 0, 0] and (grad[0] > 0).all()
    assert list(layer.state_dict()) == ["parametrizations.weight.original"]
    assert copy.deepcopy(layer)(torch.tensor([1])).tolist() == [[0.5, 0.5, 0.5]]
    parametrize.remove_parametrizations(layer, "weight")
    assert torch.equal(layer(torch.tensor([0, 1])), y)


def test_pruned_weights(patched):
    from torch.nn.utils import prune

    layer: Any = torch.nn.Embedding(5, 4, padding_idx=1)
    ids = torch.tensor([0, 1])
    layer.set_padding(2.0)
    prune.custom_from_mask(layer, "weight", torch.tensor([1, 1, 0, 0]).expand(5, 4))
    y = layer(ids)
    assert y[0, 2:].tolist() == [0, 0] and y[1].tolist() == [2, 2, 0, 0]
    prune.remove(layer, "weight")
    assert torch.equal(layer(ids), y) and layer.weight[1].tolist() == [2, 2, 0, 0]


@pytest.fixture
def process_group(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    "options", [{}, {"padding_idx": 2, "max_norm": 1.0}, {"sparse": True}]
)
@pytest.mark.parametrize("cls", [Embedding, EmbeddingBag])
def test_data_parallel_training(cls, options, process_group):
    layer = cls(10, 4, **options)
    model = nn.parallel.DistributedDataParallel(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = layer.weight.detach().clone()
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.tensor([[1, 3, 1]])).sum().backward()
        optimizer.step()
    moved = (layer.weight != before).any(dim=1)
    assert (
        moved[1]
        and moved[3]
        and layer.weight.grad.is_sparse == options.get("sparse", False)
    )
    assert list(model.state_dict()) == ["module.weight"]


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
def test_sharded_training(process_group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1,))
    for layer in (Embedding(10, 4, padding_idx=2), EmbeddingBag(10, 4, padding_idx=2)):
        layer.set_padding(3.0)
        model: Any = fully_shard(layer, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        ids = torch.tensor([[1, 2, 3]])
        before = model(ids).detach().clone()
        for _ in range(3):
            optimizer.zero_grad()
            (model(ids) ** 2).sum().backward()
            optimizer.step()
        after = model(ids)
        assert not torch.equal(after, before) and list(model.state_dict()) == ["weight"]
        if isinstance(layer, Embedding):
            # Weight decay moves the padding row, which gets no gradient.
            torch.testing.assert_close(after[0, 1], torch.full((4,), 3 * 0.95**3))


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(("cls", "stock"), PAIRS)
def test_max_norm_of_sharded_rows_equals_torch(cls, stock, inside, process_group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    want = stock(11, 4, padding_idx=2, max_norm=0.7, norm_type=3.0)
    model: Any = cls(11, 4, padding_idx=2, max_norm=0.7, norm_type=3.0)
    model.load_state_dict(want.state_dict())
    model = fully_shard(
        nn.Sequential(model) if inside else model, mesh=init_device_mesh("cpu", (1,))
    )
    results = []
    for layer in (want, model):
        (weight,) = layer.parameters()
        optimizer = torch.optim.AdamW([weight], lr=0.3, weight_decay=0.5)
        for ids in (torch.tensor([[1, 2, 3, 3]]), torch.tensor([[3, 5, 0, 1]])):
            optimizer.zero_grad()
            ((layer(ids) - torch.arange(4.0)) ** 2).sum().backward()
            optimizer.step()
        results.append(weight.detach())
    torch.testing.assert_close(results[1].full_tensor(), results[0])


def test_state_dict_of_a_sharded_partly_frozen_table_is_whole(process_group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    layer: Any = PartlyFrozenEmbedding(5, 4, frozen=[1], padding_idx=2)
    table, ids = layer.weight.detach().clone(), torch.tensor([0, 1, 4])
    layer = fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    assert torch.equal(layer.state_dict()["weight"], table)
    layer.load_state_dict({"weight": table + 1})
    y = layer(ids)
    y.sum().backward()
    optimizer.step()
    assert torch.equal(y, table[ids] + 1)
    want = table + torch.tensor([[0.0], [1], [1], [1], [0]])
    torch.testing.assert_close(layer.state_dict()["weight"], want)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
@pytest.mark.filterwarnings("ignore:DTensor random operators:UserWarning")
def test_padding_of_a_layer_sharded_on_the_meta_device(process_group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1,))
    on_meta = {"padding_idx": 2, "device": "meta"}
    makers = (
        lambda: Embedding(10, 4, **on_meta),
        lambda: EmbeddingBag(10, 4, **on_meta),
        lambda: LearnedPositions(7, 4, row_offset=3, **on_meta),
        lambda: EmbeddingLayer(10, 4, max_positions=5, **on_meta),
    )
    for make in makers:
        layer: Any = make()
        layer = fully_shard(layer, mesh=mesh).to_empty(device="cpu")
        layer.reset_parameters()
        token = getattr(layer, "token", layer)
        table = token.weight.full_tensor()
        assert table[2].tolist() == [0, 0, 0, 0] and table.count_nonzero() == 36
        token.set_padding(torch.arange(4.0))
        again = token.weight.full_tensor()
        assert again[2].tolist() == [0, 1, 2, 3] and torch.equal(again[3:], table[3:])
        assert token.double().half().weight.full_tensor()[2].tolist() == [0, 1, 2, 3]


# Torch's default device and dtype


def test_lookups_ignore_the_default_device():
    ids, x = torch.tensor([[1, 2, 1]]), torch.randn(2, 3, 4)
    layers = [
        Embedding(5, 4, sparse=True, max_norm=1.0),
        EmbeddingBag(5, 4, mode="sum"),
        EmbeddingBag(5, 4, mode="max", sparse=True),
    ]
    want = [layer(ids) for layer in layers]
    rotary = RotaryPositions(4, heads_axis=-3)
    rotated = rotary(x, [0.5, 1.0, 2.0])
    with torch.device("meta"):
        got = [layer(ids) for layer in layers]
        torch.stack([y.sum() for y in got]).sum().backward()
        layers[0].resize(7)
        assert torch.equal(rotary(x, [0.5, 1.0, 2.0]), rotated)
    for layer, a, b in zip(layers, got, want, strict=True):
        assert torch.equal(a, b) and layer.weight.is_cpu
    assert layers[1].weight.grad.is_cpu and layers[1].weight.grad[1].tolist() == [2] * 4


def test_groups_and_combined_rows_ignore_the_default_device():
    ids = torch.tensor([[1, 0, 2]])
    tables = {
        "user": Table(5, 4, mode=None, padding_idx=0),
        "item": Table(5, 4),
        "shop": Table(5, 4, mode="mean"),
    }
    group = TableGroup(tables)
    features, weights = dict.fromkeys(tables, ids), {"item": torch.tensor([[3.0, 1, 2]])}
    others = [
        HashedEmbedding(9, 4, hashes=2, importance_rows=3),
        QuotientRemainderEmbedding(9, 4, buckets=2),
        FrequencyEmbedding([2, 7], 9, 4),
        GrowingEmbedding(9, 4),
    ]

    def results():
        return [*group(features, weights).values(), *(layer(ids) for layer in others)]

    want = results()
    with torch.device("meta"):
        got = results()
        torch.stack([y.sum() for y in got]).sum().backward()
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    for parameter in nn.ModuleList([group, *others]).parameters():
        assert parameter.grad.is_cpu and parameter.grad.any()


def test_python_numbers_are_not_rounded_to_a_half_precision_default_dtype():
    numbers, x = [1000.5, 2001.25], torch.randn(2, 4)
    rotary, sinusoids, bias = RotaryPositions(4), SinusoidalPositions(4), AlibiBias(2)
    fire = FireBias(2, threshold=1000.5).double()
    pair = torch.tensor(0.0, dtype=torch.float64), *map(torch.tensor, (0, 1, 5, 3))

    def everything():
        yield rotary(x, numbers)
        yield rotary(x, offset=1000.5)
        yield sinusoids(x, numbers)
        yield bias.bias(numbers, numbers)
        yield fire.score_mod()(*pair)

    want = list(everything())
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        got = list(everything())
    finally:
        torch.set_default_dtype(before)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    dense = fire.bias([5], [3], dtype=torch.float64)
    torch.testing.assert_close(want[-1], dense[1, 0, 0], rtol=1e-12, atol=0)


def test_step_counts_ignore_the_default_dtype_and_device():
    layer = Embedding(5, 2, sparse=True, dtype=torch.float32)
    model, before = nn.Sequential(layer, nn.Linear(2, 2)), torch.get_default_dtype()
    for make in (RowAdamW, RowAdagrad):
        optimizer = make(model, lr=0.1)
        optimizer.zero_grad()
        model(torch.tensor([1, 2])).sum().backward()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device("meta"):
                optimizer.step()
        finally:
            torch.set_default_dtype(before)
        step: Any = optimizer.state_dict()["state"][0]["step"]
        assert step.item() == 1 and step.dtype == torch.float32 and step.is_cpu
