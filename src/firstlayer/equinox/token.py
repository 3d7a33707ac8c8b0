"""Token embeddings for Equinox: rows of a table by id."""

from typing import Any

from jaxtyping import Array, Float

from ._table.lookup import nan_outside
from ._table.module import Ids, Table
from ._table.parameters import Init, Key


class Embedding(Table):
    """Looks up rows of a table by id.

    Args:
        num_embeddings: Rows of the table, one for each id.
        embedding_dim: Width of a row.
        padding_idx: The id that is padding; negative counts from the end. Its row gets no
            gradient, and whatever an optimizer makes of it is not what is read: only
            :meth:`set_padding` and :meth:`with_parameters` change padding. Where it is not
            zero, give optax ``eqx.filter(model, eqx.is_inexact_array)``.
        max_norm: Rows longer than this are shortened to it in the output; the table is
            left as it is until :meth:`projected`.
        norm_type: The p of the p-norm that ``max_norm`` bounds.
        scale_grad_by_freq: Divide a row's gradient by how often its id was in the call.
        weight: The table to use. A padding row in it stays.
        init: How a new table is drawn: ``"normal"`` (standard deviation 1), ``"uniform"``
            (within 0.05), ``"xavier"``, ``"truncated_normal"`` (standard deviation 0.02),
            ``"zeros"``, or what ``jax.nn.initializers`` makes.
        dtype: float64, float32, float16 or bfloat16; None is JAX's default, or the dtype of
            ``weight``.
        key: What a new table is drawn with. Not needed with ``weight``.

    Shape:
        - ids: any shape, any integer dtype, lists too; one id under ``jax.vmap``
        - output: ``(*ids.shape, embedding_dim)``, in the table's dtype

    An id that is not a row, a negative one included, is an IndexError that names it. Where
    ids are traced nothing can be raised: the row is NaN, and no row gets its gradient. Of
    NumPy's int64 ids that are arguments of a jitted function JAX drops the high bits before
    anyone can look; eager calls, an eager ``vmap`` included, see all of them.

    Example:
        >>> import jax
        >>> embedding = Embedding(10, 4, padding_idx=-1, key=jax.random.key(0))
        >>> embedding([[1, 2, 9]]).shape
        (1, 3, 4)
        >>> embedding([3, 10])
        Traceback (most recent call last):
        ...
        IndexError: ids[1] is 10, but num_embeddings is 10
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        weight: Float[Any, "num_embeddings embedding_dim"] | None = None,
        init: Init = "normal",
        dtype: Any = None,
        key: Key | None = None,
    ) -> None:
        super().__init__(
            num_embeddings,
            embedding_dim,
            padding_idx=padding_idx,
            max_norm=max_norm,
            norm_type=norm_type,
            scale_grad_by_freq=scale_grad_by_freq,
            weight=weight,
            init=init,
            dtype=dtype,
            key=key,
        )

    def __call__(
        self, ids: Ids, *, key: Key | None = None
    ) -> Float[Array, "*batch embedding_dim"]:
        """Return the rows of ``ids``.

        Args:
            ids: Which rows.
            key: Ignored; for :class:`equinox.nn.Sequential`.
        """
        found = self._find(ids)
        return nan_outside(self._rows(found, self._how()), found.inside)
