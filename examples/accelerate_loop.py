"""Train word vectors with row gradients in a loop of Accelerate.

Four words predict the next one. The table has sparse gradients, which Accelerate clips as
usual, and RowAdamW updates the rows of the batch with the result of AdamW.
Run it: ``python examples/accelerate_loop.py``.
"""

import argparse
import inspect
import re

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from firstlayer.torch import Embedding
from firstlayer.torch.optim import RowAdamW


def main() -> None:
    """Train, and print the loss."""
    torch.manual_seed(0)
    text = re.findall(r"\w+|[^\w\s]", inspect.getsource(argparse))
    number = {word: index for index, word in enumerate(sorted(set(text)))}
    windows = torch.tensor([number[word] for word in text]).unfold(0, 5, 1)
    table = Embedding(len(number), 64, sparse=True)
    model = nn.Sequential(table, nn.Flatten(), nn.Linear(4 * 64, len(number)))
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, loader = accelerator.prepare(
        model,
        RowAdamW(model.parameters(), lr=0.01, weight_decay=0.01),
        DataLoader(TensorDataset(windows), batch_size=128, shuffle=True),
    )
    for step, (words,) in enumerate(loader, 1):
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(words[:, :4]), words[:, 4])
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if step % 50 == 1:
            print(f"batch {step}: {loss.item():.2f} nats")


if __name__ == "__main__":
    main()
