"""Train word vectors with row gradients in ``lightning.Trainer``.

Four words predict the next one. The table has sparse gradients, which the trainer clips as
usual, and RowAdamW updates the rows of the batch with the result of AdamW.
Run it: ``python examples/lightning_trainer.py``.
"""

import argparse
import inspect
import re
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from firstlayer.torch import Embedding
from firstlayer.torch.optim import RowAdamW


class NextWord(lightning.LightningModule):
    """Predict a word from the four words before it."""

    def __init__(self, num_words: int) -> None:
        super().__init__()
        self.words = Embedding(num_words, 64, sparse=True)
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(4 * 64, num_words))
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        (words,) = batch
        loss = nn.functional.cross_entropy(self.head(self.words(words[:, :4])), words[:, 4])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return RowAdamW(self.parameters(), lr=0.01, weight_decay=0.01)


def main() -> None:
    """Train, and print the loss."""
    torch.manual_seed(0)
    text = re.findall(r"\w+|[^\w\s]", inspect.getsource(argparse))
    number = {word: index for index, word in enumerate(sorted(set(text)))}
    windows = torch.tensor([number[word] for word in text]).unfold(0, 5, 1)
    model = NextWord(len(number))
    trainer = lightning.Trainer(
        max_steps=100, gradient_clip_val=1.0, accelerator="cpu", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, DataLoader(TensorDataset(windows), batch_size=256, shuffle=True))
    for step in (1, 50, 100):
        print(f"step {step}: {model.losses[step - 1]:.2f} nats")


if __name__ == "__main__":
    main()
