"""Constructors of the row optimizers: real signatures, and defaults equal to torch's."""

import inspect

import pytest
import torch

import firstlayer.optim
import firstlayer.torch.optim
from firstlayer.numpy import Embedding
from tests.support.optim_cases import OPTIONS

NAMES = list(OPTIONS)


def parameters(module, name):
    return inspect.signature(getattr(module, f"Row{name}")).parameters


@pytest.mark.parametrize("name", NAMES)
def test_signatures_list_every_option_in_numpy_and_torch(name):
    ours = dict(parameters(firstlayer.optim, name))
    assert list(ours)[:2] == ["layer", "lr"]
    assert {"mode", "stochastic_rounding", "maximize", "weight_decay"} <= ours.keys()
    assert all(p.kind == p.KEYWORD_ONLY for p in list(ours.values())[2:])
    theirs = dict(parameters(firstlayer.torch.optim, name))
    assert list(theirs)[:2] == ["params", "lr"]
    assert theirs.pop("torch_options").kind == inspect.Parameter.VAR_KEYWORD
    # Torch's alone: NumPy has no computation to update rows behind.
    assert theirs.pop("background").default is False
    assert {p: theirs[p].default for p in list(theirs)[1:]} == {
        p: ours[p].default for p in list(ours)[1:]
    }


@pytest.mark.parametrize("name", [name for name in NAMES if name != "Lion"])
def test_defaults_are_those_of_torch(name):
    theirs = inspect.signature(getattr(torch.optim, name.removeprefix("Wise"))).parameters
    ours = parameters(firstlayer.optim, name)
    for option in ours.keys() - {"layer", "mode", "stochastic_rounding"}:
        assert ours[option].default == theirs[option].default, option


@pytest.mark.parametrize("name", NAMES)
def test_constructors_apply_their_defaults(name):
    layer = torch.nn.Embedding(5, 2, sparse=True)
    group = getattr(firstlayer.torch.optim, f"Row{name}")(layer).param_groups[0]
    options = getattr(firstlayer.optim, f"Row{name}")(Embedding(5, 2)).options
    assert options == {
        key: p.default
        for key, p in parameters(firstlayer.optim, name).items()
        if key not in ("layer", "mode", "stochastic_rounding")
    }
    assert {key: group[key] for key in options} == options
    assert group["mode"] == "exact" and group["stochastic_rounding"] is False


@pytest.mark.rejects
def test_numpy_optimizers_take_one_layer():
    layer = Embedding(5, 2)
    for wrong, name in ([layer], "list"), (layer.weight, "ndarray"):
        want = f"^layer must be a layer of firstlayer.numpy, got {name}$"
        with pytest.raises(TypeError, match=want):
            firstlayer.optim.RowSGD(wrong)


@pytest.mark.rejects
def test_gradients_must_have_names():
    layer = Embedding(5, 2)
    vectors, pull = layer.vjp([3])
    optimizer = firstlayer.optim.RowSGD(layer, lr=0.1)
    for wrong, name in (pull(vectors)["weight"], "RowGradient"), (vectors, "ndarray"):
        want = f"^grads must be the gradients by name of pull\\(dy\\), got {name}$"
        with pytest.raises(TypeError, match=want):
            optimizer.step(wrong)  # pyright: ignore[reportArgumentType]


@pytest.mark.rejects
def test_unknown_options_raise():
    with pytest.raises(TypeError, match="unexpected keyword argument 'momentun'"):
        firstlayer.optim.RowSGD(Embedding(5, 2), momentun=0.9)  # pyright: ignore
    for make in (firstlayer.torch.optim.RowSGD, firstlayer.torch.optim.RowLion):
        with pytest.raises(TypeError, match="unexpected keyword argument 'momentun'"):
            make(torch.nn.Embedding(5, 2, sparse=True), momentun=0.9)
