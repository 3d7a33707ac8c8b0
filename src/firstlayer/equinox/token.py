"""Token embedding for Equinox."""

from typing import Any

from jax.sharding import NamedSharding
from jaxtyping import Array, Float

from ..stores.row_store import RowStore
from ._lookup import compiled_look_up
from ._parameters import Init, Key
from ._sharding import OutSharding
from ._table import Ids, TableModule


class Embedding(TableModule):
    """Looks up rows of a table by id.

    Args:
        num_embeddings: Number of rows; None is that of ``weight``.
        embedding_dim: Width of each row; None is that of ``weight``.
        padding_idx: Id of padding; negative counts from the end. Its row starts at zero and
            gets no gradient from lookups; :meth:`set_padding` writes another value.
        max_norm: Longer rows are scaled down to this norm in the output. The table is
            unchanged until :meth:`projected`.
        norm_type: The p of the p-norm for ``max_norm``.
        scale_grad_by_freq: Divide a row's gradient by the number of times its id occurs in
            the call.
        weight: The table to use, as it is.
        init: Distribution of a new table: ``"normal"`` (standard deviation 1),
            ``"uniform"`` (within 0.05), ``"xavier"``, ``"truncated_normal"`` (standard
            deviation 0.02), ``"zeros"``, or a function from ``jax.nn.initializers``.
        dtype: float64, float32, float16 or bfloat16; None is JAX's default, or the dtype of
            ``weight``.
        key: Random key for a new table.
        sharding: Where to place the table on a mesh; see below.

    Shape:
        - ids: any shape, any integer dtype, nested lists too; one id under ``jax.vmap``
        - output: ``(*ids.shape, embedding_dim)``, in the table's dtype

    An id out of range, negative ids included, is an IndexError that names it. Traced ids
    cannot raise, and ids on an accelerator are not copied to the host to be checked: the
    row is NaN and passes no gradient. ``checkify`` with ``index_checks`` reports these ids.
    JAX drops the high bits of NumPy int64 ids when they are arguments of a jitted function;
    eager calls and an eager ``vmap`` check all bits.

    The output is on the devices of the ids and the table. On a mesh with explicit axes it
    is sharded as the ids are, and its columns as those of the table, unless the call has an
    ``out_sharding``.

    **Tables on a mesh.** With ``sharding=NamedSharding(mesh, P("rows", None))``, each
    device has a part of the rows: it looks up the ids whose rows it has, and one sum over
    the devices combines them (a reduce-scatter if the output is sharded over the same
    axis). Gradients are sharded as the table is. The table is drawn on its devices, with
    the same numbers on every mesh. If its number of rows is not a multiple of the shards,
    ``weight`` ends in rows of zeros that no id reads, and that files and :meth:`parameters`
    leave out. The other axes of the mesh, and those of the columns, work as for any array.
    Axes may be automatic or explicit. ``checkify`` does not work on such a table.

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
        num_embeddings: int | None = None,
        embedding_dim: int | None = None,
        *,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        weight: Float[Any, "num_embeddings embedding_dim"] | None = None,
        init: Init = "normal",
        dtype: Any = None,
        key: Key | None = None,
        sharding: NamedSharding | None = None,
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
            sharding=sharding,
        )

    @classmethod
    def from_store(cls, store: RowStore, **options: Any) -> Any:
        """Return a layer that looks up rows of a store, read by the host.

        The rows are constants: they are not leaves, and reading ``weight`` is a TypeError.
        Under ``jit`` they are read in a callback. To train the layers after it without one,
        call the layer on the host and pass the rows into the jitted function.

        Args:
            store: The table.
            options: ``padding_idx``, ``max_norm``, ``norm_type``, and ``dtype`` for the
                dtype of the output.

        Example:
            >>> import numpy as np
            >>> from firstlayer.stores import MemoryStore
            >>> table = np.arange(8, dtype=np.float32).reshape(4, 2)
            >>> Embedding.from_store(MemoryStore(table, format="int8"))([3]).tolist()
            [[6.0, 7.0]]
        """
        from ._stored import StoredEmbedding, stored_layer

        return stored_layer(StoredEmbedding, store, **options)

    def __call__(
        self, ids: Ids, *, out_sharding: OutSharding = None, key: Key | None = None
    ) -> Float[Array, "*batch embedding_dim"]:
        """Return the rows of the ids.

        Args:
            ids: Ids of the rows.
            out_sharding: Sharding of the result on a mesh with explicit axes, as in
                ``table.at[ids].get``, or for a layer with a ``sharding``.
            key: Ignored; accepted for :class:`equinox.nn.Sequential`.
        """
        argument = self._check_ids(ids)
        return compiled_look_up(self._options(), self.weight, argument, out_sharding)
