"""Files of ``torch.save`` are read as data, without torch."""

import json
import os
import zipfile
from collections import OrderedDict

import numpy as np
import pytest
import torch

from firstlayer.files.checkpoint import open_checkpoint
from tests.support.run_alone import run_alone
from tests.support.vector_files import Command

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64]
DTYPES += [torch.int32, torch.int8, torch.uint8]


def test_tensors_of_every_dtype_equal_torch(tmp_path):
    base = torch.arange(24).reshape(4, 6)
    tensors = {str(dtype): base.to(dtype) for dtype in DTYPES}
    tensors["rows"] = torch.arange(12.0).reshape(4, 3)[1:3]
    tensors["parameter"] = torch.nn.Parameter(torch.ones(2, 3))
    tensors["empty"] = torch.ones(0, 3)
    torch.save(OrderedDict(tensors), tmp_path / "a.bin")
    found = open_checkpoint(tmp_path / "a.bin")
    assert found.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        got = found.read(name)
        assert got.shape == tensor.shape
        np.testing.assert_array_equal(
            got.astype(np.float64), tensor.detach().double().numpy()
        )
    rows = np.concatenate(list(found.tensors["rows"].chunks()))
    np.testing.assert_array_equal(rows, tensors["rows"].numpy())


def test_nested_and_sharded_checkpoints_are_read(tmp_path):
    layer = torch.nn.Embedding(5, 4)
    model = torch.nn.ModuleDict({"wte": layer})
    optimizer = torch.optim.AdamW(model.parameters())
    layer(torch.tensor([1])).sum().backward()
    optimizer.step()
    state = {"epoch": 3, "lr": 0.1, "state_dict": model.state_dict()}
    torch.save(state | {"optimizer": optimizer.state_dict()}, tmp_path / "a.ckpt")
    want = layer.weight.detach().numpy()
    np.testing.assert_array_equal(
        open_checkpoint(tmp_path / "a.ckpt").token_table().read(), want
    )
    torch.save({"x": torch.ones(1)}, tmp_path / "m-1.bin")
    torch.save(model.state_dict(), tmp_path / "m-2.bin")
    index = {"weight_map": {"x": "m-1.bin", "wte.weight": "m-2.bin"}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    np.testing.assert_array_equal(open_checkpoint(tmp_path).token_table().read(), want)


def test_torch_is_not_imported(tmp_path):
    torch.save({"wte.weight": torch.ones(2, 3)}, tmp_path / "a.bin")
    run_alone(f"""
        import sys
        from firstlayer.files.checkpoint import open_checkpoint
        table = open_checkpoint({str(tmp_path / "a.bin")!r}).token_table().read()
        assert table.tolist() == [[1, 1, 1]] * 2 and "torch" not in sys.modules
    """)


@pytest.mark.rejects
def test_other_files_of_torch_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "a.bin"
    for value, message in (
        (torch.nn.Linear(2, 2), "names the Python object 'torch.nn.modules.linear.Linear'"),
        ({"a": Command(os.system, "touch hacked")}, "object '(posix|nt).system', which is"),
        ([torch.ones(2)], "has no tensors by name"),
    ):
        torch.save(value, path)
        with pytest.raises(ValueError, match=message):
            open_checkpoint(path)
    assert os.listdir() == ["a.bin"]
    torch.save({"a": torch.ones(1)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match="is in the format of torch before 1.6: load it"):
        open_checkpoint(path)
    torch.save({"a": torch.ones(2, 3).T}, path)
    with pytest.raises(ValueError, match="a has dtype strided F32, which is not supported"):
        open_checkpoint(path).read("a")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x", "y")
    with pytest.raises(ValueError, match="zip archive that torch.save did not write"):
        open_checkpoint(path)
    torch.save({"a": torch.ones(2, 3)}, path)
    content = path.read_bytes()
    path.write_bytes(content[:-30])
    with pytest.raises(ValueError, match="is a damaged zip archive"):
        open_checkpoint(path)
