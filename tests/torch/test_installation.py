"""``install`` and ``to_torch``: our layers in torch's code, torch's layers in its tools."""

import copy
import inspect
import io
import pickle
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import Embedding as ImportedBefore

import firstlayer.torch as firstlayer
from firstlayer.torch import Embedding, EmbeddingBag, install, to_torch
from firstlayer.torch.optim import RowSGD

QUANTIZE = sys.modules["torch.ao.quantization.quantize"]
CONSTRUCTORS = nn.Embedding.__init__, nn.EmbeddingBag.__init__
OTHERS = nn.functional.embedding, nn.functional.embedding_bag
IGNORED = (
    "ignore:torch.ao.quantization is deprecated:DeprecationWarning",
    "ignore:torch.quantize_per_tensor, torch.quantize_per_channel:UserWarning",
)


def quantization(test: Any) -> Any:
    """Ignore torch's announcements that it will remove its quantization."""
    for message in IGNORED:
        test = pytest.mark.filterwarnings(message)(test)
    return test


@pytest.fixture(autouse=True)
def torch_is_restored():
    torch.manual_seed(0)
    propagate = QUANTIZE.propagate_qconfig_
    yield
    assert (nn.Embedding.__init__, nn.EmbeddingBag.__init__) == CONSTRUCTORS
    assert QUANTIZE.propagate_qconfig_ is propagate
    assert type(nn.Embedding(3, 2)) is nn.Embedding


def test_constructors_build_our_layers_and_isinstance_holds():
    older, signature = nn.Embedding(5, 3), inspect.signature(nn.Embedding)
    with install():
        layers = [
            nn.Embedding(5, 3, padding_idx=-1, max_norm=2.0, dtype=torch.float64),
            nn.Embedding(num_embeddings=5, embedding_dim=3),
            ImportedBefore(5, 3),
            nn.Embedding.from_pretrained(torch.ones(5, 3)),
            nn.utils.skip_init(nn.Embedding, 5, 3),
        ]
        bags = [nn.EmbeddingBag(5, 3), nn.EmbeddingBag.from_pretrained(torch.ones(5, 3))]
        assert [type(layer) for layer in layers] == [Embedding] * 5
        assert [type(bag) for bag in bags] == [EmbeddingBag] * 2
        assert layers[0].padding_idx == 4 and layers[0].weight.dtype == torch.float64
        for layer in (older, *layers):
            assert isinstance(layer, nn.Embedding)
        assert issubclass(Embedding, nn.Embedding) and type(older) is nn.Embedding
        assert inspect.signature(nn.Embedding) == signature
        assert (nn.functional.embedding, nn.functional.embedding_bag) == OTHERS
        with pytest.raises(IndexError, match=r"ids\[0\] is 5, but num_embeddings is 5"):
            layers[1](torch.tensor([5]))


def test_same_seed_gives_the_same_weights():
    torch.manual_seed(1)
    want = nn.Embedding(5, 3, padding_idx=2).weight
    with install():
        torch.manual_seed(1)
        assert torch.equal(nn.Embedding(5, 3, padding_idx=2).weight, want)


def test_torchs_layers_stay_torchs_when_copied_and_loaded():
    model: Any = nn.Sequential(nn.Embedding(5, 3), nn.EmbeddingBag(5, 3))
    file = io.BytesIO()
    torch.save(model, file)
    pickled = pickle.dumps(model)
    with install():
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        for other in (loaded, copy.deepcopy(model), pickle.loads(pickled)):
            assert [type(m) for m in other] == [nn.Embedding, nn.EmbeddingBag]
            assert torch.equal(other[0].weight, model[0].weight)
        ours = nn.Embedding(5, 3)
        for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
            assert type(other) is Embedding
    assert type(pickle.loads(pickle.dumps(ours))) is Embedding


def test_subclasses_and_failed_constructions_do_not_change():
    class Positions(nn.Embedding):
        def __init__(self, size, width):
            super().__init__(size + 2, width)

    with install():
        layer = Positions(5, 3)
        assert not isinstance(layer, Embedding) and layer.num_embeddings == 7
        with pytest.raises(TypeError, match="embedding_dim"):
            nn.Embedding(5)  # pyright: ignore
        with pytest.raises(ValueError, match="max_norm must be positive, got -1"):
            nn.Embedding(5, 3, max_norm=-1.0)


def test_handles_remove_once_and_a_second_one_has_no_effect():
    first, second = install(), install()
    second.remove()
    assert type(nn.Embedding(5, 3)) is Embedding
    first.remove()
    assert type(nn.Embedding(5, 3)) is nn.Embedding
    first.remove()
    with pytest.raises(KeyError), install():
        raise KeyError


def test_transformers_models_have_our_layers():
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=60, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=20,
    )  # fmt: skip
    ids = torch.tensor([[1, 5, 0]])
    torch.manual_seed(3)
    plain = BertModel(config).eval()
    with install():
        torch.manual_seed(3)
        model = BertModel(config).eval()
    kinds = [type(m) for m in model.modules() if isinstance(m, nn.Embedding)]
    assert kinds == [Embedding] * 3
    torch.testing.assert_close(model(ids)[0], plain(ids)[0])


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_installed_layers_can_be_scripted():
    ids = torch.tensor([[1, 2]])
    with install():
        for layer in (nn.Embedding(5, 3, padding_idx=1), nn.EmbeddingBag(5, 3, mode="max")):
            scripted: Any = torch.jit.script(nn.Sequential(layer))
            assert torch.equal(scripted(ids), layer(ids))


# Torch's layers


def test_to_torch_keeps_parameters_and_frees_hooks():
    layer, tied = Embedding(6, 3, padding_idx=1, max_norm=0.5, sparse=True), nn.Linear(3, 6)
    tied.weight = layer.weight
    model: Any = nn.Sequential(layer, tied)
    layer(torch.tensor([2])).sum().backward()
    assert layer.weight._post_accumulate_grad_hooks
    assert to_torch(model) is model and model[0] is layer and type(layer) is nn.Embedding
    assert layer.weight is tied.weight and not layer.weight._post_accumulate_grad_hooks
    assert layer.padding_idx == 1 and layer.sparse
    layer.weight.grad = None
    layer(torch.tensor([2])).sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.is_sparse
    bag = EmbeddingBag(6, 3, mode="max")
    assert type(to_torch(bag)) is nn.EmbeddingBag and bag.mode == "max"


def test_to_torch_catches_stale_rows_up():
    layer = Embedding(6, 3, sparse=True)
    optimizer = RowSGD(layer.parameters(), lr=0.1, weight_decay=0.5)
    want = layer.weight.detach().clone() * 0.95
    want[2] -= 0.1
    layer(torch.tensor([2])).sum().backward()
    optimizer.step()
    torch.testing.assert_close(to_torch(layer).weight.detach(), want)


# Quantization


@quantization
@pytest.mark.parametrize("by", ["install", "to_torch"])
def test_quantized_layers_equal_torchs(by):
    from torch.ao.nn.quantized import Embedding as Quantized
    from torch.ao.quantization import quantize_dynamic
    from torch.ao.quantization.qconfig import float_qparams_weight_only_qconfig as config

    ids, plain = torch.tensor([[1, 19, 0]]), nn.Sequential(nn.Embedding(20, 8))
    ours: Any = nn.Sequential(Embedding(20, 8))
    ours.load_state_dict(plain.state_dict())
    want = quantize_dynamic(plain, {nn.Embedding: config})
    if by == "install":
        with install():
            got = quantize_dynamic(ours, {nn.Embedding: config})
        assert type(ours[0]) is Embedding
    else:
        got = quantize_dynamic(to_torch(ours), {nn.Embedding: config})
    assert type(got[0]) is Quantized
    assert torch.equal(got(ids), want(ids))
    torch.testing.assert_close(got(ids), plain(ids), atol=0.02, rtol=0)


@quantization
def test_prepared_and_converted_layers_are_quantized():
    from torch.ao.quantization import convert, prepare
    from torch.ao.quantization.qconfig import float_qparams_weight_only_qconfig as config

    model: Any = nn.Sequential(EmbeddingBag(20, 8, mode="sum", padding_idx=2))
    model.qconfig = config
    ids, offsets = torch.tensor([1, 19, 0, 2]), torch.tensor([0, 2])
    want = model[0](ids, offsets)
    with install():
        got = convert(prepare(model))
    assert got[0]._get_name() == "QuantizedEmbeddingBag"
    torch.testing.assert_close(got[0](ids, offsets), want, atol=0.05, rtol=0)


@quantization
def test_from_float_takes_converted_layers():
    from torch.ao.nn.quantized import Embedding as Quantized
    from torch.ao.quantization.qconfig import float_qparams_weight_only_qconfig as config

    layer: Any = Embedding(20, 8)
    ids = torch.tensor([1, 19])
    want = layer(ids)
    layer.qconfig = config
    got = Quantized.from_float(to_torch(layer))(ids)
    torch.testing.assert_close(got, want, atol=0.02, rtol=0)


@quantization
@pytest.mark.rejects
@pytest.mark.parametrize(
    "layer, message",
    [
        (Embedding(6, 3, max_norm=0.5), "max_norm must be None in a layer .*, got 0.5"),
        (EmbeddingBag(6, 3), "mode must be 'sum' in a bag to quantize, got 'mean'"),
        (
            EmbeddingBag.from_pretrained(torch.ones(6, 3), mode="sum", padding_idx=2),
            "the padding row must be zero .*, got padding_idx 2",
        ),
    ],
)
def test_options_that_quantized_layers_ignore_are_refused(layer, message):
    from torch.ao.quantization import quantize_dynamic
    from torch.ao.quantization.qconfig import float_qparams_weight_only_qconfig as config

    model, kinds = nn.Sequential(layer), {nn.Embedding: config, nn.EmbeddingBag: config}
    for inplace in (False, True):
        with install(), pytest.raises(ValueError, match=message):
            quantize_dynamic(model, kinds, inplace=inplace)
        assert type(model[0]) in (Embedding, EmbeddingBag) and model[0] is layer
        model.apply(lambda module: module.__dict__.pop("qconfig", None))
    with install():
        kept = quantize_dynamic(model, {nn.Linear: config}, inplace=True)
    assert type(kept[0]) in (Embedding, EmbeddingBag) and kept[0] is layer
    assert firstlayer.install is install
