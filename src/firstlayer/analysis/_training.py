"""Training one small transformer, and its loss at every length.

Imported by :mod:`firstlayer.analysis.positions` when a study begins: it needs PyTorch.
"""

import copy
import math
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from ..positions.ids import randomised
from ..positions.scaling import NTK, Linear, YaRN
from ..torch import KerpleBias, LearnedPositions, RotaryPositions
from ._profile import profile
from ._transformer import Transformer
from ._windows import batches, windows
from .positions import RULES, Curve, Progress, Setting, Trained

# How many bytes are tested at a time, over the length: scores are its square.
TESTED = 1 << 23
WARM_UP = 0.05


def train(
    learn: np.ndarray,
    held_out: np.ndarray,
    *,
    scheme: str,
    setting: Setting,
    progress: Progress | None = None,
) -> Trained:
    """Train one scheme's model and return its losses; the global seed is left alone."""
    with one_thread():
        return _trained(learn, held_out, scheme=scheme, setting=setting, progress=progress)


@contextmanager
def one_thread() -> Generator[None, None, None]:
    """Let torch use one thread: models this small only lose by sharing work.

    The same seed then also gives the same losses whatever the number of cores.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _trained(
    learn: np.ndarray,
    held_out: np.ndarray,
    *,
    scheme: str,
    setting: Setting,
    progress: Progress | None,
) -> Trained:
    began = time.perf_counter()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(setting.seed)
        model = build(scheme, setting=setting)
        losses = []
        for loss in steps(model, learn, scheme=scheme, setting=setting):
            losses.append(loss)
            if progress is not None:
                progress(scheme, len(losses), setting.steps, loss)
    seconds = time.perf_counter() - began
    curves = tuple(
        curve(model, held_out, scheme=scheme, rule=rule, setting=setting)
        for rule in (None, *RULES.get(scheme, ()))
    )
    count = sum(parameter.numel() for parameter in model.parameters())
    seen = profile(model, setting=setting)
    return Trained(scheme, count, seconds, tuple(losses), curves, seen)


def build(scheme: str, *, setting: Setting) -> Transformer:
    """Return an untrained model."""
    return Transformer(
        scheme,
        layers=setting.layers,
        width=setting.width,
        heads=setting.heads,
        length=setting.length,
    )


def steps(
    model: Transformer, learn: np.ndarray, *, scheme: str, setting: Setting
) -> Iterator[float]:
    """Train the model, yielding the loss of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=setting.rate)
    rng = np.random.default_rng(setting.seed)
    for step, batch in enumerate(batches(learn, setting=setting)):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, setting=setting)
        positions = None
        if scheme == "randomised":
            drawn = randomised(setting.length, below=max(setting.lengths), rng=rng)
            positions = torch.from_numpy(drawn)
        ids = torch.from_numpy(batch)
        loss = loss_of(model(ids[:, :-1], positions), ids[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if isinstance(model.bias, KerpleBias):
            model.bias.project()
        yield loss.item()


def rate(step: int, *, setting: Setting) -> float:
    """Return the learning rate: up in a straight line, then down along a cosine."""
    warm = max(1, round(setting.steps * WARM_UP))
    if step < warm:
        return setting.rate * (step + 1) / warm
    rest = (step - warm) / max(1, setting.steps - warm)
    return setting.rate * 0.5 * (1.0 + math.cos(math.pi * rest))


def curve(
    model: Transformer,
    held_out: np.ndarray,
    *,
    scheme: str,
    rule: str | None,
    setting: Setting,
) -> Curve:
    """Return the loss at every length, the model changed by ``rule`` for each of them."""
    losses = []
    for length in setting.lengths:
        at_length = changed(model, rule, length=length, setting=setting)
        if at_length is None:
            losses.append(None)
            continue
        losses.append(held_out_loss(at_length, held_out, length, setting=setting))
    return Curve(scheme, rule, setting.lengths, tuple(losses))


def changed(
    model: Transformer, rule: str | None, *, length: int, setting: Setting
) -> Transformer | None:
    """Return the model as the rule has it for a length; None if it cannot read that far."""
    table = model.embedding.position
    if rule is None:
        short = isinstance(table, LearnedPositions) and table.max_positions < length
        return None if short else model
    model = copy.deepcopy(model)
    if rule == "resized":
        model.embedding.position.resize(length)
        return model
    factor = length / setting.length
    scaling = {
        "linear": Linear(factor=factor),
        "ntk": NTK(factor=factor),
        "yarn": YaRN(factor=factor, original_length=setting.length),
    }[rule]
    model.rotary = RotaryPositions(setting.width // setting.heads, scaling=scaling)
    return model


@torch.inference_mode()
def held_out_loss(
    model: Transformer, held_out: np.ndarray, length: int, *, setting: Setting
) -> float:
    """Return the mean loss of the target bytes, read with ``length`` bytes of text."""
    read, targets = map(torch.from_numpy, windows(held_out, length, setting=setting))
    several = max(1, TESTED // (setting.heads * length * length))
    total = 0.0
    for ids, want in zip(read.split(several), targets.split(several), strict=True):
        logits = model(ids, last=setting.targets)
        total += loss_of(logits, want).item() * len(ids)
    return total / len(read)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss in nats for a byte."""
    return cross_entropy(logits.flatten(0, 1), targets.flatten())
