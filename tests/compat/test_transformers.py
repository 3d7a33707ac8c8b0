"""Embeddings of the book, BERT and GPT-2, and swapped modules in transformers models.

Seen with transformers 5.22.2; models are small and random.
"""

import copy
import io
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn
import transformers
from transformers.models.bert.modeling_bert import BertEmbeddings as TheirBertEmbeddings

import firstlayer.torch
from firstlayer.compat.transformers import (
    BertEmbeddings,
    Embeddings,
    GPT2Embeddings,
    swapped,
)

CONFIG = SimpleNamespace(
    vocab_size=50,
    hidden_size=16,
    max_position_embeddings=12,
    hidden_dropout_prob=0.2,
    pad_token_id=0,
)


class Notebook(nn.Module):
    """The class as the document has it."""

    def __init__(self, config):
        super().__init__()
        self.token_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embeddings = nn.Embedding(
            config.max_position_embeddings, config.hidden_size
        )
        self.layer_norm = nn.LayerNorm(config.hidden_size, eps=1e-12)
        self.dropout = nn.Dropout()

    def forward(self, input_ids):
        # Create position IDs for input sequence
        seq_length = input_ids.size(1)
        position_ids = torch.arange(seq_length, dtype=torch.long).unsqueeze(0)
        # Create token and position embeddings
        token_embeddings = self.token_embeddings(input_ids)
        position_embeddings = self.position_embeddings(position_ids)
        # Combine token and position embeddings
        embeddings = token_embeddings + position_embeddings
        embeddings = self.layer_norm(embeddings)
        embeddings = self.dropout(embeddings)
        return embeddings


def test_example_embeddings_of_the_notebook():
    torch.manual_seed(0)
    theirs, ours = Notebook(CONFIG).eval(), Embeddings(CONFIG).eval()
    ours.load_state_dict(theirs.state_dict())
    ids = torch.randint(0, 50, (3, 12))
    torch.testing.assert_close(ours(ids), theirs(ids), atol=1e-6, rtol=0)
    # One sequence without a batch axis, on which the notebook's fails.
    torch.testing.assert_close(ours(ids[1]), theirs(ids)[1], atol=1e-6, rtol=0)


def test_dropout_follows_the_config():
    torch.manual_seed(0)
    ids = torch.randint(1, 50, (200, 12))
    dropped = (Embeddings(CONFIG)(ids) == 0).float().mean()
    assert abs(dropped - 0.2) < 0.01
    sizes = {**vars(CONFIG)}
    del sizes["hidden_dropout_prob"]
    assert Embeddings(SimpleNamespace(**sizes)).dropout.p == 0.1


def test_every_parameter_except_the_padding_row_gets_a_gradient():
    layer = Embeddings(CONFIG)
    ids = torch.tensor([[1, 2, 0, 0]])
    (layer(ids) * torch.randn(1, 4, 16)).sum().backward()
    for parameter in layer.parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0
    assert (layer.token_embeddings.weight.grad[0] == 0).all()  # pyright: ignore
    assert (layer.token_embeddings.weight[0] == 0).all()


def test_positions_are_made_on_the_device_of_the_ids():
    with torch.device("meta"):
        layer = Embeddings(CONFIG)
    out = layer(torch.zeros(2, 5, dtype=torch.int64, device="meta"))
    assert out.device.type == "meta" and out.shape == (2, 5, 16)


def test_half_precision_norm_keeps_its_epsilon():
    layer = Embeddings(CONFIG).half().eval()
    nn.init.zeros_(layer.token_embeddings.weight)
    nn.init.zeros_(layer.position_embeddings.weight)
    assert (layer(torch.tensor([[1, 2]])) == 0).all()


@pytest.mark.rejects
def test_error_names_ids_and_positions_out_of_range():
    layer = Embeddings(CONFIG)
    with pytest.raises(ValueError, match="smaller than max_positions 12, got 12"):
        layer(torch.ones(1, 13, dtype=torch.int64))
    with pytest.raises(IndexError, match=r"ids\[0\] is 50, but num_embeddings is 50"):
        layer(torch.tensor([50]))
    gpt2 = GPT2Embeddings(transformers.GPT2Config(n_embd=8, n_head=2, vocab_size=9))
    with pytest.raises(ValueError, match="give input_ids or inputs_embeds, got neither"):
        gpt2()


# BERT's and GPT-2's.


def bert_config(**options) -> Any:
    sizes = {
        "vocab_size": 97,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "max_position_embeddings": 20,
        "type_vocab_size": 3,
    }
    return transformers.BertConfig(**{**sizes, **options})


def gpt2_config() -> Any:
    return transformers.GPT2Config(
        vocab_size=97,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=20,
        bos_token_id=1,
        eos_token_id=1,
    )


def test_bert_embeddings_equal_transformers():
    torch.manual_seed(0)
    config = bert_config(layer_norm_eps=1e-3, hidden_dropout_prob=0.3)
    theirs, ours = TheirBertEmbeddings(config).eval(), BertEmbeddings(config).eval()
    ours.load_state_dict(theirs.state_dict())
    assert ours.dropout.p == 0.3 and ours.word_embeddings.padding_idx == 0
    ids, types = torch.randint(0, 97, (2, 9)), torch.randint(0, 3, (2, 9))
    at = torch.randint(0, 20, (2, 9))
    calls: list[dict[str, Any]] = [
        {"input_ids": ids},
        {"input_ids": ids, "token_type_ids": types, "position_ids": at},
        {"input_ids": ids, "position_ids": torch.arange(3, 12)[None]},
        {"input_ids": ids, "past_key_values_length": 7},
        {"inputs_embeds": torch.randn(2, 9, 32), "token_type_ids": types},
    ]
    for call in calls:
        torch.testing.assert_close(ours(**call), theirs(**call), atol=2e-6, rtol=1e-5)


def test_gpt2_embeddings_equal_transformers():
    torch.manual_seed(0)
    model = transformers.GPT2Model(gpt2_config()).eval()
    ours = GPT2Embeddings(model.config).eval()
    state = model.state_dict()
    ours.load_state_dict({k: v for k, v in state.items() if k.startswith(("wte", "wpe"))})
    seen: list[Any] = []
    model.drop.register_forward_hook(lambda _, args, out: seen.append(out))
    ids, types = torch.randint(0, 97, (2, 9)), torch.randint(0, 97, (2, 9))
    calls: list[dict[str, Any]] = [
        {"input_ids": ids},
        {"input_ids": ids, "token_type_ids": types},
        {"input_ids": ids, "position_ids": torch.arange(4, 13)[None]},
        {"inputs_embeds": torch.randn(2, 9, 32)},
    ]
    for call in calls:
        model(**call)
        torch.testing.assert_close(ours(**call), seen[-1], atol=1e-6, rtol=0)
    whole = ours(ids)
    step = ours(ids[:, 5:6], past_key_values_length=5)
    torch.testing.assert_close(step, whole[:, 5:6], atol=0, rtol=0)
    assert ours.drop.p == model.config.embd_pdrop


# Firstlayer inside the models.

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 1,
}


def build(name: str) -> Any:
    torch.manual_seed(0)
    if name == "bert":
        return transformers.BertForMaskedLM(bert_config()).eval()
    if name == "gpt2":
        return transformers.GPT2LMHeadModel(gpt2_config()).eval()
    if name == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=97, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4
        )
    ).eval()


IDS = torch.randint(1, 97, (2, 9), generator=torch.Generator().manual_seed(0))


def logits(name: str, model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    more = {"decoder_input_ids": ids} if name == "t5" else {}
    return model(input_ids=ids, **more).logits


def kinds(model: nn.Module) -> list[type]:
    return [type(module) for module in model.modules()]


# Replaced modules: BERT has three tables, GPT-2 two, Llama a table and rotary, T5 a
# shared table in three places and a bias for each stack.
@pytest.mark.parametrize(
    "name, places", [("bert", 3), ("gpt2", 2), ("llama", 2), ("t5", 5)]
)
def test_logits_are_equal_before_inside_and_after(name, places):
    model = build(name)
    before, were, keys = logits(name, model), kinds(model), list(model.state_dict())
    with swapped(model) as count:
        assert count == places and nn.Embedding not in kinds(model)
        inside = logits(name, model)
        assert list(model.state_dict()) == keys
    # Looked up the same, to the bit; turned by angles that are closer to the truth.
    tolerance = 1e-5 if name == "llama" else 0
    torch.testing.assert_close(inside, before, atol=tolerance, rtol=0)
    assert kinds(model) == were
    assert torch.equal(logits(name, model), before)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5"])
def test_training_inside_persists(name):
    model, twin = build(name), build(name)
    for one in (model, twin):
        optimizer = torch.optim.AdamW(one.parameters(), lr=1e-2)
        parameters = list(one.parameters())
        for step in range(4):
            # The optimizer knows nothing of what happens in between.
            if one is model and step % 2:
                with swapped(one):
                    logits(name, one).logsumexp(-1).mean().backward()
            else:
                logits(name, one).logsumexp(-1).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert all(a is b for a, b in zip(one.parameters(), parameters, strict=True))
    torch.testing.assert_close(logits(name, model), logits(name, twin), atol=1e-4, rtol=0)
    assert not torch.allclose(logits(name, model), logits(name, build(name)), atol=1e-2)


def test_tied_heads_and_shared_tables_stay_shared():
    gpt2, t5 = build("gpt2"), build("t5")
    with swapped(gpt2), swapped(t5):
        assert gpt2.lm_head.weight is gpt2.transformer.wte.weight
        assert isinstance(gpt2.get_input_embeddings(), firstlayer.torch.Embedding)
        assert t5.shared.weight is t5.encoder.embed_tokens.weight
        assert t5.shared.weight is t5.decoder.embed_tokens.weight
    table = nn.Embedding(5, 2)
    twice: Any = nn.ModuleDict({"a": table, "b": nn.ModuleDict({"c": table})})
    with swapped(twice) as places:
        assert places == 2 and type(table) is firstlayer.torch.Embedding
    assert twice["a"] is twice["b"]["c"] is table


def test_padding_row_keeps_what_is_written():
    model = build("bert")
    with torch.no_grad():
        model.bert.embeddings.word_embeddings.weight[0] = 3.0
    ids = torch.zeros_like(IDS)
    before = logits("bert", model, ids)
    with swapped(model):
        assert torch.equal(logits("bert", model, ids), before)
        with torch.no_grad():
            model.bert.embeddings.word_embeddings.weight[0, 0] = 4.0
        inside = logits("bert", model, ids)
        assert not torch.equal(inside, before)
    assert torch.equal(logits("bert", model, ids), inside)


def test_float32_gradient_sums_and_id_errors_inside_a_model():
    model = build("gpt2").to(torch.bfloat16)
    ids = torch.full((150, 20), 7)
    for want in (256, 3000):
        rows = model.transformer.wte
        if want == 3000:
            with swapped(model):
                model.transformer.wte(ids).sum().backward()
        else:
            rows(ids).sum().backward()
        assert rows.weight.grad[7, 0] == want
        model.zero_grad()
    with swapped(model), pytest.raises(IndexError, match=r"ids\[0, 1\] is 97, but"):
        model(torch.tensor([[5, 97]]))
    assert type(model.transformer.wte) is nn.Embedding


def test_rotary_inside_is_accurate_at_large_positions():
    model = build("llama")
    at = torch.tensor([[1_000_000, 999_999]])
    with swapped(model):
        cos, _ = model.model.rotary_emb(torch.zeros(1), at)
    want = (at[0, :, None].double() * 10_000.0 ** (-torch.arange(4.0).double() / 4)).cos()
    torch.testing.assert_close(cos[0, :, :4].double(), want, atol=2.5e-7, rtol=0)


def test_modules_changed_inside_stay():
    model = build("gpt2")
    before = logits("gpt2", model)
    with swapped(model):
        model.double()
        model.resize_token_embeddings(100)
        model.train()
    assert model.transformer.wpe.weight.dtype == torch.float64
    assert model.transformer.wte.weight.shape == (100, 32)
    assert model.transformer.wpe.training
    after = logits("gpt2", model.float().eval())
    torch.testing.assert_close(after[..., :97], before, atol=1e-6, rtol=0)


def test_resizing_inside_persists():
    model = nn.Sequential(nn.Embedding(5, 2))
    with swapped(model):
        model[0].resize(8)  # pyright: ignore
    assert model[0].num_embeddings == 8 and model[0].weight.shape == (8, 2)
    model[0](torch.tensor([7]))


def test_hooks_are_kept():
    model, seen = build("gpt2"), []
    model.transformer.wte.register_forward_hook(lambda *_: seen.append(1))
    with swapped(model):
        logits("gpt2", model)
    assert seen == [1]


def test_embedding_options_are_kept():
    table = nn.Embedding(5, 2, padding_idx=1, max_norm=0.5, norm_type=1.0, sparse=True)
    plain = nn.Embedding(5, 2, scale_grad_by_freq=True)
    model: Any = nn.ModuleList([table, plain])
    with swapped(model):
        assert model[0].padding_idx == 1 and model[0].max_norm == 0.5
        assert model[0].norm_type == 1.0 and model[0].sparse
        assert model[1].scale_grad_by_freq and not model[1].sparse


def test_error_inside_restores_the_model():
    model = build("llama")
    were = kinds(model)
    with pytest.raises(KeyError, match="mine"), swapped(model):
        raise KeyError("mine")
    assert kinds(model) == were


def test_unsupported_modules_stay_and_are_reported():
    class Odd(nn.Module):
        config = transformers.LlamaConfig(**SIZES)

        def __init__(self):
            super().__init__()
            self.register_buffer("inv_freq", torch.ones(4), persistent=False)

        def forward(self, x, position_ids):
            return x

    class Scaled(nn.Embedding):
        def forward(self, input):
            return 2 * nn.functional.embedding(input, self.weight)

    tables = nn.Sequential(nn.Embedding(5, 2), Scaled(5, 2))
    model = nn.Sequential(tables, Odd())
    with swapped(model) as replaced:
        assert replaced == 1 and replaced.names == ["0.0"]
        assert isinstance(tables[0], firstlayer.torch.Embedding)
        assert replaced.left == {
            "1": "Odd must return cosines and sines as its config describes",
            "0.1": "Scaled.forward does not call that of nn.Embedding",
        }
        assert kinds(model)[3:] == [Scaled, Odd]
    assert kinds(model)[2:] == [nn.Embedding, Scaled, Odd]


def test_nested_swaps():
    model = build("llama")
    before = logits("llama", model)
    with swapped(model) as outer, swapped(model) as inner:
        assert (outer, inner) == (2, 0)
    assert torch.equal(logits("llama", model), before)


def test_state_dict_saved_inside_loads_outside():
    model, file = build("bert"), io.BytesIO()
    with swapped(model):
        torch.save(model.state_dict(), file)
        twin = copy.deepcopy(model)
    file.seek(0)
    fresh = transformers.BertForMaskedLM(bert_config()).eval()
    fresh.load_state_dict(torch.load(file))
    want = logits("bert", model)
    assert torch.equal(logits("bert", fresh), want)
    # A copy made inside keeps the replaced modules and is independent.
    assert torch.equal(logits("bert", pickle.loads(pickle.dumps(twin))), want)
