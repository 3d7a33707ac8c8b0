"""The result of functions that replace modules of an existing model."""

from typing import Self

from torch import nn


class Replaced(int):
    """Number of replaced modules, with their names and the modules that were left.

    Names are those of ``model.named_modules()``. A module with two names counts twice.

    Args:
        names: Names of the replaced modules.
        left: Reason for each module that was not replaced, by its name.

    Example:
        >>> result = Replaced(["rotary"], {"vision.rotary": "it has parameters"})
        >>> result == 1, result.names, result.left
        (True, ['rotary'], {'vision.rotary': 'it has parameters'})
    """

    names: list[str]
    left: dict[str, str]

    def __new__(cls, names: list[str], left: dict[str, str]) -> Self:
        self = super().__new__(cls, len(names))
        self.names, self.left = names, left
        return self

    def __getnewargs__(self) -> tuple[list[str], dict[str, str]]:  # pyright: ignore
        return self.names, self.left

    def __repr__(self) -> str:
        return f"Replaced({self.names}, left={self.left})"

    __str__ = int.__repr__

    def check(self, model: nn.Module, ours: type[nn.Module], missing: str) -> Self:
        """Return this result, or raise if ``model`` has no module of Firstlayer's.

        Args:
            model: The model.
            ours: Class of the modules that replace others.
            missing: Message if there was no module to replace.
        """
        if not self and not any(isinstance(module, ours) for module in model.modules()):
            reasons = "; ".join(f"{name}: {why}" for name, why in self.left.items())
            raise ValueError(reasons or missing)
        return self
