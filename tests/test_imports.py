"""What an import costs, and which part of the package may know which."""

import ast
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "firstlayer"
FRAMEWORKS = {"torch", "jax", "equinox", "flax", "tensorflow"}
HEAVY = FRAMEWORKS | {"numba", "llvmlite", "scipy", "matplotlib", "click", "rich"}

USED_BY = {"numpy": set(), "torch": {"torch"}, "equinox": {"jax", "equinox"}}
FRONT_ENDS = USED_BY.keys()

# Import arrows point down: for each folder, the folders of the package and the libraries
# that its files may import, wherever in a file the import stands. Every folder may import
# ``_array`` and ``_check``.
CORE = {"positions", "embeddings", "optim", "files"}
ARRAYS = {"numpy", "jaxtyping", "ml_dtypes"}
PARTS = {
    "_array": (set(), set()),
    "_check": (set(), ARRAYS),
    "kernels": (set(), {"numpy", "numba", "llvmlite"}),
    "positions": ({"kernels", "embeddings"}, ARRAYS),
    "embeddings": ({"kernels"}, ARRAYS),
    "optim": ({"kernels", "embeddings"}, ARRAYS),
    "files": ({"positions"}, ARRAYS),
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
        ARRAYS | {"safetensors", "torch", "matplotlib"},
    ),
    "cli": ({"__init__", "files", "analysis", "word_vectors"}, {"numpy", "click", "rich"}),
    # ``firstlayer`` itself re-exports the names that the front ends share.
    "__init__": ({*CORE, "kernels"}, set()),
    "__main__": ({"cli"}, set()),
}


def imported_by(code: str) -> set[str]:
    """Return the modules that ``code`` imports in a fresh interpreter."""
    script = "import json, sys; before = set(sys.modules)\n" + textwrap.dedent(code)
    script += "\nprint(json.dumps(sorted(set(sys.modules) - before)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def outside(modules: set[str]) -> set[str]:
    """Return what is neither Firstlayer's nor the standard library's, by first name."""
    tops = {name.partition(".")[0] for name in modules}
    return tops - sys.stdlib_module_names - {"firstlayer"}


def test_import_firstlayer_loads_the_standard_library_only():
    loaded = imported_by("import firstlayer; dir(firstlayer); firstlayer.__doc__")
    assert "firstlayer" in loaded and not outside(loaded)


def test_every_public_name_comes_without_numba_or_a_framework():
    loaded = imported_by("""
        import firstlayer
        for name in firstlayer.__all__:
            getattr(firstlayer, name)
    """)
    assert {"numpy", "jaxtyping"} <= outside(loaded)
    assert not outside(loaded) & (HEAVY | {"safetensors", "ml_dtypes"})


def test_the_numpy_face_comes_without_numba_or_a_framework():
    loaded = imported_by("""
        import firstlayer.numpy
        for name in firstlayer.numpy.__all__:
            getattr(firstlayer.numpy, name)
    """)
    assert "firstlayer.numpy.token" in loaded
    assert not outside(loaded) & (HEAVY | {"safetensors"})


@pytest.mark.parametrize("face", [face for face in FRONT_ENDS if (SOURCE / face).is_dir()])
def test_a_face_comes_without_the_others(face):
    loaded = imported_by(f"import firstlayer.{face}")
    others = {f"firstlayer.{other}" for other in FRONT_ENDS - {face}}
    assert f"firstlayer.{face}" in loaded and not loaded & others
    assert not outside(loaded) & (FRAMEWORKS - USED_BY[face])


def test_numba_comes_with_the_first_kernel_call():
    build = "from firstlayer.numpy import Embedding; layer = Embedding(5, 4)"
    assert "numba" not in imported_by(build)
    call = build + "; import numpy as np; layer.vjp([1, 1])[1](np.ones((2, 4), 'float32'))"
    loaded = imported_by(call)
    assert "numba" in loaded and not outside(loaded) & FRAMEWORKS


def test_files_are_written_and_read_without_a_framework(tmp_path):
    loaded = imported_by(f"""
        from firstlayer.files.safetensors import read, write
        write({str(tmp_path / "a")!r}, {{}}, {{}})
        read({str(tmp_path / "a")!r})
    """)
    assert not outside(loaded) & (HEAVY | {"safetensors"})


def part_of(module: str) -> str:
    """Return the folder or file that a dotted name after ``firstlayer.`` belongs to."""
    first = module.partition(".")[0]
    exists = (SOURCE / first).is_dir() or (SOURCE / f"{first}.py").is_file()
    return first if first and exists else "__init__"


def imports_of(path: Path) -> set[str]:
    """Return the absolute names that the import statements of a file mention."""
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


def wrong_arrows(path: Path) -> list[str]:
    """Return the imports of a file that its folder may not make."""
    part = part_of(".".join(path.relative_to(SOURCE).with_suffix("").parts))
    ours, theirs = PARTS[part]
    wrong = []
    for name in imports_of(path):
        top, _, rest = name.partition(".")
        if top == "firstlayer":
            allowed = part_of(rest) in {part, "_array", "_check", *ours}
        else:
            allowed = top in theirs or top in sys.stdlib_module_names
        wrong += [] if allowed else [name]
    return sorted(wrong)


def name_of(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=name_of)
def test_arrows_point_down(path):
    assert wrong_arrows(path) == []


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
def test_an_arrow_that_points_up_is_found(where, line, name, tmp_path, monkeypatch):
    for part in ("kernels", "positions", "embeddings", "files", "numpy", "torch", "cli"):
        (tmp_path / part).mkdir()
    monkeypatch.setattr(sys.modules[__name__], "SOURCE", tmp_path)
    (tmp_path / where).write_text(f"import numpy as np\nfrom . import _check\n{line}\n")
    assert wrong_arrows(tmp_path / where) == [name]
