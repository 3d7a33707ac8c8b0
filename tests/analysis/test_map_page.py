"""Maps of tables and positions, and their pages in a browser."""

import json
import re
import shutil

import numpy as np
import pytest
from playwright.sync_api import sync_playwright
from safetensors.numpy import save_file

from firstlayer.analysis.map_page import map_page, positions_page
from firstlayer.analysis.position_rows import position_rows
from firstlayer.analysis.table_map import table_map
from firstlayer.word_vectors.neighbors import neighbors, parse
from firstlayer.word_vectors.vectors import Vectors
from tests.support.command import error_message, stdout_of

HOSTILE = ["</script><b>", "<!--", 'a"b', "\x1b[2J", "日本", "a&b"]


def example_table(rows=300, width=16, seed=0):
    """Return a table in which the words of a group of 10 are near each other."""
    rng = np.random.default_rng(seed)
    words = HOSTILE + [f"word{i}" for i in range(rows - len(HOSTILE))]
    centers = rng.standard_normal((rows // 10, width))
    weight = centers[np.arange(rows) // 10] + 0.4 * rng.standard_normal((rows, width))
    return Vectors(words, (weight * rng.uniform(0.5, 2, (rows, 1))).astype(np.float32))


@pytest.fixture(scope="module")
def table():
    return example_table()


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        path = shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def page_file(table, tmp_path_factory):
    path = tmp_path_factory.mktemp("map") / "map.html"
    path.write_text(map_page(table_map(table), title="vectors & <words>"), "utf-8")
    return path


@pytest.fixture
def opened(browser, request):
    """Return a function that opens a file; no page may log or raise anything."""
    logged = []

    def open_file(path, *, size=(1200, 800), dark=False):
        context = browser.new_context(
            viewport={"width": size[0], "height": size[1]},
            color_scheme="dark" if dark else "light",
            reduced_motion="reduce",
            offline=True,
        )
        request.addfinalizer(context.close)
        page = context.new_page()
        page.on("console", lambda message: logged.append(message.text))
        page.on("pageerror", lambda error: logged.append(str(error)))
        page.goto(path.as_uri())
        return page

    yield open_file
    assert logged == []


def listed(page):
    """Return the words and cosines in the panel."""
    rows = page.locator("#near li").all_inner_texts()
    pairs = [re.split(r"\s*\n\s*", row.strip()) for row in rows]
    return [word for word, _ in pairs], [float(cosine) for _, cosine in pairs]


def expected(table, query, count=15):
    (found,) = neighbors(table, parse([query]), count=count)
    return [n.word for n in found.found], [n.cosine for n in found.found]


def assert_neighbors(page, table, query):
    words, cosines = listed(page)
    wanted, values = expected(table, query)
    # Vectors in the page have 8 bits.
    np.testing.assert_allclose(cosines, values, atol=0.015)
    assert wanted[0] in words[:2] and len(set(words) & set(wanted)) >= 12


def background(page):
    return page.evaluate("getComputedStyle(document.body).backgroundColor")


def colors_on(page):
    """Return the number of different colors on the canvas."""
    return page.evaluate("""() => {
        const c = document.getElementById("map");
        const d = new Uint32Array(c.getContext("2d").getImageData(0, 0, c.width, c.height)
            .data.buffer);
        return new Set(d).size;
    }""")


def test_search_sums_and_clicks_show_the_neighbors_of_the_library(opened, page_file, table):
    page = opened(page_file)
    assert page.title() == "vectors & <words>"
    assert page.locator("b", has_text="</script>").count() == 0
    assert colors_on(page) > 50
    page.keyboard.press("/")
    page.keyboard.type("word12")
    assert page.locator("#suggestions li").first.inner_text().split("\n")[0] == "word12"
    assert page.locator("#suggestions li").count() == 8
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    chosen = page.locator("#panel h2").inner_text()
    assert chosen in {f"word{i}" for i in range(120, 130)}
    assert_neighbors(page, table, chosen)
    page.fill("#search", "WORD40")
    page.press("#search", "Enter")
    assert page.locator("#panel h2").inner_text() == "word40"
    assert_neighbors(page, table, "word40")
    # The selected word is in the middle of the map.
    box = page.locator("#map").bounding_box()
    middle = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.locator("#map").focus()
    page.keyboard.press("Escape")
    assert page.locator("#near").count() == 0 and page.locator("#clusters li").count() > 1
    page.mouse.move(*middle)
    assert page.locator("#tip").inner_text() == "word40"
    page.mouse.click(*middle)
    assert page.locator("#panel h2").inner_text() == "word40"
    page.fill("#sum", "word40 - word41 + word90")
    page.press("#sum", "Enter")
    assert page.locator("#panel h2").inner_text() == "word40 − word41 + word90"
    assert_neighbors(page, table, "word40 - word41 + word90")
    page.fill("#sum", "word40 + nothing")
    page.press("#sum", "Enter")
    assert "“nothing” is not on this map" in page.locator("#problem").inner_text()
    page.locator("#near button").first.click()
    assert page.locator("#panel h2").inner_text() in table.words


def test_hostile_words_are_text(opened, page_file, table):
    page = opened(page_file)
    for word in HOSTILE[:3]:
        page.fill("#search", word)
        page.press("#search", "Enter")
        assert page.locator("#panel h2").inner_text() == word
        assert_neighbors(page, table, word)
    assert page.locator("script").count() == 2


def test_views_change_the_picture_and_keys_move_it(opened, page_file):
    page = opened(page_file)
    before = page.locator("#map").screenshot()
    for change in (
        lambda: page.select_option("#layout", "pca"),
        lambda: page.select_option("#color", "norm"),
        lambda: page.select_option("#size", "norm"),
        lambda: page.uncheck("#labels"),
        lambda: page.check("#density"),
        lambda: page.locator("#map").press("+"),
        lambda: page.locator("#map").press("ArrowLeft"),
        lambda: page.mouse.wheel(0, -200) or page.locator("#closer").click(),
        lambda: page.click("#theme"),
    ):
        change()
        page.wait_for_timeout(60)
        after = page.locator("#map").screenshot()
        assert after != before
        before = after
    assert "Norm of the row" in page.locator("#legend").inner_text()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_narrow_screens_and_themes(opened, page_file, dark):
    page = opened(page_file, size=(390, 800), dark=dark)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    stage, panel = (page.locator(part).bounding_box() for part in (".stage", "#panel"))
    assert stage["height"] > 250 and panel["y"] >= stage["y"] + stage["height"] - 1
    assert (background(page) == "rgb(22, 24, 27)") == dark
    page.click("#theme")
    assert (background(page) == "rgb(22, 24, 27)") != dark


def test_positions_are_compared_and_read_off(opened, tmp_path):
    angles = np.arange(40)[:, None] * np.array([1.0, 0.1])
    rows = np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
    save_file(
        {"embeddings.position_embeddings.weight": rows}, tmp_path / "model.safetensors"
    )
    found = position_rows(tmp_path)
    distance = np.arange(40)[:, None] - np.arange(40)
    cosines = (np.cos(distance) + np.cos(0.1 * distance)) / 2
    np.testing.assert_allclose(found.cosines, cosines, atol=1e-6)
    np.testing.assert_allclose(found.norms, 2**0.5, rtol=1e-6)
    output = stdout_of("map", tmp_path, "--positions", "-o", tmp_path / "p.html")
    assert "40 rows" in output
    page = opened(tmp_path / "p.html", size=(390, 800))
    page.locator("#cosines").focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
    shown = page.locator("#value").inner_text()
    assert shown == f"positions 3 and 1: {cosines[3, 1]:.3f}"
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert positions_page(found, title="a").count("<script") == 2


def test_rows_without_a_direction_are_left_out():
    table = example_table(60)
    table.weight[7], table.weight[9, 2] = 0, np.nan
    table.words[11] = ""
    found = table_map(table, max_rows=50, seed=3)
    assert found.places.tolist() == [i for i in range(53) if i not in (7, 9, 11)]
    assert found.words == [table.words[i] for i in found.places] and found.rows == 60
    assert len(found.labels) == found.clusters.max() + 1
    for names, cluster in zip(found.labels, range(len(found.labels)), strict=True):
        inside = {
            w for w, c in zip(found.words, found.clusters, strict=True) if c == cluster
        }
        assert set(names) & inside
    with pytest.raises(ValueError, match="at least 2 rows with a direction, got 0"):
        table_map(Vectors(["a", "b"], np.zeros((2, 3), np.float32)))


def test_rows_after_those_on_the_map_are_not_read():
    read = []

    class Recorded(Vectors):
        def take(self, numbers):
            read.extend(numbers)
            return super().take(numbers)

    weight = np.random.default_rng(0).standard_normal((5000, 4), np.float32)
    weight[:1500] = 0
    found = table_map(Recorded([f"word{i}" for i in range(5000)], weight), max_rows=20)
    assert found.places.tolist() == [*range(1500, 1520)]
    norms = np.linalg.norm(weight[1500:1520], axis=1)
    np.testing.assert_allclose(found.norms, norms, rtol=1e-6)
    assert read == [*range(2048)]


def test_command_writes_one_page_and_replaces_it_only_if_told(tmp_path):
    table = example_table(40)
    source, page = tmp_path / "vectors.txt", tmp_path / "map.html"
    lines = [
        f"{word} {' '.join(map(str, row))}"
        for word, row in zip(table.words[6:], table.weight[6:].tolist(), strict=True)
    ]
    source.write_text("\n".join(lines))
    result = json.loads(stdout_of("map", source, "-o", page, "--max-rows", 30, "--json"))
    assert result["rows"] == 30 and result["bytes"] == page.stat().st_size
    assert "src=" not in page.read_text() and "href" not in page.read_text()
    before = page.read_bytes()
    assert "exists; use --force" in error_message("map", source, "-o", page)
    stdout_of("map", source, "-o", page, "--max-rows", 30, "--force", "-q")
    assert page.read_bytes() == before
    assert "has no table of positions" in error_message(
        "map", _model_without_positions(tmp_path), "--positions", "-o", tmp_path / "x.html"
    )


def _model_without_positions(folder):
    path = folder / "tokens.safetensors"
    save_file({"wte.weight": np.ones((3, 2), np.float32)}, path)
    return path
