"""Lookups of firstlayer inside transformers models, for good.

Seen with transformers 5.22.2; models are small and random.
"""

import copy
import pickle
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.models.idefics.modeling_idefics import IdeficsDecoupledEmbedding
from transformers.models.t5gemma2.modeling_t5gemma2 import T5Gemma2TextScaledWordEmbedding

from firstlayer.compat.transformers import swapped
from firstlayer.torch import (
    Embedding,
    FrozenRowsEmbedding,
    replace_embeddings,
    to_torch,
)
from firstlayer.torch.optim import RowAdamW
from tests.support.hf_models import small_config, small_model

IDS = torch.randint(8, 64, (2, 9), generator=torch.Generator().manual_seed(0))
# Types with an nn.Embedding of their own: scaled tables, positions, a norm after the rows.
TYPES = [
    *("gemma2", "gemma3_text", "bart", "mbart", "xglm", "m2m_100", "biogpt", "blenderbot"),
    *("opt", "pegasus", "marian", "bigbird_pegasus", "plbart", "vaultgemma", "prophetnet"),
    *("inkling_text", "roformer", "nllb-moe", "t5", "bert"),
]


def causal(model_type: str) -> Any:
    torch.manual_seed(0)
    config = small_config(model_type)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def output(model: Any) -> torch.Tensor:
    more = {"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {}
    result = model(input_ids=IDS, **more)
    return result.logits if "logits" in result else result.last_hidden_state


def tables_of(model: nn.Module) -> list[nn.Embedding]:
    return [module for module in model.modules() if isinstance(module, nn.Embedding)]


@pytest.mark.parametrize("model_type", TYPES)
def test_outputs_keep_their_bits(model_type):
    model = small_model(model_type)
    with torch.no_grad():
        before = output(model)
    tables, keys = tables_of(model), list(model.state_dict())
    parameters, classes = list(model.parameters()), [type(table) for table in tables]
    result = replace_embeddings(model)
    assert not result.left and result >= len(tables)
    assert [type(module) for module in tables_of(model)] != classes
    for module, table, cls in zip(tables_of(model), tables, classes, strict=True):
        assert module is table and isinstance(module, cls) and isinstance(module, Embedding)
    with torch.no_grad():
        assert torch.equal(output(model), before)
    assert list(model.state_dict()) == keys
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    with pytest.raises(IndexError, match=r"ids\[1\] is 64, but num_embeddings is 64"):
        model.get_input_embeddings()(torch.tensor([5, 64]))


@pytest.mark.parametrize("model_type", ["gemma2", "bart", "xglm"])
def test_gradients_equal_those_of_the_original(model_type):
    models = [small_model(model_type), small_model(model_type)]
    replace_embeddings(models[1])
    for model in models:
        output(model).square().sum().backward()
    pairs = zip(models[0].named_parameters(), models[1].parameters(), strict=True)
    for (name, a), b in pairs:
        if a.grad is None:
            assert b.grad is None
            continue
        assert b.grad is not None
        scale = a.grad.abs().max().item()
        torch.testing.assert_close(b.grad, a.grad, atol=1e-5 * scale, rtol=1e-4, msg=name)


def test_tied_head_resizing_and_files(tmp_path):
    model = causal("gemma2")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    replace_embeddings(model)
    model.tie_weights()
    table = model.get_input_embeddings()
    assert isinstance(table, Embedding) and model.lm_head.weight is table.weight
    output(model).sum().backward()
    assert table.weight.grad is not None and table.weight.grad.abs().sum() > 0
    model.zero_grad()
    before = output(model)
    model.resize_token_embeddings(70, mean_resizing=False)
    table = model.get_input_embeddings()
    assert isinstance(table, Embedding) and table.num_embeddings == 70
    assert model.lm_head.weight is table.weight and table.weight.shape == (70, 32)
    torch.testing.assert_close(output(model)[..., :64], before, atol=1e-6, rtol=1e-6)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    assert not isinstance(loaded.get_input_embeddings(), Embedding)
    assert torch.equal(output(loaded), output(model))
    replace_embeddings(loaded)
    loaded.load_state_dict(model.state_dict())
    assert torch.equal(output(loaded), output(model))


def test_hooks_dtype_frozen_tables_and_mode_are_kept():
    model, seen = small_model("gemma2").to(torch.bfloat16).train(), []
    table = model.get_input_embeddings()
    table.register_forward_hook(lambda *_: seen.append(1))
    table.weight.requires_grad_(False)
    scale = table.embed_scale
    replace_embeddings(model)
    assert table.training and not table.weight.requires_grad
    assert table.weight.dtype == torch.bfloat16 and table.embed_scale is scale
    model.eval()(IDS)
    assert seen == [1] and not table.training
    assert "FirstlayerGemma2TextScaledWordEmbedding(64, 32, padding_idx=5)" in repr(model)


def test_half_precision_gradients_are_summed_in_float32():
    model = small_model("gemma2").to(torch.bfloat16)
    table = model.get_input_embeddings()
    table.embed_scale.fill_(1)
    replace_embeddings(model)
    table(torch.full((150, 20), 7)).sum().backward()
    assert table.weight.grad[7, 0] == 3000 + 8  # 3000 rounded to bfloat16


@pytest.mark.parametrize("model_type", ["gemma2", "llama"])
def test_row_optimizer_trains_the_token_table(model_type):
    models = [causal_untied(model_type), causal_untied(model_type)]
    result = replace_embeddings(models[1], sparse=True)
    assert result.names == ["model.embed_tokens"] and not result.left
    options: Any = {"lr": 1e-2, "weight_decay": 0.1}
    optimizers = [
        torch.optim.AdamW(models[0].parameters(), **options),
        RowAdamW(models[1], **options),
    ]
    for step in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            ids = (IDS + step) % 64
            model(input_ids=ids).logits.logsumexp(-1).mean().backward()
            is_sparse = model.get_input_embeddings().weight.grad.is_sparse
            assert is_sparse == (model is models[1])
            optimizer.step()
            optimizer.zero_grad()
    optimizers[1].flush()  # pyright: ignore[reportAttributeAccessIssue]
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=2e-4, rtol=1e-3)


def causal_untied(model_type: str) -> Any:
    torch.manual_seed(0)
    config = small_config(model_type)
    config.tie_word_embeddings = False
    return transformers.AutoModelForCausalLM.from_config(config).float()


def test_sparse_sets_the_token_table_only():
    model = small_model("bert")
    replace_embeddings(model, sparse=True)
    embeddings = model.embeddings
    assert embeddings.word_embeddings.sparse
    assert not embeddings.position_embeddings.sparse
    # Again, with the modules that are firstlayer's already.
    assert replace_embeddings(model, sparse=False).names == []
    assert not embeddings.word_embeddings.sparse
    plain: Any = nn.ModuleList([nn.Embedding(4, 2), nn.Embedding(4, 2, sparse=True)])
    replace_embeddings(plain)
    assert not plain[0].sparse and plain[1].sparse
    replace_embeddings(plain, sparse=True)
    assert plain[0].sparse and plain[1].sparse


def test_modules_that_cannot_be_replaced_are_left_with_a_reason():
    class FSDPModule:
        pass

    class Sharded(FSDPModule, nn.Embedding):
        pass

    patched, computed = nn.Embedding(4, 2), nn.Embedding(4, 2)
    patched.forward = lambda input: input  # pyright: ignore[reportAttributeAccessIssue]
    nn.utils.parametrizations.orthogonal(computed)
    integers = nn.Embedding(4, 2, _weight=torch.ones(4, 2, dtype=torch.int8), _freeze=True)
    sizes: Any = {
        **{"vocab_size": 64, "d_model": 8, "encoder_layers": 1, "decoder_layers": 1},
        **{"encoder_attention_heads": 2, "decoder_attention_heads": 2},
        **{"encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "pad_token_id": 5},
        **{"bos_token_id": 1, "eos_token_id": 1, "decoder_start_token_id": 1},
    }
    whisper = transformers.WhisperModel(transformers.WhisperConfig(**sizes))
    model = nn.ModuleDict({
        "a": patched,
        "b": computed,
        "c": integers,
        "d": IdeficsDecoupledEmbedding(9, 3, 4),
        "e": Sharded(4, 2),
        "f": whisper.decoder,
        "g": nn.Embedding(3, 2),
    })
    classes = [type(table) for table in tables_of(model)]
    result = replace_embeddings(model)
    own = "forward does not call that of nn.Embedding"
    assert result.left == {
        "a": "its forward was replaced on the instance, by accelerate's hooks for example",
        "b": "weight of ParametrizedEmbedding is not a parameter, but computed",
        "c": "its table must be real, got int8",
        "d": f"IdeficsDecoupledEmbedding.{own}",
        "e": "it is sharded by fully_shard: replace embeddings before sharding",
        "f.embed_positions": f"WhisperPositionalEmbedding.{own}",
    }
    assert result.names == ["d.additional_embedding", "f.embed_tokens", "g"]
    changed = [type(t) is not c for t, c in zip(tables_of(model), classes, strict=True)]
    assert sum(changed) == 3


def test_module_with_an_extra_row_keeps_its_forward():
    torch.manual_seed(0)
    table = T5Gemma2TextScaledWordEmbedding(9, 4, 0, embed_scale=2.0, eoi_token_index=3)
    nn.init.normal_(table.eoi_embedding)
    ids = torch.tensor([[1, 3, 3]])
    before = table(ids)
    replace_embeddings(table)
    assert torch.equal(table(ids), before)
    table(ids).sum().backward()
    assert (table.eoi_embedding.grad == 2).all()
    assert table.weight.grad is not None and (table.weight.grad[1] == 2).all()


def test_copies_pickles_compiled_and_scripted_modules():
    table = small_model("gemma2").get_input_embeddings()
    original = type(table)
    want = table(IDS)
    replace_embeddings(table, sparse=True)
    for twin in (copy.deepcopy(table), pickle.loads(pickle.dumps(table))):
        assert type(twin) is type(table) and twin.weight is not table.weight
        assert torch.equal(twin(IDS), want)
        twin(IDS).sum().backward()
        assert twin.weight.grad.is_sparse and twin.weight.grad.is_coalesced()
    compiled = torch.compile(table, backend="eager", fullgraph=True)
    assert torch.equal(compiled(IDS), want)
    scripted = table.__prepare_scriptable__()
    assert type(scripted) is original and scripted.weight is table.weight
    assert torch.equal(scripted(IDS), want) and isinstance(table, Embedding)


def test_swapped_restores_classes_and_removes_gradient_hooks():
    model = small_model("bart")
    classes = [type(table) for table in tables_of(model)]
    with torch.no_grad():
        before = output(model)
    with swapped(model) as count:
        assert count >= len(classes)
        assert all(isinstance(table, Embedding) for table in tables_of(model))
        with torch.no_grad():
            assert torch.equal(output(model), before)
    assert [type(table) for table in tables_of(model)] == classes
    limited = nn.Sequential(nn.Embedding(5, 2, max_norm=0.1))
    with swapped(limited):
        inside = limited(torch.tensor([1, 2]))
    inside.sum().backward()
    limited(torch.tensor([1, 2])).sum().backward()
    assert not limited[0].weight._post_accumulate_grad_hooks


@pytest.mark.rejects
def test_model_without_embeddings_is_an_error():
    with pytest.raises(ValueError, match=r"model must have an nn.Embedding, got none"):
        replace_embeddings(nn.Linear(2, 2))

    class Vision(nn.Embedding):
        def get_input_embeddings(self) -> Any:
            raise NotImplementedError

    with pytest.raises(ValueError, match="sparse must be None for a model without a token"):
        replace_embeddings(Vision(3, 2), sparse=True)
    replace_embeddings(Vision(3, 2))
    integers = nn.Embedding(4, 2, _weight=torch.ones(4, 2, dtype=torch.int8), _freeze=True)
    with pytest.raises(ValueError, match="0: its table must be real, got int8"):
        replace_embeddings(nn.Sequential(integers))


def test_result_is_a_number_with_names_and_reasons():
    table = nn.Embedding(4, 2)
    patched = nn.Embedding(4, 2)
    patched.forward = lambda input: input  # pyright: ignore[reportAttributeAccessIssue]
    result = replace_embeddings(nn.ModuleDict({"a": table, "b": table, "c": patched}))
    for same in (result, copy.deepcopy(result), pickle.loads(pickle.dumps(result))):
        assert int(same) == 2 and f"{same}" == "2" and same.names == ["a", "b"]
        assert list(same.left) == ["c"] and "its forward was replaced" in same.left["c"]
    assert repr(replace_embeddings(table)) == "Replaced([], left={})"


def test_to_torch_undoes_the_replacement():
    model = small_model("bart")
    classes = [type(table) for table in tables_of(model)]
    replace_embeddings(model, sparse=True)
    to_torch(model)
    assert [type(table) for table in tables_of(model)] == classes
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    frozen = FrozenRowsEmbedding(4, 2, frozen=[1])
    assert type(to_torch(frozen)) is FrozenRowsEmbedding
