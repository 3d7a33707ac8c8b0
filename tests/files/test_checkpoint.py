"""Reading safetensors files: headers, copies, memory maps, chunks of rows, shards."""

import json

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from firstlayer.analysis.inspect import inspect
from firstlayer.files import checkpoint as reader
from firstlayer.files.checkpoint import INDEX, open_checkpoint, role_of
from firstlayer.vector_files.reading import read_rows

rng = np.random.default_rng(0)
DTYPES = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16, np.int64, np.int8]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_a_copy_a_map_and_chunks_hold_the_same_bits(dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "CHUNK_BYTES", 100)
    table = rng.integers(-100, 100, (37, 5)).astype(dtype)
    save_file({"a": np.ones(3, np.int8), "x": table}, tmp_path / "m.safetensors")
    stored = open_checkpoint(tmp_path).tensors["x"]
    assert (stored.shape, stored.nbytes) == (table.shape, table.nbytes)
    chunks = list(stored.chunks())
    assert len(chunks) > 1
    for array in (stored.read(), stored.map(), np.concatenate(chunks)):
        assert array.dtype == table.dtype and array.tobytes() == table.tobytes()


def test_writing_to_a_map_does_not_change_the_file(tmp_path):
    path = tmp_path / "m.safetensors"
    save_file({"x": np.ones((2, 3), np.float32), "none": np.ones((0, 3))}, path)
    before, tensors = path.read_bytes(), open_checkpoint(path).tensors
    array = tensors["x"].map()
    array[...] = 7
    assert path.read_bytes() == before and tensors["x"].read().max() == 1
    assert tensors["none"].map().shape == (0, 3)


def test_a_tensor_that_is_not_aligned_is_copied(tmp_path):
    table = rng.standard_normal((4, 3)).astype(np.float32)
    entry = {"dtype": "F32", "shape": [4, 3], "data_offsets": [0, table.nbytes]}
    header = json.dumps({"x": entry}).encode()
    header += b" " * ((1 - len(header)) % 4)
    path = tmp_path / "m.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + table.tobytes())
    stored = open_checkpoint(path).tensors["x"]
    assert stored.start % 4 == 1
    array = stored.map()
    assert array.flags.aligned and array.tobytes() == table.tobytes()


def test_shards_without_a_wanted_tensor_are_not_opened(tmp_path):
    save_file({"x": np.ones(2), "y": np.zeros(3)}, tmp_path / "1.safetensors")
    shards = {"x": "1.safetensors", "y": "1.safetensors", "z": "2.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": shards}))
    opened = open_checkpoint(tmp_path, names=["x", "elsewhere"])
    assert opened.tensors.keys() == {"x", "y"} and len(opened.files) == 1
    assert opened.read("x").tolist() == [1, 1]
    assert open_checkpoint(tmp_path, names=[]).tensors == {}
    with pytest.raises(FileNotFoundError, match="names '2.safetensors', which does not"):
        open_checkpoint(tmp_path)


def test_tables_are_the_matrices_with_a_known_name(tmp_path):
    tensors = {
        "model.embed_tokens.weight": np.ones((4, 2), np.float32),
        "wte.weight": np.ones((9, 2), np.int8),
        "embeddings.position_embeddings.weight": np.ones(3),
        "token_type_embeddings.weight": np.ones((2, 2), np.int64),
        "mlp.weight": np.ones((5, 5)),
    }
    save_file(tensors, tmp_path / "m.safetensors")
    checkpoint = open_checkpoint(tmp_path / "m.safetensors")
    names = [table.name for table in checkpoint.tables()]
    assert names == ["model.embed_tokens.weight", "wte.weight"]
    assert checkpoint.token_table().name == names[0]


NAMES = {
    "token": [
        "emb.weight",
        "embed.weight",
        "embeddings",
        "embedding.weight",
        "embeddings.weight",
        "model.embed.weight",
        "model.embed_tokens.weight",
        "tok_embeddings.weight",
        "tok_emb.weight",
        "tokens_embed.weight",
        "token_embd.weight",
        "word_embedding.weight",
        "0.auto_model.embeddings.word_embeddings.weight",
        "backbone.embeddings.weight",
        "transformer.wte.weight",
        "gpt_neox.embed_in.weight",
        "model.shared.weight",
        "token.weight",
        "token_emb.emb.weight",
        "text_model.embeddings.token_embedding.weight",
        "vocab_embed.weight",
    ],
    "position": [
        "embeddings.position_embeddings.weight",
        "transformer.wpe.weight",
        "model.decoder.embed_positions.weight",
        "positions_embed.weight",
        "positional_embedding",
        "pos_embed",
        "pos_emb.emb.weight",
        "position.weight",
    ],
    "segment": ["embeddings.token_type_embeddings.weight", "segment.weight"],
    "head": ["lm_head.weight", "gpt_neox.embed_out.weight", "output.weight"],
    "bias": ["encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"],
    None: [
        "weight",
        "layer_norm.weight",
        "embeddings.LayerNorm.weight",
        "word_embeddings_layernorm.weight",
        "embed_layer_norm.weight",
        "embeddings.patch_embeddings.projection.weight",
        "embeddings.patch_embedding.weight",
        "class_embedding",
        "time_embedding.emb.weight",
        "query_embed.weight",
        "rotary_emb.inv_freq",
        "encoder.embedding_hidden_mapping_in.weight",
        "relative_position_embeddings.weight",
        "layers.3.attention.output.weight",
        "lm_head.bias",
        "embedding.bias",
        "wte.weight_scale",
        "output",
        "member.weight",
    ],
}


def test_names_of_tensors_imply_their_roles():
    names = {name: role for role, names in NAMES.items() for name in names}
    assert {name: role_of(name) for name in names} == names


@pytest.mark.rejects
def test_a_folder_with_several_unnamed_files_is_refused(tmp_path):
    for name in "ab":
        save_file({"x": np.ones(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ValueError, match="or one other safetensors file, got 2 others"):
        open_checkpoint(tmp_path)


@pytest.mark.rejects
@pytest.mark.parametrize("shape", [[1] * 33, [2**63, 0]])
def test_shapes_that_numpy_does_not_have_are_refused(shape, tmp_path):
    header = json.dumps({"x": {"dtype": "U8", "shape": shape, "data_offsets": [0, 0]}})
    path = tmp_path / "m.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode())
    with pytest.raises(ValueError, match="a tensor 'x' with a malformed entry"):
        open_checkpoint(path)


def test_the_only_matrix_of_a_file_is_its_table(tmp_path):
    layer = torch.nn.Embedding(5, 3)
    rows = layer.weight.detach().numpy()
    torch.save(layer.state_dict(), tmp_path / "a.pt")
    save_file({"weight": rows, "bias": rows[0]}, tmp_path / "b.safetensors")
    for path in (tmp_path / "a.pt", tmp_path / "b.safetensors"):
        assert open_checkpoint(path).token_table().name == "weight"
        assert read_rows(path).tolist() == rows.tolist()
        (table,) = inspect(path).tables
        assert (table.name, table.role, table.shape) == ("weight", None, (5, 3))


@pytest.mark.rejects
def test_several_matrices_or_another_table_are_no_token_table(tmp_path):
    rows = np.ones((4, 2), np.float32)
    for names in (("a", "b"), ("wpe.weight",), ("wpe.weight", "a")):
        save_file(dict.fromkeys(names, rows), tmp_path / "a.safetensors")
        with pytest.raises(ValueError, match="has no token table"):
            open_checkpoint(tmp_path / "a.safetensors").token_table()
