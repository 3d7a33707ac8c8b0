"""Numba's compiler, without work that kernels do not need.

Numba optimizes each function of a program on its own, then all of them cheaply, to remove
counts of references, then all of them in full. It also makes machine code of every function
that a kernel calls, which nothing uses, because the function is compiled into the kernel as
well. Here a kernel is optimized once, in full, and functions that only kernels call get no
machine code. Passes over Numba's own code that change nothing in a kernel are left out.

The classes override methods of Numba's code libraries, which are no public API. A version
of Numba that is not in :data:`numba_abi.KNOWN_VERSIONS` uses its own compiler.
"""

from types import SimpleNamespace
from typing import Any

import llvmlite.binding as llvm
from numba.core import config
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler

from .numba_abi import is_known_version

# Passes for code that kernels do not contain: context managers, closures, comprehensions,
# errors with computed texts, ``literally`` and ``literal_unroll``, expressions of whole
# arrays, calls of ``parallel=True``; and one that writes a listing.
LEFT_OUT = frozenset({
    "WithLifting",
    "InlineClosureLikes",
    "RewriteDynamicRaises",
    "MakeFunctionToJitFunction",
    "FindLiterallyCalls",
    "LiteralUnroll",
    "NopythonRewrites",
    "DumpParforDiagnostics",
    "AnnotateTypes",
})


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
                step for step in pipeline.passes if step[0].__name__ not in LEFT_OUT
            ]
        state = self.state
        name = state.func_id.func_qualname
        state.library = self.library_class(state.targetctx.codegen(), name)
        state.library.enable_object_caching()
        return pipelines


class KernelCompiler(InternalCompiler):
    """Compiler of kernels that create no arrays, and so have no counts of references."""

    library_class = _KernelLibrary
