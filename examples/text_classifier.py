"""Classify text as forward or reversed, with a recurrent layer.

Both classes contain the same letters, so only their order carries information. The LRU
encodes order by its recurrence, so no positions are added. Pieces have different lengths;
padding has no effect on the output.

Run it: ``python examples/text_classifier.py``, optionally with a file.
"""

import argparse
import math
import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from firstlayer.compat.lrnnx import Classifier

SHORTEST, LONGEST, BATCH, RATE = 16, 48, 32, 4e-3


def read_ids(file: str | None) -> Tensor:
    """Return the bytes of a file as ids; id 0 is padding."""
    path = Path(file or Path(sysconfig.get_path("stdlib")) / "argparse.py")
    return torch.tensor(list(path.read_bytes())) + 1


def pieces(text: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return padded pieces of text, and whether each is reversed."""
    backwards = torch.arange(count) % 2
    lengths = torch.randint(SHORTEST, LONGEST + 1, (count,))
    starts = torch.randint(0, len(text) - LONGEST, (count,))
    rows = [text[start : start + n] for start, n in zip(starts, lengths, strict=True)]
    turned = [
        row.flip(0) if flip else row for row, flip in zip(rows, backwards, strict=True)
    ]
    return pad_sequence(turned, batch_first=True), backwards


def test(model: Classifier, text: Tensor) -> tuple[float, float]:
    """Return the loss and accuracy on held-out text."""
    ids, target = pieces(text, 500)
    with torch.no_grad():
        logits = model.eval()(ids)
    right = (logits.argmax(-1) == target).float().mean()
    return float(cross_entropy(logits, target)), float(right)


def main(arguments: list[str] | None = None) -> None:
    """Train, and print losses and held-out accuracy."""
    parser = argparse.ArgumentParser(description="Tell forwards from backwards.")
    parser.add_argument("file", nargs="?", help="what to read instead of a Python module")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    text = read_ids(options.file)
    learn, held_out = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    model = Classifier(
        input_dim=0,
        num_classes=2,
        d_model=64,
        d_state=64,
        n_layers=2,
        vocab_size=257,
        embedding_dim=32,
        padding_idx=0,
        pooling="mean",
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    print(f"{len(text):,} bytes, forwards or backwards: {math.log(2):.2f} nats")
    for step in range(1, options.steps + 1):
        ids, target = pieces(learn, BATCH)
        loss = cross_entropy(model(ids), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}: {float(loss.detach()):.2f} nats")
    loss, right = test(model, held_out)
    print(f"held out: {loss:.2f} nats, {right:.0%} right")


if __name__ == "__main__":
    main()
