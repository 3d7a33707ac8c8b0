"""Compare position schemes: one small transformer each, tested beyond its training length.

Every scheme gets the same text, model, seeds and steps at a short length. All models then
predict the same held-out bytes, with more and more text in front of them. Only the context
grows, so losses at different lengths are comparable. The loss of a scheme that extrapolates
falls or stays (ALiBi, https://arxiv.org/abs/2108.12409); that of others rises, soon
(sinusoidal) or later (rotary).

Rules that extend a trained model are applied without further training: position
interpolation (``linear``), NTK and YaRN for rotary, resizing for a learned table. Without
resizing, a learned table has no rows beyond the training length and its loss there is None.

Texts are read as bytes, so any file will do and no tokenizer is needed. Losses are in nats
per byte; guessing uniformly gives ln 256 = 5.55.
"""

from collections.abc import Sequence
from dataclasses import replace

from ..._check import one_of
from ...word_vectors.text import standard_library
from .. import SCHEMES as SCHEMES
from .data import split
from .results import QUICK as QUICK
from .results import RULES as RULES
from .results import Curve as Curve
from .results import Profile as Profile
from .results import Progress as Progress
from .results import Setting as Setting
from .results import Study as Study
from .results import Trained as Trained
from .results import mean_curve


def python_source() -> bytes:
    """Return the source of the top-level modules of the standard library."""
    files = standard_library()
    top = min(len(path.parts) for path in files)
    return b"".join(path.read_bytes() for path in files if len(path.parts) == top)


def compare(
    text: bytes,
    schemes: Sequence[str] = SCHEMES,
    *,
    setting: Setting | None = None,
    progress: Progress | None = None,
) -> Study:
    """Train a model for each scheme on a text and test it at every length.

    The last tenth of the text is held out for the test. Needs PyTorch.

    Args:
        text: Text to learn from; a megabyte or more gives meaningful results.
        schemes: Some of :data:`SCHEMES`.
        setting: Size and length of the training; :data:`QUICK` takes two minutes.
        progress: Called after every step.
    """
    setting = setting or Setting()
    for scheme in schemes:
        one_of("scheme", scheme, SCHEMES)
    trained = tuple(
        measure(text, scheme, setting=setting, progress=progress) for scheme in schemes
    )
    return Study(setting, len(text), trained)


def measure(
    text: bytes, scheme: str, *, setting: Setting, progress: Progress | None = None
) -> Trained:
    """Train and test one scheme; see :func:`compare`."""
    one_of("scheme", scheme, SCHEMES)
    learn, held_out = split(text, setting=setting)
    try:
        from .training import train
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(
            "comparing position schemes needs PyTorch: pip install 'firstlayer[torch]'"
        ) from error
    models = [
        train(
            learn,
            held_out,
            scheme=scheme,
            setting=replace(setting, seed=setting.seed + run),
            progress=progress and _of_all(progress, run, setting),
        )
        for run in range(setting.seeds)
    ]
    curves = zip(*(model.curves for model in models), strict=True)
    return replace(
        models[0],
        seconds=sum(model.seconds for model in models),
        curves=tuple(mean_curve(each) for each in curves),
    )


def _of_all(progress: Progress, run: int, setting: Setting) -> Progress:
    """Return a report of one model's steps that counts the steps of all models."""

    def report(scheme: str, step: int, of: int, loss: float) -> None:
        progress(scheme, run * of + step, setting.seeds * of, loss)

    return report
