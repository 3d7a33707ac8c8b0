"""Train word vectors with row gradients in ``lightning.Trainer``.

Four words predict the next one. The table has sparse gradients, which the trainer clips as
usual, and RowAdamW updates the rows of the batch with the result of AdamW. A second run
stops halfway and continues from its checkpoint, with equal weights (up to rounding).
Run it: ``python examples/lightning_trainer.py``.
"""

import argparse
import inspect
import re
import tempfile
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

from firstlayer.torch import Embedding
from firstlayer.torch.optim import RowAdamW

EPOCH = 50  # batches in an epoch


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

    def configure_optimizers(self) -> Any:
        """Return the optimizer and its schedule, which advances with every step."""
        optimizer = RowAdamW(self.parameters(), lr=0.01, weight_decay=0.01)
        schedule = OneCycleLR(optimizer, 0.02, total_steps=2 * EPOCH)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def train(
    windows: Tensor, epochs: int, *, checkpoint: str | None = None
) -> tuple[NextWord, lightning.Trainer]:
    """Train a number of epochs, from the beginning or from a checkpoint."""
    torch.manual_seed(0)
    model = NextWord(int(windows.max()) + 1)
    order = torch.randperm(len(windows))[: EPOCH * 256]
    loader = DataLoader(TensorDataset(windows[order]), batch_size=256)
    trainer = lightning.Trainer(
        max_epochs=epochs, gradient_clip_val=1.0, accelerator="cpu", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, loader, ckpt_path=checkpoint)
    return model, trainer


def main() -> None:
    """Train, print the loss, and train again with a break."""
    text = re.findall(r"\w+|[^\w\s]", inspect.getsource(argparse))
    number = {word: index for index, word in enumerate(sorted(set(text)))}
    windows = torch.tensor([number[word] for word in text]).unfold(0, 5, 1)
    model, _ = train(windows, 2)
    with tempfile.TemporaryDirectory() as folder:
        halfway = f"{folder}/halfway.ckpt"
        _, trainer = train(windows, 1)
        trainer.save_checkpoint(halfway)
        resumed, _ = train(windows, 2, checkpoint=halfway)
    for step in (1, 50, 100):
        print(f"step {step}: {model.losses[step - 1]:.2f} nats")
    pairs = zip(model.parameters(), resumed.parameters(), strict=True)
    # Saving brings all rows up to date, which rounds some of them once more.
    same = all(torch.allclose(one, other, atol=1e-5) for one, other in pairs)
    print(f"resumed from the checkpoint: weights {'equal' if same else 'NOT equal'}")


if __name__ == "__main__":
    main()
