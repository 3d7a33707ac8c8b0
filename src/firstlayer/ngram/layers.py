"""Options of the n-gram layers: checked once, the same in every front end."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from .._check import boolean, not_negative_number, one_of, positive
from .byte_groups import ByteGroups
from .engram import Engram
from .longcat import LongCatNgram
from .qwen import QwenNgram
from .salted import SaltedNgram
from .scheme import Scheme

#: Schemes that a file may name.
SCHEMES: dict[str, Any] = {
    scheme.__name__: scheme
    for scheme in (ByteGroups, Engram, LongCatNgram, QwenNgram, SaltedNgram)
}
#: Limit on the columns of all layers of a scheme in a file: each takes a prime.
_MAX_COLUMNS = 2**12


class ParameterSpec(NamedTuple):
    """Shape and initial values of a parameter.

    Args:
        shape: Shape.
        init: ``"linear"`` for uniform numbers within the inverse root of the last axis, as
            ``torch.nn.Linear`` has them, ``"ones"`` or ``"zeros"``.
    """

    shape: tuple[int, ...]
    init: str


@dataclass(frozen=True, kw_only=True)
class EngramOptions:
    """Options of :class:`~firstlayer.numpy.EngramGate`, which has their meaning.

    Example:
        >>> options = EngramOptions(memory_dim=6, embedding_dim=4, streams=2, eps=0.0)
        >>> options.parameters()["key_weight"]
        ParameterSpec(shape=(2, 4), init='ones')
    """

    memory_dim: int
    embedding_dim: int
    streams: int | None
    eps: float

    def __post_init__(self) -> None:
        streams = None if self.streams is None else positive("streams", self.streams)
        _set(
            self,
            memory_dim=positive("memory_dim", self.memory_dim),
            embedding_dim=positive("embedding_dim", self.embedding_dim),
            streams=streams,
            eps=not_negative_number("eps", self.eps),
        )

    @property
    def hidden_dims(self) -> tuple[int, ...]:
        """Last axes of the hidden states."""
        streams = () if self.streams is None else (self.streams,)
        return *streams, self.embedding_dim

    def parameters(self) -> dict[str, ParameterSpec]:
        """Return the parameters by name."""
        shape = self.streams or 1, self.embedding_dim
        rows = (shape[0] + 1) * self.embedding_dim
        return {
            "projection": ParameterSpec((rows, self.memory_dim), "linear"),
            "query_weight": ParameterSpec(shape, "ones"),
            "key_weight": ParameterSpec(shape, "ones"),
        }


@dataclass(frozen=True, kw_only=True)
class ShortConvOptions(EngramOptions):
    """Options of :class:`~firstlayer.numpy.ShortConvGate`, which has their meaning."""

    kernel_size: int
    dilation: int
    bias: bool
    #: None is ``eps``, which the constructor replaces it with.
    conv_eps: Any

    def __post_init__(self) -> None:
        super().__post_init__()
        conv_eps = self.eps if self.conv_eps is None else self.conv_eps
        _set(
            self,
            kernel_size=positive("kernel_size", self.kernel_size),
            dilation=positive("dilation", self.dilation),
            bias=boolean("bias", self.bias),
            conv_eps=not_negative_number("conv_eps", conv_eps),
        )

    def parameters(self) -> dict[str, ParameterSpec]:
        """Return the parameters by name."""
        shape = self.streams or 1, self.embedding_dim
        specs = {
            "key_projection": ParameterSpec((*shape, self.memory_dim), "linear"),
            "value_projection": ParameterSpec(
                (self.embedding_dim, self.memory_dim), "linear"
            ),
            **{
                name: ParameterSpec(shape, "ones")
                for name in ("key_norm", "query_norm", "conv_norm")
            },
            "conv": ParameterSpec((*shape, self.kernel_size), "zeros"),
        }
        if self.bias:
            specs["key_bias"] = ParameterSpec(shape, "zeros")
            specs["value_bias"] = ParameterSpec((self.embedding_dim,), "zeros")
        return specs


@dataclass(frozen=True, kw_only=True)
class AverageOptions:
    """Options of :class:`~firstlayer.numpy.NgramAverage`, which has their meaning."""

    columns: int
    width: int
    embedding_dim: int

    def __post_init__(self) -> None:
        names = ("columns", "width", "embedding_dim")
        _set(self, **{name: positive(name, getattr(self, name)) for name in names})

    @property
    def memory_dim(self) -> int:
        """Width of the n-gram vectors."""
        return self.columns * self.width

    @property
    def hidden_dims(self) -> tuple[int, ...]:
        """Last axis of the token vectors."""
        return (self.embedding_dim,)

    def parameters(self) -> dict[str, ParameterSpec]:
        """Return the parameter by name."""
        shape = self.columns, self.embedding_dim, self.width
        return {"weight": ParameterSpec(shape, "linear")}


class GateArguments:
    """Base class of the gates of every front end: their arguments as properties."""

    _options_class: type[Any] = EngramOptions
    options: Any

    @classmethod
    def _parameter_shapes(cls, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """Return the shape of each parameter of a layer with this config."""
        options = {name: value for name, value in config.items() if name != "dtype"}
        specs = cls._options_class(**options).parameters()
        return {name: spec.shape for name, spec in specs.items()}

    @property
    def memory_dim(self) -> int:
        """Width of the n-gram vectors."""
        return self.options.memory_dim

    @property
    def embedding_dim(self) -> int:
        """Width of the hidden states."""
        return self.options.embedding_dim


class EngramArguments(GateArguments):
    """Arguments of ``EngramGate`` as properties."""

    @property
    def streams(self) -> int | None:
        """Number of streams, or None."""
        return self.options.streams

    @property
    def eps(self) -> float:
        """Term added to mean squares."""
        return self.options.eps


class ShortConvArguments(EngramArguments):
    """Arguments of ``ShortConvGate`` as properties."""

    _options_class = ShortConvOptions

    @property
    def kernel_size(self) -> int:
        """Number of positions that the convolution reads."""
        return self.options.kernel_size

    @property
    def dilation(self) -> int:
        """Distance between them."""
        return self.options.dilation

    @property
    def bias(self) -> bool:
        """Whether keys and values have a bias."""
        return self.options.bias

    @property
    def conv_eps(self) -> float:
        """Term added to the mean squares before the convolution."""
        return self.options.conv_eps


class AverageArguments(GateArguments):
    """Arguments of ``NgramAverage`` as properties."""

    _options_class = AverageOptions

    @property
    def columns(self) -> int:
        """Number of rows for each position."""
        return self.options.columns

    @property
    def width(self) -> int:
        """Width of a row."""
        return self.options.width


class NgramArguments:
    """Base class of ``NgramEmbedding`` of every front end."""

    scheme: Scheme
    layer: int | None
    combine: str
    table: Any
    #: Class of the table in this front end.
    _embedding_class: Any

    def _set_arguments(
        self,
        scheme: Scheme,
        table: Any,
        *,
        layer: int | None,
        combine: str,
        **options: Any,
    ) -> None:
        """Set the fields of a new layer, and make its table unless one is given.

        Args:
            scheme: The scheme.
            table: Layer with the table, store, or width of the rows of a new table.
            layer: Layer of the model, or None.
            combine: ``"concat"`` or ``"sum"``.
            options: Arguments of a new table, or of the layer of a store.
        """
        one_of("combine", combine, ("concat", "sum"))
        if not isinstance(scheme, Scheme):
            got = type(scheme).__name__
            raise TypeError(f"scheme must be an n-gram scheme, such as Engram, got {got}")
        rows = scheme.layout(layer).rows
        if hasattr(table, "num_embeddings"):
            if options:
                given = sorted(options)
                raise TypeError(f"a given table takes no other options, got {given}")
        elif hasattr(table, "read"):
            table = self._embedding_class.from_store(table, **options)
        else:
            table = self._embedding_class(rows, table, **options)
        if table.num_embeddings < rows:
            raise ValueError(f"table must have {rows} rows, got {table.num_embeddings}")
        self.scheme, self.layer, self.table = scheme, layer, table
        self.combine = combine

    def _rows(self, ids: Any, **others: Any) -> Any:
        """Return the rows of the n-grams that end at each position."""
        return self.scheme(ids, layer=self.layer, **others)

    @property
    def embedding_dim(self) -> int:
        """Width of the output."""
        columns = self.scheme.columns if self.combine == "concat" else 1
        return columns * self.table.embedding_dim

    def _config_with(self, table: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments that rebuild the layer, except the arrays of the scheme.

        Args:
            table: Config of the table.
        """
        arguments = _arguments(self.scheme).items()
        plain = {
            name: _json_value(value)
            for name, value in arguments
            if not isinstance(value, np.ndarray)
        }
        return {
            "scheme": {"class": type(self.scheme).__name__, **plain},
            "table": {"class": "Embedding", **table},
            "layer": self.layer,
            "combine": self.combine,
        }

    def _scheme_arrays(self) -> dict[str, np.ndarray]:
        """Return the arguments of the scheme that are arrays."""
        arguments = _arguments(self.scheme).items()
        return {k: v for k, v in arguments if isinstance(v, np.ndarray)}

    @staticmethod
    def _scheme_from(config: Any, arrays: Mapping[str, np.ndarray]) -> Scheme:
        """Return the scheme of a config and of arrays, which may be forged."""
        arguments = dict(config) if isinstance(config, Mapping) else {}
        name = arguments.pop("class", None)
        if not isinstance(name, str) or name not in SCHEMES:
            raise ValueError(f"scheme must be one of {', '.join(SCHEMES)}, got {name!r}")
        columns = 1
        for option in ("order", "heads", "splits", "functions", "salts"):
            columns *= int(arguments.get(option, 1))
        for option in ("layers", "sizes", "orders"):
            columns *= len(arguments.get(option, (1,)))
        if not 0 < columns <= _MAX_COLUMNS:
            raise ValueError(
                f"scheme must have at most {_MAX_COLUMNS} columns, got {columns}"
            )
        return SCHEMES[name](**arguments, **arrays)


def check_shapes(
    hidden: Any, memory: Any, mask: Any, *, options: Any, name: str = "hidden"
) -> None:
    """Raise ValueError unless the arguments of a gate fit together.

    Args:
        hidden: Hidden states, or token vectors.
        memory: N-gram vectors.
        mask: Mask, or None.
        options: Options of the gate.
        name: Name of the first argument.
    """
    dims = options.hidden_dims
    lead = tuple(hidden.shape[: hidden.ndim - len(dims)])
    if tuple(hidden.shape[hidden.ndim - len(dims) :]) != dims:
        raise ValueError(f"{name} must end in {dims}, got shape {tuple(hidden.shape)}")
    expected = *lead, options.memory_dim
    if tuple(memory.shape) != expected:
        raise ValueError(f"memory must have shape {expected}, got {tuple(memory.shape)}")
    if mask is not None and tuple(mask.shape) != lead:
        raise ValueError(f"mask must have shape {lead}, got {tuple(mask.shape)}")


def _arguments(scheme: Scheme) -> dict[str, Any]:
    return {
        field.name: getattr(scheme, field.name) for field in fields(scheme) if field.init
    }


def _set(options: Any, **values: Any) -> None:
    """Set arguments of a frozen value that is being constructed to their checked values."""
    for name, value in values.items():
        object.__setattr__(options, name, value)


def _json_value(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    return list(value) if isinstance(value, tuple) else value
