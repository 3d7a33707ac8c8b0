"""The examples learn, and their cached decoding equals the uncached one."""

import importlib.util
import itertools
import math
import re
import runpy
import shutil
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

EXAMPLES = Path(__file__).parent.parent / "examples"
SCHEMES = ["learned", "sinusoidal", "rotary", "alibi", "t5", "none"]


@pytest.fixture
def run(capsys, monkeypatch):
    """Return a function that runs an example as a script and returns its stdout."""

    def run_script(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return run_script


def nats(printed: str) -> list[float]:
    return [float(number) for number in re.findall(r"([\d.]+) nats", printed)]


def module(name: str) -> Any:
    """Return an example as a new module, whose constants may be changed."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example


def text_file(folder: Path) -> str:
    """Return the path of a file with a few sentences, repeated."""
    path = folder / "text.txt"
    path.write_text("The cat sat on the mat. A dog ran to the sea.\n" * 60, "utf-8")
    return str(path)


def test_every_example_is_tested():
    known = (
        "accelerate_loop bag_classifier hf_trainer lightning_trainer next_token "
        "ngram_memory sharded text_classifier transformer transformer_jax"
    )
    assert sorted(path.stem for path in EXAMPLES.glob("*.py")) == known.split()


def test_next_token_learns(run):
    first, *_, last = nats(run("next_token"))
    assert last < first - 2


def test_text_classifier_learns_the_direction_of_text(run):
    chance, *_, held_out = nats(run("text_classifier", "--steps", "90"))
    assert chance == pytest.approx(math.log(2), abs=0.01)
    # Letter counts are the same both ways, so they give no better than chance.
    assert held_out < 0.4


def test_text_classifier_reads_a_given_file(run, tmp_path):
    printed = run("text_classifier", text_file(tmp_path), "--steps", "40")
    assert printed.startswith("2,760 bytes") and nats(printed)[-1] < 0.4


def test_bag_classifier_learns_the_file_of_a_line(run):
    chance, *_, held_out = nats(run("bag_classifier", "--steps", "400"))
    assert chance == pytest.approx(math.log(8), abs=0.01)
    assert held_out < 0.8


def test_bag_classifier_reads_given_files(run, tmp_path):
    one, other = tmp_path / "one.txt", tmp_path / "other.txt"
    one.write_text("the sun is warm\n" * 400, "utf-8")
    other.write_text("the moon is cold\n" * 400, "utf-8")
    printed = run("bag_classifier", str(one), str(other), "--steps", "30")
    assert nats(printed)[0] == 0.69 and nats(printed)[-1] < 0.1
    assert "100% right" in printed


# Lightning suggests more workers and more frequent logging.
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@pytest.mark.parametrize("name", ["hf_trainer", "lightning_trainer", "accelerate_loop"])
def test_training_frameworks_learn_and_resume(run, name):
    printed = run(name)
    first, *_, last = nats(printed)
    assert last < first - 1.5
    assert printed.endswith("resumed from the checkpoint: weights equal\n")


def test_ngram_memory_lowers_the_loss(tmp_path, capsys):
    stdlib = Path(sysconfig.get_path("stdlib"))
    for name in ("argparse", "ast", "calendar", "cmd", "codecs", "copy", "csv", "difflib"):
        shutil.copy(stdlib / f"{name}.py", tmp_path)
    example = module("ngram_memory")
    example.LENGTH, example.BATCH, example.WIDTH, example.LAYERS = 64, 8, 32, 1
    example.RATE = 5e-3
    # A step takes one second of this clock.
    example.time = SimpleNamespace(perf_counter=itertools.count().__next__)
    folder = ["--folder", str(tmp_path)]
    example.main([*folder, "--rows", "60000", "--seconds", "150", "--seeds", "3"])
    printed = capsys.readouterr().out
    chance, without, with_memory = nats(printed)
    assert "seed 3: " in printed and chance == 5.55
    assert printed.count("memory: 151 steps of 1000 ms") == 2
    assert with_memory < without - 0.1


@pytest.mark.parametrize("scheme", SCHEMES)
def test_transformer_learns_and_decodes_with_a_cache(run, scheme, tmp_path):
    text = text_file(tmp_path)
    printed = run("transformer", text, "--positions", scheme, "--steps", "25")
    chance, *_, last = nats(printed)
    assert chance == 5.55 and last < 2.2
    assert "equal to the output without" in printed and "NOT equal" not in printed


def test_transformer_learns_more_than_byte_frequencies(run):
    *_, last = nats(run("transformer", "--steps", "100"))
    text = Path(sysconfig.get_path("stdlib")) / "argparse.py"
    counts = np.bincount(np.frombuffer(text.read_bytes(), np.uint8))
    share = counts[counts > 0] / counts.sum()
    assert last < -(share * np.log(share)).sum() - 0.8


@pytest.mark.parametrize("scheme", SCHEMES)
@torch.no_grad()
def test_cached_logits_equal_those_of_the_full_sequence(scheme):
    torch.manual_seed(0)
    example = module("transformer")
    model = example.Transformer(scheme).eval()
    if scheme == "t5":
        nn.init.normal_(model.bias.weight)
    ids = torch.randint(0, 256, (2, 20))
    whole, _ = model(ids)
    logits, cache = model(ids[:, :7])
    torch.testing.assert_close(logits, whole[:, :7], atol=1e-4, rtol=1e-4)
    for at in [*range(7, 12), slice(12, 20)]:
        new = ids[:, at] if isinstance(at, slice) else ids[:, at : at + 1]
        logits, cache = model(new, cache)
        want = whole[:, at] if isinstance(at, slice) else whole[:, at : at + 1]
        torch.testing.assert_close(logits, want, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_every_scheme_but_none_distinguishes_positions():
    example = module("transformer")
    example.LAYERS = 1
    ids = torch.tensor([[5, 6, 7, 8], [6, 5, 7, 8]])
    for scheme in SCHEMES:
        torch.manual_seed(0)
        model = example.Transformer(scheme).eval()
        if scheme == "t5":
            nn.init.normal_(model.bias.weight)
        one, other = model(ids)[0][:, -1]
        # Without positions, one layer sees an unordered bag of the previous tokens.
        assert torch.allclose(one, other, atol=1e-5) == (scheme == "none"), scheme


def test_jax_transformer_learns_and_decodes_with_a_cache(run, tmp_path):
    text = text_file(tmp_path)
    printed = run("transformer_jax", text, "--steps", "25")
    chance, *_, last = nats(printed)
    assert chance == 5.55 and last < 2.2
    assert "equal to the output without" in printed and "NOT equal" not in printed


@pytest.fixture(scope="module")
def small() -> Any:
    """Return the JAX example with one layer and a length of eight."""
    example = module("transformer_jax")
    example.LAYERS, example.LENGTH, example.WIDTH = 1, 8, 16
    return example


@pytest.mark.parametrize("scheme", ["learned", "rotary", "alibi", "t5"])
def test_cached_jax_logits_equal_those_of_the_full_sequence(small, scheme):
    model = small.Transformer(scheme, key=jax.random.key(0))
    if scheme == "t5":
        weight = jax.random.normal(jax.random.key(1), model.bias.weight.shape)
        model = eqx.tree_at(lambda model: model.bias.weight, model, weight)
    ids = np.random.default_rng(0).integers(0, 256, 8)

    @eqx.filter_jit
    def both(model, ids):
        def step(cache, at):
            logits, cache = model(ids[at, None], cache, offset=at)
            return cache, logits[0]

        cached = jax.lax.scan(step, small.empty_cache(), jnp.arange(8))[1]
        return cached, model(ids)[0]

    np.testing.assert_allclose(*both(model, jnp.asarray(ids)), atol=1e-5)


def test_jax_attention_equals_that_of_equinox(small):
    model = small.Transformer("rotary", key=jax.random.key(0))
    block, x = model.blocks[0], jax.random.normal(jax.random.key(1), (8, 16))

    def process_heads(q, k, v):
        return model.rotary(q), model.rotary(k), v

    @eqx.filter_jit
    def both(block, x):
        _, mask = scores = model.scores(0, 8, 8)
        normed = jax.vmap(block.first)(x)
        mixed = x + block.attention(
            normed, normed, normed, mask, process_heads=process_heads
        )
        want = mixed + jax.vmap(block.maps)(jax.vmap(block.second)(mixed))
        got, _ = block(x, rotary=model.rotary, offset=0, scores=scores, past=None)
        return got, want

    np.testing.assert_allclose(*both(block, x), atol=1e-5)
