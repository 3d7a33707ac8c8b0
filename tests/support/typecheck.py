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
# What runs in other processes, and what torch traces: it cannot follow the checks.
LEFT_OUT = ("docs", "files.py", "imports", "kernels", "threads", "torch", "equinox")

# An int is good where a float is asked for.
_check = beartype(conf=BeartypeConf(is_pep484_tower=True))


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Check the arguments and the result of ``function`` against its annotations."""
    # beartype knows what Self is in a class only, and jaxtyping hands it functions.
    if Self in getattr(function, "__annotations__", {}).values():
        return function
    return _check(function)


def modules() -> list[str]:
    """Return the names of the modules to check: the core's and the NumPy face's."""
    files = [*SOURCE.glob("firstlayer/*.py")]
    for part in ("positions", "embeddings", "optim", "files", "numpy"):
        files += SOURCE.glob(f"firstlayer/{part}/**/*.py")
    names = [".".join(file.relative_to(SOURCE).with_suffix("").parts) for file in files]
    return [name for name in names if not name.endswith(".__init__")]


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return (
        collection_path.name.startswith(tuple(f"test_{name}" for name in LEFT_OUT)) or None
    )


def pytest_configure() -> None:
    install_import_hook(modules(), "tests.support.typecheck.checked")
    torch.compile = lambda model=None, **_: model
