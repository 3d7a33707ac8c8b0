"""Token embeddings on NumPy: rows of a table by id."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from jaxtyping import Float, Int, Integer

from .. import kernels
from .._check import (
    check_real,
    ids_in_range,
    integers,
    not_negative,
    out_of_range,
    padding_index,
)
from ..embeddings.row_gradient import RowGradient, sum_by_id
from ..embeddings.token import (
    Init,
    Resized,
    Seed,
    check_norm,
    initial,
    resized,
    within_norm,
)
from ._bias import gradient_like
from ._module import Module, given, native, upcast

if TYPE_CHECKING:
    pass

# How many table entries are widened at a time when half-precision logits are made.
CHUNK = 1 << 22

Ids = Integer[Any, "*batch"] | Sequence[Any] | int | np.integer


class Embedding(Module):
    """Looks up rows of a table by id.

    Args:
        num_embeddings: Rows of the table, one for each id.
        embedding_dim: Width of a row.
        padding_idx: The id that is padding; negative counts from the end. Its row gets no
            gradient, and whatever else writes to it is undone before the next lookup.
        max_norm: Rows longer than this are shortened to it in the output; the table is
            left as it is until :meth:`project`.
        norm_type: The p of the p-norm that ``max_norm`` bounds.
        scale_grad_by_freq: Divide a row's gradient by how often its id was in the call.
        weight: The table to use, not copied if it fits. A padding row in it stays.
        init: How a new table is drawn; see :func:`firstlayer.embeddings.token.initial`.
        dtype: float64, float32 (the default), float16 or bfloat16.
        rng: A seed or a generator for ``init``.

    Shape:
        - ids: any shape, any integer dtype, lists too
        - output: ``(*ids.shape, embedding_dim)``, in the table's dtype

    An id that is not a row, a negative one included, is an IndexError that names it.

    Example:
        >>> embedding = Embedding(10, 4, padding_idx=-1, rng=0)
        >>> embedding([[1, 2, 9]]).shape
        (1, 3, 4)
        >>> embedding([3, 10])
        Traceback (most recent call last):
        ...
        IndexError: ids[1] is 10, but num_embeddings is 10
    """

    prefix: ClassVar[str] = "token."
    #: What a row optimizer has yet to do to rows before they are read; see
    #: :mod:`firstlayer.optim`. Neither copied nor pickled.
    table_state: "Pending | None" = None

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        weight: np.ndarray | None = None,
        init: Init = "normal",
        dtype: Any = None,
        rng: Seed = None,
    ) -> None:
        self.num_embeddings = not_negative("num_embeddings", num_embeddings)
        self.embedding_dim = not_negative("embedding_dim", embedding_dim)
        self.padding_idx = padding_index(padding_idx, num_embeddings)
        self.max_norm, self.norm_type = check_norm(max_norm, norm_type)
        self.scale_grad_by_freq = bool(scale_grad_by_freq)
        shape = (self.num_embeddings, self.embedding_dim)
        if weight is None:
            self.weight = initial(shape, init=init, rng=rng, dtype=dtype)
            if self.padding_idx is not None:
                self.weight[self.padding_idx] = 0
        else:
            self.weight = given(weight, shape, dtype=dtype)
        self.keep_padding()

    def __call__(self, ids: Ids) -> Float[np.ndarray, "*batch embedding_dim"]:
        if type(ids) is not np.ndarray or ids.dtype != np.int64:
            ids = ids_in_range(ids, self.num_embeddings)
        self.make_ready(ids)
        rows = kernels.gather_rows(self.weight, ids.ravel())
        if rows is None:
            raise out_of_range(ids, self.num_embeddings)
        if self.max_norm is not None:
            rows = self._shortened(rows, self.max_norm)
        return rows.reshape(*ids.shape, self.embedding_dim)

    def vjp(
        self, ids: Ids
    ) -> tuple[np.ndarray, Callable[[np.ndarray], dict[str, RowGradient]]]:
        """Return the output and the function from its gradient to the table's.

        Example:
            >>> y, pull = Embedding(5, 2).vjp([3, 1, 3])
            >>> grad = pull(np.ones_like(y))["weight"]
            >>> grad.ids.tolist(), grad.values[:, 0].tolist()
            ([1, 3], [1.0, 2.0])
        """
        ids = ids_in_range(ids, self.num_embeddings).copy()
        return self(ids), lambda dy: {"weight": self.row_gradient(ids, dy)}

    def row_gradient(
        self, ids: Int[np.ndarray, "*batch"], dy: Float[Any, "*batch embedding_dim"]
    ) -> RowGradient:
        """Return the table's gradient, given that of the rows looked up by ``ids``."""
        dy = np.asarray(dy)
        if dy.shape != (*ids.shape, self.embedding_dim):
            want = (*ids.shape, self.embedding_dim)
            raise ValueError(f"dy must have shape {want}, got {dy.shape}")
        dy = native(dy)
        return sum_by_id(ids, dy, skip=self.padding_idx, mean=self.scale_grad_by_freq)

    def logits(
        self, x: Float[Any, "*batch embedding_dim"]
    ) -> Float[np.ndarray, "*batch num_embeddings"]:
        """Return the product of ``x`` with every row: the output head tied to this table.

        Sums are float32 (float64 for float64); the result has the dtype of ``x``.
        """
        self.make_ready()
        x = np.asarray(x)
        check_real(x, name="x", whole=False)
        if x.shape[-1:] != (self.embedding_dim,):
            raise ValueError(
                f"x must end in embedding_dim {self.embedding_dim}, got shape {x.shape}"
            )
        wide = upcast(x)
        out = np.empty((*x.shape[:-1], self.num_embeddings), x.dtype)
        step = max(1, CHUNK // max(1, self.embedding_dim))
        if self.weight.dtype == wide.dtype:
            step = max(1, self.num_embeddings)
        for lo in range(0, self.num_embeddings, step):
            part = self.weight[lo : lo + step].astype(wide.dtype, copy=False)
            out[..., lo : lo + step] = wide @ part.T
        return out

    def logits_vjp(
        self, x: Float[Any, "*batch embedding_dim"]
    ) -> tuple[np.ndarray, Callable[[np.ndarray], dict[str, np.ndarray]]]:
        """Return the logits and the function to the gradients of ``x`` and the table.

        Every row of the table takes part, so its gradient is an array of its shape; the
        padding row's is zero.
        """
        x = np.array(x)
        logits = self.logits(x)

        def pull(dlogits: np.ndarray) -> dict[str, np.ndarray]:
            wide, d = upcast(x), gradient_like(dlogits, logits, name="dlogits")
            dweight = d.reshape(-1, d.shape[-1]).T @ wide.reshape(-1, x.shape[-1])
            if self.padding_idx is not None:
                dweight[self.padding_idx] = 0
            dx = d @ self.weight.astype(wide.dtype, copy=False)
            return {"x": dx.astype(x.dtype, copy=False), "weight": dweight}

        return logits, pull

    def project(self, ids: Ids | None = None) -> None:
        """Shorten the stored rows to ``max_norm``: those of ``ids``, or all.

        To be called after an optimizer step. Between two steps every use of the table then
        sees the same weight.
        """
        if self.max_norm is None:
            return
        rows: Any = slice(None)
        if ids is not None:
            rows = ids = np.unique(ids_in_range(ids, self.num_embeddings))
        self.make_ready(ids)
        self.weight[rows] = self._shortened(self.weight[rows], self.max_norm)
        self.repair()

    def resize(
        self, num_embeddings: int, *, init: Init | np.ndarray = "mean", rng: Seed = None
    ) -> Resized:
        """Change the number of rows in place and return what became of which row.

        Ids keep their rows and padding stays padding. The head of :meth:`logits` follows.

        Args:
            num_embeddings: How many rows there shall be.
            init: What new rows are; see :func:`firstlayer.embeddings.token.resized`.
            rng: A seed or a generator, for what is drawn.
        """
        self.make_ready()
        self.weight, what = resized(
            self.weight, num_embeddings, init=init, rng=rng, padding_idx=self.padding_idx
        )
        self.num_embeddings = len(self.weight)
        return what

    def set_padding(
        self, value: Float[Any, " embedding_dim"] | Sequence[float] | float
    ) -> None:
        """Make ``value`` the padding row, from now on."""
        if self.padding_idx is None:
            raise ValueError("set_padding needs a layer with padding_idx, got None")
        self.weight[self.padding_idx] = value
        self.keep_padding()

    def mask(self, ids: Ids) -> np.ndarray:
        """Return True where ``ids`` is a token and False where it is padding."""
        ids = integers(ids)
        if self.padding_idx is None:
            return np.ones(ids.shape, bool)
        return ids != self.padding_idx

    def repair(self) -> None:
        """Undo whatever was written to the padding row. Lookups and saving do this."""
        if self.padding_idx is not None:
            row = self.weight[self.padding_idx]
            if row.tobytes() != self.padding_row.tobytes():
                row[...] = self.padding_row

    def make_ready(self, ids: Int[np.ndarray, "*batch"] | None = None) -> None:
        """Get ready to be read: bring rows up to date, and undo writes to padding.

        Args:
            ids: The rows that will be read, None for all.
        """
        if self.table_state is not None and self.table_state.has_stale_weights:
            self.table_state.catch_up(None if ids is None else ids.ravel())
        self.repair()

    def parameters(self) -> dict[str, np.ndarray]:
        """Return the table under the name ``weight``."""
        self.make_ready()
        return {"weight": self.weight}

    def embeddings(self) -> dict[str, Any]:
        """Return this layer under the name of its table."""
        return {"weight": self}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Copy a table into this one. Its padding row becomes what padding is."""
        super().load_state_dict(state)
        self.keep_padding()

    def config(self) -> dict[str, Any]:
        """Return the arguments that build a table like this one."""
        return {
            "num_embeddings": self.num_embeddings,
            "embedding_dim": self.embedding_dim,
            "padding_idx": self.padding_idx,
            "max_norm": self.max_norm,
            "norm_type": self.norm_type,
            "scale_grad_by_freq": self.scale_grad_by_freq,
            "dtype": self.weight.dtype.name,
        }

    def keep_padding(self) -> None:
        """Make what is in the padding row now what padding is."""
        if self.padding_idx is not None:
            self.padding_row = self.weight[self.padding_idx].copy()

    def __getstate__(self) -> dict[str, Any]:
        # A copy has no optimizer that would bring its rows up to date later.
        self.make_ready()
        return {**self.__dict__, "table_state": None}

    def _shortened(self, rows: np.ndarray, max_norm: float) -> np.ndarray:
        short = within_norm(upcast(rows), max_norm=max_norm, norm_type=self.norm_type)
        return short.astype(rows.dtype, copy=False)
