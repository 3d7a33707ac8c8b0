"""Train a Llama of Hugging Face with row gradients in ``transformers.Trainer``.

The token table has sparse gradients, which the trainer clips as usual, and RowAdamW updates
the rows of the batch with the result of AdamW. A checkpoint is saved halfway. A second
trainer continues from it, and the weights are equal.
Run it: ``python examples/hf_trainer.py``.
"""

import argparse
import inspect
import re
import tempfile

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from firstlayer.torch import Embedding
from firstlayer.torch.optim import RowAdamW

LENGTH, STEPS = 32, 60


def train(
    text: Tensor, folder: str, *, checkpoint: str | None = None
) -> tuple[LlamaForCausalLM, Trainer]:
    """Train from the beginning, or from a checkpoint; return the model and its trainer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=int(text.max()) + 1,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        tie_word_embeddings=False,  # a tied head would give every row a gradient
    )
    model = LlamaForCausalLM(config)
    vectors = model.model.embed_tokens.weight.detach()
    model.set_input_embeddings(
        Embedding.from_pretrained(vectors, freeze=False, sparse=True)
    )
    optimizer = RowAdamW(model.parameters(), lr=5e-3, weight_decay=0.01)
    schedule = LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    rows = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)
    arguments = TrainingArguments(
        output_dir=folder, max_steps=STEPS, max_grad_norm=0.5, logging_steps=20,
        per_device_train_batch_size=16, save_steps=STEPS // 2, report_to=[],
        logging_first_step=True, use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in rows]
    both = optimizer, schedule
    trainer = Trainer(model, arguments, train_dataset=data, optimizers=both)
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=checkpoint)
    return model, trainer


def main() -> None:
    """Train, print the loss, and train the second half again."""
    words = re.findall(r"\w+|[^\w\s]", inspect.getsource(argparse))
    number = {word: index for index, word in enumerate(sorted(set(words)))}
    text = torch.tensor([number[word] for word in words])
    with tempfile.TemporaryDirectory() as folder:
        model, trainer = train(text, folder)
        halfway = f"{folder}/checkpoint-{STEPS // 2}"
        resumed, _ = train(text, folder, checkpoint=halfway)
    for log in trainer.state.log_history[:-1]:
        print(f"step {log['step']}: {log['loss']:.2f} nats, norm {log['grad_norm']:.2f}")
    pairs = zip(model.parameters(), resumed.parameters(), strict=True)
    same = all(torch.equal(one, other) for one, other in pairs)
    print(f"resumed from the checkpoint: weights {'equal' if same else 'NOT equal'}")


if __name__ == "__main__":
    main()
