"""Translation of kernels from Numba's typed statements to LLVM instructions.

Differs from Numba's own in what kernels do not need: code that counts references, debug
information, and indices that are negative at run time. A kernel indexes arrays from the
beginning.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core.cgutils import alloca_once
from numba.core.lowering import Lower

from .numba_abi import array_struct
from .signatures import signature_of

BYTE_POINTER = ir.IntType(8).as_pointer()
RANGE = types.range_iter64_type


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

    def lower_expr(self, resty: Any, expr: Any) -> Any:
        if expr.op == "getiter" and resty == RANGE:
            return self._range_iterator(expr.value)
        if expr.op == "iternext" and self.typeof(expr.value.name) == RANGE:
            return self._next_in_range(expr.value, resty)
        if expr.op in ("pair_first", "pair_second"):
            pair, position = self.loadvar(expr.value.name), expr.op == "pair_second"
            return self.builder.extract_value(pair, int(position))
        return super().lower_expr(resty, expr)

    def _range_iterator(self, range_: Any) -> Any:
        """Return an iterator over a range, which is at its start.

        Numba's own counts the steps that are left; here a loop compares with the end.
        """
        start, stop, step = (
            self.builder.extract_value(self.loadvar(range_.name), field)
            for field in range(3)
        )
        current = alloca_once(self.builder, start.type)
        self.builder.store(start, current)
        model = self.context.data_model_manager[RANGE]
        iterator = ir.Constant(model.get_value_type(), ir.Undefined)
        # The count is not used, but a generator saves what both pointers point to.
        fields = {"iter": current, "stop": stop, "step": step, "count": current}
        for name, value in fields.items():
            position = model.get_field_position(name)
            iterator = self.builder.insert_value(iterator, value, position)
        return iterator

    def _next_in_range(self, iterator: Any, pair_type: Any) -> Any:
        """Return the next number, and whether it is in the range."""
        # Any: the declared methods lack parameters of llvmlite's.
        builder: Any = self.builder
        model = self.context.data_model_manager[RANGE]
        current, stop, step = (
            builder.extract_value(
                self.loadvar(iterator.name), model.get_field_position(name)
            )
            for name in ("iter", "stop", "step")
        )
        number = builder.load(current)
        builder.store(builder.add(number, step, flags=["nsw"]), current)
        is_inside = builder.select(
            builder.icmp_signed(">", step, step.type(0)),
            builder.icmp_signed("<", number, stop),
            builder.icmp_signed(">", number, stop),
        )
        pair = ir.Constant(self.context.get_value_type(pair_type), ir.Undefined)
        return builder.insert_value(builder.insert_value(pair, number, 0), is_inside, 1)

    def lower_binop(self, resty: Any, expr: Any, op: Any) -> Any:
        # Numba would look for overloads for constants first.
        context, inferred = self.context.typing_context, self.fndesc.calltypes[expr]
        function = context.resolve_value_type(op)
        args = [
            self._cast_var(variable, type_)
            for variable, type_ in zip((expr.lhs, expr.rhs), inferred.args, strict=True)
        ]
        signature = signature_of(context, function, inferred.args)
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
            # Numba's own for a constant such as -1.
            and all(getattr(type_, "literal_value", 0) >= 0 for type_ in indices)
        )

    def _pointer(self, array: Any, index: Any) -> Any:
        """Return the pointer to an entry."""
        builder: Any = self.builder
        array_type, numbers = self.typeof(array.name), self._indices(index)
        struct = array_struct(self.context, builder, array_type, self.loadvar(array.name))
        if array_type.layout == "C":
            flat = numbers[0]
            for axis, number in enumerate(numbers[1:], 1):
                length = builder.extract_value(struct.shape, axis)
                flat = builder.add(
                    builder.mul(flat, length, flags=["nsw"]), number, flags=["nsw"]
                )
            return builder.gep(struct.data, [flat], inbounds=True)
        pointer = builder.bitcast(struct.data, BYTE_POINTER)
        for axis, number in enumerate(numbers):
            stride = builder.extract_value(struct.strides, axis)
            step = builder.mul(number, stride, flags=["nsw"])
            pointer = builder.gep(pointer, [step], inbounds=True)
        return builder.bitcast(pointer, struct.data.type)

    def _indices(self, index: Any) -> list[Any]:
        """Return one index or a tuple of them as int64."""
        type_, value = self.typeof(index.name), self.loadvar(index.name)
        values = [value]
        if isinstance(type_, types.BaseTuple):
            axes = range(len(_index_types(type_)))
            values = [self.builder.extract_value(value, axis) for axis in axes]
        return [
            self.context.cast(self.builder, value, type_, types.int64)
            for value, type_ in zip(values, _index_types(type_), strict=True)
        ]


def _index_types(index: Any) -> tuple[Any, ...]:
    return tuple(getattr(index, "types", (index,)))
