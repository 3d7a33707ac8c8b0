"""Files of version 0.1, whose package was called Inlay, load in every front end."""

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.front_ends import FRONT_ENDS

DATA = Path(__file__).parent.parent / "data" / "version-0.1"
IDS = np.array([[1, 3, 5], [11, 0, 2]])
SEGMENTS = np.array([[0, 1, 1], [1, 0, 0]])


def array(front_end: str, value: np.ndarray) -> Any:
    return torch.from_numpy(value) if front_end == "torch" else value


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@torch.no_grad()
def test_old_layer_gives_its_old_output(front_end):
    layer = importlib.import_module(f"firstlayer.{front_end}").load(
        DATA / "layer.safetensors"
    )
    got = layer(array(front_end, IDS), segments=array(front_end, SEGMENTS))
    want = np.load(DATA / "layer_output.npy")
    np.testing.assert_allclose(np.asarray(got), want, atol=2e-6)


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@torch.no_grad()
def test_old_embedding_keeps_its_padding_row(front_end):
    layer = importlib.import_module(f"firstlayer.{front_end}").load(
        DATA / "embedding.safetensors"
    )
    table = np.load(DATA / "embedding.npz")["with_leaf"]
    assert layer.padding_idx == 2 and table[2].all()
    got = layer(array(front_end, np.arange(7)))
    np.testing.assert_array_equal(np.asarray(got), table)


def test_manifest_describes_every_old_file():
    manifest = json.loads((DATA / "manifest.json").read_text())
    files = {path.name for path in DATA.iterdir()} - {"manifest.json"}
    assert manifest["files"].keys() == files
