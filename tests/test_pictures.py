"""Pictures and pages that scripts in docs write: up to date, and correct."""

import importlib.util
import json
import re
from pathlib import Path

import numpy as np
import pytest

from tests.test_public_names import NAMES

DOCS = Path(__file__).parent.parent / "docs"


def script(name):
    """Import a script of the docs folder."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pictures = script("pictures")
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_pictures_are_up_to_date(name):
    # Coordinates may differ in their last digits between processors. Ids of glyphs and
    # clip paths are hashes of coordinates.
    def parts(text):
        text = re.sub(r'(id="|#)[mp][0-9a-f]{10}', "", text)
        numbers = [float(number) for number in NUMBER.findall(text)]
        return NUMBER.sub("0", text), np.array(numbers)

    words, numbers = parts((DOCS / "pictures" / f"{name}.svg").read_text())
    drawn_words, drawn_numbers = parts(pictures.svg(name))
    assert drawn_words == words, "run python docs/pictures.py"
    np.testing.assert_allclose(drawn_numbers, numbers, atol=0.01)


def test_every_picture_is_shown_on_a_page():
    text = "".join(page.read_text() for page in DOCS.rglob("*.md"))
    assert {*re.findall(r"pictures/(\w+)\.svg", text)} == {*pictures.PICTURES}
    drawn = (DOCS / "pictures").glob("*.svg")
    assert {path.stem for path in drawn} == {*pictures.PICTURES}


def test_row_weights_are_dense_where_they_are_read():
    dense = pictures.dense_weights()
    stored, read = pictures.row_weights("exact")
    steps = [*read]
    np.testing.assert_allclose([*read.values()], dense[steps], rtol=1e-5)
    after = [*pictures.GRADIENTS]
    np.testing.assert_allclose(stored[after], dense[after], rtol=1e-5)
    lazy, _ = pictures.row_weights("lazy")
    assert lazy[-1] - dense[-1] > 0.5


def test_command_line_page_is_up_to_date():
    command_line = script("command_line")
    assert command_line.PAGE.read_text() == command_line.page(), (
        "run python docs/command_line.py"
    )


@pytest.mark.parametrize("module", NAMES)
def test_every_public_name_is_in_the_reference(module):
    text = "".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    described = {*re.findall(r"^::: (\S+)$", text, re.MULTILINE)}
    # Modules; their names have entries of their own.
    modules = {"__version__", "functional", "ngram", "positions", "rows"}
    names = {f"{module}.{name}" for name in {*NAMES[module]} - modules}
    assert names <= described


def test_tables_of_the_speed_page_are_up_to_date():
    tables = script("speed_tables")
    page, results = tables.PAGE.read_text(), json.loads(tables.RESULTS.read_text())
    assert tables.filled(page, results["speed"]) == page, "run python docs/speed_tables.py"
