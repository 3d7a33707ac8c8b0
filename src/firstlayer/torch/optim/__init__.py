"""Row optimizers: train a table of a million rows at the cost of a batch.

Embeddings with ``sparse=True`` have row gradients, which most optimizers refuse. These take
them, and dense gradients of other parameters beside them. In ``mode="exact"``, the default,
every number that is read is what torch's optimizer of that name would have made it from
dense gradients, schedules and decay included; in ``mode="lazy"`` a row without a gradient
simply stays, which is what SparseAdam does, and another algorithm. What can be exact, and
why, is said in :mod:`firstlayer.optim`.

    >>> import torch
    >>> from firstlayer.torch import Embedding
    >>> layer = Embedding(1_000_000, 4, sparse=True)
    >>> optimizer = RowAdamW(layer.parameters(), lr=0.1)
    >>> layer(torch.tensor([3, 7, 3])).square().sum().backward()
    >>> optimizer.step()

**Who brings a row up to date.** A row that was left alone catches up before it is read. For
that ``parameter.table_state`` is put on a table with its first step. Firstlayer's layers settle with
it in lookups, ``logits``, ``state_dict``, ``load_state_dict`` and ``eval``; torch's own do
in lookups and for state_dicts if the optimizer is given the model, ``RowAdamW(model)``.
Copies and pickles of a parameter are up to date and have nothing pending. Whatever else
reads or writes ``weight`` (also ``torch.func`` and ``torch.export``) calls ``flush()``
before; a row that was read too early is found in ``step()``, which then changes nothing.

Tables are on the CPU, in any float dtype; states of half-precision tables are float32. A
table whose gradient is dense, as that of a tied head is, has all of its rows moved. Saving
brings every row up to date, which rounds them once more: two runs are equal to the bit if
they save at the same steps, and a run that goes on from a checkpoint equals the one that
wrote it.
"""

from typing import Any

import torch

from ...optim.adagrad import Adagrad
from ...optim.adam import Adam
from ...optim.lion import Lion as LionRule
from ...optim.rmsprop import RMSprop
from ...optim.rule import Rule
from ...optim.sgd import SGD
from .clip import clip_grad_norm_ as clip_grad_norm_
from .lion import Lion
from .row_optimizer import RowOptimizer as RowOptimizer
from .row_optimizer import step_count

__all__ = [
    "RowAdagrad",
    "RowAdam",
    "RowAdamW",
    "RowLion",
    "RowOptimizer",
    "RowRMSprop",
    "RowSGD",
    "RowWiseAdagrad",
    "clip_grad_norm_",
]


class RowSGD(RowOptimizer):
    """Gradient descent by rows. Equals ``torch.optim.SGD`` on dense gradients.

    Arguments are those of :class:`RowOptimizer` and of ``torch.optim.SGD``: ``momentum``,
    ``dampening``, ``weight_decay``, ``nesterov``, ``maximize``.

    Example:
        >>> layer = torch.nn.Embedding(5, 2, sparse=True)
        >>> optimizer = RowSGD(layer, lr=0.1, momentum=0.9, weight_decay=0.01)
    """

    torch_class = torch.optim.SGD

    def rule(self, *, lazy: bool) -> Rule:
        return SGD()


class RowAdagrad(RowOptimizer):
    """Adagrad by rows. Equals ``torch.optim.Adagrad`` on dense gradients.

    Arguments are those of :class:`RowOptimizer` and of ``torch.optim.Adagrad``:
    ``lr_decay``, ``initial_accumulator_value``, ``eps``, ``maximize``; ``weight_decay``,
    which is added to gradients, in ``mode="lazy"`` only.

    Example:
        >>> layer = torch.nn.Embedding(5, 2, sparse=True)
        >>> optimizer = RowAdagrad(layer, lr=0.1, initial_accumulator_value=0.1)
    """

    torch_class = torch.optim.Adagrad

    def rule(self, *, lazy: bool) -> Rule:
        return Adagrad()

    def _step_dense(self, groups: list[dict[str, Any]]) -> None:
        # torch makes this state when it is constructed.
        for group in groups:
            for parameter in group["params"]:
                state, first = self.state[parameter], group["initial_accumulator_value"]
                if not state:
                    state["step"] = step_count(0)
                    state["sum"] = torch.full_like(parameter, first)
        super()._step_dense(groups)


class RowWiseAdagrad(RowAdagrad):
    """Adagrad with one number a row: the sum of the mean squares of its gradients.

    The state of a table of a million rows is 4 MB. Parameters that are no tables get
    torch's Adagrad. Arguments are those of :class:`RowAdagrad`.

    Example:
        >>> layer = torch.nn.Embedding(5, 2, sparse=True)
        >>> optimizer = RowWiseAdagrad(layer, lr=0.1, eps=1e-8)
    """

    def rule(self, *, lazy: bool) -> Rule:
        return Adagrad(by_row=True)


class RowAdam(RowOptimizer):
    """Adam by rows. Equals ``torch.optim.Adam`` on dense gradients.

    Arguments are those of :class:`RowOptimizer` and of ``torch.optim.Adam``: ``betas``,
    ``eps``, ``amsgrad``, ``maximize``; ``weight_decay``, which is added to gradients, in
    ``mode="lazy"`` only. There it is ``torch.optim.SparseAdam``, with ``eps`` before the
    bias correction.

    Example:
        >>> layer = torch.nn.Embedding(5, 2, sparse=True)
        >>> optimizer = RowAdam(layer, lr=0.1, betas=(0.9, 0.99), mode="lazy")
    """

    torch_class = torch.optim.Adam

    def rule(self, *, lazy: bool) -> Rule:
        return Adam(decoupled=False, hat=lazy)


class RowAdamW(RowOptimizer):
    """AdamW by rows. Equals ``torch.optim.AdamW`` on dense gradients.

    Arguments are those of :class:`RowOptimizer` and of ``torch.optim.AdamW``: ``betas``,
    ``eps``, ``weight_decay``, ``amsgrad``, ``maximize``.

    Example:
        >>> layer = torch.nn.Embedding(5, 2, sparse=True)
        >>> optimizer = RowAdamW(layer, lr=0.1, weight_decay=0.1)
    """

    torch_class = torch.optim.AdamW

    def rule(self, *, lazy: bool) -> Rule:
        return Adam(decoupled=True, hat=lazy)


class RowRMSprop(RowOptimizer):
    """RMSprop by rows. Equals ``torch.optim.RMSprop`` on dense gradients.

    Arguments are those of :class:`RowOptimizer` and of ``torch.optim.RMSprop``: ``alpha``,
    ``eps``, ``momentum``, ``centered``, ``maximize``; ``weight_decay``, which is added to
    gradients, in ``mode="lazy"`` only.

    Example:
        >>> layer = torch.nn.Embedding(5, 2, sparse=True)
        >>> optimizer = RowRMSprop(layer, lr=0.1, momentum=0.9, centered=True)
    """

    torch_class = torch.optim.RMSprop

    def rule(self, *, lazy: bool) -> Rule:
        return RMSprop()


class RowLion(RowOptimizer):
    """Lion by rows: weights move by the sign of an average of gradients.

    Arguments are those of :class:`RowOptimizer` and ``betas``, what of the average moves a
    weight and what of it is kept, ``weight_decay``, times ``lr``, and ``maximize``.

    Example:
        >>> layer = torch.nn.Embedding(5, 2, sparse=True)
        >>> optimizer = RowLion(layer, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
    """

    torch_class = Lion

    def rule(self, *, lazy: bool) -> Rule:
        return LionRule()
