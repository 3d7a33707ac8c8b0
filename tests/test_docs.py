"""The code blocks of the README and the docs run, and design.md agrees with the source."""

import importlib
import inspect
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.test_public_names import NAMES

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").rglob("*.md"))
# Beginnings of printed values.
VALUE = re.compile(r"[-\d\[({'\"]|True|False|None|torch\.|$")


def blocks(page: Path) -> list[str]:
    """Return the Python code blocks of a page, also those inside of tabs.

    A block of another language, or one that begins with ``text``, is not run.
    """
    found = re.findall(
        r"^( *)```python\n(.*?)^\1```", page.read_text(), re.MULTILINE | re.DOTALL
    )
    return [textwrap.dedent(code) for _, code in found]


@pytest.mark.parametrize(
    "page", PAGES, ids=lambda page: str(page.relative_to(ROOT / "docs"))
)
def test_code_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_blocks(page)


def test_code_blocks_of_the_readme_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_blocks(ROOT / "README.md")


def run_blocks(page: Path) -> None:
    """Run the code blocks of a page, in order and in one namespace.

    The comment after a ``print(...)``, on its line or alone on the next one, begins with
    its output, unless it describes the output in words.
    """
    printed: list[tuple[int, str]] = []

    def record(*values: object) -> None:
        printed.append((sys._getframe(1).f_lineno, " ".join(map(str, values))))

    names: dict[str, object] = {"__name__": "__main__", "print": record}
    for i, code in enumerate(blocks(page)):
        printed.clear()
        exec(compile(code, f"{page.name}, block {i + 1}", "exec"), names)
        lines = [*code.splitlines(), ""]
        for number, text in printed:
            after, below = re.search(r" # (.+)", lines[number - 1]), lines[number]
            shown = after[1] if after else below.strip().removeprefix("# ")
            is_shown = shown == text or shown.startswith((f"{text}:", f"{text} "))
            assert is_shown or not VALUE.match(shown), (
                f"{page.name}, block {i + 1}: {text!r} is shown as {shown!r}"
            )


def test_code_fits_on_a_page():
    # Wider lines scroll sideways in a window of 1400 pixels.
    fences = re.compile(r"^( *)```.*?\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
    for page in PAGES:
        codes = [textwrap.dedent(code) for _, code in fences.findall(page.read_text())]
        wide = [line for code in codes for line in code.splitlines() if len(line) > 84]
        assert not wide, page


def test_wrong_output_on_a_page_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1 + 1)  # 2: the sum\nprint(2 * 3)\n# 7\n```\n")
    with pytest.raises(AssertionError, match=r"page.md, block 1: '6' is shown as '7'"):
        run_blocks(page)


def test_the_site_builds_without_warnings(tmp_path):
    # Dead links and unknown names of the reference are warnings.
    # Copies, because Zensical follows links and writes the site next to its config.
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "zensical.toml", tmp_path)
    (tmp_path / "src").symlink_to(ROOT / "src")
    command = [Path(sys.executable).with_name("zensical"), "build", "--strict"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {str(p.relative_to(tmp_path / "site")) for p in tmp_path.glob("site/**/*.html")}
    for page in PAGES:
        name = page.relative_to(ROOT / "docs").with_suffix("")
        expected = "index.html" if name.name == "index" else f"{name}/index.html"
        assert expected in pages
    _check_constructors(tmp_path / "site" / "reference")


def _check_constructors(reference: Path) -> None:
    """Check that row optimizers have the signatures that they have at run time."""
    text = "".join(
        (reference / f"{x}/index.html").read_text() for x in ("optim", "equinox")
    )
    for module in (name for name in NAMES if name.endswith("optim")):
        for name in (name for name in NAMES[module] if name[:3] == "Row"):
            path = re.escape(f'id="{module}.{name}"')
            (shown,) = re.findall(rf"{path}.*?doc-signature(.*?)</div>", text, re.DOTALL)
            words = re.findall(r"\w+", re.sub("<[^>]+>", " ", shown))
            value = getattr(importlib.import_module(module), name)
            assert {*inspect.signature(value).parameters} <= {*words}, (module, name)


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_outside_of_the_site_lead_to_files(name):
    links = re.findall(r"\]\(([^)]+)\)", (ROOT / name).read_text())
    missing = [to for to in links if "://" not in to and not (ROOT / to).exists()]
    assert not missing


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
