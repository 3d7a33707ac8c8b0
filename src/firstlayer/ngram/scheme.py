"""The common part of n-gram schemes: rows of ids, decoding state, comparison by value."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from .._array import cast, exact_integers, namespace_of
from .._check import all_in_range, host_array, integer, out_of_range
from ..kernels import has_compiler
from . import history as windows
from .hashing import Hashing, Layout

#: Number of rows up to which row ids fit in int32.
_INT32_ROWS = 2**31 - 1


@dataclass(frozen=True, kw_only=True, eq=False)
class Scheme:
    """Base class of the n-gram schemes.

    A scheme is an immutable value: it is compared by its arguments, and may be a static
    field or a static argument. Calling it has no side effects. Subclasses call
    :func:`define` when they are constructed.
    """

    _layouts: Mapping[int | None, Layout] = field(init=False, repr=False)
    _hashing: Hashing = field(init=False, repr=False)

    @property
    def columns(self) -> int:
        """Number of rows that each position reads."""
        return len(next(iter(self._layouts.values())).sizes)

    @property
    def history_length(self) -> int:
        """Number of ids before a position that its n-grams read."""
        return self._hashing.span - 1

    def layout(self, layer: int | None = None) -> Layout:
        """Return the sizes, offsets, multipliers and number of rows of a layer's table.

        Args:
            layer: One of ``layers``. May be left out if there is only one table.
        """
        layers = list(self._layouts)
        if layer is None and len(layers) == 1:
            return self._layouts[layers[0]]
        if layer is None or layer not in self._layouts:
            rule = "None" if layers == [None] else f"one of {', '.join(map(str, layers))}"
            raise ValueError(f"layer must be {rule}, got {layer}")
        return self._layouts[layer]

    def __call__(
        self,
        ids: Any,
        *,
        layer: int | None = None,
        history: Any = None,
        documents: Any = None,
        dead: Any = None,
    ) -> Any:
        """Return the rows that the n-grams ending at each position read.

        Args:
            ids: Integers of NumPy, torch or JAX, or nested lists: ``(..., length)``.
            layer: Layer whose table is read. May be left out if there is only one.
            history: The ids before ``ids``, at most ``history_length`` of them, oldest
                first; a negative id stands for none. None is the start of a sequence.
            documents: Document of each id of a packed sequence. N-grams do not cross from
                one into the next. With a history, either ``(..., history + length)``, for
                its ids too, or ``(..., length)``: its ids are then in the first document.
            dead: True at ids that n-grams must not read, such as images and padding.
                Shape as of ``documents``. Negative ids are dead.

        Returns:
            Rows in the joined table of the layer, ``(..., length, columns)``. int64; in JAX
            int32 unless ``jax_enable_x64`` is set. Under tracing and on accelerators, an
            id out of range gives -1 instead of an IndexError.
        """
        layout, ids = self.layout(layer), windows.as_ids(ids, name="ids")
        extra = {"history": history, "documents": documents, "dead": dead}
        for name in ("history", "documents"):
            if extra[name] is not None:
                extra[name] = windows.as_ids(extra[name], name=name)
        if extra["dead"] is not None and not hasattr(dead, "dtype"):
            extra["dead"] = host_array(dead, name="dead")
        if namespace_of(ids) is sys.modules.get("torch"):
            hosts = {k: v if v is None else windows.host_view(v) for k, v in extra.items()}
            is_on_host = all((hosts[k] is None) == (extra[k] is None) for k in extra)
            if is_on_host and (host := windows.host_view(ids)) is not None:
                torch = sys.modules["torch"]
                return torch.from_numpy(self._rows(host, layout, **hosts))
        row_dtype = _row_dtype(ids, layout)
        with exact_integers(ids):
            extra = {k: v if v is None else windows.like(v, ids) for k, v in extra.items()}
            return cast(self._rows(ids, layout, **extra), row_dtype)

    def ngrams(self, ids: Any) -> np.ndarray:
        """Return the numbers that are hashed at each position, ``(..., length, span)``.

        Two positions have the same row in a column of order n if their first n numbers are
        equal; if only their rows are equal, they collide.

        Args:
            ids: NumPy integers, or nested lists: ``(..., length)``.

        Example:
            >>> from firstlayer.ngram import SaltedNgram
            >>> SaltedNgram(orders=(2, 3), rows=1000).ngrams([5, 6, 7]).tolist()
            [[5, 0, 0], [6, 5, 0], [7, 6, 5]]
        """
        ids = windows.as_ids(ids, name="ids")
        self._check("ids", ids)
        hashing = self._hashing
        full = windows.joined(None, ids, span=hashing.span, no_id=hashing.no_id)
        slots, _ = self._slots(full, None, ids.shape[-1], checked=True)
        return np.stack(slots, -1)

    def column_orders(self, layer: int | None = None) -> tuple[int, ...]:
        """Return the number of ids that each column reads.

        Args:
            layer: As in a call.

        Example:
            >>> from firstlayer.ngram import SaltedNgram
            >>> SaltedNgram(orders=(2, 3), salts=2, rows=1000).column_orders()
            (2, 2, 3, 3)
        """
        return self._hashing.column_orders(self.layout(layer))

    def advance(
        self, history: Any, ids: Any, *, accepted: Any = None, dead: Any = None
    ) -> Any:
        """Return the history after ``ids``: the last ``history_length`` of all ids.

        Args:
            history: History before ``ids``, as in a call, or None.
            ids: Ids that were read, ``(..., length)``.
            accepted: Number of leading ids that are kept, if ``ids`` are a draft: an
                integer, or an array or list of one per sequence. None keeps all of them.
            dead: True at ids that n-grams must not read, ``(..., length)``.

        Example:
            >>> from firstlayer.ngram import SaltedNgram
            >>> scheme = SaltedNgram(orders=(2, 3), rows=1000)
            >>> history = scheme.advance(None, [5, 6])
            >>> bool((scheme([7], history=history) == scheme([5, 6, 7])[-1:]).all())
            True
        """
        ids = _signed(windows.as_ids(ids, name="ids"))
        if history is not None:
            history = _signed(windows.like(windows.as_ids(history, name="history"), ids))
        if dead is not None:
            dead = windows.like(dead, ids)
            windows.check_shape(dead, name="dead", shape=tuple(ids.shape), given=0)
            ids = windows.without_dead(ids, dead, no_id=self._hashing.no_id)
        full = windows.joined(
            history, ids, span=self._hashing.span, no_id=self._hashing.no_id
        )
        is_array = hasattr(accepted, "dtype") and not isinstance(accepted, np.generic)
        if not is_array and not isinstance(accepted, list | tuple):
            kept = ids.shape[-1] if accepted is None else accepted
            kept = integer("accepted", kept)  # pyright: ignore[reportArgumentType]
            _check_accepted(np.array(kept), ids.shape[-1])
            return windows.last_ids(full, kept, span=self._hashing.span)
        accepted = windows.like(windows.as_integers(accepted, name="accepted"), ids)
        if tuple(accepted.shape) != tuple(ids.shape[:-1]):
            raise ValueError(
                f"accepted must have the leading axes of ids, {tuple(ids.shape[:-1])}, "
                f"got shape {tuple(accepted.shape)}"
            )
        if (host := windows.host_view(accepted)) is not None:
            _check_accepted(host, ids.shape[-1])
        return windows.last_ids(full, accepted, span=self._hashing.span)

    def _rows(
        self, ids: Any, layout: Layout, *, history: Any, documents: Any, dead: Any
    ) -> Any:
        """Return the rows with operators of the library of ``ids``."""
        xp, shape, hashing = namespace_of(ids), tuple(ids.shape), self._hashing
        is_checked = self._check("ids", ids) and self._check("history", history)
        ids, given = cast(ids, "int64"), 0 if history is None else history.shape[-1]
        history = None if history is None else cast(history, "int64")
        full = windows.joined(
            history, ids, span=self._hashing.span, no_id=self._hashing.no_id
        )
        if documents is not None:
            windows.check_shape(documents, name="documents", shape=shape, given=given)
        if dead is not None:
            windows.check_shape(dead, name="dead", shape=shape, given=given)
            start = full.shape[-1] - dead.shape[-1]
            alive = windows.without_dead(full[..., start:], dead, no_id=self._hashing.no_id)
            full = xp.concat([full[..., :start], alive], axis=-1)
        if 0 in shape:
            return windows.filled((*shape, self.columns), 0, full)
        if isinstance(full, np.ndarray) and hashing.dtype == "int64" and has_compiler():
            return self._kernel_rows(full, documents, layout)
        if documents is not None:
            documents = windows.joined_documents(documents, full)
        slots, is_wrong = self._slots(full, documents, shape[-1], checked=is_checked)
        rows = hashing.rows(slots, layout)
        if is_wrong is None:
            return rows
        return xp.where(is_wrong[..., None], windows.filled((), -1, rows), rows)

    def _slots(
        self, full: Any, documents: Any, length: int, *, checked: bool
    ) -> tuple[list[Any], Any]:
        """Return the numbers of n-grams, newest first, and where an id is out of range.

        Args:
            full: Ids of :func:`firstlayer.ngram.history.joined`.
            documents: Document of each of them, or None.
            length: Number of positions.
            checked: Whether all ids are known to be in range.
        """
        xp, hashing = namespace_of(full), self._hashing

        def at(x: Any, s: int) -> Any:
            first = hashing.span - 1 - s
            return x[..., first : first + length]

        numbers, present = hashing.numbers_of(full)
        fill, valid = windows.filled((), hashing.fill, full), at(present, 0)
        slots, is_wrong = [], None
        for s in range(hashing.span):
            if s:
                valid = valid & at(present, s)
                if documents is not None:
                    valid = valid & (at(documents, s) == at(documents, 0))
                if hashing.stop is not None:
                    valid = valid & (at(numbers, s) != hashing.stop)
            slots.append(xp.where(valid, at(numbers, s), fill))
            if hashing.bound is not None and not checked:
                wrong = valid & (at(full, s) >= hashing.bound[1])
                is_wrong = wrong if is_wrong is None else is_wrong | wrong
        return slots, is_wrong

    def _kernel_rows(
        self, full: np.ndarray, documents: np.ndarray | None, layout: Layout
    ) -> np.ndarray:
        """Return the rows of ids that are in range, in one pass over them."""
        # Numba is imported with the first call.
        from ..kernels.ngram import ngram_rows

        hashing = self._hashing
        if documents is not None:
            # A copy is contiguous and writable, which the kernel is compiled for.
            documents = np.array(documents, np.int64, order="C")
            documents = documents.reshape(-1, documents.shape[-1])
        rows = ngram_rows(
            full.reshape(-1, full.shape[-1]),
            documents,
            hashing.numbers,
            fill=hashing.fill,
            stop=hashing.stop,
            negative=hashing.negative,
            no_id=hashing.no_id,
            multipliers=np.array(layout.multipliers, np.int64),
            sizes=np.array(layout.sizes, np.int64),
            offsets=np.array(layout.offsets, np.int64),
        )
        return rows.reshape(*full.shape[:-1], *rows.shape[-2:])

    def _check(self, name: str, ids: Any) -> bool:
        """Raise if an id is out of range; return whether all of them could be read."""
        if self._hashing.bound is None or ids is None:
            return True
        host, (bound, size) = windows.host_view(ids), self._hashing.bound
        if host is None:
            return False
        if host.dtype.kind == "u":
            is_inside = all_in_range(host, size)
        else:
            is_inside = not host.size or int(host.max()) < size
        if not is_inside:
            raise out_of_range(np.maximum(host, 0), size, name=name, bound=bound)
        return True

    def _arguments(self) -> list[Any]:
        return [getattr(self, f.name) for f in fields(self) if f.init]

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        pairs = zip(self._arguments(), other._arguments(), strict=True)
        return all(a is b or np.array_equal(a, b) for a, b in pairs)

    def __hash__(self) -> int:
        known = (v.size if isinstance(v, np.ndarray) else v for v in self._arguments())
        return hash((type(self), *known))


def define(scheme: Scheme, layouts: Mapping[int | None, Layout], hashing: Hashing) -> None:
    """Set the layouts and the hashing of a scheme that is being constructed."""
    object.__setattr__(scheme, "_layouts", layouts)
    object.__setattr__(scheme, "_hashing", hashing)


def _signed(ids: Any) -> Any:
    """Return ids in a dtype that has negative numbers: int64, or int32 in JAX."""
    if namespace_of(ids).__name__ != "jax.numpy":
        return cast(ids, "int64")
    return ids if ids.dtype == "int64" else cast(ids, "int32")


def _check_accepted(accepted: np.ndarray, length: int) -> None:
    for value in accepted.reshape(-1):
        if not 0 <= value <= length:
            raise ValueError(f"accepted must be between 0 and {length}, got {value}")


def _row_dtype(ids: Any, layout: Layout) -> str:
    """Return the dtype of rows: the widest integers that the caller of JAX has set."""
    if namespace_of(ids).__name__ != "jax.numpy":
        return "int64"
    if sys.modules["jax"].config.jax_enable_x64:
        return "int64"
    if layout.rows > _INT32_ROWS:
        raise ValueError(
            f"a table of {layout.rows} rows needs "
            "jax.config.update('jax_enable_x64', True): its rows do not fit in int32"
        )
    return "int32"
