"""Tensor: an array that records how it was computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from tinygrad_mha import engine, numpy_protocol, ops
from tinygrad_mha.engine import Node, WriteTime
from tinygrad_mha.modes import SCOPE, STATE
from tinygrad_mha.ops.elementary import Axis
from tinygrad_mha.primitives import REGISTRY, Primitive, as_dtype, as_operand, from_data
from tinygrad_mha.torch_names import METHODS, find_hint, translate_keywords

__all__ = ["Tensor", "apply", "as_tensor", "mark_written", "matmul", "plain", "replace_array"]
__all__ += ["wrap"]


class Tensor:
    """A NumPy array with a gradient and a record of the operation that computed it.

    Args:
        data: an array or buffer of any library (copied, its dtype kept), or numbers and nested lists of numbers
            (float32; booleans stay bool).
        requires_grad: whether `backward` stores a gradient here; floating dtypes only.
        dtype: the dtype to convert to, directly: a list is not rounded to float32 first.
        name: a name for graphs and messages.

    Attributes:
        data: the values. Of a leaf this is the array itself; assigning to the attribute copies into it. Element-wise
            writes to the array are not tracked; use `assign_`. Of an intermediate it is a read-only view.
        grad: None, or an array of the tensor's shape and dtype that shares memory with nothing.
        node: None for a leaf, else the record of its computation: `.op`, `.inputs`, `.kwargs`, `.scope`.

    Example:
        >>> x = Tensor([1.0, 2.0], requires_grad=True, name="x")
        >>> (x * x).sum().backward()
        >>> x.grad
        array([2., 4.], dtype=float32)
    """

    __slots__ = ("__weakref__", "_data", "_needs_grad", "_written", "grad", "name", "node")

    _data: np.ndarray
    _needs_grad: bool
    _written: WriteTime | None
    grad: np.ndarray | None
    name: str | None
    node: Node | None

    def __init__(self, data: Any, requires_grad: bool = False, dtype: Any = None, name: str | None = None) -> None:
        if isinstance(data, Tensor):
            if data.requires_grad:
                raise TypeError(
                    "a Tensor from a Tensor that needs a gradient would cut the graph: use x.detach() or x.astype()"
                )
            data = data._data
        elif isinstance(data, (list, tuple)) and _holds_tensors(data):
            raise TypeError(
                "a list of Tensors is not data: join them with tg.ops.stack(...), which keeps their gradients"
            )
        self._data = np.array(from_data(data, dtype), order="C", subok=False)
        self.grad = None
        self.node = None
        self.name = name
        self._written = None
        self._needs_grad = False
        self.requires_grad = requires_grad

    # ---------------------------------------------------------------------------------------------------- attributes

    @property
    def data(self) -> np.ndarray:
        """The values: of a leaf the array itself, of an intermediate a read-only view."""
        return self._data if self.node is None else _read_only(self._data)

    @data.setter
    def data(self, array: Any) -> None:
        self.assign_(array)

    @property
    def requires_grad(self) -> bool:
        """Whether `backward` computes the gradient of this tensor. It can be set on leaves."""
        return self._needs_grad

    @requires_grad.setter
    def requires_grad(self, wanted: bool) -> None:
        if wanted and self._data.dtype.kind != "f":
            raise TypeError(f"only floating tensors have gradients, got {self._data.dtype}: use x.astype(np.float32)")
        if self.node is not None and wanted != self._needs_grad:
            raise ValueError("this tensor was computed, its inputs decide whether it needs a gradient: use .detach()")
        self._needs_grad = bool(wanted)

    @property
    def shape(self) -> tuple[int, ...]:
        """The length of each axis."""
        return self._data.shape

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self._data.ndim

    @property
    def size(self) -> int:
        """The number of elements."""
        return Size(self._data.size)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The NumPy dtype of the elements."""
        return self._data.dtype

    @property
    def T(self) -> Tensor:  # noqa: N802 (NumPy's name)
        """The transpose, all axes reversed: (a, b, c) -> (c, b, a)."""
        return ops.transpose(self)

    @property
    def mT(self) -> Tensor:  # noqa: N802
        """The matrix transpose, the last two axes exchanged: (..., a, b) -> (..., b, a)."""
        if self.ndim < 2:
            raise ValueError(f"mT needs two or more axes, got shape {self.shape}")
        axes = (*range(self.ndim - 2), self.ndim - 1, self.ndim - 2)
        return apply(ops.transpose, (self,), {"axes": axes})

    # ----------------------------------------------------------------------------------------------------- gradients

    @translate_keywords
    def backward(self, grad: Any = None, leaves_only: bool = False) -> None:
        """Compute the gradients of this tensor with respect to all tensors it was computed from.

        Gradients are added to the `.grad` of leaves and overwrite the `.grad` of intermediates, which stays readable.
        The graph is kept as long as this tensor is: a second call adds the same gradients again.

        Args:
            grad: the gradient of this tensor, in its shape; 1 if it has a single element.
            leaves_only: store nothing on intermediates. Training loops need no more.

        Raises:
            ValueError: nothing to differentiate, no `grad` for several elements, or a `grad` of another shape.
            TypeError: a `grad` that does not consist of real numbers, or an operation without a derivative rule.
            RuntimeError: an operand was written to after it had been used.
        """
        observer = STATE.get().observer
        if observer is not None:
            observer.backward(self)
        if not self._needs_grad:
            raise ValueError(
                f"backward from {self._label()}, which does not require grad: no tensor that it was made from has "
                f"requires_grad=True, or it was made under no_grad"
            )
        engine.backward(self, self._seed(grad), leaves_only)
        if observer is not None:
            observer.returned(self)

    def _seed(self, grad: Any) -> np.ndarray:
        """The gradient that a backward starts with: `grad` checked and converted, or 1."""
        if grad is None:
            if self.size != 1:
                raise ValueError(
                    f"backward from shape {self.shape} needs to know the gradient of each of its {self.size} elements: "
                    f"pass grad=, an array of that shape, or make a scalar first"
                )
            return np.ones_like(self._data)
        array = np.asarray(plain(grad))
        if array.dtype.kind not in "fiu":
            raise TypeError(f"grad must consist of real numbers, got {array.dtype}")
        array = from_data(plain(grad), self.dtype)
        if array.shape != self.shape:
            raise ValueError(f"grad must have the shape of the tensor, {self.shape}, got {array.shape}")
        return array.astype(self.dtype)

    def zero_grad(self) -> None:
        """Delete the gradient: `.grad` is None again."""
        self.grad = None

    def detach(self) -> Tensor:
        """A leaf with the same values that needs no gradient. It shares memory, read-only if this was computed."""
        out = wrap(self.data)
        out._written = self._write_time()
        out.name = self.name
        return out

    def assign_(self, array: Any) -> Tensor:
        """Copy new values, of the same shape and a dtype that fits, into a leaf, and return it.

        A later `backward` through a graph that has used the old values raises RuntimeError.
        """
        if self.node is not None:
            raise ValueError(f"{self._label()} was computed; only leaves can be assigned to")
        new = as_array(array)
        if new.shape != self.shape:
            raise ValueError(f"assign_ keeps the shape: expected {self.shape}, got {new.shape}")
        if not np.can_cast(new.dtype, self.dtype, "same_kind"):
            raise TypeError(f"assign_ keeps the dtype: {new.dtype} does not fit into {self.dtype}")
        if not self._data.flags.writeable:
            raise ValueError("this tensor is a read-only view (of a broadcast, say): copy it first, Tensor(t.numpy())")
        np.copyto(self._data, new, casting="same_kind")
        mark_written(self)
        return self

    def _write_time(self) -> WriteTime:
        if self._written is None:
            self._written = WriteTime()
        return self._written

    def named(self, name: str) -> Tensor:
        """Set the name that graphs and messages use, and return the tensor."""
        self.name = name
        return self

    # ------------------------------------------------------------------------------------------------ plain values

    def numpy(self) -> np.ndarray:
        """The values as a read-only array that shares memory with the tensor. Use `.numpy().copy()` to write."""
        return _read_only(self._data)

    def item(self) -> float | int | bool:
        """The single element as a Python number."""
        if self.size != 1:
            raise ValueError(f"item() needs one element, got shape {self.shape}")
        return self._data.item()

    if not TYPE_CHECKING:  # type checkers would take array + tensor for an array, and accept every attribute

        def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
            if self._needs_grad:
                raise TypeError(
                    "making an array of a tensor that needs a gradient would cut the graph: use .numpy() or .detach(), "
                    "float() of a scalar, and np.stack or np.concatenate to join tensors"
                )
            return np.array(self.numpy(), dtype=dtype, copy=copy)

        def __dlpack__(self, **options: Any) -> Any:
            """A copy for another library, as `torch.from_dlpack(x)` asks for. Raises TypeError as np.asarray does."""
            return self.__array__(copy=True).__dlpack__(**options)

        def __dlpack_device__(self) -> tuple[int, int]:
            return self._data.__dlpack_device__()

        def __getattr__(self, name: str) -> Any:  # called for unknown names only
            raise AttributeError(f"a Tensor has no attribute {name!r}{find_hint(name, METHODS, REGISTRY)}")

    @property
    def _mask(self) -> Any:
        # The functions of np.ma read the attributes _data and _mask of what they are given, and compute past the graph.
        raise TypeError("a masked array takes no Tensor, its gradient would be lost: use .filled(value) and ops.where")

    def __format__(self, spec: str) -> str:
        if not spec:
            return str(self)
        if self.size != 1:
            raise TypeError(f"the format {spec!r} needs one element, got shape {self.shape}: format x.numpy() in parts")
        return format(self.item(), spec)

    def __round__(self, ndigits: int | None = None) -> float | int:
        return round(self.item(), ndigits)

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __index__(self) -> int:
        if self.dtype.kind not in "iu":
            raise TypeError(f"only an integer tensor can be an index, got {self.dtype}")
        return int(self.item())

    def __bool__(self) -> bool:
        if self.size != 1:
            raise ValueError(f"the truth of {self.size} elements is ambiguous: use .numpy().any() or .all()")
        return bool(self.item())

    def __len__(self) -> int:
        if self.ndim == 0:
            raise TypeError("a tensor of shape () has no length")
        return self.shape[0]

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self)))

    def _label(self) -> str:
        """The tensor in words, for messages."""
        made = "leaf" if self.node is None else f"made by {self.node.op.name}"
        return f"a tensor of shape {self.shape} ({f'{self.name!r}, ' if self.name else ''}{made})"

    def __repr__(self) -> str:
        # Beside numbers of ordinary size, tiny ones are printed as 0: else one of them gives all of them exponents.
        data = self._data
        largest = np.max(np.abs(data), initial=0, where=np.isfinite(data)) if data.dtype.kind == "f" else 0
        is_ordinary = bool(0.01 <= largest < 1e8)
        values = np.array2string(
            self._data, separator=", ", prefix="Tensor(", threshold=200, precision=4, suppress_small=is_ordinary
        )
        made = f"made by {self.node.op.name}" if self.node else "leaf" if self._needs_grad else "constant"
        name = f", name={self.name!r}" if self.name else ""
        return f"Tensor({values}, shape={self.shape}, {self.dtype}{name}, {made})"

    def __reduce__(self) -> tuple[Any, ...]:  # for copy and pickle
        if self.node is not None:
            raise TypeError(f"{self._label()} belongs to a graph; copy x.detach() instead")
        return _restore, (self._data, self._needs_grad, self.name, self.grad)

    # ----------------------------------------------------------------------------------------------------- operators

    __hash__ = object.__hash__

    def __add__(self, other: Any) -> Tensor:
        return apply(ops.add, (self, other if other.__class__ is Tensor else self._like(other)))

    def __radd__(self, other: Any) -> Tensor:
        return apply(ops.add, (self._like(other), self))

    def __sub__(self, other: Any) -> Tensor:
        return apply(ops.sub, (self, self._like(other)))

    def __rsub__(self, other: Any) -> Tensor:
        return apply(ops.sub, (self._like(other), self))

    def __mul__(self, other: Any) -> Tensor:
        if other.__class__ is not float:
            other = self._like(other)
        if isinstance(other, (int, float)):
            return apply(ops.scale, (self,), {"by": other})
        return apply(ops.mul, (self, other))

    def __rmul__(self, other: Any) -> Tensor:
        other = self._like(other)
        if isinstance(other, (int, float)):
            return apply(ops.scale, (self,), {"by": other})
        return apply(ops.mul, (other, self))

    def __truediv__(self, other: Any) -> Tensor:
        return apply(ops.div, (self, self._like(other)))

    def __rtruediv__(self, other: Any) -> Tensor:
        return apply(ops.div, (self._like(other), self))

    def __pow__(self, other: Any) -> Tensor:
        return apply(ops.pow, (self, self._like(other)))

    def __rpow__(self, other: Any) -> Tensor:
        return apply(ops.pow, (self._like(other), self))

    def __matmul__(self, other: Any) -> Tensor:
        if other.__class__ is Tensor and self._data.ndim > 1 and other._data.ndim > 1:
            return apply(ops.matmul, (self, other))
        return matmul(self, self._like(other))

    def __rmatmul__(self, other: Any) -> Tensor:
        return matmul(self._like(other), self)

    def __neg__(self) -> Tensor:
        return apply(ops.neg, (self,))

    def __pos__(self) -> Tensor:
        return self

    def __abs__(self) -> Tensor:
        return ops.abs(self)

    def __getitem__(self, index: Any) -> Tensor:
        return ops.getitem(self, index=index)

    def __setitem__(self, index: Any, value: Any) -> None:
        raise TypeError(
            "tensors have no item assignment: use tg.ops.where(mask, new, x), or x.assign_(array) for a leaf"
        )

    # Comparisons have no derivative, so they return plain boolean arrays.

    def __eq__(self, other: Any) -> Any:
        return np.asarray(self._data == plain(other))

    def __ne__(self, other: Any) -> Any:
        return np.asarray(self._data != plain(other))

    def __lt__(self, other: Any) -> Any:
        return np.asarray(self._data < plain(other))

    def __le__(self, other: Any) -> Any:
        return np.asarray(self._data <= plain(other))

    def __gt__(self, other: Any) -> Any:
        return np.asarray(self._data > plain(other))

    def __ge__(self, other: Any) -> Any:
        return np.asarray(self._data >= plain(other))

    def _like(self, other: Any) -> Any:
        """Convert the other operand: integers and booleans beside a floating tensor take its dtype."""
        if isinstance(other, Tensor):
            kind, own = other._data.dtype.kind, self._data.dtype
            return other if kind == "f" or own.kind != "f" else other.astype(own)
        other = as_operand(other, (self,))
        if isinstance(other, np.ndarray) and other.dtype.kind != "f" and self._data.dtype.kind == "f":
            return from_data(other).astype(self._data.dtype)
        return other

    # ------------------------------------------------------------------------------------------------------- methods

    def astype(self, dtype: Any) -> Tensor:
        """The tensor in another dtype. Between floating dtypes the gradient passes; to others the result is a leaf."""
        dtype = as_dtype(dtype)
        if dtype.kind != "f":
            return wrap(self._data.astype(dtype))
        return self if self.dtype == dtype else ops.cast(self, dtype=dtype)

    def exp(self) -> Tensor:
        """e ** x, element-wise."""
        return ops.exp(self)

    def log(self) -> Tensor:
        """The natural logarithm, element-wise."""
        return ops.log(self)

    def sqrt(self) -> Tensor:
        """The square root, element-wise. Its derivative at 0 is infinite."""
        return ops.sqrt(self)

    def tanh(self) -> Tensor:
        """The hyperbolic tangent, element-wise."""
        return apply(ops.tanh, (self,))

    def sigmoid(self) -> Tensor:
        """1 / (1 + exp(-x)), element-wise."""
        return ops.sigmoid(self)

    def relu(self) -> Tensor:
        """max(x, 0), element-wise."""
        return ops.relu(self)

    def gelu(self, tanh: bool = False) -> Tensor:
        """x * Phi(x), element-wise; with `tanh` the approximation that GPT-2 uses. See `ops.gelu`."""
        return ops.gelu(self, tanh=tanh)

    def neg(self) -> Tensor:
        """-x, element-wise."""
        return ops.neg(self)

    def abs(self) -> Tensor:
        """The absolute value, element-wise."""
        return ops.abs(self)

    def clip(self, min: float | None = None, max: float | None = None) -> Tensor:
        """x limited to the range `min` to `max`, element-wise."""
        return ops.clip(self, min=min, max=max)

    @translate_keywords
    def sum(self, axis: Axis = None, keepdims: bool = False) -> Tensor:
        """The sum over `axis` (None: all axes), which is removed, or left at length 1 with `keepdims`."""
        return ops.sum(self, axis=axis, keepdims=keepdims)

    @translate_keywords
    def mean(self, axis: Axis = None, keepdims: bool = False) -> Tensor:
        """The mean over `axis`; the shape as for `sum`."""
        return ops.mean(self, axis=axis, keepdims=keepdims)

    @translate_keywords
    def var(self, axis: Axis = None, ddof: int = 0, keepdims: bool = False) -> Tensor:
        """The variance over `axis`, with divisor n - ddof; the shape as for `sum`."""
        return ops.var(self, axis=axis, ddof=ddof, keepdims=keepdims)

    @translate_keywords
    def std(self, axis: Axis = None, ddof: int = 0, keepdims: bool = False) -> Tensor:
        """The standard deviation over `axis`, with divisor n - ddof; the shape as for `sum`."""
        return ops.std(self, axis=axis, ddof=ddof, keepdims=keepdims)

    @translate_keywords
    def norm(self, axis: Axis = None, keepdims: bool = False) -> Tensor:
        """The Euclidean norm over `axis`; the shape as for `sum`."""
        return ops.norm(self, axis=axis, keepdims=keepdims)

    @translate_keywords
    def max(self, axis: Axis = None, keepdims: bool = False) -> Tensor:
        """The maximum over `axis`; the shape as for `sum`. Equal maxima share the gradient evenly."""
        return ops.max(self, axis=axis, keepdims=keepdims)

    @translate_keywords
    def min(self, axis: Axis = None, keepdims: bool = False) -> Tensor:
        """The minimum over `axis`; the shape as for `sum`. Equal minima share the gradient evenly."""
        return ops.min(self, axis=axis, keepdims=keepdims)

    @translate_keywords
    def argmax(self, axis: int | None = None, keepdims: bool = False) -> Any:
        """The index of the maximum over `axis` (None: of all elements), as plain integers without gradient."""
        return np.argmax(self._data, axis=axis, keepdims=keepdims)

    @translate_keywords
    def argmin(self, axis: int | None = None, keepdims: bool = False) -> Any:
        """The index of the minimum over `axis` (None: of all elements), as plain integers without gradient."""
        return np.argmin(self._data, axis=axis, keepdims=keepdims)

    @translate_keywords
    def softmax(self, axis: int = -1) -> Tensor:
        """exp(x) / sum(exp(x)) along `axis`, in the shape of x. A row of -inf gives zeros."""
        return ops.softmax(self, axis=axis)

    @translate_keywords
    def log_softmax(self, axis: int = -1) -> Tensor:
        """The logarithm of the softmax along `axis`, in the shape of x."""
        return ops.log_softmax(self, axis=axis)

    def reshape(self, *shape: Any) -> Tensor:
        """The same elements in another shape, `reshape(2, 3)` or `reshape((2, 3))`; one length may be -1."""
        return ops.reshape(self, shape=_one_or_many(shape))

    def transpose(self, *axes: Any) -> Tensor:
        """The axes in another order, `transpose(1, 0, 2)` or `transpose((1, 0, 2))`; without arguments reversed."""
        axes = _one_or_many(axes)
        if axes and len(axes) != self.ndim:
            raise ValueError(
                f"transpose takes every axis, got {axes} for shape {self.shape}: use "
                "swapaxes(axis1, axis2) to exchange two"
            )
        return ops.transpose(self, axes=axes or None)

    def swapaxes(self, axis1: int, axis2: int) -> Tensor:
        """The tensor with two axes exchanged."""
        return ops.swapaxes(self, axis1, axis2)

    def broadcast_to(self, *shape: Any) -> Tensor:
        """The tensor repeated to a shape by NumPy's broadcasting rules."""
        return ops.broadcast_to(self, shape=_one_or_many(shape))

    # --------------------------------------------------------------------------------------------------------- NumPy

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        return numpy_protocol.apply_ufunc(ufunc, method, inputs, kwargs)

    def __array_function__(self, function: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
        return numpy_protocol.apply_function(function, args, kwargs)

    @staticmethod
    def __apply_primitive__(op: Any, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        return apply(op, inputs, _plain_keywords(op, kwargs))


class Size(int):
    """The number of elements, an integer. In PyTorch `size` is a method; the error of such a call says what to use."""

    def __call__(self, *axes: Any) -> None:
        raise TypeError(
            "size is the number of elements, as in NumPy: the lengths of the axes are x.shape, one is x.shape[0]"
        )


# --------------------------------------------------------------------------------------------------------------------
# How a primitive is applied

NO_KEYWORDS: dict[str, Any] = {}


def apply(op: Primitive[..., Any], inputs: tuple[Any, ...], kwargs: dict[str, Any] = NO_KEYWORDS) -> Tensor:
    """Apply `op` to tensors and constants, `kwargs` without tensors. Record a node if an input needs a gradient."""
    grad_on, recording, observer, _, _ = STATE.get()
    if not (grad_on or recording) and observer is None:
        value = op.compute([x._data if isinstance(x, Tensor) else as_operand(x, inputs) for x in inputs], kwargs)
        out = new_tensor(Tensor)  # as in `wrap`, without the call: every operation passes here
        out._data = value
        out.grad = out.node = out.name = out._written = None
        out._needs_grad = False
        if value.base is not None:
            _share_write_time(out, inputs)
        return out
    arrays: list[Any] = []
    bit, bits = 1, 0  # bit i of `bits`: input i needs a gradient
    has_constants = False
    for x in inputs:
        if isinstance(x, Tensor):
            arrays.append(x._data)
            if x._needs_grad:
                bits |= bit
        elif x is None:
            arrays.append(None)
        else:
            arrays.append(as_operand(x, inputs))
            has_constants = True
        bit += bit
    needed = POSITIONS[bits] if grad_on else ()
    if has_constants and (needed or recording):
        _copy_constants(inputs, arrays)
    try:
        value = op.forward(*arrays, **kwargs) if kwargs else op.forward(*arrays)  # an empty ** costs time
    except Primitive.EXPLAINED as error:
        raise op.explain(error, arrays, kwargs) from error
    residuals: tuple[Any, ...] = ()
    if value.__class__ is not np.ndarray:
        value, residuals = op.value_and_residuals(value)
    out = wrap(value)
    if needed and value.dtype.kind == "f":
        out._needs_grad = True
        if op.without_rule:
            _check_derivable(op, needed)
        out.node = Node(op, inputs, needed, tuple(arrays), kwargs, residuals, SCOPE.get())
    elif needed and value.dtype.kind == "c":
        raise TypeError(f"{op.name!r} has a complex result, and gradients are real here: take real and imaginary parts")
    elif needed and value.dtype.kind not in "iub":
        raise TypeError(f"primitive {op.name!r} must return an array of numbers, got dtype {value.dtype}")
    elif recording:
        out.node = Node(op, inputs, (), tuple(arrays), kwargs, residuals, SCOPE.get())
    if value.base is not None:
        _share_write_time(out, inputs)
    if observer is not None:
        observer.applied(op, inputs, out)
    return out


class _Positions(dict[int, tuple[int, ...]]):
    """The positions of the ones in a binary number, cached: most nodes share a few of these tuples."""

    def __missing__(self, bits: int) -> tuple[int, ...]:
        positions = tuple(i for i in range(bits.bit_length()) if bits >> i & 1)
        self[bits] = positions
        return positions


POSITIONS = _Positions()


def _copy_constants(inputs: tuple[Any, ...], arrays: list[Any]) -> None:
    """Copy the plain arrays among the operands: later writes by their owner must not change the backward."""
    for i, array in enumerate(arrays):
        if array.__class__ is np.ndarray and not isinstance(inputs[i], Tensor):
            arrays[i] = array.copy()


def _check_derivable(op: Primitive[..., Any], needed: tuple[int, ...]) -> None:
    for i in needed:
        if i in op.without_rule:
            raise TypeError(
                f"argument {op.argument_name(i)!r} of {op.name!r} has no derivative, so it takes no tensor that needs "
                f"a gradient: use .detach()"
            )


new_tensor = Tensor.__new__


def wrap(value: np.ndarray) -> Tensor:
    """A leaf that needs no gradient, around an array that is not copied."""
    out = new_tensor(Tensor)
    out._data = value
    out.grad = out.node = out.name = out._written = None
    out._needs_grad = False
    return out


def mark_written(tensor: Tensor) -> None:
    """Record that the memory of `tensor` was written to, so that a backward that used the old values raises."""
    tensor._write_time().touch()


def replace_array(tensor: Tensor, array: np.ndarray) -> None:
    """Give a leaf an array of another dtype. It stays the same object, for ties and optimizers, without a gradient."""
    tensor._data = array
    tensor.grad = None
    mark_written(tensor)
    WriteTime.replaced = WriteTime.latest


def _share_write_time(out: Tensor, inputs: tuple[Any, ...]) -> None:
    """A result that is a view of an input is written to whenever that input is."""
    owner = out._data.base
    for x in inputs:
        if isinstance(x, Tensor) and (owner is x._data or owner is x._data.base):
            out._written = x._write_time()
            if x.node is not None:
                out._data.flags.writeable = False  # no alias may write to a computed value


def _plain_keywords(op: Primitive[..., Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keywords are constants: tensors among them become arrays, NumPy scalars become Python numbers."""
    for name, value in kwargs.items():
        if isinstance(value, (Tensor, np.generic)):
            if isinstance(value, Tensor) and value._needs_grad:
                raise TypeError(
                    f"{op.name!r} takes {name}= as a constant, got a tensor that needs a gradient: use .detach()"
                )
            kwargs = {**kwargs, name: as_operand(plain(value))}
    return kwargs


def matmul(a: Any, b: Any) -> Any:
    """a @ b for vectors, matrices and stacks of them: a vector is a row on the left and a column on the right."""
    n, m = np.ndim(plain(a)), np.ndim(plain(b))
    if n >= 2 and m >= 2:
        return ops.matmul(a, b)
    if n == 0 or m == 0:
        raise ValueError(
            f"@ needs at least one axis on both sides, got shapes {np.shape(plain(a))} and {np.shape(plain(b))}"
        )
    left = ops.reshape(a, shape=(1, a.shape[0])) if n == 1 else a
    right = ops.reshape(b, shape=(b.shape[0], 1)) if m == 1 else b
    product = ops.matmul(left, right)
    shape = product.shape[: -2 + (n > 1)] if m == 1 else (*product.shape[:-2], product.shape[-1])
    return ops.reshape(product, shape=shape)


def plain(x: Any) -> Any:
    """The array of a tensor; anything else unchanged."""
    return x._data if isinstance(x, Tensor) else x


def as_array(x: Any) -> np.ndarray:
    """The array of a tensor; anything else as an array. TypeError for a masked one."""
    return np.asarray(from_data(x) if isinstance(x, np.ma.MaskedArray) else plain(x))


def as_tensor(x: Any) -> Tensor:
    """A tensor unchanged; anything else as a constant tensor."""
    return x if isinstance(x, Tensor) else Tensor(x)


def _read_only(array: np.ndarray) -> np.ndarray:
    view = array.view()
    view.flags.writeable = False
    return view


def _one_or_many(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Accept f(2, 3) and f((2, 3))."""
    return tuple(values[0]) if len(values) == 1 and isinstance(values[0], (tuple, list)) else values


def _holds_tensors(data: Any) -> bool:
    """Whether nested lists contain a Tensor. Iterative, so any depth works."""
    stack = list(data)
    while stack:
        x = stack.pop()
        if isinstance(x, Tensor):
            return True
        if isinstance(x, (list, tuple)):
            stack.extend(x)
    return False


def _restore(data: np.ndarray, requires_grad: bool, name: str | None, grad: np.ndarray | None) -> Tensor:
    """A leaf from its parts, for copy and pickle. It shares memory with nothing."""
    out = Tensor(data, requires_grad=requires_grad, name=name)
    out.grad = None if grad is None else grad.copy()
    return out
