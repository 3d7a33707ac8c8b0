"""Train word vectors with row gradients in a loop of Accelerate.

Four words predict the next one. The table has sparse gradients, which Accelerate clips as
usual, and RowAdamW updates the rows of the batch with the result of AdamW. A checkpoint is
saved halfway, from which a new process could continue. The second half is run twice, and
the weights are equal. Run it: ``python examples/accelerate_loop.py``.
"""

import argparse
import inspect
import re
import tempfile

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

from firstlayer.torch import Embedding
from firstlayer.torch.optim import RowAdamW

BATCHES = 120


def train(windows: Tensor, folder: str, *, resume: bool) -> tuple[nn.Module, list[float]]:
    """Train and save a checkpoint halfway, or continue from it; return model and losses."""
    torch.manual_seed(0)
    num_words = int(windows.max()) + 1
    table = Embedding(num_words, 64, sparse=True)
    model = nn.Sequential(table, nn.Flatten(), nn.Linear(4 * 64, num_words))
    optimizer = RowAdamW(model.parameters(), lr=0.01, weight_decay=0.01)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    schedule = OneCycleLR(optimizer, 0.02, total_steps=BATCHES // 2)
    order = torch.randperm(len(windows))[: BATCHES * 128]
    loader = DataLoader(TensorDataset(windows[order]), batch_size=128)
    model, optimizer, loader, schedule = accelerator.prepare(
        model, optimizer, loader, schedule
    )
    first = 0
    if resume:
        accelerator.load_state(folder)
        first, loader = BATCHES // 2, accelerator.skip_first_batches(loader, BATCHES // 2)
    losses = []
    for number, (words,) in enumerate(loader, first):
        if number == BATCHES // 2 and not resume:
            accelerator.save_state(folder)
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(words[:, :4]), words[:, 4])
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


def main() -> None:
    """Train, print the loss, and train the second half again."""
    text = re.findall(r"\w+|[^\w\s]", inspect.getsource(argparse))
    number = {word: index for index, word in enumerate(sorted(set(text)))}
    windows = torch.tensor([number[word] for word in text]).unfold(0, 5, 1)
    with tempfile.TemporaryDirectory() as folder:
        model, losses = train(windows, folder, resume=False)
        resumed, _ = train(windows, folder, resume=True)
    for batch in (1, 60, BATCHES):
        print(f"batch {batch}: {losses[batch - 1]:.2f} nats")
    pairs = zip(model.parameters(), resumed.parameters(), strict=True)
    same = all(torch.equal(one, other) for one, other in pairs)
    print(f"resumed from the checkpoint: weights {'equal' if same else 'NOT equal'}")


if __name__ == "__main__":
    main()
