"""Length extrapolation of position schemes: ``python -m benchmarks.positions``.

Trains every scheme of the position study on Python's standard library (3 layers of width
96, 4 heads, 600 steps of 16 × 128 bytes, about 90 s per scheme on one core) and tests it at
up to eight times the training length. Checks published results: ALiBi stays flat and
sinusoidal degrades at once (Press et al. 2021, table 2), rotary degrades soon after, YaRN
and NTK repair it without training and interpolation alone does not (Peng et al. 2023).

``--results FILE`` appends the result of each scheme and skips schemes already in the file.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from firstlayer.analysis.position_study import (
    SCHEMES,
    Curve,
    Setting,
    measure,
    python_source,
)

Losses = dict[str, Curve]


@dataclass(frozen=True)
class Claim:
    """A published result and its measured value, in nats per byte.

    Args:
        text: The claim.
        value: Measured value.
        least: Lower bound, or None.
        most: Upper bound, or None.
    """

    text: str
    value: float
    least: float | None = None
    most: float | None = None

    @property
    def holds(self) -> bool:
        """Return whether the measured value is within the bounds."""
        return (self.least is None or self.value > self.least) and (
            self.most is None or self.value < self.most
        )


def claims(curves: Losses, length: int) -> Iterator[Claim]:
    """Yield the claims about models trained at ``length``."""

    def loss(name: str, times: float) -> float:
        value = curves[name].at(round(times * length))
        return float("nan") if value is None else value

    def rise(name: str, times: float) -> float:
        return loss(name, times) - loss(name, 1)

    best_other = min(loss(name, 1) for name in SCHEMES if name != "rotary")
    rotary = loss("rotary", 1)
    yield Claim("rotary is best at the training length, by", best_other - rotary, least=0.0)
    yield Claim("ALiBi rises at 8×, by", rise("alibi", 8), most=0.05)
    yield Claim("sinusoidal rises at 1.5×, by", rise("sinusoidal", 1.5), least=0.6)
    yield Claim("rotary rises at 4×, by", rise("rotary", 4), least=0.7)
    for rule, times, least in (("yarn", 4, 0.5), ("ntk", 2, 0.1)):
        below = loss("rotary", times) - loss(f"rotary + {rule}", times)
        yield Claim(f"{rule} is below plain rotary at {times}×, by", below, least=least)
    above = loss("rotary + linear", 1.5) - loss("rotary", 1.5)
    yield Claim("interpolation alone is above plain rotary at 1.5×, by", above, least=0.1)


def measured(seed: int, results: Path | None) -> Losses:
    """Return the curves of every scheme by name, from the file or trained now."""
    setting, text, curves = Setting(seed=seed, seeds=1), python_source(), {}
    known = [] if results is None or not results.exists() else _read(results)
    for scheme in SCHEMES:
        found = next((r for r in known if (r["seed"], r["scheme"]) == (seed, scheme)), None)
        if found is None:
            trained = measure(text, scheme, setting=setting)
            found = {"seed": seed, "scheme": scheme, "seconds": trained.seconds}
            found["curves"] = [asdict(curve) for curve in trained.curves]
            if results is not None:
                with results.open("a") as file:
                    file.write(json.dumps(found) + "\n")
        for curve in found["curves"]:
            losses = {name: tuple(curve[name]) for name in ("lengths", "losses")}
            curve = Curve(curve["scheme"], curve["rule"], **losses)
            curves[curve.name] = curve
            _print(curve)
    return curves


def _read(results: Path) -> list[dict]:
    return [json.loads(line) for line in results.read_text().splitlines()]


def _print(curve: Curve) -> None:
    cells = ("    –" if loss is None else f"{loss:.3f}" for loss in curve.losses)
    print(f"{curve.name:<20}" + "  ".join(cells), flush=True)


def main() -> None:
    """Train, print losses and claims, and exit with 1 if a claim does not hold."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.positions")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--results", type=Path, help="append results to this file and resume from it"
    )
    options = parser.parse_args()
    setting = Setting(seed=options.seed, seeds=1)
    print(f"{'bytes read':<20}" + "  ".join(f"{n:>5}" for n in setting.lengths))
    found = list(claims(measured(options.seed, options.results), setting.length))
    for claim in found:
        bound = f"> {claim.least:g}" if claim.most is None else f"< {claim.most:g}"
        verdict = "holds" if claim.holds else "DOES NOT HOLD"
        print(f"{claim.text} {claim.value:.3f} ({bound}): {verdict}")
    sys.exit(not all(claim.holds for claim in found))


if __name__ == "__main__":
    main()
