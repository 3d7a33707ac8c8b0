"""Token embeddings on NumPy: rows of a table by id."""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from jaxtyping import Float, Int, Integer

from .. import kernels
from .._check import (
    boolean,
    check_real,
    check_table,
    host_array,
    ids_in_range,
    integers,
    not_masked,
    not_negative,
    out_of_range,
    padding_index,
)
from ..embeddings.init import Init, Seed, initial_table
from ..embeddings.resize import Resized, resize_table
from ..embeddings.row_gradient import RowGradient, sum_by_id
from ..embeddings.token import check_norm, clip_norms, table_sizes
from ..files.layer_configs import config_of
from ..stores.row_store import RowStore
from ..stores.training import TrainingStore
from ._bias import gradient_like
from ._disk import layer_on_disk, refuse_copy
from ._module import Module, as_parameter, checked_gradient, upcast

if TYPE_CHECKING:
    from ..optim.table_state import TableState

# Number of table entries upcast at a time to compute half-precision logits.
CHUNK = 1 << 22

Ids = Integer[Any, "*batch"] | Sequence[Any] | int | np.integer


class Embedding(Module):
    """Looks up rows of a table by id.

    Args:
        num_embeddings: Number of rows; None is that of ``weight``.
        embedding_dim: Width of each row; None is that of ``weight``.
        padding_idx: Id of padding; negative counts from the end. Its row starts at zero and
            gets no gradient from lookups; :meth:`set_padding` writes another value.
        max_norm: Largest norm of a row in the output. The table itself changes only in
            :meth:`project`.
        norm_type: The p of the p-norm for ``max_norm``.
        scale_grad_by_freq: Divide a row's gradient by the number of times its id occurs in
            the call.
        weight: Table to use, not copied if possible. Its padding row is kept.
        init: Initial values; see :func:`firstlayer.embeddings.init.initial_table`.
        dtype: float64, float32 (the default), float16 or bfloat16.
        rng: Seed or generator for ``init``.

    Shape:
        - ids: any shape, any integer dtype, or lists
        - output: ``(*ids.shape, embedding_dim)``, in the table's dtype

    An id that is negative or not smaller than ``num_embeddings`` is an IndexError. If
    ``weight`` is replaced by another array, its shape counts from the next call on.

    Example:
        >>> embedding = Embedding(10, 4, padding_idx=-1, rng=0)
        >>> embedding([[1, 2, 9]]).shape
        (1, 3, 4)
        >>> embedding([3, 10])
        Traceback (most recent call last):
        ...
        IndexError: ids[1] is 10, but num_embeddings is 10
    """

    #: Optimizer state that stale rows are caught up from; see :mod:`firstlayer.optim`.
    #: Neither copied nor pickled.
    table_state: "TableState | None" = None
    #: State of the optimizer that trains the table, in lazy mode too. Not copied either.
    optimizer_state: "TableState | None" = None
    #: Whether rows are read from a store, so that there is no ``weight``.
    is_stored = False
    #: Store of the table if it is trained on disk.
    store: TrainingStore | None = None

    def __init__(
        self,
        num_embeddings: int | None = None,
        embedding_dim: int | None = None,
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
        rows, width = table_sizes(num_embeddings, embedding_dim, weight)
        shape = not_negative("num_embeddings", rows), not_negative("embedding_dim", width)
        self.padding_idx = padding_index(padding_idx, shape[0])
        self.max_norm, self.norm_type = check_norm(max_norm, norm_type)
        self.scale_grad_by_freq = boolean("scale_grad_by_freq", scale_grad_by_freq)
        if weight is None:
            self.weight = initial_table(shape, init=init, rng=rng, dtype=dtype)
            if self.padding_idx is not None:
                self.weight[self.padding_idx] = 0
        else:
            self.weight = as_parameter(weight, shape, dtype=dtype)

    @classmethod
    def from_store(cls, store: RowStore, **options: Any) -> Self:
        """Return a layer over the table of a store.

        Rows of a :class:`~firstlayer.stores.TrainingStore` are trained on disk: row
        optimizers put their state into the store, ``store.commit()`` makes a step
        permanent, and :meth:`state_dict` has the commit instead of the values.

        Rows of any other store are read and not trained. Reading ``weight`` is a TypeError,
        and :meth:`parameters` is empty.

        Args:
            store: The table.
            options: Further arguments of the layer: ``padding_idx``, ``max_norm``,
                ``norm_type``, ``dtype``, and those of a bag.

        Example:
            >>> from firstlayer.stores import MemoryStore
            >>> table = np.arange(8, dtype=np.float32).reshape(4, 2)
            >>> Embedding.from_store(MemoryStore(table, format="int8"))([3]).tolist()
            [[6.0, 7.0]]
        """
        if isinstance(store, TrainingStore):
            return layer_on_disk(cls, store, **options)
        from ._stored import stored_layer

        return stored_layer(cls, store, **options)

    @classmethod
    def from_pretrained(
        cls, embeddings: np.ndarray | str | os.PathLike[str], **options: Any
    ) -> Self:
        """Return a layer with this table.

        Args:
            embeddings: The table, or the path of a file or folder with one: whatever
                :func:`firstlayer.open_vectors` opens, with or without words. A table from a
                file is float32.
            options: Further arguments of the layer.

        Example:
            >>> table = np.arange(8, dtype=np.float32).reshape(4, 2)
            >>> Embedding.from_pretrained(table, padding_idx=0)([3]).tolist()
            [[6.0, 7.0]]
        """
        if isinstance(embeddings, str | os.PathLike):
            from ..vector_files.reading import read_rows

            embeddings = read_rows(embeddings)
        if embeddings is None:
            raise TypeError("embeddings must be an array or a path, got None")
        return cls(weight=embeddings, **options)

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the table and of the output."""
        return self.stored_weight.dtype

    @property
    def weight(self) -> Float[np.ndarray, "num_embeddings embedding_dim"]:
        """The table. Reading it, or replacing it, catches up every stale row.

        The array is not copied: it becomes stale again with the optimizer's next step.
        """
        self.catch_up()
        return self.stored_weight

    @weight.setter
    def weight(self, value: np.ndarray) -> None:
        # First, so that no missed step is applied to the new values.
        self.catch_up()
        vars(self)["weight"] = value

    @property
    def stored_weight(self) -> Float[np.ndarray, "num_embeddings embedding_dim"]:
        """The table as it is stored; rows that no lookup has read may be stale."""
        return vars(self)["weight"]

    @property
    def num_embeddings(self) -> int:
        """Number of rows of ``weight``."""
        return check_table(self.stored_weight).shape[0]

    @property
    def embedding_dim(self) -> int:
        """Width of each row of ``weight``."""
        return check_table(self.stored_weight).shape[1]

    def __call__(self, ids: Ids) -> Float[np.ndarray, "*batch embedding_dim"]:
        """Return the rows of the ids.

        Args:
            ids: Ids of any shape and any integer dtype.
        """
        weight = check_table(self.stored_weight)
        if type(ids) is not np.ndarray or ids.dtype != np.int64:
            ids = ids_in_range(ids, weight.shape[0])
        self.catch_up(ids)
        rows = kernels.gather_rows(weight, ids.ravel())
        if rows is None:
            raise out_of_range(ids, weight.shape[0])
        if self.max_norm is not None:
            rows = self._clipped(rows, self.max_norm)
        return rows.reshape(*ids.shape, weight.shape[1])

    def upcast_rows(self, ids: Ids) -> Float[np.ndarray, "*batch embedding_dim"]:
        """Return rows that are not yet rounded to the dtype of the layer."""
        return self(ids)

    def vjp(
        self, ids: Ids
    ) -> tuple[np.ndarray, Callable[[np.ndarray], dict[str, RowGradient]]]:
        """Return the output and its pullback, to the gradient of the table.

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
        """Return the gradient of the table, given that of the rows looked up."""
        dy = checked_gradient(dy, (*ids.shape, self.embedding_dim))
        return sum_by_id(ids, dy, skip=self.padding_idx, mean=self.scale_grad_by_freq)

    def logits(
        self, x: Float[Any, "*batch embedding_dim"]
    ) -> Float[np.ndarray, "*batch num_embeddings"]:
        """Return the product of ``x`` with every row: the tied output head.

        Sums are in float32 (float64 for float64); the result has the dtype of ``x``.

        Example:
            >>> layer = Embedding(weight=np.array([[1.0, 0.0], [0.0, 2.0]]))
            >>> layer.logits(np.array([3.0, 4.0])).tolist()
            [3.0, 8.0]
        """
        x = host_array(x, name="x")
        check_real(x, name="x", whole=False)
        if x.shape[-1:] != (self.embedding_dim,):
            raise ValueError(
                f"x must end in embedding_dim {self.embedding_dim}, got shape {x.shape}"
            )
        upcast_x, out = upcast(x), np.empty((*x.shape[:-1], self.num_embeddings), x.dtype)
        for lo, hi, rows in self._chunks(upcast_x.dtype):
            out[..., lo:hi] = upcast_x @ rows.T
        return out

    def logits_vjp(
        self, x: Float[Any, "*batch embedding_dim"]
    ) -> tuple[np.ndarray, Callable[[np.ndarray], dict[str, np.ndarray]]]:
        """Return the logits and their pullback, to the gradients of ``x`` and the table.

        Every row takes part, the padding row included, so the gradient of the table is
        dense. The table is not copied: call the pullback before it changes.

        Example:
            >>> layer = Embedding(weight=np.array([[1.0, 0.0], [0.0, 2.0]]))
            >>> logits, pull = layer.logits_vjp(np.array([[3.0, 4.0]]))
            >>> pull(np.array([[1.0, 0.0]]))["x"].tolist()
            [[1.0, 0.0]]
        """
        x = host_array(x, name="x").copy()
        logits = self.logits(x)

        def pull(dlogits: np.ndarray) -> dict[str, np.ndarray]:
            upcast_x, d = upcast(x), gradient_like(dlogits, logits, name="dlogits")
            count = math.prod(x.shape[:-1])
            by_row = d.reshape(count, d.shape[-1]).T
            dweight = by_row @ upcast_x.reshape(count, x.shape[-1])
            dx = d @ self.weight.astype(upcast_x.dtype, copy=False)
            return {"x": dx.astype(x.dtype, copy=False), "weight": dweight}

        return logits, pull

    def project(self, ids: Ids | None = None) -> None:
        """Scale stored rows down to ``max_norm``: those of ``ids``, or all.

        Call this after an optimizer step, so that all reads until the next step see the
        same rows.

        Example:
            >>> layer = Embedding(weight=np.array([[3.0, 4.0]]), max_norm=1.0)
            >>> layer.project()
            >>> layer.weight.round(4).tolist()
            [[0.6, 0.8]]
        """
        if self.max_norm is None:
            return
        rows: Any = slice(None)
        if ids is not None:
            rows = ids = np.unique(ids_in_range(ids, self.num_embeddings))
        self.catch_up(ids)
        weight = self.stored_weight
        if self.store is not None:
            self.store.before_write(ids)
        weight[rows] = self._clipped(weight[rows], self.max_norm)

    def resize(
        self, num_embeddings: int, *, init: Init | np.ndarray = "mean", rng: Seed = None
    ) -> Resized:
        """Change the number of rows and return the ids kept, added and dropped.

        Kept ids keep their rows, and padding stays padding. :meth:`logits` is resized too.
        A row optimizer's state follows with its ``resize_rows``.

        Args:
            num_embeddings: New number of rows.
            init: Values of new rows; see :func:`firstlayer.embeddings.resize.resize_table`.
            rng: Seed or generator for drawn rows.

        Example:
            >>> layer = Embedding(3, 2, rng=0)
            >>> changes = layer.resize(5)
            >>> changes.kept, changes.added, layer.weight.shape
            (range(0, 3), range(3, 5), (5, 2))
        """
        refuse_copy(self.store)
        if self.optimizer_state is not None:
            self.optimizer_state.check_resize()
        self.weight, changes = resize_table(
            self.weight, num_embeddings, init=init, rng=rng, padding_idx=self.padding_idx
        )
        return changes

    def set_padding(
        self, value: Float[Any, " embedding_dim"] | Sequence[float] | float
    ) -> None:
        """Write a vector or a number to the padding row.

        Example:
            >>> layer = Embedding(3, 2, padding_idx=0, rng=0)
            >>> layer.set_padding(0.5)
            >>> layer([0]).tolist()
            [[0.5, 0.5]]
        """
        if self.padding_idx is None:
            raise ValueError("set_padding needs a layer with padding_idx, got None")
        # First, so that a later catch-up does not change what is written here.
        row = not_masked(value, name="value")
        index = np.array([self.padding_idx])
        self.catch_up(index)
        if self.store is not None:
            self.store.before_write(index)
        self.stored_weight[self.padding_idx] = row

    def mask(self, ids: Ids) -> np.ndarray:
        """Return True where ``ids`` is a token and False where it is padding.

        Example:
            >>> Embedding(3, 2, padding_idx=0, rng=0).mask([[2, 1, 0]]).tolist()
            [[True, True, False]]
        """
        ids = integers(ids)
        if self.padding_idx is None:
            return np.ones(ids.shape, bool)
        return ids != self.padding_idx

    def prefetch(self, ids: Ids) -> None:
        """Start to read the rows of a coming lookup, if the table is on disk.

        Args:
            ids: Ids of any shape. One out of range is an IndexError.

        Example:
            >>> import tempfile
            >>> from firstlayer.stores import create_store
            >>> with create_store(tempfile.mkdtemp() + "/table", (1000, 4)) as store:
            ...     layer = Embedding.from_store(store)
            ...     layer.prefetch([7, 8])
            ...     print(layer([7, 8]).shape)
            (2, 4)
        """
        if self.store is None:
            ids_in_range(ids, self.num_embeddings)
        else:
            self.store.prefetch(ids)

    def catch_up(self, ids: Int[np.ndarray, "*batch"] | None = None) -> None:
        """Apply the optimizer steps that stale rows have missed.

        Args:
            ids: Rows about to be read; None is all.
        """
        if self.table_state is not None and self.table_state.needs_catch_up:
            self.table_state.catch_up(None if ids is None else ids.ravel())

    def parameters(self) -> dict[str, np.ndarray]:
        # Every row of a table on disk would be read.
        if self.store is not None:
            return {"weight": self.stored_weight}
        return {"weight": self.weight}

    def embeddings(self) -> dict[str, Any]:
        """Return this layer under the name of its table."""
        return {"weight": self}

    def config(self) -> dict[str, Any]:
        return config_of(self, dtype=self.dtype.name)

    def __getstate__(self) -> dict[str, Any]:
        # A copy has no optimizer to catch its rows up later.
        refuse_copy(self.store)
        self.catch_up()
        return {**self.__dict__, "table_state": None, "optimizer_state": None}

    def _chunks(self, dtype: Any) -> Iterator[tuple[int, int, np.ndarray]]:
        """Yield all rows in ``dtype``, some at a time, with the bounds of their numbers."""
        weight, step = self.weight, max(1, CHUNK // max(1, self.embedding_dim))
        if weight.dtype == dtype:
            step = max(1, len(weight))
        for lo in range(0, len(weight), step):
            hi = min(lo + step, len(weight))
            yield lo, hi, weight[lo:hi].astype(dtype, copy=False)

    def _clipped(self, rows: np.ndarray, max_norm: float) -> np.ndarray:
        clipped = clip_norms(upcast(rows), max_norm=max_norm, norm_type=self.norm_type)
        return clipped.astype(rows.dtype, copy=False)
