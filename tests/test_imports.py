"""Modules loaded by an import, and imports allowed in each folder of the package."""

import ast
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.run_alone import run_alone

SOURCE = Path(__file__).parent.parent / "src" / "firstlayer"
FRAMEWORKS = {"torch", "jax", "equinox", "flax", "tensorflow"}
HEAVY = FRAMEWORKS | {"numba", "llvmlite", "scipy", "matplotlib", "click", "rich"}

FRONT_ENDS = {"numpy": set(), "torch": {"torch"}, "equinox": {"jax", "equinox"}}

# For each folder, the other folders of the package and the libraries that its files may
# import, at any level of a file. Every folder may import the modules in ``SHARED``.
SHARED = {"_array", "_check", "_interrupts"}
CORE = {"positions", "ngram", "embeddings", "optim", "files", "stores", "vector_files"}
ARRAYS = {"numpy", "jaxtyping", "ml_dtypes"}
ALLOWED = {
    "_array": (set(), set()),
    "_check": (set(), ARRAYS),
    "_interrupts": (set(), set()),
    "_warmup": ({"embeddings", "kernels", "numpy", "optim"}, {"numpy"}),
    "kernels": (set(), {"numpy", "jaxtyping", "numba", "llvmlite"}),
    "positions": ({"kernels", "embeddings"}, ARRAYS),
    "ngram": ({"kernels", "embeddings"}, ARRAYS),
    "embeddings": ({"kernels"}, ARRAYS),
    "optim": ({"kernels", "embeddings", "stores"}, ARRAYS),
    "files": ({"positions"}, ARRAYS),
    "stores": ({"files", "kernels"}, ARRAYS),
    "vector_files": ({"files", "stores", "kernels"}, ARRAYS | {"pyarrow"}),
    "numpy": ({*CORE, "kernels"}, ARRAYS),
    "torch": ({*CORE, "kernels"}, ARRAYS | {"torch"}),
    "equinox": ({*CORE, "kernels"}, ARRAYS | {"jax", "equinox"}),
    "compat": ({*CORE, *FRONT_ENDS}, ARRAYS | {"torch", "jax", "equinox"}),
    "word_vectors": (
        {*CORE, "kernels", "numpy"},
        ARRAYS | {"safetensors", "tokenizers"},
    ),
    "analysis": (
        {"__init__", *CORE, "kernels", "numpy", "torch", "word_vectors"},
        ARRAYS | {"safetensors", "tokenizers", "torch", "matplotlib"},
    ),
    "cli": (
        {
            "__init__",
            "files",
            "ngram",
            "stores",
            "vector_files",
            "analysis",
            "word_vectors",
        },
        {"numpy", "click", "rich"},
    ),
    # ``firstlayer`` itself re-exports the names that the front ends share.
    "__init__": ({*CORE, "kernels", "word_vectors", "_warmup"}, set()),
    "__main__": ({"cli"}, set()),
}


def imported_by(code: str) -> set[str]:
    """Return the modules that ``code`` imports in a fresh interpreter."""
    before = "import json, sys; before = set(sys.modules)\n"
    after = "\nprint(json.dumps(sorted(set(sys.modules) - before)))"
    return set(json.loads(run_alone(before, code, after).splitlines()[-1]))


def third_party(modules: set[str]) -> set[str]:
    """Return the top-level names of third-party modules."""
    tops = {name.partition(".")[0] for name in modules}
    return tops - sys.stdlib_module_names - {"firstlayer"}


def test_import_firstlayer_loads_the_standard_library_only():
    loaded = imported_by("import firstlayer; dir(firstlayer); firstlayer.__doc__")
    assert "firstlayer" in loaded and not third_party(loaded)


def test_public_names_load_neither_numba_nor_a_framework():
    loaded = imported_by("""
        import firstlayer
        for name in firstlayer.__all__:
            getattr(firstlayer, name)
    """)
    assert {"numpy", "jaxtyping"} <= third_party(loaded)
    assert not third_party(loaded) & (HEAVY | {"safetensors", "ml_dtypes"})


def test_numpy_front_end_loads_neither_numba_nor_a_framework():
    loaded = imported_by("""
        import firstlayer.numpy
        for name in firstlayer.numpy.__all__:
            getattr(firstlayer.numpy, name)
    """)
    assert "firstlayer.numpy.token" in loaded
    assert not third_party(loaded) & (HEAVY | {"safetensors"})


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_a_front_end_does_not_load_the_others(front_end):
    loaded = imported_by(f"import firstlayer.{front_end}")
    others = {f"firstlayer.{other}" for other in FRONT_ENDS.keys() - {front_end}}
    assert f"firstlayer.{front_end}" in loaded and not loaded & others
    assert not third_party(loaded) & (FRAMEWORKS - FRONT_ENDS[front_end])


def test_torch_layers_do_not_load_the_compiler(tmp_path):
    """``torch.compile``'s modules take as long to import as torch itself."""
    path = tmp_path / "table.npy"
    np.save(path, np.ones((5, 8), np.float32))
    loaded = imported_by(f"""
        import torch
        from firstlayer import stores, torch as layers
        layer = layers.EmbeddingLayer(5, 8, max_positions=4, layer_norm=True, sparse=True)
        x = layer(torch.tensor([[1, 2]]))
        layers.RotaryPositions(8)(x[:, None]).sum().backward()
        layers.AlibiBias(2).bias(range(3), range(3))
        layers.Embedding.from_store(stores.open_store({str(path)!r}))(torch.tensor([4]))
    """)
    assert "firstlayer.torch._table.stored" in loaded and "torch._dynamo" not in loaded


def test_numba_loads_with_the_first_kernel_call():
    build = "from firstlayer.numpy import Embedding; layer = Embedding(5, 4)"
    assert "numba" not in imported_by(build)
    call = build + "; import numpy as np; layer.vjp([1, 1])[1](np.ones((2, 4), 'float32'))"
    loaded = imported_by(call)
    assert "numba" in loaded and not third_party(loaded) & FRAMEWORKS


def test_files_are_written_and_read_without_a_framework(tmp_path):
    loaded = imported_by(f"""
        from firstlayer.files.safetensors import read, write
        write({str(tmp_path / "a")!r}, {{}}, {{}})
        read({str(tmp_path / "a")!r})
    """)
    assert not third_party(loaded) & (HEAVY | {"safetensors"})


def folder_of(module: str) -> str:
    """Return the top-level folder or file of a dotted name after ``firstlayer.``."""
    first = module.partition(".")[0]
    exists = (SOURCE / first).is_dir() or (SOURCE / f"{first}.py").is_file()
    return first if first and exists else "__init__"


def imports_of(path: Path) -> set[str]:
    """Return the absolute names that a file imports."""
    package = ["firstlayer", *path.relative_to(SOURCE).parts[:-1]]
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *filter(None, [node.module])])
            names |= {f"{stem}.{alias.name}" for alias in node.names}
    return names


def forbidden_imports(path: Path) -> list[str]:
    """Return the imports of a file that are not allowed in its folder."""
    folder = folder_of(".".join(path.relative_to(SOURCE).with_suffix("").parts))
    folders, libraries = ALLOWED[folder]
    forbidden = []
    for name in imports_of(path):
        top, _, rest = name.partition(".")
        if top == "firstlayer":
            allowed = folder_of(rest) in {folder, *SHARED, *folders}
        else:
            allowed = top in libraries or top in sys.stdlib_module_names
        forbidden += [] if allowed else [name]
    return sorted(forbidden)


def name_of(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=name_of)
def test_file_imports_only_what_its_folder_may(path):
    assert forbidden_imports(path) == []


@pytest.mark.parametrize(
    "where, line, name",
    [
        ("_check.py", "from .numpy import token", "firstlayer.numpy.token"),
        ("_check.py", "from . import numpy", "firstlayer.numpy"),
        ("positions/x.py", "def f():\n    import torch.nn", "torch.nn"),
        ("files/x.py", "import firstlayer.cli.main", "firstlayer.cli.main"),
        (
            "kernels/x.py",
            "from ..embeddings import bag",
            "firstlayer.embeddings.bag",
        ),
        ("kernels/x.py", "from firstlayer import positions", "firstlayer.positions"),
        (
            "numpy/x.py",
            "from ..torch.token import Embedding",
            "firstlayer.torch.token.Embedding",
        ),
        ("numpy/x.py", "from numba import njit", "numba.njit"),
    ],
)
def test_forbidden_import_is_found(where, line, name, tmp_path, monkeypatch):
    for folder in ("kernels", "positions", "embeddings", "files", "numpy", "torch", "cli"):
        (tmp_path / folder).mkdir()
    monkeypatch.setattr(sys.modules[__name__], "SOURCE", tmp_path)
    (tmp_path / where).write_text(f"import numpy as np\nfrom . import _check\n{line}\n")
    assert forbidden_imports(tmp_path / where) == [name]
