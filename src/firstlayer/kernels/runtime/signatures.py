"""Types of calls in kernels, each found once.

Numba asks every overload of an operator for each use of it, when it infers types and again
when it lowers the call.
"""

from typing import Any

# Module state: signatures by function and types of arguments. An overload that is
# registered later makes another function type, so that none is out of date.
_signatures: dict[Any, Any] = {}


def signature_of(context: Any, function: Any, args: tuple[Any, ...]) -> Any:
    """Return the signature of a function's call, or None if there is none.

    Args:
        context: Numba's typing context.
        function: Type of the function.
        args: Types of the arguments.
    """
    signature = _signatures.get((function, args))
    if signature is None:
        signature = context.resolve_function_type(function, args, {})
        _signatures[function, args] = signature
    return signature


class TypingContext:
    """Numba's typing context, which remembers the signatures of calls."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def resolve_function_type(self, function: Any, args: Any, kwargs: Any) -> Any:
        if kwargs:
            return self._context.resolve_function_type(function, args, kwargs)
        return signature_of(self._context, function, args)
