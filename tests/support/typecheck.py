"""Pytest plugin that checks types and shapes in signatures while tests run.

Use ``python -m pytest -p tests.support.typecheck -m "not rejects"``. Tests marked
``rejects`` pass wrong arguments on purpose and are excluded.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import torch
from beartype import BeartypeConf, beartype
from jaxtyping import install_import_hook

SOURCE = Path(__file__).parent.parent.parent / "src"
# Tests that run in other processes, and code that torch traces through.
EXCLUDED = ("docs", "files.py", "imports", "kernels", "threads", "torch", "equinox")

# Update rules, whose methods are compiled into kernels.
COMPILED = tuple(
    f"firstlayer.optim.{name}"
    for name in ("adagrad", "adam", "lion", "rmsprop", "rule", "sgd")
)

# An int is accepted for a float.
_check = beartype(conf=BeartypeConf(is_pep484_tower=True))


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Check the arguments and the result of ``function`` against its annotations."""
    # beartype resolves Self only in classes, and jaxtyping passes it functions.
    if Self in getattr(function, "__annotations__", {}).values():
        return function
    return _check(function)


def modules() -> list[str]:
    """Return the modules to check: the core and the NumPy front end."""
    files = [*SOURCE.glob("firstlayer/*.py")]
    for part in ("positions", "embeddings", "optim", "files", "numpy"):
        files += SOURCE.glob(f"firstlayer/{part}/**/*.py")
    names = [".".join(file.relative_to(SOURCE).with_suffix("").parts) for file in files]
    return [n for n in names if not n.endswith(".__init__") and n not in COMPILED]


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return (
        collection_path.name.startswith(tuple(f"test_{name}" for name in EXCLUDED)) or None
    )


def pytest_configure() -> None:
    install_import_hook(modules(), "tests.support.typecheck.checked")
    torch.compile = lambda model=None, **_: model
