"""Time2Vec for torch."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from .._check import same_dtype
from ..files.layer_configs import config_of
from ..positions.time2vec import check_width, time2vec
from ._positions.arguments import Positions, positions_tensor, signed
from ._positions.bias import parameter
from ._tensors.buffers import repr_of
from ._tensors.dtypes import dtype_name


class Time2Vec(nn.Module):
    """Maps times to one linear feature and sines with learned frequencies and phases.

    Args:
        embedding_dim: Number of features, at least 2.
        weight: Slope of the linear feature, then the frequencies in radians per unit, not
            copied if possible.
        bias: Offset of the linear feature, then the phases in radians.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Shape:
        - weight, bias: ``(embedding_dim,)``
        - times: ``(...)``, integers or reals
        - output: ``(..., embedding_dim)``, in the dtype of real times, or of the parameters
          if times are integers

    The product of a frequency and a time is rounded to float32, or float64 if times or
    parameters are: subtract a near origin from large times such as timestamps.

    Parameters that are not given are drawn from a normal distribution.

    Example:
        >>> layer = Time2Vec(3, weight=[2.0, 3.0, 5.0], bias=[1.0, 0.0, 0.0])
        >>> layer([0.0, 4.0])[:, 0].tolist(), layer(torch.ones(7, 5)).shape
        ([1.0, 9.0], torch.Size([7, 5, 3]))
    """

    def __init__(
        self,
        embedding_dim: int,
        *,
        weight: Any = None,
        bias: Any = None,
        device: Any = None,
        dtype: torch.dtype | str | None = None,
    ) -> None:
        super().__init__()
        self.embedding_dim = check_width(embedding_dim)
        shape, options = (self.embedding_dim,), {"device": device, "dtype": dtype}
        self.weight = parameter(weight, shape, **options)
        self.bias = parameter(bias, shape, **options, name="bias")
        names = (dtype_name(own.dtype) for own in (self.weight, self.bias))
        same_dtype("weight and bias", *names)
        for given, own in ((weight, self.weight), (bias, self.bias)):
            if given is None:
                nn.init.normal_(own)

    def reset_parameters(self) -> None:
        """Draw the parameters from their initial distribution."""
        nn.init.normal_(self.weight)
        nn.init.normal_(self.bias)

    def forward(self, times: Positions) -> Float[Tensor, "*shape embedding_dim"]:
        """Return the features of each time.

        Args:
            times: Integers or floats of any shape.
        """
        device = self.weight.device
        times = signed(positions_tensor(times, device=device, name="times"))
        any_double = torch.float64 in (times.dtype, self.weight.dtype)
        compute = torch.float64 if any_double else torch.float32
        weight, bias = self.weight.to(compute), self.bias.to(compute)
        dtype = times.dtype if times.is_floating_point() else self.weight.dtype
        return time2vec(times, weight=weight, bias=bias).to(dtype)

    def config(self) -> dict[str, Any]:
        """Return the constructor arguments that rebuild this layer, as plain values.

        Example:
            >>> Time2Vec(3).config()
            {'embedding_dim': 3, 'dtype': 'float32'}
        """
        return config_of(self, dtype=dtype_name(self.weight.dtype))

    def extra_repr(self) -> str:
        return repr_of(self)
