"""Row optimizers: a step updates the rows of the batch, not the whole table.

Embeddings with ``sparse=True`` have sparse gradients, which most torch optimizers reject.
Row optimizers accept them, together with dense gradients of other parameters.

``mode="exact"`` (the default): every weight that is read is what torch's optimizer of that
name would have computed from dense gradients, schedules and decay included.
``mode="lazy"``: a row without a gradient does not move at all, as in ``SparseAdam``. This
is a different algorithm. :mod:`firstlayer.optim` lists what can be exact, and to what
accuracy.

    >>> import torch
    >>> from firstlayer.torch import Embedding
    >>> layer = Embedding(1_000_000, 4, sparse=True)
    >>> optimizer = RowAdamW(layer.parameters(), lr=0.1)
    >>> layer(torch.tensor([3, 7, 3])).square().sum().backward()
    >>> optimizer.step()

**Reading the table.** Rows without a gradient become stale and catch up before they are
read. Lookups catch up the rows that they read. Every other operation on the parameter
catches up the whole table before it reads or writes values: the first step changes the
class of the parameter to a subclass of ``torch.nn.Parameter`` for that purpose. Averages of
a model, ``functional_call``, tied heads, ``detach()``, ``data``, state dicts, copies,
``torch.save``, ``torch.export`` and writes in place therefore see what a dense optimizer
would have computed. ``shape``, ``grad``, clipping and ``zero_grad`` cost nothing.

- An alias (``detach()``, ``data``, ``numpy()``, the tensors of a state dict) is up to date
  when it is made, and may be stale after the next step. Make a new one, or call
  ``optimizer.flush()``, which brings the memory of every table up to date.
- Lookups in evaluation (``layer.eval()``, without gradients) correct the rows that they
  return and do not write to the table. ``eval()`` itself does not touch it.
- Functions of torch that do not check the class of their argument read memory as it is:
  copies by constructors (``torch.tensor(weight)``, ``asarray`` and ``as_tensor`` with
  another dtype, ``new_tensor``, values of sparse and nested tensors), ``to_dlpack``,
  another tensor's ``data = weight``, the collectives of ``torch.distributed``, functions
  and layers of ``torch.jit.script``, operations with a jagged tensor, and transforms of
  ``torch.func`` whose argument is the parameter itself. Give them ``weight.detach()``, or
  call ``flush()`` first. Modules called with jagged tensors or by ``functional_call`` in a
  transform catch up if the optimizer was given the model: ``RowAdamW(model)``.
- ``torch.nn.Parameter(weight)`` raises a RuntimeError, and with it
  ``torch.nn.Embedding.from_pretrained(weight)``. Give them ``weight.detach()``. The layers
  of Firstlayer take either.
- Tensors of the optimizer's state are up to date after ``flush()`` or ``state_dict()``.
- ``step()`` raises, and changes nothing, if a row with a gradient was stale when it was
  read. Under ``torch.distributed`` it catches such rows up instead, because another process
  may have read them.

**Tied heads.** A tied output head gives every row a gradient, so every step updates every
row. This is exact, but costs as much as a dense optimizer, and a warning says so once. A
sampled softmax through the table stays sparse and exact:

    >>> ids, targets = torch.tensor([3, 7, 3]), torch.tensor([7, 3, 9])
    >>> sampled = torch.cat([targets, torch.randint(1_000_000, (100,))])
    >>> scores = torch.nn.functional.linear(layer(ids), layer(sampled))
    >>> loss = torch.nn.functional.cross_entropy(scores, torch.arange(3))

**Gradient clipping.** ``torch.nn.utils.clip_grad_norm_`` and ``clip_grad_value_`` accept
the sparse gradients of Firstlayer's layers, and of torch's layers if the optimizer is given
the model. The norm is that of dense gradients. The trainers of Hugging Face, Lightning and
Accelerate therefore clip them as they clip any gradient.

**Any device.** Kernels update contiguous tables on the CPU. Torch operators update tables
on other devices and tables that are not contiguous: they gather the rows of the batch,
catch up, update and write back. A step waits for the device only to sum repeated ids, which
Firstlayer's layers have already summed in the backward. If a row with a gradient was read
while stale, an accelerator reports it when every row next catches up, as in ``state_dict``.
In this release the operators were tested on the CPU, on ``meta`` and on fake tensors only,
not on CUDA.

**In the background.** With ``background=True`` a worker thread updates the rows of tables.
``step`` returns earlier, and the next read of a table waits for its update, so results have
the same bits. This hides the update behind whatever the model computes before it reads the
table: data loading, or the layers below an n-gram memory.

**Compiled steps.** :meth:`RowOptimizer.row_step` returns a :class:`RowStep`, which looks up
rows and takes a step of one table in code compiled with ``fullgraph=True``. ``step`` itself
ends a graph: a compiled function calls it uncompiled.

**Resized tables.** Call :meth:`RowOptimizer.resize_rows` after ``layer.resize``, or after
rows were pruned or reordered, and :meth:`RowOptimizer.reset_rows` after rows were given new
values that belong to something else. State and averages follow.

**Limits.** Tables have any float dtype; the state of a half-precision table is float32.
Saving brings every row up to date, which rounds stale rows once more: two runs are bitwise
equal if they save at the same steps, and a resumed run equals the run that wrote the
checkpoint.
``ZeroRedundancyOptimizer`` of a row optimizer raises a TypeError in its first step.
"""

import functools
from typing import Any

import torch

from ...optim.adagrad import AdagradOptions, WiseAdagradOptions
from ...optim.adam import AdamOptions, AdamWOptions
from ...optim.lion import LionOptions
from ...optim.rmsprop import RMSpropOptions, WiseRMSpropOptions
from ...optim.sgd import SGDOptions
from .averaged_rows import AveragedRows as AveragedRows
from .clip import clip_grad_norm_ as clip_grad_norm_
from .dense import DenseOptimizer
from .row_optimizer import RowOptimizer as RowOptimizer
from .row_step import RowStep as RowStep
from .table_state import step_tensor

__all__ = [
    "AveragedRows",
    "RowAdagrad",
    "RowAdam",
    "RowAdamW",
    "RowLion",
    "RowOptimizer",
    "RowRMSprop",
    "RowSGD",
    "RowStep",
    "RowWiseAdagrad",
    "RowWiseRMSprop",
    "clip_grad_norm_",
]


class RowSGD(RowOptimizer):
    """SGD on rows. Equals ``torch.optim.SGD`` on dense gradients.

    Args:
        params, mode, stochastic_rounding, background: See :class:`RowOptimizer`.
        lr, momentum, dampening, weight_decay, nesterov, maximize, torch_options: See
            ``torch.optim.SGD``.

    Example:
        >>> layer = torch.nn.Embedding(5, 2, sparse=True)
        >>> optimizer = RowSGD(layer, lr=0.1, momentum=0.9, weight_decay=0.01)
    """

    _options_class = SGDOptions
    _torch_class = torch.optim.SGD


class RowAdagrad(RowOptimizer):
    """Adagrad on rows. Equals ``torch.optim.Adagrad`` on dense gradients.

    Args:
        params, mode, stochastic_rounding, background: See :class:`RowOptimizer`.
        lr, lr_decay, initial_accumulator_value, eps, maximize, torch_options: See
            ``torch.optim.Adagrad``.
        weight_decay: Weight decay, added to the gradient; must be 0 in exact mode.

    Example:
        >>> layer = torch.nn.Embedding(5, 2, sparse=True)
        >>> optimizer = RowAdagrad(layer, lr=0.1, initial_accumulator_value=0.1)
    """

    _options_class = AdagradOptions
    _torch_class = torch.optim.Adagrad

    def _step_dense(self, groups: list[dict[str, Any]]) -> None:
        _check_entrywise(self, groups, "sum")
        # torch.optim.Adagrad creates its state at construction, not at the first step.
        for group in groups:
            for parameter in group["params"]:
                state, initial = self.state[parameter], group["initial_accumulator_value"]
                if not state:
                    if parameter.is_complex():
                        # torch has sums of the real and the imaginary parts.
                        initial = complex(initial, initial)
                    state["step"] = step_tensor(0)
                    state["sum"] = torch.full_like(parameter, initial)
        super()._step_dense(groups)


class RowWiseAdagrad(RowAdagrad):
    """Adagrad with one number per row: the sum of the mean squares of its gradients.

    The state of a table of a million rows takes 4 MB. Parameters that are not tables get
    torch's Adagrad.

    Args:
        params, mode, stochastic_rounding, background: See :class:`RowOptimizer`.
        lr, lr_decay, initial_accumulator_value, eps, maximize, torch_options: See
            ``torch.optim.Adagrad``.
        weight_decay: Weight decay, added to the gradient; must be 0 in exact mode.

    Example:
        >>> layer = torch.nn.Embedding(5, 2, sparse=True)
        >>> optimizer = RowWiseAdagrad(layer, lr=0.1, eps=1e-8)
    """

    _options_class = WiseAdagradOptions


class RowAdam(RowOptimizer):
    """Adam on rows. Equals ``torch.optim.Adam`` on dense gradients.

    In ``mode="lazy"`` it equals ``torch.optim.SparseAdam``, which adds ``eps`` before the
    bias correction.

    Args:
        params, mode, stochastic_rounding, background: See :class:`RowOptimizer`.
        lr, betas, eps, amsgrad, maximize, torch_options: See ``torch.optim.Adam``.
        weight_decay: Weight decay, added to the gradient; must be 0 in exact mode.

    Example:
        >>> layer = torch.nn.Embedding(5, 2, sparse=True)
        >>> optimizer = RowAdam(layer, lr=0.1, betas=(0.9, 0.99), mode="lazy")
    """

    _options_class = AdamOptions
    _torch_class = torch.optim.Adam


class RowAdamW(RowOptimizer):
    """AdamW on rows. Equals ``torch.optim.AdamW`` on dense gradients.

    Args:
        params, mode, stochastic_rounding, background: See :class:`RowOptimizer`.
        lr, betas, eps, weight_decay, amsgrad, maximize, torch_options: See
            ``torch.optim.AdamW``.

    Example:
        >>> layer = torch.nn.Embedding(5, 2, sparse=True)
        >>> optimizer = RowAdamW(layer, lr=0.1, weight_decay=0.1)
    """

    _options_class = AdamWOptions
    _torch_class = torch.optim.AdamW


class RowRMSprop(RowOptimizer):
    """RMSprop on rows. Equals ``torch.optim.RMSprop`` on dense gradients.

    Args:
        params, mode, stochastic_rounding, background: See :class:`RowOptimizer`.
        lr, alpha, eps, momentum, centered, maximize, torch_options: See
            ``torch.optim.RMSprop``.
        weight_decay: Weight decay, added to the gradient; must be 0 in exact mode.

    Example:
        >>> layer = torch.nn.Embedding(5, 2, sparse=True)
        >>> optimizer = RowRMSprop(layer, lr=0.1, momentum=0.9, centered=True)
    """

    _options_class = RMSpropOptions
    _torch_class = torch.optim.RMSprop


class RowWiseRMSprop(RowRMSprop):
    """RMSprop with one number per row: the average of its gradients' mean squares.

    The state of a table of a million rows takes 4 MB. Parameters that are not tables get
    torch's RMSprop.

    Args:
        params, mode, stochastic_rounding, background: See :class:`RowOptimizer`.
        lr, alpha, eps, maximize, torch_options: See ``torch.optim.RMSprop``.
        weight_decay: Weight decay, added to the gradient; must be 0 in exact mode.

    Example:
        >>> layer = torch.nn.Embedding(5, 2, sparse=True)
        >>> optimizer = RowWiseRMSprop(layer, lr=0.1, alpha=0.9)
    """

    _options_class = WiseRMSpropOptions

    def _step_dense(self, groups: list[dict[str, Any]]) -> None:
        _check_entrywise(self, groups, "square_avg")
        super()._step_dense(groups)


class RowLion(RowOptimizer):
    """Lion on rows: updates weights by the sign of an average of gradients.

    Args:
        params, mode, stochastic_rounding, background: See :class:`RowOptimizer`.
        lr: Learning rate.
        betas: Decay rates of the average: in the update, and in the stored state.
        weight_decay: Decoupled weight decay.
        maximize: Maximize instead of minimize.
        torch_options: None, because torch has no Lion.

    Example:
        >>> layer = torch.nn.Embedding(5, 2, sparse=True)
        >>> optimizer = RowLion(layer, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
    """

    _options_class = LionOptions
    _torch_class = functools.partial(DenseOptimizer, options_class=LionOptions)


def _check_entrywise(
    optimizer: RowOptimizer, groups: list[dict[str, Any]], name: str
) -> None:
    """Raise ValueError if a state of one number per row meets a dense gradient."""
    for parameter in (parameter for group in groups for parameter in group["params"]):
        array = optimizer.state.get(parameter, {}).get(name)
        if array is not None and array.shape != parameter.shape:
            raise ValueError(
                f"{name} must have the shape {tuple(parameter.shape)} of a parameter "
                f"with a dense gradient, got {tuple(array.shape)}"
            )
