"""Classify which file a few lines come from, with a bag of word embeddings.

A piece of text is the mean of its word rows, and a linear head maps it to a file. Pieces
differ in length, so a batch is one list of word ids and the offset of each piece. Only rows
of words in the batch get a gradient, and ``RowAdamW`` updates only those.

Run it: ``python examples/bag_classifier.py``, optionally with two or more files.
"""

import argparse
import math
import random
import re
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from firstlayer.torch import EmbeddingBag
from firstlayer.torch.optim import RowAdamW

MODULES = "argparse ast difflib doctest inspect pickle subprocess tarfile".split()
LINES, BATCH, WIDTH, RATE = 4, 64, 32, 0.01

Piece = tuple[list[int], int]


def read_pieces(files: list[str]) -> tuple[int, list[Piece]]:
    """Return the vocabulary size, and pieces of text as word ids with their file."""
    folder = Path(sysconfig.get_path("stdlib"))
    paths = [Path(file) for file in files] or [folder / f"{name}.py" for name in MODULES]
    number, pieces = {}, []
    for label, path in enumerate(paths):
        lines = [line for line in path.read_text("utf-8").splitlines() if line.strip()]
        for start in range(0, len(lines), LINES):
            words = re.findall(r"\w+|[^\w\s]", " ".join(lines[start : start + LINES]))
            ids = [number.setdefault(word, len(number)) for word in words]
            pieces.append((ids, label))
    return len(number), pieces


def batch(pieces: list[Piece]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the word ids of a batch, the offset of each piece, and its file."""
    lengths = torch.tensor([0] + [len(words) for words, _ in pieces[:-1]])
    ids = torch.tensor([word for words, _ in pieces for word in words])
    return ids, lengths.cumsum(0), torch.tensor([label for _, label in pieces])


def test(bag: EmbeddingBag, head: nn.Linear, pieces: list[Piece]) -> tuple[float, float]:
    """Return the loss and accuracy on held-out pieces."""
    ids, offsets, target = batch(pieces)
    with torch.no_grad():
        logits = head(bag(ids, offsets))
    right = (logits.argmax(-1) == target).float().mean()
    return float(cross_entropy(logits, target)), float(right)


def main(arguments: list[str] | None = None) -> None:
    """Train, and print losses and held-out accuracy."""
    parser = argparse.ArgumentParser(description="Tell which file lines come from.")
    parser.add_argument("file", nargs="*", help="two or more, instead of Python's modules")
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    chance = random.Random(0)
    words, pieces = read_pieces(options.file)
    chance.shuffle(pieces)
    held_out, learn = pieces[: len(pieces) // 5], pieces[len(pieces) // 5 :]
    files = 1 + max(label for _, label in pieces)
    bag = EmbeddingBag(words, WIDTH, mode="mean", sparse=True)
    nn.init.normal_(bag.weight, std=0.1)
    head = nn.Linear(WIDTH, files)
    # Exact AdamW at the cost of the words in a batch instead of the vocabulary.
    optimizer = RowAdamW([*bag.parameters(), *head.parameters()], lr=RATE)
    print(f"{len(pieces):,} pieces of {files} files: {math.log(files):.2f} nats")
    for step in range(1, options.steps + 1):
        ids, offsets, target = batch(chance.sample(learn, BATCH))
        loss = cross_entropy(head(bag(ids, offsets)), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 200 == 0:
            print(f"step {step}: {float(loss.detach()):.2f} nats")
    loss, right = test(bag, head, held_out)
    print(f"held out: {loss:.2f} nats, {right:.0%} right")


if __name__ == "__main__":
    main()
