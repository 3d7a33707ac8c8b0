"""Write the tables of docs/speed.md from docs/speed.json.

Run it after measuring, on a machine that does nothing else::

    python -m benchmarks --rounds 4 --json > docs/speed.json
    python docs/speed_tables.py
"""

import json
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
RESULTS, PAGE = DOCS / "speed.json", DOCS / "speed.md"
#: Beginnings of the names in each table, by its title. A row is in the first that fits.
TABLES = {
    "small calls": r"small:",
    "training on disk": r"training step on disk",
    "half precision": r"(bfloat16|float16) ",
    "large sizes": r"large:",
    "threads": r"threads:",
    "training": r"(train|Adam step|exact AdamW|table group)",
    "quantized rows": r"(int8|int4|fp8)",
    "n-grams and growing tables": r"(Engram|assign|growing)",
    "torch layers": r"torch ",
    "NumPy layers": r"",
}
#: Place of a table in the page: comments before and after it.
PLACE = r"(<!-- table: {} -->\n).*?(<!-- end -->)"


def filled(text: str, results: list[dict[str, Any]]) -> str:
    """Return a page with the results in its tables.

    Args:
        text: The page.
        results: Results of the benchmarks; see ``benchmarks/timing.py``.
    """
    rows: dict[str, list[str]] = {title: [] for title in TABLES}
    for result in results:
        name = result["name"]
        title = next(t for t, start in TABLES.items() if re.match(start, name))
        rows[title].append(_row(result))
    for title, lines in rows.items():
        head = ["| | ours | peer's time / ours |", "|---|---|---|"]
        table = "\n".join(["", *head, *lines, "", ""])
        text, count = re.subn(
            PLACE.format(title),
            lambda place, table=table: place[1] + table + place[2],
            text,
            flags=re.DOTALL,
        )
        if count != 1:
            raise ValueError(f"{PAGE.name} must have one place for {title}, got {count}")
    return text


def _row(result: dict[str, Any]) -> str:
    ours = result["ours"]
    time = f"{1000 * ours:.1f} µs" if ours < 0.1 else f"{ours:.3g} ms"
    peers = []
    for name, ratio in result["ratios"].items():
        goal = result["bars"].get(name)
        short = f"{ratio:.3g}" if ratio >= 10 else f"{ratio:.2f}"
        peers.append(f"{name} {short}×" + ("" if goal is None else f" (goal {goal:.3g})"))
    return f"| {result['name']} | {time} | {', '.join(peers)} |"


if __name__ == "__main__":
    measured = json.loads(RESULTS.read_text())["speed"]
    PAGE.write_text(filled(PAGE.read_text(), measured))
