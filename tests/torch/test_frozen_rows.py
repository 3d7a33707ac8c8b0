"""``FrozenRowsEmbedding``: one weight whose frozen rows no optimizer moves."""

# A gradient is None before the first backward.
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false

import copy
import pickle
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn

from firstlayer.torch import Embedding, FrozenRowsEmbedding, frozen_rows
from firstlayer.torch.optim import RowAdamW, RowSGD
from tests.support.torch_tables import ids_of

FROZEN = [0, 2, 3, 7]
OPTIMIZERS = {
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.1, weight_decay=0.5),
    "Adam, fused": lambda ps: torch.optim.Adam(ps, lr=0.1, weight_decay=0.5, fused=True),
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.5),
    "NAdam": lambda ps: torch.optim.NAdam(ps, lr=0.1, weight_decay=0.5),
    "RowAdamW": lambda ps: RowAdamW(ps, lr=0.1, weight_decay=0.5),
    "RowSGD": lambda ps: RowSGD(ps, lr=0.1, momentum=0.9, weight_decay=0.5),
    "RowAdamW, lazy": lambda ps: RowAdamW(ps, lr=0.1, weight_decay=0.5, mode="lazy"),
}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def train_step(model, optimizer, ids, *, head=True):
    optimizer.zero_grad()
    x = model(ids)
    loss = ((model.logits(x) if head else x) - 1).square().sum()
    loss.backward()
    optimizer.step()


# Torch's optimizers reject sparse gradients. A tied head makes the gradient dense.
CASES = [(name, False) for name in OPTIMIZERS]
CASES += [(name, True) for name in OPTIMIZERS if name.startswith("Row")]


@pytest.mark.parametrize(("name", "sparse"), CASES)
def test_no_optimizer_moves_frozen_rows_and_others_train_as_usual(name, sparse):
    head = not sparse
    table = torch.randn(9, 4)
    layer = FrozenRowsEmbedding.from_pretrained(
        table.clone(), frozen=FROZEN, padding_idx=-1, sparse=sparse
    )
    # The reference drops the gradients of frozen rows and writes the rows by hand.
    reference = Embedding(9, 4, _weight=table.clone(), padding_idx=-1, sparse=sparse)
    still = [*FROZEN, 8]
    make = OPTIMIZERS[name]
    optimizer, by_hand = make(layer.parameters()), make(reference.parameters())
    for ids in (ids_of(0, 1, 5, 1), ids_of(2, 3, 4), ids_of(6, 8, 0), ids_of(1, 5)):
        train_step(layer, optimizer, ids, head=head)
        assert torch.equal(layer.weight[still], table[still])
        by_hand.zero_grad()
        x = reference(ids)
        ((reference.logits(x) if head else x) - 1).square().sum().backward()
        if sparse:
            grad = reference.weight.grad
            kept = torch.tensor([int(i) not in still for i in grad.indices()[0]])
            reference.weight.grad = torch.sparse_coo_tensor(
                grad.indices()[:, kept],
                grad.values()[kept],
                grad.shape,
                check_invariants=False,
            )
        else:
            reference.weight.grad[still] = 0
        by_hand.step()
        if isinstance(by_hand, RowAdamW | RowSGD):
            by_hand.flush()
        with torch.no_grad():
            reference.weight[still] = table[still]
    layer.eval()
    torch.testing.assert_close(layer.weight, reference.weight, rtol=1e-5, atol=1e-6)
    assert (layer.weight != table).any(dim=1)[[1, 4, 5, 6]].all()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph:UserWarning")
def test_gradients_of_frozen_rows_are_dropped_from_lookup_and_tied_head():
    layer = FrozenRowsEmbedding(9, 4, frozen=FROZEN)
    plain = Embedding(9, 4, _weight=layer.weight.detach().clone())
    for one in (layer, plain):
        for ids in (ids_of(0, 1, 1), ids_of(2, 5)):
            one.logits(one(ids)).square().sum().backward()
    want = plain.weight.grad.clone()
    assert want[FROZEN].abs().min() > 0
    want[FROZEN] = 0
    torch.testing.assert_close(layer.weight.grad, want)
    # Gradients of gradients too.
    layer.zero_grad()
    (layer(ids_of(0, 1)) ** 3).sum().backward(create_graph=True)
    assert layer.weight.grad[0].tolist() == [0] * 4
    (second,) = torch.autograd.grad(layer.weight.grad.sum(), layer.weight)
    torch.testing.assert_close(second[1], 6 * layer.weight[1].detach())
    assert second[0].tolist() == [0] * 4


def test_sparse_gradients_contain_no_frozen_rows():
    layer = FrozenRowsEmbedding(9, 4, frozen=torch.tensor(FROZEN), sparse=True)
    for ids in (ids_of(0, 5, 1, 5), ids_of(2, 5, 8)):
        layer(ids).sum().backward()
    grad = layer.weight.grad
    assert grad.is_coalesced() and grad.indices().tolist() == [[1, 5, 8]]
    assert grad.values()[:, 0].tolist() == [1, 3, 1]
    layer.zero_grad()
    layer(ids_of(0, 3)).sum().backward()
    assert layer.weight.grad._nnz() == 0
    torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0, float("inf"))


@pytest.mark.parametrize(
    ("name", "sparse"), [("AdamW", False), ("RowAdamW", False), ("RowAdamW", True)]
)
def test_values_written_between_steps_stay(name, sparse):
    layer = FrozenRowsEmbedding(9, 4, frozen=FROZEN, sparse=sparse)
    optimizer = OPTIMIZERS[name](layer.parameters())
    train_step(layer, optimizer, ids_of(1, 2), head=False)
    with torch.no_grad():
        layer.weight[2] = 7.0
    layer.weight.data[3] = 8.0
    assert layer(ids_of(2, 3))[:, 0].tolist() == [7, 8]
    train_step(layer, optimizer, ids_of(1, 2, 3), head=False)
    assert layer(ids_of(2, 3))[:, 0].tolist() == [7, 8]
    table = torch.randn(9, 4)
    layer.load_state_dict({"weight": table})
    train_step(layer, optimizer, ids_of(1, 2, 3), head=False)
    assert torch.equal(layer.state_dict()["weight"][FROZEN], table[FROZEN])


def test_two_layers_copies_and_pickles_are_independent():
    one = FrozenRowsEmbedding(9, 4, frozen=FROZEN, padding_idx=8)
    other = FrozenRowsEmbedding(5, 4, frozen=[1])
    twins = [copy.deepcopy(one), pickle.loads(pickle.dumps(one)), one, other]
    ids = torch.arange(5)
    optimizer = OPTIMIZERS["SGD"]([p for layer in twins for p in layer.parameters()])
    before = [layer.weight.detach().clone() for layer in twins]
    for _ in range(2):
        optimizer.zero_grad()
        torch.stack([(x.logits(x(ids)) ** 2).sum() for x in twins]).sum().backward()
        optimizer.step()
    for layer, weight in zip(twins, before, strict=True):
        assert (layer.weight == weight).all(dim=1).tolist() == layer.is_frozen.tolist()
    assert list(one.state_dict()) == ["weight"]
    assert one.is_frozen.tolist() == [i in (*FROZEN, 8) for i in range(9)]
    assert repr(one) == "FrozenRowsEmbedding(9, 4, padding_idx=8, frozen=5 rows)"


def test_layers_that_share_a_weight_freeze_the_rows_of_both():
    one = FrozenRowsEmbedding(6, 4, frozen=[0])
    other = FrozenRowsEmbedding.from_embedding(one, frozen=[2])
    assert other.weight is one.weight
    before, optimizer = one.weight.detach().clone(), OPTIMIZERS["AdamW"](one.parameters())
    train_step(other, optimizer, torch.arange(6))
    assert (one.weight != before).any(dim=1).nonzero()[:, 0].tolist() == [1, 3, 4, 5]


def test_a_step_that_calls_the_step_of_its_base_class():
    class Decayed(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            result = super().step(closure)
            with torch.no_grad():
                for parameter in self.param_groups[0]["params"]:
                    parameter.mul_(0.5)
            return result

    layer = FrozenRowsEmbedding(6, 4, frozen=[0, 3])
    before, optimizer = layer.weight.detach().clone(), Decayed(layer.parameters())
    for _ in range(2):
        train_step(layer, optimizer, torch.arange(6))
        with pytest.raises(ZeroDivisionError):
            optimizer.step(lambda: 1 / 0)
    assert (layer.weight == before).all(dim=1).nonzero()[:, 0].tolist() == [0, 3]


def test_compiled_forward_and_step():
    layer = FrozenRowsEmbedding(6, 4, frozen=[0, 3])
    layer.weight = nn.Parameter(torch.randn(6, 4))
    before, optimizer = (
        layer.weight.detach().clone(),
        OPTIMIZERS["AdamW"](layer.parameters()),
    )
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        optimizer.zero_grad()
        compiled(torch.arange(6)).square().sum().backward()
        assert layer.weight.grad[[0, 3]].abs().sum() == 0
        optimizer.step()
    assert (layer.weight == before).all(dim=1).nonzero()[:, 0].tolist() == [0, 3]


def test_resize_trains_the_new_rows_and_max_norm_spares_frozen_rows():
    layer = FrozenRowsEmbedding(6, 4, frozen=[0, 5], max_norm=1.0)
    with torch.no_grad():
        layer.weight.fill_(3.0)
    layer.resize(4)
    layer.resize(8)
    assert layer.is_frozen.nonzero()[0].tolist() == [0]
    assert layer(torch.arange(8)).norm(dim=1).max() < 1.0001
    optimizer = OPTIMIZERS["SGD"](layer.parameters())
    train_step(layer, optimizer, torch.arange(8), head=False)
    assert layer.weight[0].tolist() == [3] * 4
    with torch.no_grad():
        layer.weight[1:].fill_(2.0)
    layer.project(torch.tensor([[0, 3], [3, 5]]))
    norms = layer.weight.detach().norm(dim=1)
    assert (norms < 1.0001).nonzero()[:, 0].tolist() == [3, 5]
    layer.project()
    norms = layer.weight.detach().norm(dim=1)
    assert norms[0] == 6 and norms[1:].max() < 1.0001


@pytest.mark.rejects
def test_refuses_weights_that_no_torch_optimizer_steps(tmp_path):
    layer = FrozenRowsEmbedding(6, 4, frozen=[0])
    weight = torch.randn(6, 4, requires_grad=True)
    message = "must be a plain torch.nn.Parameter in training, got Tensor"
    with pytest.raises(TypeError, match=message):
        torch.func.functional_call(layer, {"weight": weight}, ids_of(1))
    with torch.no_grad():
        torch.func.functional_call(layer, {"weight": weight}, ids_of(1))
    parametrized = copy.deepcopy(layer)
    nn.utils.parametrize.register_parametrization(parametrized, "weight", nn.Tanh())
    with pytest.raises(TypeError, match=message):
        parametrized(ids_of(1))
    with pytest.raises(IndexError, match=r"frozen\[1\] is 6, but num_embeddings is 6"):
        FrozenRowsEmbedding(6, 4, frozen=[0, 6])
    from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

    scaled: Any = Gemma3TextScaledWordEmbedding(6, 4, 0, 2.0)
    with pytest.raises(TypeError, match="own forward, got Gemma3TextScaledWordEmbedding"):
        FrozenRowsEmbedding.from_embedding(scaled, frozen=[0])


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
@pytest.mark.rejects
def test_refuses_tables_sharded_by_fsdp(tmp_path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    try:
        mesh = init_device_mesh("cpu", (1,))
        model: Any = fully_shard(
            nn.Sequential(FrozenRowsEmbedding(6, 4, frozen=[0])), mesh=mesh
        )
        with pytest.raises(TypeError, match=r"plain torch\.nn\.Parameter in training"):
            model(ids_of(1, 0)).sum().backward()
    finally:
        torch.distributed.destroy_process_group()


SIZES: dict[str, Any] = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(
        vocab_size=20,
        intermediate_size=8,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        **SIZES,
    ),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=20, n_layer=1, n_embd=8, n_head=2),
}


def tiny_model(name) -> Any:
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]())
    old = model.get_input_embeddings()
    model.set_input_embeddings(FrozenRowsEmbedding.from_embedding(old, frozen=range(16)))
    return model


def train(model, steps=2):
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.5)
    ids = torch.arange(18)[None]
    for _ in range(steps):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()


@pytest.mark.parametrize("name", CONFIGS)
def test_tied_models_of_hugging_face(name):
    model = tiny_model(name)
    layer, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert head.weight is layer.weight
    model.tie_weights()
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    before = layer.weight.detach().clone()
    train(model)
    moved = (layer.weight != before).any(dim=1)
    assert moved.tolist() == [False] * 16 + [True] * 4
    model.resize_token_embeddings(24, mean_resizing=False)
    layer = model.get_input_embeddings()
    assert type(layer) is FrozenRowsEmbedding and layer.weight.shape[0] == 24
    assert model.get_output_embeddings().weight is layer.weight
    before = layer.weight.detach().clone()
    train(model)
    moved = (layer.weight != before).any(dim=1)
    assert moved.tolist() == [False] * 16 + [True] * 8


def test_saved_models_of_hugging_face_load_as_usual(tmp_path):
    model = tiny_model("llama")
    train(model)
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.arange(20)[None]
    torch.testing.assert_close(again.eval()(ids).logits, model.eval()(ids).logits)


def test_peft_adapters_accept_it():
    # A trained copy of the whole layer: frozen rows stay frozen.
    model = tiny_model("llama")
    before = model.get_input_embeddings().weight.detach().clone()
    lora = peft.LoraConfig(
        target_modules=["q_proj"],
        modules_to_save=["embed_tokens"],
        ensure_weight_tying=True,
    )
    adapted = peft.get_peft_model(model, lora)
    train(adapted)
    layer: Any = adapted.get_input_embeddings()
    weight = layer.modules_to_save["default"].weight
    assert type(layer.modules_to_save["default"]) is FrozenRowsEmbedding
    assert (weight != before).any(dim=1).tolist() == [False] * 16 + [True] * 4
    # Single tokens: PEFT trains their difference from the table, frozen or not.
    model = tiny_model("llama")
    lora = peft.LoraConfig(target_modules=["q_proj"], trainable_token_indices=[3, 17])
    adapted: Any = peft.get_peft_model(model, lora)
    before = model.get_input_embeddings()(torch.arange(20)).detach()
    train(adapted)
    merged = adapted.merge_and_unload()
    after = merged.get_input_embeddings()(torch.arange(20)).detach()
    assert (after != before).any(dim=1).nonzero()[:, 0].tolist() == [3, 17]
    # LoRA on the table itself.
    model = tiny_model("llama")
    before = model.get_input_embeddings().weight.detach().clone()
    lora = peft.LoraConfig(target_modules=["embed_tokens"], ensure_weight_tying=True)
    adapted = peft.get_peft_model(model, lora)
    train(adapted)
    base: Any = adapted.get_input_embeddings()
    assert torch.equal(base.base_layer.weight, before)


def test_first_layer_may_be_built_in_the_closure_of_a_step():
    for hook in frozen_rows._step_hooks:
        hook.remove()
    frozen_rows._step_hooks.clear()
    other = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    layers = []

    def closure():
        layers.append(FrozenRowsEmbedding(4, 2, frozen=[1]))
        return 0.0

    optimizer.step(closure)
    layer, optimizer = layers[0], torch.optim.SGD(layers[0].parameters(), lr=0.1)
    before = layer.weight.detach().clone()
    layer(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    assert (layer.weight == before).all(1).tolist() == [True, True, False, True]
