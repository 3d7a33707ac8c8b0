"""The linear recurrent unit: a diagonal linear recurrence with complex entries.

``state[t] = λ · state[t-1] + γ · B x[t]`` and ``y[t] = Re(C state[t]) + D · x[t]`` (Orvieto
et al. 2023, https://arxiv.org/abs/2303.06349). ``λ`` lies inside the unit circle for all
parameter values, so the recurrence is stable at any length. It needs no positions: the
recurrence itself encodes order.

:meth:`LRU.forward` computes all states by doubling: the sum over the last ``2n`` steps is
the sum over the last ``n`` plus ``λⁿ`` times the sum over the ``n`` before them.
:meth:`LRU.step` computes one state at a time. Both return the same numbers.
"""

import math
from typing import Any

import torch
from jaxtyping import Complex, Float
from torch import Tensor, nn

from ..._check import positive
from ...torch._tensors.dtypes import upcast


class LRU(nn.Module):
    """Linear recurrent unit, on whole sequences or step by step.

    Args:
        d_model: Width of input and output.
        d_state: Number of complex numbers in the state.
        r_min: Smallest initial magnitude of ``λ``, at least 0.
        r_max: Largest initial magnitude of ``λ``, above ``r_min`` and at most 1.
        max_phase: Largest initial angle of ``λ``, in radians.

    Shape:
        - x: ``(batch, length, d_model)``
        - output: as ``x``

    Example:
        >>> lru, x = LRU(8, 4), torch.randn(2, 5, 8)
        >>> cache = lru.allocate_inference_cache(2)
        >>> steps = [lru.step(x[:, t], cache)[0] for t in range(5)]
        >>> torch.allclose(lru(x), torch.stack(steps, dim=1), atol=1e-5)
        True
    """

    def __init__(
        self,
        d_model: int,
        d_state: int,
        r_min: float = 0.0,
        r_max: float = 1.0,
        max_phase: float = 2 * math.pi,
    ) -> None:
        super().__init__()
        if not 0 <= r_min < r_max <= 1:
            raise ValueError(
                f"r_min and r_max must be in order and within [0, 1], got {r_min}, {r_max}"
            )
        if not max_phase > 0:
            raise ValueError(f"max_phase must be positive, got {max_phase}")
        self.d_model = positive("d_model", d_model)
        self.d_state = positive("d_state", d_state)
        self.r_min, self.r_max, self.max_phase = r_min, r_max, max_phase
        self.nu_log, self.theta_log, self.gamma_log = _parameters(3, d_state)
        self.B_re, self.B_im = _parameters(2, d_state, d_model)
        self.C_re, self.C_im = _parameters(2, d_model, d_state)
        (self.D,) = _parameters(1, d_model)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw ``λ`` uniformly from the ring, and initialize the other parameters."""
        low, high = self.r_min**2, self.r_max**2
        # Excludes 0 and 1, whose logarithms are infinite.
        area, phase = (torch.rand(2, self.d_state) * (1 - 2e-6) + 1e-6).unbind()
        size_squared = low + area * (high - low)
        self.nu_log.copy_((-0.5 * size_squared.log()).log())
        self.theta_log.copy_((self.max_phase * phase).log())
        # Keeps the variance of the state equal to that of its input for every decay.
        self.gamma_log.copy_(0.5 * torch.log1p(-size_squared))
        for part in (self.B_re, self.B_im):
            nn.init.normal_(part, std=(2 * self.d_model) ** -0.5)
        for part in (self.C_re, self.C_im):
            nn.init.normal_(part, std=self.d_state**-0.5)
        nn.init.normal_(self.D)

    def forward(
        self,
        x: Float[Tensor, "batch length d_model"],
        integration_timesteps: None = None,
        lengths: Any = None,
    ) -> Float[Tensor, "batch length d_model"]:
        """Return the output of every step.

        Args:
            x: The sequences. The recurrence is causal, so trailing padding has no effect.
            integration_timesteps: Must be None; an LRU has uniform steps.
            lengths: Ignored.
        """
        if integration_timesteps is not None:
            raise ValueError("integration_timesteps must be None for an LRU")
        self._check(x, ("batch", "length"))
        decay, into, out = self.discretize()
        states = scan_linear(x.to(into.dtype) @ into.T, decay)
        return self._output(states, x, out)

    def step(
        self, x: Float[Tensor, "batch d_model"], inference_cache: dict[str, Any]
    ) -> tuple[Float[Tensor, "batch d_model"], dict[str, Any]]:
        """Return the output of one step, and the cache with the state after it.

        Args:
            x: Input of the step.
            inference_cache: From :meth:`allocate_inference_cache`. Updated in place.
        """
        self._check(x, ("batch",))
        into, out = inference_cache["B_norm"], inference_cache["C_complex"]
        state = inference_cache["Lambda"] * inference_cache["lrnn_state"]
        state = state + x.to(into.dtype) @ into.T
        inference_cache["lrnn_state"] = state
        return self._output(state, x, out), inference_cache

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int = 1, dtype: Any = None
    ) -> dict[str, Any]:
        """Return the state before the first step and the matrices that every step uses.

        Args:
            batch_size: Number of sequences.
            max_seqlen: Ignored; the state does not grow.
            dtype: Ignored; the state is complex64 or complex128.
        """
        decay, into, out = self.discretize()
        state = into.new_zeros(batch_size, self.d_state)
        names = ("lrnn_state", "Lambda", "B_norm", "C_complex")
        return dict(zip(names, (state, decay, into, out), strict=True))

    def discretize(
        self,
    ) -> tuple[
        Complex[Tensor, " d_state"],
        Complex[Tensor, "d_state d_model"],
        Complex[Tensor, "d_model d_state"],
    ]:
        """Return ``λ``, ``γ · B`` and ``C`` in at least float32 precision."""
        decay = torch.polar(
            torch.exp(-upcast(self.nu_log).exp()), upcast(self.theta_log).exp()
        )
        into = torch.complex(upcast(self.B_re), upcast(self.B_im))
        out = torch.complex(upcast(self.C_re), upcast(self.C_im))
        return decay, into * upcast(self.gamma_log).exp()[:, None], out

    def _output(self, states: Tensor, x: Tensor, out: Tensor) -> Tensor:
        y = (states @ out.T).real
        return (y + upcast(x) * upcast(self.D)).to(x.dtype)

    def _check(self, x: Tensor, axes: tuple[str, ...]) -> None:
        if x.ndim != len(axes) + 1 or x.shape[-1] != self.d_model:
            want = f"({', '.join(axes)}, {self.d_model})"
            raise ValueError(f"x must have shape {want}, got {tuple(x.shape)}")


def scan_linear(
    x: Complex[Tensor, "batch length d_state"], decay: Complex[Tensor, " d_state"]
) -> Complex[Tensor, "batch length d_state"]:
    """Return ``s[t] = decay · s[t-1] + x[t]`` for every ``t``, from ``s[-1] = 0``.

    Example:
        >>> x = torch.ones(1, 4, 1, dtype=torch.complex64)
        >>> scan_linear(x, torch.tensor([0.5 + 0j])).real.flatten().tolist()
        [1.0, 1.5, 1.75, 1.875]
    """
    span, power = 1, decay
    while span < x.shape[1]:
        x = x + power * nn.functional.pad(x[:, :-span], (0, 0, span, 0))
        span, power = 2 * span, power * power
    return x


def _parameters(count: int, *shape: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.empty(shape)) for _ in range(count)]
