"""Numba's compiler, without work that kernels do not need.

Most of the time that Numba takes to compile a kernel is spent in Python. Kernels count no
references, have no debug information, and assign values of one type to each variable, so
that passes for all of these, and for code that kernels do not contain, are left out. Types
of calls, such as that of an addition of two integers, are found once.

Numba optimizes each function of a program on its own, then all of them cheaply, to remove
counts of references, then all of them in full. It also makes machine code of every function
that a kernel calls, which nothing uses, because the function is compiled into the kernel as
well. Here a kernel is optimized once, in full, and functions that only kernels call get no
machine code.

The classes override methods of Numba's compiler, which are no public API. A version of
Numba that is not in :data:`numba_abi.KNOWN_VERSIONS` uses its own compiler.
"""

from types import SimpleNamespace
from typing import Any

import llvmlite.binding as llvm
from numba.core import config
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.compiler_machinery import register_pass
from numba.core.typed_passes import NativeLowering

from .lowering import KernelLowering
from .numba_abi import is_known_version

# Passes for code that kernels do not contain: context managers, closures, comprehensions,
# errors with computed texts, ``literally`` and ``literal_unroll``, expressions of whole
# arrays, calls of ``parallel=True``; and one that writes a listing.
UNUSED = {
    "WithLifting",
    "InlineClosureLikes",
    "RewriteDynamicRaises",
    "MakeFunctionToJitFunction",
    "FindLiterallyCalls",
    "LiteralUnroll",
    "NopythonRewrites",
    "DumpParforDiagnostics",
    "AnnotateTypes",
}
# Passes that give each assignment of a variable its own name and type, which LLVM does too
# for variables of one type, and that end the life of variables which count references.
UNNEEDED = {"ReconstructSSA", "PreLowerStripPhis", "IRLegalization"}


@register_pass(mutates_CFG=True, analysis_only=False)
class _LoweringPass(NativeLowering):
    _name = "firstlayer_lowering"

    @property
    def lowering_class(self) -> type[KernelLowering]:
        return KernelLowering


class _TypingContext:
    """Numba's typing context, which remembers the types of calls.

    Numba asks every overload of an operator for each use of it. An overload that is
    registered later makes another function type, so that nothing here is out of date.
    """

    # State of the class: signatures by function and types of arguments.
    _signatures: dict[Any, Any] = {}

    def __init__(self, context: Any) -> None:
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def resolve_function_type(self, function: Any, args: Any, kwargs: Any) -> Any:
        if kwargs:
            return self._context.resolve_function_type(function, args, kwargs)
        signature = self._signatures.get((function, args))
        if signature is None:
            signature = self._context.resolve_function_type(function, args, kwargs)
            self._signatures[function, args] = signature
        return signature


class _InternalLibrary(JITCodeLibrary):
    """Code of a function that only kernels call, which is compiled into them."""

    def _optimize_final_module(self) -> None:
        """Do nothing: its parts are optimized, and the whole within each kernel."""

    def _finalize_final_module(self) -> None:
        self._finalized = True

    @property
    def codegen(self) -> Any:
        # Numba would write the address of Python objects into the machine code.
        return SimpleNamespace(set_env=lambda name, environment: None)


class _KernelLibrary(JITCodeLibrary):
    """Code of one kernel, optimized once, with everything that it calls."""

    def _optimize_functions(self, ll_module: Any) -> None:
        ll_module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self) -> None:
        # Any: Numba sets the variables of this module when it is imported.
        settings: Any = config
        options = llvm.create_pipeline_tuning_options(int(settings.OPT))
        options.loop_vectorization = bool(settings.LOOP_VECTORIZE)
        options.slp_vectorization = bool(settings.SLP_VECTORIZE)
        builder = llvm.create_pass_builder(self._codegen._tm, options)
        builder.getModulePassManager().run(self._final_module, builder)


class InternalCompiler(Compiler):
    """Compiler of functions that only kernels call."""

    library_class: type[JITCodeLibrary] = _InternalLibrary

    def define_pipelines(self) -> Any:
        pipelines = super().define_pipelines()
        if not is_known_version():
            return pipelines
        for pipeline in pipelines:
            pipeline.passes = [
                (_LoweringPass if step is NativeLowering else step, description)
                for step, description in pipeline.passes
                if step.__name__ not in UNUSED | UNNEEDED
            ]
        state = self.state
        state.typingctx = _TypingContext(state.typingctx)
        name = state.func_id.func_qualname
        state.library = self.library_class(state.targetctx.codegen(), name)
        state.library.enable_object_caching()
        return pipelines


class KernelCompiler(InternalCompiler):
    """Compiler of kernels."""

    library_class = _KernelLibrary
