"""Compilation of all kernels before they are needed."""

import ast
import json
import textwrap
from pathlib import Path

import pytest

import firstlayer
from firstlayer import kernels
from tests.support.command import stdout_of
from tests.support.run_alone import run_alone

KERNELS = Path(kernels.__file__).parent
# Every kernel with the types that it was compiled for or read from the cache with.
SIGNATURES = """
import sys
def signatures():
    return {
        (name, value.__name__, str(types))
        for name, module in list(sys.modules.items())
        if name.startswith("firstlayer.kernels.")
        for value in vars(module).values()
        if hasattr(value, "signatures")
        for types in value.signatures
    }
"""


def test_layers_and_optimizers_of_torch_need_no_other_kernels():
    print_new = """
        import json
        import firstlayer
        steps = []
        firstlayer.warmup(progress=lambda *step: steps.append(step))
        before = signatures()

        import torch
        from firstlayer.torch import Embedding, EmbeddingBag, EmbeddingLayer
        from firstlayer.torch import RotaryPositions
        from firstlayer.torch.optim import RowAdamW
        ids = torch.randint(0, 40, (3, 7))
        for sparse in (True, False):
            table = Embedding(40, 16, sparse=sparse)
            table(ids).sum().backward()
            bag = EmbeddingBag(40, 16, mode="sum", sparse=sparse)
            bag(ids.reshape(-1), torch.tensor([0, 5])).sum().backward()
            options = {"max_positions": 9, "layer_norm": True, "sparse": sparse}
            layer = EmbeddingLayer(40, 16, padding_idx=3, **options)
            for segments in (None, 2):
                other = EmbeddingLayer(40, 16, segments=segments, **options)
                other(ids).square().sum().backward()
            optimizer = RowAdamW(layer.parameters())
            for _ in range(3):
                layer(ids).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        RotaryPositions(16)(torch.randn(2, 3, 7, 16, requires_grad=True)).sum().backward()
        print(json.dumps([sorted(signatures() - before), len(before), steps]))
    """
    code = SIGNATURES + textwrap.dedent(print_new)
    new, count, steps = json.loads(run_alone(code).splitlines()[-1])
    assert new == []
    assert count > 50
    assert [done for done, _, _ in steps] == list(range(len(steps)))
    assert steps[-1] == [len(steps) - 1, len(steps) - 1, ""]


def test_an_unknown_dtype_is_refused():
    names = "float32, float16, bfloat16, float64"
    with pytest.raises(ValueError, match=f"dtypes must be among {names}, got 'int8'"):
        firstlayer.warmup(["float32", "int8"])


def test_the_command_says_where_the_cache_is_and_that_nothing_is_left():
    firstlayer.warmup()
    first, second = stdout_of("warmup").splitlines()
    assert first == "nothing to compile: all kernels are in the cache"
    done = json.loads(stdout_of("warmup", "--json"))
    assert done["compiled"] == 0 and done["cache_bytes"] > 0
    assert Path(done["folder"]).is_dir()
    assert second.startswith(f"cache: {done['folder']}, ")


@pytest.mark.parametrize("path", sorted(KERNELS.rglob("*.py")), ids=lambda path: path.name)
def test_kernels_assign_no_array_to_a_slice(path):
    # Numba compiles an error with the shapes as text for each, which takes a second.
    for function in ast.walk(ast.parse(path.read_text())):
        if not isinstance(function, ast.FunctionDef) or not is_compiled(function):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and any(map(has_slice, node.targets)):
                assert is_number(node.value), f"{path.name}:{node.lineno}"


def is_compiled(function: ast.FunctionDef) -> bool:
    names = {
        ast.unparse(decorator).partition("(")[0] for decorator in function.decorator_list
    }
    return bool(names & {"kernel", "internal", "inlined"})


def has_slice(target: ast.expr) -> bool:
    return any(isinstance(node, ast.Slice) for node in ast.walk(target))


def is_number(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant | ast.UnaryOp) or ast.unparse(value) == "np.nan"
