"""Other libraries' names on Inlay's layers, for people who have those in their fingers.

A module for each: :mod:`inlay.compat.lrnnx`, :mod:`inlay.compat.lucid`,
:mod:`inlay.compat.equinox`, :mod:`inlay.compat.tinytorch`,
:mod:`inlay.compat.transformers`. Signatures, attributes and the names in a checkpoint are
the other library's; what its documents promise and it does not keep is kept here. Nothing
is imported until one of them is.
"""
