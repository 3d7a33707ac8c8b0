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
FACES = USED_BY.keys()

# Arrows point down: what each part may import of Firstlayer, and of the world beyond the
# standard library, wherever in a file the import stands.
PARTS = {
    "kernels": ({"kernels", "_array", "_check"}, {"numpy", "numba", "llvmlite"}),
    "core": (
        {"core", "kernels"},
        {"numpy", "jaxtyping", "ml_dtypes", "safetensors"},
    ),
    "numpy": ({"numpy", "core", "kernels"}, {"numpy", "jaxtyping", "ml_dtypes"}),
    "torch": (
        {"torch", "core", "kernels"},
        {"numpy", "jaxtyping", "safetensors", "torch"},
    ),
    "equinox": ({"equinox", "core", "kernels"}, {"numpy", "jaxtyping", "jax", "equinox"}),
    "compat": (
        {"compat", "numpy", "torch", "equinox", "core"},
        {"numpy", "jaxtyping", "torch", "jax", "equinox"},
    ),
    "study": (
        {"study", "numpy", "torch", "core", "kernels"},
        {"numpy", "jaxtyping", "ml_dtypes", "safetensors", "tokenizers", "torch"}
        | {"matplotlib"},
    ),
    "cli": ({"cli", "study", "core"}, {"numpy", "click", "rich"}),
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


@pytest.mark.parametrize("face", [face for face in FACES if (SOURCE / face).is_dir()])
def test_a_face_comes_without_the_others(face):
    loaded = imported_by(f"import firstlayer.{face}")
    others = {f"firstlayer.{other}" for other in FACES - {face}}
    assert f"firstlayer.{face}" in loaded and not loaded & others
    assert not outside(loaded) & (FRAMEWORKS - USED_BY[face])


def test_numba_comes_with_the_first_kernel_call():
    build = "from firstlayer.numpy import Embedding; layer = Embedding(5, 4)"
    assert "numba" not in imported_by(build)
    call = build + "; import numpy as np; layer.vjp([1, 1])[1](np.ones((2, 4), 'float32'))"
    loaded = imported_by(call)
    assert "numba" in loaded and not outside(loaded) & FRAMEWORKS


def test_safetensors_comes_with_the_first_file(tmp_path):
    assert "safetensors" not in imported_by(
        "import firstlayer.files, firstlayer.numpy.files"
    )
    loaded = imported_by(f"""
        from firstlayer.files import read, write
        write({str(tmp_path / "a")!r}, {{}}, {{}})
        read({str(tmp_path / "a")!r})
    """)
    assert "safetensors" in loaded and not outside(loaded) & HEAVY


def part_of(module: str) -> str:
    """Return which part of the package a dotted name after ``firstlayer.`` belongs to."""
    first = module.partition(".")[0]
    is_package = (SOURCE / first).is_dir() and first != ""
    return "cli" if first == "__main__" else first if is_package else "core"


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
    """Return the imports of a file that its part may not make."""
    part = part_of(".".join(path.relative_to(SOURCE).with_suffix("").parts))
    ours, theirs = PARTS[part]
    wrong = []
    for name in imports_of(path):
        top, _, rest = name.partition(".")
        if top == "firstlayer":
            allowed = part_of(rest) in ours or rest.partition(".")[0] in ours
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
        ("x.py", "from .numpy import token", "firstlayer.numpy.token"),
        ("x.py", "from . import numpy", "firstlayer.numpy"),
        ("x.py", "def f():\n    import torch.nn", "torch.nn"),
        ("x.py", "import firstlayer.cli.main", "firstlayer.cli.main"),
        ("kernels/x.py", "from ..rows import Rows", "firstlayer.rows.Rows"),
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
    for part in ("kernels", "numpy", "torch", "cli"):
        (tmp_path / part).mkdir()
    monkeypatch.setattr(sys.modules[__name__], "SOURCE", tmp_path)
    (tmp_path / where).write_text(f"import numpy as np\nfrom . import _check\n{line}\n")
    assert wrong_arrows(tmp_path / where) == [name]
