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
Numba that is not in :data:`numba_abi.COMPILER_VERSIONS` uses its own compiler.
"""

import importlib
import sys
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import llvmlite.binding as llvm
from numba import typeof
from numba.core import config, ir, types
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.compiler_machinery import AnalysisPass, register_pass
from numba.core.typed_passes import NativeLowering

from .lowering import KernelLowering
from .numba_abi import WORKER_SUFFIX, has_known_compiler
from .signatures import TypingContext

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


@register_pass(mutates_CFG=False, analysis_only=True)
class _OneTypePass(AnalysisPass):
    """Check that no variable is assigned values of two types.

    Without a name for each assignment, Numba would give the variable a type for both, such
    as float64 for float32 and an integer.
    """

    _name = "firstlayer_one_type"

    def __init__(self) -> None:
        super().__init__()

    def run_pass(self, state: Any) -> bool:
        for block in state.func_ir.blocks.values():
            for assignment in block.find_insts(ir.Assign):
                name = assignment.target.name
                found, type_ = _assigned_type(assignment.value, state), state.typemap[name]
                if found not in (None, types.unliteral(type_)):
                    raise TypeError(
                        f"variables of a kernel must have one type, got {found} and"
                        f" {type_} for {name} at {assignment.loc}"
                    )
        return False


def _assigned_type(value: Any, state: Any) -> Any:
    """Return the type of an assigned value, or None if it has no type of its own."""
    if isinstance(value, ir.Var):
        return types.unliteral(state.typemap[value.name])
    if isinstance(value, ir.Const):
        return typeof(value.value)
    signature = state.calltypes.get(value)
    return signature and types.unliteral(signature.return_type)


@register_pass(mutates_CFG=True, analysis_only=False)
class _LoweringPass(NativeLowering):
    _name = "firstlayer_lowering"

    @property
    def lowering_class(self) -> type[KernelLowering]:
        return KernelLowering


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
        for function in self._final_module.functions:
            if _only_passes_arguments(function):
                function.add_function_attribute("noinline")
                function.add_function_attribute("optnone")
        # Any: Numba sets the variables of this module when it is imported.
        settings: Any = config
        options = llvm.create_pipeline_tuning_options(int(settings.OPT))
        options.loop_vectorization = bool(settings.LOOP_VECTORIZE)
        # Neither makes a kernel faster, and together they take a quarter of LLVM's time.
        options.loop_unrolling = options.slp_vectorization = False
        builder = llvm.create_pass_builder(self._codegen._tm, options)
        builder.getModulePassManager().run(self._final_module, builder)


def _only_passes_arguments(function: Any) -> bool:
    """Return whether a function calls a kernel with arguments from Python or memory."""
    is_wrapper = function.name.startswith("_ZN7cpython")
    is_called = is_wrapper or function.name.endswith(WORKER_SUFFIX)
    return is_called and not function.is_declaration


def _import_array_functions() -> None:
    """Import Numba's functions of arrays, which every compilation needs, without SciPy.

    Numba imports scipy.linalg there, only to find out whether it exists. That would take
    longer than to compile a kernel.
    """
    if "numba.np.arraymath" in sys.modules:
        return
    linalg: Any = importlib.import_module("numba.np.linalg")
    ensure_blas = linalg.ensure_blas
    linalg.ensure_blas = _ensure_scipy
    try:
        importlib.import_module("numba.np.arraymath")
    finally:
        linalg.ensure_blas = ensure_blas


def _ensure_scipy() -> None:
    if find_spec("scipy") is None:
        raise ImportError("linear algebra needs SciPy")


class InternalCompiler(Compiler):
    """Compiler of functions that only kernels call."""

    library_class: type[JITCodeLibrary] = _InternalLibrary

    def __init__(self, *args: Any) -> None:
        if has_known_compiler():
            _import_array_functions()
        super().__init__(*args)

    def define_pipelines(self) -> Any:
        pipelines = super().define_pipelines()
        if not has_known_compiler():
            return pipelines
        for pipeline in pipelines:
            pipeline.passes = [
                (step, description)
                for step, description in pipeline.passes
                if step.__name__ not in UNUSED | UNNEEDED
            ]
            lowering = [step for step, _ in pipeline.passes].index(NativeLowering)
            pipeline.passes[lowering : lowering + 1] = [
                (_OneTypePass, "check types of variables"),
                (_LoweringPass, "lower kernel"),
            ]
        state = self.state
        state.typingctx = TypingContext(state.typingctx)
        name = state.func_id.func_qualname
        state.library = self.library_class(state.targetctx.codegen(), name)
        state.library.enable_object_caching()
        return pipelines


class KernelCompiler(InternalCompiler):
    """Compiler of kernels."""

    library_class = _KernelLibrary
