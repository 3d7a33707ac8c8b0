"""The code blocks of the README and the docs run, and design.md agrees with the source."""

import re
from pathlib import Path

import pytest

from tests.support.run_alone import run_alone
from tests.test_public_names import NAMES

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def blocks(page: Path) -> list[str]:
    """Return the Python code blocks of a page."""
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_blocks_run(page, tmp_path):
    # In a process of their own: blocks of the README change the libraries they import.
    parts = [blocks(page)] if page.name != "README.md" else [[b] for b in blocks(page)]
    for part in parts:
        run_alone(*part, folder=tmp_path)


def test_readme_has_code_blocks():
    assert len(blocks(ROOT / "README.md")) >= 2


def test_design_lists_the_layout():
    design = (ROOT / "docs" / "design.md").read_text()
    table = design.partition("## Layout")[2].partition("\n\n")[0]
    listed = {name.rstrip("/") for name in re.findall(r"`([\w.]+/?)`", _first_cells(table))}
    source = ROOT / "src" / "firstlayer"
    folders = {path.parent.name for path in source.glob("*/__init__.py")}
    assert listed == folders | {"_array.py", "_check.py", "_interrupts.py", "_warmup.py"}


def test_design_names_existing_files():
    design = (ROOT / "docs" / "design.md").read_text()
    for path in re.findall(r"`((?:\w+/)+\w+\.py)`", design):
        assert (ROOT / "src" / "firstlayer" / path).exists() or (ROOT / path).exists(), path


@pytest.mark.parametrize("module", NAMES)
def test_design_lists_the_public_names(module):
    names = (ROOT / "docs" / "design.md").read_text().partition("## Names")[2]
    listed = set(re.findall(r"`([\w.]+)`", names))
    assert module in listed and {*NAMES[module]} - {"__version__"} <= listed


def _first_cells(table: str) -> str:
    return "\n".join(line.split("|")[1] for line in table.splitlines() if "|" in line)
