"""Give a small byte-level language model an n-gram memory on disk, 160× its size.

Two models are trained on the sources of Python's standard library for the same time: a
transformer, and the same transformer with a memory. Before its first block, the memory
hashes the last few bytes at each position to rows of a table, and a gate adds the rows to
the hidden states. The table is a training store: its rows are read from a file, updated
there by a row optimizer, and after a crash the file returns to the last commit. A step
touches only the rows of its batch, so the table may be as large as the disk allows.

Steps of the two models are interleaved, so that other load on the machine slows both. Some
files are held out from training. On one core, with 100 seconds for each model::

    seed 0: 478,976 parameters, 160× in the table
      without memory: 470 steps of 213 ms, held out 1.672 nats per byte
      with memory: 419 steps of 240 ms, held out 1.193 nats per byte
    seed 1: 478,976 parameters, 160× in the table
      without memory: 467 steps of 215 ms, held out 1.628 nats per byte
      with memory: 416 steps of 241 ms, held out 1.231 nats per byte

Run it: ``python examples/ngram_memory.py``, optionally with the training time of each model
(``--seconds``).
"""

import argparse
import math
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from firstlayer.ngram import ByteGroups
from firstlayer.stores import TrainingStore, create_store
from firstlayer.torch import EmbeddingLayer, EngramGate, NgramEmbedding, RotaryPositions
from firstlayer.torch.optim import RowWiseAdagrad

WIDTH, HEADS, LAYERS, LENGTH, BATCH, RATE = 128, 4, 2, 256, 16, 2e-3
# Bytes in an n-gram, width of a row, and learning rate of the table.
GROUPS, ROW_WIDTH, TABLE_RATE = (2, 3, 4, 5, 6, 8), 32, 0.05


class Block(nn.Module):
    """Causal attention and a feed-forward network, each with pre-norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.rotary = RotaryPositions(WIDTH // HEADS)

    def forward(self, x: Tensor) -> Tensor:
        """Return the vectors after this block."""
        heads = self.qkv(self.first(x)).unflatten(-1, (3, HEADS, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(
            self.rotary(q), self.rotary(k), v, is_causal=True
        )
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.second(x))))


class LanguageModel(nn.Module):
    """Byte-level transformer, with an n-gram memory if a store is given."""

    def __init__(self, store: TrainingStore | None = None) -> None:
        super().__init__()
        self.embedding = EmbeddingLayer(256, WIDTH, position=None)
        nn.init.normal_(self.embedding.token.weight, std=0.02)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.memory = self.gate = None
        if store is not None:
            self.memory = NgramEmbedding(scheme(len(store)), store)
            self.gate = EngramGate(self.memory.embedding_dim, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of each next byte."""
        x = self.embedding(ids)
        if self.memory is not None and self.gate is not None:
            x = self.gate(x, self.memory(ids))
        for block in self.blocks:
            x = block(x)
        return self.embedding.logits(self.norm(x))


class Trainer:
    """A model with its optimizers, and the time that its steps have taken."""

    def __init__(self, store: TrainingStore | None = None) -> None:
        self.model, self.seconds, self.steps = LanguageModel(store), 0.0, 0
        table = [] if self.model.memory is None else [self.model.memory.table.weight]
        rest = [p for p in self.model.parameters() if all(p is not t for t in table)]
        self.optimizers = [torch.optim.AdamW(rest, lr=RATE)]
        self.optimizers += [RowWiseAdagrad(table, lr=TABLE_RATE)] if table else []

    def step(self, ids: Tensor, share: float) -> None:
        """Train on a batch; learning rates fall to a tenth with the share of the time."""
        start = time.perf_counter()
        for optimizer, rate in zip(self.optimizers, (RATE, TABLE_RATE), strict=False):
            optimizer.param_groups[0]["lr"] = rate * (1 - 0.9 * share)
            optimizer.zero_grad()
        loss_of(self.model, ids).backward()
        for optimizer in self.optimizers:
            optimizer.step()
        # The first step compiles kernels.
        self.seconds += time.perf_counter() - start if self.steps else 0
        self.steps += 1

    @property
    def milliseconds(self) -> float:
        """Mean time of a step."""
        return 1000 * self.seconds / max(1, self.steps - 1)


def scheme(rows: int) -> ByteGroups:
    """Return the hash of the last bytes at each position, for a table of some rows."""
    return ByteGroups(sizes=GROUPS, rows=rows // len(GROUPS))


def loss_of(model: LanguageModel, ids: Tensor) -> Tensor:
    """Return the mean loss of the next bytes, in nats."""
    return cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def read_files(folder: Path) -> tuple[Tensor, Tensor]:
    """Return the bytes of the Python files of a folder: for training, and held out."""
    skipped = {"site-packages", "test", "tests"}
    files = [f for f in sorted(folder.rglob("*.py")) if not skipped & {*f.parts}]
    held_out = files[7::16]
    parts = [f for f in files if f not in held_out], held_out
    texts = [bytearray(b"".join(f.read_bytes() for f in part)) for part in parts]
    return torch.tensor(texts[0]).long(), torch.tensor(texts[1]).long()


def windows(text: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return random pieces of a text."""
    starts = torch.randint(len(text) - LENGTH, (count, 1), generator=generator)
    return text[starts + torch.arange(LENGTH + 1)]


def train(trainers: list[Trainer], text: Tensor, seconds: float, seed: int) -> None:
    """Train the models for the same time each; they take turns."""
    generators = [torch.Generator().manual_seed(seed) for _ in trainers]
    while (least := min(trainers, key=lambda one: one.seconds)).seconds < seconds:
        ids = windows(text, BATCH, generators[trainers.index(least)])
        least.step(ids, least.seconds / seconds)


@torch.no_grad()
def held_out_loss(model: LanguageModel, text: Tensor) -> float:
    """Return the mean loss on random pieces of a text, the same in every call."""
    generator = torch.Generator().manual_seed(0)
    return float(loss_of(model.eval(), windows(text, 128, generator)))


def small_rows(seed: int) -> Callable[[int, int], np.ndarray]:
    """Return a function that draws the rows of a table, a part at a time."""
    rng = np.random.default_rng(seed)
    return lambda lo, hi: 0.02 * rng.standard_normal((hi - lo, ROW_WIDTH), np.float32)


def compare(
    text: Tensor, held_out: Tensor, *, rows: int, seconds: float, seed: int
) -> None:
    """Train with and without a memory, and print sizes, times and losses."""
    torch.manual_seed(seed)
    shape = rows, ROW_WIDTH
    with (
        tempfile.TemporaryDirectory() as folder,
        create_store(f"{folder}/table", shape, rows=small_rows(seed)) as store,
    ):
        trainers = {"without": Trainer(), "with": Trainer(store)}
        train(list(trainers.values()), text, seconds, seed)
        store.commit("trained")
        size = (
            sum(p.numel() for p in trainers["with"].model.parameters()) - store.array.size
        )
        print(
            f"seed {seed}: {size:,} parameters, {store.array.size / size:.0f}× in the table"
        )
        for name, one in trainers.items():
            loss = held_out_loss(one.model, held_out)
            print(
                f"  {name} memory: {one.steps} steps of {one.milliseconds:.0f} ms, "
                f"held out {loss:.3f} nats per byte"
            )


def main(arguments: list[str] | None = None) -> None:
    """Compare both models for each seed."""
    parser = argparse.ArgumentParser(description="Compare models with and without memory.")
    parser.add_argument("--folder", type=Path, default=Path(sysconfig.get_path("stdlib")))
    parser.add_argument("--rows", type=int, default=2_400_000, help="rows of the table")
    parser.add_argument("--seconds", type=float, default=100, help="training time of each")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    options = parser.parse_args(arguments)
    text, held_out = read_files(options.folder)
    print(f"{len(text):,} bytes; uniform guessing costs {math.log(256):.2f} nats per byte")
    for seed in options.seeds:
        compare(text, held_out, rows=options.rows, seconds=options.seconds, seed=seed)


if __name__ == "__main__":
    main()
