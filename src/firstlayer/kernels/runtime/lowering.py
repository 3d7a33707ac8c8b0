"""Translation of kernels from Numba's typed statements to LLVM instructions.

Differs from Numba's own in what kernels do not need: code that counts references, debug
information, and negative indices, which count from the end of an array. A kernel indexes
arrays from the beginning.
"""

from typing import Any

from numba import types
from numba.core.cgutils import alloca_once
from numba.core.lowering import Lower

from .numba_abi import array_struct


class KernelLowering(Lower):
    """Lowering of a kernel, or of a function that only kernels call."""

    def alloca_lltype(self, name: str, lltype: Any, datamodel: Any = None) -> Any:
        return alloca_once(self.builder, lltype, name=name, zfill=False)

    def storevar(self, value: Any, name: str, argidx: int | None = None) -> None:
        self._alloca_var(name, self.typeof(name))
        if name in self._singly_assigned_vars:
            self._blk_local_varmap[name] = value
        else:
            self.builder.store(value, self.getvar(name))

    def lower_binop(self, resty: Any, expr: Any, op: Any) -> Any:
        # The signature that type inference found; Numba would look for others.
        function = self.context.typing_context.resolve_value_type(op)
        signature = self.fndesc.calltypes[expr]
        args = [
            self._cast_var(variable, type_)
            for variable, type_ in zip((expr.lhs, expr.rhs), signature.args, strict=True)
        ]
        result = self.context.get_function(function, signature)(self.builder, args)
        return self.context.cast(self.builder, result, signature.return_type, resty)

    def lower_getitem(
        self, resty: Any, expr: Any, value: Any, index: Any, signature: Any
    ) -> Any:
        array = self.typeof(value.name)
        if not self._is_entry(array, index):
            return super().lower_getitem(resty, expr, value, index, signature)
        pointer = self._pointer(value, index)
        number = self.context.unpack_value(self.builder, array.dtype, pointer)
        return self.context.cast(self.builder, number, array.dtype, resty)

    def lower_setitem(
        self, target_var: Any, index_var: Any, value_var: Any, signature: Any
    ) -> Any:
        array = self.typeof(target_var.name)
        if not self._is_entry(array, index_var):
            return super().lower_setitem(target_var, index_var, value_var, signature)
        number = self._cast_var(value_var, array.dtype)
        pointer = self._pointer(target_var, index_var)
        self.context.pack_value(self.builder, array.dtype, number, pointer)

    def _is_entry(self, array: Any, index: Any) -> bool:
        """Return whether an array of numbers is indexed by one integer for each axis."""
        if not isinstance(array, types.Array):
            return False
        indices = _index_types(self.typeof(index.name))
        return (
            len(indices) == array.ndim
            and isinstance(array.dtype, types.Number | types.Boolean)
            and all(isinstance(type_, types.Integer) for type_ in indices)
        )

    def _pointer(self, array: Any, index: Any) -> Any:
        """Return the pointer to an entry."""
        builder, array_type = self.builder, self.typeof(array.name)
        index_type, value = self.typeof(index.name), self.loadvar(index.name)
        is_tuple = isinstance(index_type, types.BaseTuple)
        numbers = [
            self.context.cast(
                builder, builder.extract_value(value, axis) if is_tuple else value,
                type_, types.int64,
            )
            for axis, type_ in enumerate(_index_types(index_type))
        ]  # fmt: skip
        struct = array_struct(self.context, builder, array_type, self.loadvar(array.name))
        if array_type.layout == "C":
            flat = numbers[0]
            for axis, number in enumerate(numbers[1:], 1):
                flat = builder.mul(flat, builder.extract_value(struct.shape, axis))
                flat = builder.add(flat, number)
            return builder.gep(struct.data, [flat])
        offset = None
        for axis, number in enumerate(numbers):
            step = builder.mul(number, builder.extract_value(struct.strides, axis))
            offset = step if offset is None else builder.add(offset, step)
        start = builder.ptrtoint(struct.data, offset.type)
        return builder.inttoptr(builder.add(start, offset), struct.data.type)


def _index_types(index: Any) -> tuple[Any, ...]:
    return tuple(index) if isinstance(index, types.BaseTuple) else (index,)
