"""Griffe extension for the reference: docstrings as Markdown, constructors of optimizers.

Methods that all layers of a front end inherit are shown once, in ``AnyLayer``.

Docstrings use roles such as ``:class:`Name```, which Markdown does not know, and the
heading ``Example:``, which griffe calls ``Examples:``. The constructors of row optimizers
have signatures that are made at run time, which griffe does not see in the source.
"""

import inspect
import re
from typing import Any

import griffe

from firstlayer import optim

ROLE = re.compile(r":[a-z]+:`~?\.?([^`]+)`")
EXAMPLE = re.compile(r"^( *)Example:$", re.MULTILINE)


PLAIN = griffe.ParameterKind.positional_or_keyword
KEYWORD = griffe.ParameterKind.keyword_only


class Docstrings(griffe.Extension):
    """Rewrites each docstring before it is rendered, and signatures of optimizers."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Move methods of all layers, and give row optimizers their signatures."""
        for front_end in ("numpy", "equinox"):
            module = pkg[f"{front_end}._module"]
            base, shared = module["Module"], griffe.Class("AnyLayer")
            module.set_member("AnyLayer", shared)
            for name in [name for name in base.members if not name.startswith("_")]:
                shared.set_member(name, base[name])
                base.del_member(name)
        for name in set(optim.__all__) - {"AveragedRows", "RowOptimizer"}:
            for module in ("optim", "torch.optim", "equinox.optim"):
                found = pkg[f"{module}.{name}"]
                found = found.final_target if found.is_alias else found
                parameters = _parameters(pkg, module, name)
                constructor = griffe.Function("__init__", parameters=parameters)
                found.set_member("__init__", constructor)

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of a module, class, function or attribute."""
        if obj.docstring:
            text = ROLE.sub(r"`\1`", obj.docstring.value)
            obj.docstring.value = EXAMPLE.sub(r"\1Examples:", text)


def _parameters(pkg: griffe.Module, module: str, name: str) -> griffe.Parameters:
    """Return the parameters of an optimizer's constructor."""
    signature = inspect.signature(getattr(optim, name))
    options = [
        griffe.Parameter(
            option.name,
            kind=PLAIN if option.kind is option.POSITIONAL_OR_KEYWORD else KEYWORD,
            default=repr(option.default),
        )
        for option in list(signature.parameters.values())[1:]
    ]
    if module == "optim":
        return griffe.Parameters(griffe.Parameter("layer", kind=PLAIN), *options)
    if module == "torch.optim":
        background = griffe.Parameter("background", kind=KEYWORD, default="False")
        others = griffe.Parameter("torch_options", kind=griffe.ParameterKind.var_keyword)
        first = griffe.Parameter("params", kind=PLAIN)
        return griffe.Parameters(first, *options, background, others)
    base = pkg[f"{module}.row_optimizer.RowOptimizer.__init__"]
    own = [parameter for parameter in base.parameters if parameter.kind is KEYWORD]
    general = {"mode", "stochastic_rounding"}
    return griffe.Parameters(*(o for o in options if o.name not in general), *own)
