"""Runs the code blocks of the README and the docs."""

import re
from pathlib import Path

import pytest

from tests.support.run_alone import run_alone

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def blocks(page: Path) -> list[str]:
    """Return the Python code blocks of a page."""
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_blocks_run(page, tmp_path):
    # In processes of their own: some blocks change the libraries they import.
    for block in blocks(page):
        run_alone(block, folder=tmp_path)


def test_readme_has_code_blocks():
    assert len(blocks(ROOT / "README.md")) >= 2
