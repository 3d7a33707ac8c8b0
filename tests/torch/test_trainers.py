"""Row gradients in the trainers of Hugging Face, Lightning and Accelerate, clipped."""

import copy
from typing import Any

import accelerate
import lightning
import pytest
import torch
import transformers
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from firstlayer.torch import Embedding, EmbeddingBag, EmbeddingLayer
from firstlayer.torch.optim import RowAdamW

ROWS, STEPS, LIMIT = 50, 6, 0.05
OPTIONS = {"lr": 0.05, "betas": (0.8, 0.95), "weight_decay": 0.3}

pytestmark = [
    # Lightning suggests more workers, a GPU and logging intervals.
    pytest.mark.filterwarnings(
        "ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"
    ),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
]


class Classifier(nn.Module):
    """Three tables (tokens, positions, words of a bag) and a classifier."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.tokens = EmbeddingLayer(
            ROWS, 8, max_positions=6, layer_norm=True, sparse=sparse
        )
        self.words = EmbeddingBag(ROWS, 8, sparse=sparse, padding_idx=0)
        self.more = Embedding(ROWS, 8, sparse=sparse)
        self.head = nn.Linear(8, 3)

    def forward(self, input_ids: Any, labels: Any = None) -> Any:
        x = self.tokens(input_ids).mean(1) + self.words(input_ids)
        logits = self.head(x + 5 * self.more(input_ids[:, :2]).sum(1))
        return {"loss": 5 * nn.functional.cross_entropy(logits, labels), "logits": logits}


def examples(count=60):
    """Return examples in which ids repeat, and few of the rows occur in a batch."""
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(0, ROWS, (count, 6), generator=random)
    ids[:, 3] = ids[:, 0]
    labels = torch.randint(0, 3, (count,), generator=random)
    return [
        {"input_ids": one, "labels": label} for one, label in zip(ids, labels, strict=True)
    ]


def twins() -> tuple[Any, Any]:
    """Return two models with equal weights: dense gradients, and row gradients."""
    torch.manual_seed(0)
    dense = Classifier(sparse=False)
    rows = Classifier(sparse=True)
    rows.load_state_dict(dense.state_dict())
    return dense, rows


def optimizers(model, *, rows) -> tuple[Any, Any]:
    make = RowAdamW if rows else torch.optim.AdamW
    optimizer = make(model.parameters(), **OPTIONS)
    return optimizer, LambdaLR(optimizer, lambda step: 1.0 / (1 + step))


def assert_equal_weights(rows, dense, before, *, atol=3e-6):
    assert rows.tokens.token.weight.grad is None or rows.tokens.token.weight.grad.is_sparse
    for name, weight in rows.state_dict().items():
        want = dense.state_dict()[name]
        torch.testing.assert_close(weight, want, rtol=1e-5, atol=atol, msg=name)
        assert not torch.equal(want, before[name])


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({"gradient_accumulation_steps": 2}, LIMIT),
        ({"bf16": True}, LIMIT),
        ({}, 0.0),
    ],
    ids=["clipped and accumulated", "autocast", "unclipped"],
)
def test_trainer_of_hugging_face(options, limit, tmp_path):
    def run(model, rows):
        args = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=STEPS,
            per_device_train_batch_size=4,
            max_grad_norm=limit,
            logging_steps=1,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            **options,
        )
        data: Any = examples()
        trainer = transformers.Trainer(
            model, args, train_dataset=data, optimizers=optimizers(model, rows=rows)
        )
        trainer.train()
        return [log["grad_norm"] for log in trainer.state.log_history if "grad_norm" in log]

    dense, rows = twins()
    before = copy.deepcopy(dense.state_dict())
    want, got = run(dense, False), run(rows, True)
    assert len(got) == STEPS and min(got) > LIMIT
    # Products in bfloat16 round differently once weights differ in the last bit.
    rtol, atol = (2e-2, 2e-3) if "bf16" in options else (1e-4, 3e-6)
    assert got == pytest.approx(want, rel=rtol)
    assert_equal_weights(rows, dense, before, atol=atol)


def test_trainer_of_hugging_face_resumes_from_a_checkpoint(tmp_path):
    def run(model, **options):
        args = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=STEPS,
            per_device_train_batch_size=4,
            max_grad_norm=LIMIT,
            use_cpu=True,
            report_to=[],
            save_steps=3,
            logging_strategy="no",
            disable_tqdm=True,
        )
        data: Any = examples()
        trainer = transformers.Trainer(
            model, args, train_dataset=data, optimizers=optimizers(model, rows=True)
        )
        trainer.train(**options)

    _, rows = twins()
    run(rows)
    _, resumed = twins()
    run(resumed, resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    for name, weight in rows.state_dict().items():
        assert torch.equal(weight, resumed.state_dict()[name]), name


class Lit(lightning.LightningModule):
    def __init__(self, model: Any, rows: bool) -> None:
        super().__init__()
        self.model, self.rows = model, rows
        self.norms: list[tuple[float, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(**batch)["loss"]

    def configure_optimizers(self) -> Any:
        optimizer, scheduler = optimizers(self.model, rows=self.rows)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        before = self.total_norm()
        super().configure_gradient_clipping(*args, **kwargs)
        self.norms.append((before, self.total_norm()))

    def total_norm(self) -> float:
        grads = [
            p.grad.to_dense().flatten() for p in self.parameters() if p.grad is not None
        ]
        return float(torch.cat(grads).norm())


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_clip_algorithm": "value"}, {"accumulate_grad_batches": 2}],
    ids=["norm", "value", "accumulated"],
)
def test_trainer_of_lightning(options, tmp_path):
    def run(model, rows):
        trainer = lightning.Trainer(
            max_steps=STEPS,
            gradient_clip_val=LIMIT,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
            **options,
        )
        loader = torch.utils.data.DataLoader(examples(), batch_size=4)  # pyright: ignore
        lit = Lit(model, rows)
        trainer.fit(lit, loader)
        return lit.norms

    dense, rows = twins()
    before = copy.deepcopy(dense.state_dict())
    want, got = run(dense, False), run(rows, True)
    assert len(got) == STEPS
    for (first, clipped), (want_first, want_clipped) in zip(got, want, strict=True):
        assert first > LIMIT and first == pytest.approx(want_first, rel=1e-4)
        assert clipped < 0.5 * first and clipped == pytest.approx(want_clipped, rel=1e-4)
        if "gradient_clip_algorithm" not in options:
            assert clipped == pytest.approx(LIMIT, rel=1e-3)
    assert_equal_weights(rows, dense, before)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_loop_of_accelerate(accumulate):
    def run(model, rows):
        accelerator = accelerate.Accelerator(
            cpu=True, gradient_accumulation_steps=accumulate
        )
        loader = torch.utils.data.DataLoader(examples(), batch_size=4)  # pyright: ignore
        optimizer, scheduler = optimizers(model, rows=rows)
        wrapped, optimizer, loader, scheduler = accelerator.prepare(
            model, optimizer, loader, scheduler
        )
        norms = []
        for batch in loader:
            with accelerator.accumulate(wrapped):
                accelerator.backward(wrapped(**batch)["loss"])
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(wrapped.parameters(), LIMIT)
                    norms.append(float(norm))  # pyright: ignore
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        return norms

    dense, rows = twins()
    before = copy.deepcopy(dense.state_dict())
    want, got = run(dense, False), run(rows, True)
    assert min(got) > LIMIT and got == pytest.approx(want, rel=1e-4)
    assert_equal_weights(rows, dense, before)
