"""Train one small transformer and compute its loss at every length. Needs PyTorch."""

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

from ...positions.ids import randomised
from ...positions.scaling import NTK, Linear, YaRN
from ...torch import KerpleBias, LearnedPositions, RotaryPositions
from .data import batches, windows
from .distance_profile import distance_profile
from .results import RULES, Curve, Progress, Setting, Trained
from .transformer import Transformer

# Limit on the attention scores of one forward pass of the test.
MAX_SCORES = 1 << 23
WARMUP_FRACTION = 0.05


def train(
    learn: np.ndarray,
    held_out: np.ndarray,
    *,
    scheme: str,
    setting: Setting,
    progress: Progress | None = None,
) -> Trained:
    """Train and test the model of one scheme. The global torch seed is not changed."""
    start = time.perf_counter()
    with one_thread():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(setting.seed)
            model = build(scheme, setting=setting)
            losses = []
            for loss in steps(model, learn, scheme=scheme, setting=setting):
                losses.append(loss)
                if progress is not None:
                    progress(scheme, len(losses), setting.steps, loss)
        seconds = time.perf_counter() - start
        curves = tuple(
            curve(model, held_out, scheme=scheme, rule=rule, setting=setting)
            for rule in (None, *RULES.get(scheme, ()))
        )
        parameters = sum(parameter.numel() for parameter in model.parameters())
        profile = distance_profile(model, setting=setting)
    return Trained(scheme, parameters, seconds, tuple(losses), curves, profile)


@contextmanager
def one_thread() -> Generator[None, None, None]:
    """Limit torch to one thread inside the block.

    Models this small are slower with more, and the losses then do not depend on the number
    of cores.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


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
    """Train the model and yield the loss of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=setting.rate)
    rng = np.random.default_rng(setting.seed)
    for step, batch in enumerate(batches(learn, setting=setting)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, setting=setting)
        positions = None
        if scheme == "randomised":
            positions = torch.from_numpy(
                randomised(setting.length, below=max(setting.lengths), rng=rng)
            )
        ids = torch.from_numpy(batch)
        loss = mean_loss(model(ids[:, :-1], positions), ids[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if isinstance(model.bias, KerpleBias):
            model.bias.project()
        yield loss.item()


def learning_rate(step: int, *, setting: Setting) -> float:
    """Return the learning rate of a step: linear warm-up, then cosine decay."""
    warmup = max(1, round(setting.steps * WARMUP_FRACTION))
    if step < warmup:
        return setting.rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, setting.steps - warmup)
    return setting.rate * 0.5 * (1.0 + math.cos(math.pi * progress))


def curve(
    model: Transformer,
    held_out: np.ndarray,
    *,
    scheme: str,
    rule: str | None,
    setting: Setting,
) -> Curve:
    """Return the loss at every length, with ``rule`` applied for each of them."""
    losses = []
    for length in setting.lengths:
        extended = apply_rule(model, rule, length=length, setting=setting)
        if extended is None:
            losses.append(None)
        else:
            losses.append(held_out_loss(extended, held_out, length, setting=setting))
    return Curve(scheme, rule, setting.lengths, tuple(losses))


def apply_rule(
    model: Transformer, rule: str | None, *, length: int, setting: Setting
) -> Transformer | None:
    """Return the model extended to a length; None if it has no positions that far."""
    table = model.embedding.position
    if rule is None:
        ends = isinstance(table, LearnedPositions) and table.max_positions < length
        return None if ends else model
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
    """Return the mean loss of the target bytes in windows of ``length`` bytes."""
    inputs, targets = map(torch.from_numpy, windows(held_out, length, setting=setting))
    size = max(1, MAX_SCORES // (setting.heads * length * length))
    total = 0.0
    for ids, next_ids in zip(inputs.split(size), targets.split(size), strict=True):
        logits = model(ids, last=setting.targets)
        total += mean_loss(logits, next_ids).item() * len(ids)
    return total / len(inputs)


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats per byte."""
    return cross_entropy(logits.flatten(0, 1), targets.flatten())
