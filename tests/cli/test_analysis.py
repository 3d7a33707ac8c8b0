"""The commands bench, memory and positions."""

import json
import os
import signal
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from firstlayer.analysis import lookup, position_study
from firstlayer.analysis import memory as memory_analysis
from firstlayer.analysis import plot as drawing
from firstlayer.cli import bench, memory, positions
from firstlayer.cli._group import firstlayer
from firstlayer.files.safetensors import write

COMMANDS = {"bench": bench, "memory": memory, "positions": positions}
TINY = ["--layers=1", "--width=16", "--heads=2", "--length=16", "--batch=4", "--steps=3"]
TINY += ["--stretch=2", "--stretch=1", "--seeds=1"]
BENCH = ["bench", "--rows=20", "--batch=2", "--width=4", "--length=3", "--rounds=1"]
MEMORY = ["memory", "100x8", "--tokens=10", "--optimizer=sgd", "--optimizer=row-adamw"]


def run(*arguments: Any, **options: Any) -> Result:
    return CliRunner().invoke(firstlayer, list(map(str, arguments)), **options)


def data(*arguments: Any, **options: Any) -> Any:
    done = run(*arguments, "--json", **options)
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text"
    words = np.random.default_rng(0).choice([b"one ", b"two ", b"three "], 4000)
    path.write_bytes(b"".join(words))
    return path


# Every command.


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_examples_and_imports_nothing_heavy(name):
    code = (
        "import sys; from firstlayer.cli import main\n"
        "sys.argv = ['firstlayer', sys.argv[1], '-h']\n"
        "try: main()\nexcept SystemExit: pass\n"
        "heavy = {'numpy', 'torch', 'matplotlib', 'rich', 'numba'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, name], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Examples:" in done.stdout and f"firstlayer {name} " in done.stdout


@pytest.mark.rejects
@pytest.mark.parametrize("file", ["a.gif", "plot", "a.txt"])
@pytest.mark.parametrize("name", COMMANDS)
def test_unknown_plot_format_is_rejected_before_any_work(name, file):
    done = run(name, "--plot", file)
    assert done.exit_code == 2 and done.stdout == ""
    assert "--plot must end in one of .png, .svg, .pdf" in done.stderr
    assert f"got {file!r}" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.rejects
@pytest.mark.parametrize("name", COMMANDS)
def test_existing_plot_is_not_replaced(name, tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(b"mine")
    done = run(name, "--plot", path)
    assert done.exit_code == 1 and path.read_bytes() == b"mine"
    assert done.stderr == f"firstlayer: {path} exists; use --force to replace it\n"


@pytest.mark.rejects
@pytest.mark.parametrize("name", COMMANDS)
def test_plot_in_a_missing_folder_is_rejected_before_any_work(name, tmp_path):
    path = tmp_path / "nowhere" / "a.png"
    done = run(name, "--plot", path)
    assert done.exit_code == 1
    assert f"no folder {path.parent} to write {path} in" in done.stderr


@pytest.mark.rejects
def test_missing_matplotlib_error_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = run(*BENCH, "--plot", tmp_path / "a.png")
    assert done.exit_code == 1 and not os.listdir(tmp_path)
    assert (
        done.stderr == "firstlayer: this needs matplotlib: pip install 'firstlayer[plot]'\n"
    )


def test_choices_in_help_match_the_library():
    assert set(positions.QUICK_SCHEMES) < set(positions.SCHEMES)
    assert positions.FORMATS == drawing.FORMATS
    assert memory.OPTIMIZERS == tuple(memory_analysis.OPTIMIZERS)
    assert memory.DTYPES == tuple(memory_analysis.DTYPES)
    assert set(memory.DEFAULT_OPTIMIZERS) < set(memory.OPTIMIZERS)
    defaults = {option.name: option.default for option in memory.command.params}
    assert round(defaults["allow"] * 1e9) <= memory_analysis.ALLOWED
    help_of = {option.name: option.help for option in positions.command.params[1:]}  # pyright: ignore
    for name in ("length", "steps", "layers", "width", "heads", "batch"):
        default = getattr(position_study.Setting(), name)
        assert f"[default: {default}]" in help_of[name]
    help_of = {option.name: option.help for option in bench.command.params}  # pyright: ignore
    for name, values in (
        ("rows", lookup.ROWS),
        ("batches", lookup.BATCHES),
        ("widths", lookup.WIDTHS),
    ):
        assert f"[default: {', '.join(map(str, values))}]" in help_of[name]


# firstlayer bench


def test_bench_prints_every_library_and_writes_a_plot(tmp_path):
    path = tmp_path / "a.svg"
    done = run(*BENCH, "--batch=1", "--plot", path)
    assert done.exit_code == 0, done.stderr
    head, *rows = done.stdout.splitlines()
    assert head.split() == [
        "rows",
        "width",
        "ids",
        "firstlayer",
        "numpy",
        "firstlayer.torch",
        "torch",
    ]
    assert [row.split()[:5] for row in rows[:2]] == [
        ["20", "4", "1", "×", "3"],
        ["20", "4", "2", "×", "3"],
    ]
    assert "GB/s" in rows[-1] and path.read_bytes().startswith(b"<?xml")
    assert done.stderr == ""


def test_bench_json_equals_text():
    found = data(*BENCH, "--seed=4")
    (first, *_), libraries = found["readings"], [r["library"] for r in found["readings"]]
    assert libraries == ["firstlayer", "numpy", "firstlayer.torch", "torch"]
    assert first["tokens_per_second"] == pytest.approx(6 / first["seconds"])
    assert found["missing"] == [] and found["bandwidth"] > 0


def test_bench_names_missing_libraries(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    head, *_, last = run(*BENCH).stdout.splitlines()
    assert head.split() == ["rows", "width", "ids", "firstlayer", "numpy"]
    assert last == "torch is not installed"


@pytest.mark.rejects
def test_bench_rejects_a_table_without_rows():
    done = run("bench", "--rows=0")
    assert done.exit_code == 2
    want = "--rows must be an integer of at least 1, got 0 (see firstlayer bench --help)"
    assert done.stderr == f"firstlayer: {want}\n"


# firstlayer memory


def test_memory_measures_the_requested_tables():
    found = data(*MEMORY, "--dtype=float32", "--dtype=bfloat16", "--head-dim=32")
    assert [(t["dtype"], t["optimizer"], t["how"]) for t in found["tables"]] == [
        ("float32", "sgd", "allocated"),
        ("float32", "row-adamw", "allocated"),
        ("bfloat16", "sgd", "allocated"),
        ("bfloat16", "row-adamw", "allocated"),
    ]
    assert found["tables"][0]["measured"]["parameters"] == 100 * 8 * 4
    assert found["tables"][1]["computed"]["gradient"] == 10 * (8 * 4 + 8)
    assert found["tables"][0]["tokens"] == 10
    rotary = [table for table in found["positions"] if table["scheme"] == "rotary"]
    assert rotary[0]["whole"] == 8 * 32 * rotary[0]["length"]


def test_memory_prints_and_plots(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(b"old")
    done = run(*MEMORY, "--allow=0", "--plot", path, "--force")
    assert done.exit_code == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "100 × 8, float32:" and lines[1].startswith("optimizer ")
    assert lines[2].startswith("sgd ") and lines[2].endswith("virtual")
    assert lines[3].startswith("row-adamw ") and lines[3].endswith("computed")
    assert max(map(len, lines)) <= 80
    assert "positions of width 8, rotary on heads of 64:" in lines
    assert path.read_bytes().startswith(b"\x89PNG")


def test_memory_reads_tables_of_a_checkpoint(tmp_path):
    path = tmp_path / "model.safetensors"
    tensors = {
        "token.weight": np.zeros((50, 6), np.float16),
        "position.weight": np.zeros((9, 6), np.float32),
        "norm.weight": np.zeros(6, np.float32),
    }
    write(path, tensors, {})
    for where in (path, tmp_path):
        found = data("memory", where, "--optimizer=sgd", "--tokens=3")["tables"]
        assert [(t["name"], t["rows"], t["width"], t["dtype"]) for t in found] == [
            ("token.weight", 50, 6, "float16"),
            ("position.weight", 9, 6, "float32"),
        ]


def test_memory_defaults_to_common_sizes():
    assert [tuple(table) for table in memory._tables(())] == [
        ("small", 10_000, 256, "float32"),
        ("medium", 50_000, 512, "float32"),
        ("large", 100_000, 1024, "float32"),
        ("GPT-3", 50_257, 12_288, "float32"),
    ]
    assert [tuple(t) for t in memory._tables(("1_000x20", "5,000×30"))] == [
        ("", 1000, 20, "float32"),
        ("", 5000, 30, "float32"),
    ]


@pytest.mark.rejects
@pytest.mark.parametrize(
    "argument, code, message",
    [
        ("0x8", 2, "a table must have rows and width, got '0x8'"),
        ("missing.safetensors", 1, "no file or folder missing.safetensors"),
        ("1000", 1, "no file or folder 1000; a size is written as ROWSxWIDTH, such as "),
    ],
)
def test_memory_rejects_arguments_that_are_not_tables(argument, code, message):
    done = run("memory", argument)
    assert done.exit_code == code and done.stdout == ""
    assert message in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.rejects
def test_memory_rejects_damaged_checkpoints_and_those_without_tables(tmp_path):
    path = tmp_path / "a.safetensors"
    write(path, {"norm.weight": np.zeros(6, np.float32)}, {})
    done = run("memory", path)
    assert done.exit_code == 1 and f"{path} has no embedding table" in done.stderr
    path.write_bytes(path.read_bytes()[:20])
    done = run("memory", path)
    assert done.exit_code == 1 and done.stderr.count("\n") == 1


def test_memory_of_a_table_beyond_any_memory_is_computed():
    sizes = "2000000000x100", "9000000000000000000x1000"
    options = ["--optimizer=row-adamw", "--optimizer=sgd", "--tokens=4"]
    for table in data("memory", *sizes, *options)["tables"]:
        entries = table["rows"] * table["width"]
        assert table["computed"]["parameters"] == 4 * entries
        assert table["how"] in (None, "virtual")
        assert (table["how"] == "virtual") == (
            table["optimizer"] == "sgd" and table["rows"] == 2_000_000_000
        )


@pytest.mark.rejects
def test_memory_rejects_an_odd_head_dim_before_measuring():
    done = run("memory", "100x8", "--head-dim=7")
    assert done.exit_code == 1 and "even, got 7" in done.stderr


# firstlayer positions


def test_positions_compares_schemes_on_a_file(text, tmp_path):
    path = tmp_path / "report.html"
    wanted = ["--scheme=rotary", "--scheme=alibi", "--scheme=alibi"]
    done = run("positions", text, *TINY, *wanted, "--plot", path)
    assert done.exit_code == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["scheme", "16", "(1×)", "32", "(2×)", "rise"]
    assert [line.split("  ")[0] for line in lines[1:6]] == [
        "rotary",
        "rotary + linear",
        "rotary + ntk",
        "rotary + yarn",
        "alibi",
    ]
    assert lines[-3].startswith("At 16 bytes (the training length) the lowest loss is ")
    assert lines[-2].startswith("At 32 bytes (2× the training length) the lowest loss is ")
    assert lines[-1] == "With one seed, differences may be chance; compare several."
    assert "2 schemes, each 1 × 3 steps of 4 × 16 bytes" in done.stderr
    page = path.read_text()
    assert page.startswith("<!doctype html>") and "rotary + yarn" in page


def test_positions_json_equals_text_and_quiet_is_silent(text):
    options = ["positions", *TINY, "--scheme=none", "-q", "--seed=5"]
    found = data(*options, text)
    assert found == data(*options, "-", input=text.read_bytes()) | {
        "trained": found["trained"]
    }
    again = data(*options, text, text)
    assert found["setting"]["seed"] == 5 and found["setting"]["stretches"] == [1.0, 2.0]
    assert again["bytes"] == 2 * found["bytes"] == 2 * text.stat().st_size
    assert found["trained"][0]["curves"][0]["losses"][0] > 2
    assert run(*options, text).stderr == ""


@pytest.fixture
def pressed(monkeypatch):
    """Press Ctrl-C when a scheme's training begins."""

    def at(scheme):
        measure = position_study.measure

        def measuring(text, name, **options):
            if name == scheme:
                signal.raise_signal(signal.SIGINT)
            return measure(text, name, **options)

        monkeypatch.setattr(position_study, "measure", measuring)

    return at


def test_ctrl_c_prints_completed_schemes(text, tmp_path, pressed):
    path, wanted = tmp_path / "a.html", ["--scheme=none", "--scheme=alibi", "--scheme=t5"]
    pressed("alibi")
    done = run("positions", text, *TINY, *wanted, "--plot", path, "--json", "-q")
    assert done.exit_code == 130
    assert done.stderr == "firstlayer: interrupted before alibi, t5\n"
    found = json.loads(done.stdout)
    assert [each["scheme"] for each in found["trained"]] == ["none"]
    assert ">none</th>" in path.read_text() and "alibi" not in path.read_text()


@pytest.mark.rejects
def test_ctrl_c_before_the_first_scheme_prints_nothing(text, tmp_path, pressed):
    pressed("none")
    options = ["--scheme=none", "-q", "--plot", tmp_path / "a.html"]
    done = run("positions", text, *TINY, *options)
    assert done.exit_code == 130 and done.stdout == ""
    assert done.stderr.split("\n")[-2:] == ["firstlayer: interrupted", ""]
    assert os.listdir(tmp_path) == [text.name]


def test_the_same_seed_gives_the_same_losses(text):
    options = ["positions", text, *TINY, "--scheme=kerple", "-q"]
    losses = [
        data(*options, f"--seed={seed}")["trained"][0]["curves"][0]["losses"]
        for seed in (1, 1, 2)
    ]
    assert losses[0] == losses[1] != losses[2]


def test_quick_settings_can_be_overridden():
    setting = positions._setting(True, {"length": 20, "steps": None, "stretches": ()})
    assert (setting.length, setting.targets, setting.layers, setting.steps) == (
        20,
        20,
        2,
        300,
    )
    full = positions._setting(False, {"stretches": (4.0, 1.0, 4.0)})
    assert full.stretches == (1.0, 4.0) and full.steps == 600


def test_positions_defaults_to_python_source(monkeypatch):
    monkeypatch.setattr(position_study, "python_source", lambda: b"import this")
    assert positions._text(()) == b"import this"


@pytest.mark.rejects
def test_positions_rejects_missing_empty_and_short_texts(tmp_path):
    empty, short = tmp_path / "empty", tmp_path / "short"
    empty.write_bytes(b"")
    short.write_bytes(b"few words")
    for argument, message in [
        (tmp_path / "missing", "no such file or directory"),
        (empty, f"{empty} is empty"),
        (short, "text must have at least 10880 bytes"),
        (tmp_path, "is a directory"),
    ]:
        done = run("positions", argument, "-q", "--scheme=none")
        assert done.exit_code == 1 and done.stdout == "", done.stderr
        assert message in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.rejects
def test_positions_rejects_bad_schemes_and_sizes(text):
    done = run("positions", text, "--scheme=rope")
    assert done.exit_code == 2 and "'rope' is not one of 'none'" in done.stderr
    done = run("positions", text, "--width=10")
    assert done.exit_code == 1 and "multiple of twice the heads, 8, got 10" in done.stderr
