"""Module: the base class of everything with parameters."""

from __future__ import annotations

import copy
import functools
import inspect
import os
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, ParamSpec, Protocol, Self, TypeVar, cast

import numpy as np

from tinygrad_mha import modes
from tinygrad_mha.files import CheckpointError, load_arrays, save_arrays
from tinygrad_mha.primitives import as_dtype
from tinygrad_mha.tensors import Tensor, replace_array
from tinygrad_mha.torch_names import MODULE_METHODS, check_keywords, find_hint, translate_keywords

__all__ = ["Module", "Scope", "copy_on_arrays", "has_array_forward", "walk"]

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)


class HasForward(Protocol[P, R_co]):
    """A module with a `forward` of these parameters and this result. Tells type checkers how a module is called."""

    on_arrays: bool

    def scope(self) -> modes.scope: ...
    def forward(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...


class Scope(NamedTuple):
    """What a call of a module adds to the scope of the nodes made inside it.

    Every field but `module` outlives the module, so a picture that is drawn later can use it.
    """

    name: str  # the module's name in its parent, "" at the top
    class_name: str = ""  # its class; "" for an entry that is not a module, such as one head
    module: Callable[[], Module | None] = lambda: None  # a weak reference to it
    is_attention: bool = False  # see `Module.is_attention`
    detail: str = ""  # see `Module.detail`


class Module:
    """Parameters, and a `forward` that uses them.

    Tensors and modules are found in the attributes, and in lists, tuples and dicts there. A tensor that requires a
    gradient is a parameter; other tensors (frozen ones, tables) are part of the state but not trained. Names are
    attribute paths such as `h.0.attn.wq`. A tensor that is held several times is tied, and has the first of its names.

    Example:
        >>> class Affine(Module):
        ...     def __init__(self):
        ...         self.a = Tensor([2.0], requires_grad=True)
        ...     def forward(self, x):
        ...         return self.a * x
        >>> f = Affine()
        >>> f(3.0).data
        array([6.], dtype=float32)
        >>> f
        Affine: 1 parameter
          a  (1,)  1
    """

    is_attention: ClassVar[bool] = False
    """Whether the module computes attention. Pictures colour it accordingly."""
    detail: str = ""
    """What pictures add to the name of the class, such as "4 heads"."""
    takes_arrays: ClassVar[bool] = False
    """Whether `forward` computes on arrays as it does on tensors. Counts for the class that states it, not for others
    derived from it."""
    on_arrays: bool = False
    """Whether the parameters are arrays, as in a twin that `copy_on_arrays` makes. True for classes of twins only."""

    _training: bool = True
    _name: str = ""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the output. Subclasses define it; calling the module calls it."""
        raise NotImplementedError(f"{type(self).__name__} does not define forward")

    def __call__(self: HasForward[P, R_co], *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Call `forward` with the same arguments, in the scope of this module."""
        if kwargs:
            check_keywords(type(self).__name__, self.forward, kwargs)
        if modes.STATE.get().is_silent:  # no node is made that could have a scope
            return self.forward(*args, **kwargs)
        with self.scope():
            return self.forward(*args, **kwargs)

    def scope(self) -> modes.scope:
        """A context manager: nodes made inside belong to this module, as they do in a call of it."""
        if not self._name and (around := modes.SCOPE.get()):
            # The module was appended to a list after the list was assigned: look for its name in the calling module.
            parent = around[-1].module() if isinstance(around[-1], Scope) else None
            found = [name for name, module in parent.named_modules() if module is self] if parent else []
            self._name = found[0] if found else ""
        class_name = type(self).__name__
        return modes.scope(Scope(self._name, class_name, weakref.ref(self), self.is_attention, self.detail))

    def __setattr__(self, name: str, value: Any) -> None:
        held = self.__dict__.get(name)
        if isinstance(held, Tensor) and not isinstance(value, (Tensor, Module, type(None))):
            hint = f"{name}.assign_(array) writes numbers into it"
            raise TypeError(f"{name} is a tensor of {type(self).__name__}, not a {type(value).__name__}; {hint}")
        check_overrides(name, value, type(self))
        contents = list(walk(value, name, enter_modules=False))
        if isinstance(held, (list, tuple, dict, Module)) and isinstance(value, (list, tuple, dict, np.ndarray)):
            lost = [path for path, found in walk(held, name) if isinstance(found, Tensor) and found.requires_grad]
            if lost and not contents:
                raise TypeError(
                    f"{lost[0]} is a parameter of {type(self).__name__}, and the new {name} holds none: assign_(array) "
                    f"writes numbers into a parameter; set {name} to None first to remove it"
                )
        is_parameter = isinstance(held, Tensor) and held.requires_grad and held.node is None
        if is_parameter and isinstance(value, Tensor) and value.node is not None:
            raise TypeError(
                f"{name} is a parameter of {type(self).__name__}, and a computed tensor in its place would be neither "
                f"trained nor saved: {name}.assign_(tensor.numpy()) writes numbers into it"
            )
        object.__setattr__(self, name, value)
        for path, found in contents:
            if isinstance(found, Module):
                object.__setattr__(found, "_name", path)

    # ------------------------------------------------------------------------------------------------------- contents

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        for name, value in vars(cls).items():
            if not name.startswith("__"):
                check_overrides(name, value, Module, in_class=True)

    if not TYPE_CHECKING:  # type checkers would accept every argument and every attribute

        def __new__(cls, *args: Any, **keywords: Any) -> Self:
            check_keywords(cls.__name__, cls.__init__, keywords)
            return super().__new__(cls)

        def __getattr__(self, name: str) -> Any:  # called for unknown names only
            message = f"{type(self).__name__!r} object has no attribute {name!r}{find_hint(name, MODULE_METHODS)}"
            raise AttributeError(message, name=name, obj=self)

    def named_modules(self) -> list[tuple[str, Module]]:
        """This module, named "", and all modules in it, each once, parents first."""
        return [(path, found) for path, found in walk(self) if isinstance(found, Module)]

    def named_parameters(self) -> list[tuple[str, Tensor]]:
        """The tensors that require a gradient, each once, in the order of definition."""
        return [(name, tensor) for name, tensor in self._tensors().items() if tensor.requires_grad]

    def parameters(self) -> list[Tensor]:
        """The tensors that require a gradient, each once."""
        return [tensor for _, tensor in self.named_parameters()]

    def generators(self) -> dict[str, np.random.Generator]:
        """The random generators (of dropout), each once. A checkpoint of a training run includes their states."""
        return first_names((path, found) for path, found in walk(self) if isinstance(found, np.random.Generator))

    def count(self) -> int:
        """The number of trained elements; a tied tensor counts once."""
        return sum(tensor.size for tensor in self.parameters())

    def _tensors(self) -> dict[str, Tensor]:
        return first_names(self._named_tensors())

    def _named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every leaf tensor under each of its names. Results of operations are not part of the state."""
        return ((path, found) for path, found in walk(self) if isinstance(found, Tensor) and found.node is None)

    # ---------------------------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, np.ndarray]:
        """A copy of every tensor, by name."""
        return {name: tensor.numpy().copy() for name, tensor in self._tensors().items()}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> tuple[list[str], list[str]]:
        """Copy arrays into the tensors of the same names. Tensors keep their dtype.

        A tied tensor may be given under any of its names; arrays given under several must be equal. If an error is
        raised, nothing has been changed.

        Returns:
            The missing names and the unexpected names (both empty if `strict`).

        Raises:
            ValueError: missing or unexpected names (if `strict`), shapes or dtypes that do not fit, or different
                arrays for one tied tensor. One message lists all of them.
        """
        tensors = self._tensors()
        first = {id(tensor): name for name, tensor in tensors.items()}
        names = {name: first[id(tensor)] for name, tensor in self._named_tensors()}
        unexpected = [name for name in state if name not in names]
        chosen: dict[str, np.ndarray] = {}
        wrong = []
        for name, owner in names.items():
            if name not in state:
                continue
            array = np.asarray(state[name])
            if owner not in chosen:
                chosen[owner] = array
                wrong += find_misfit(name, array, tensors[owner])
            elif not np.array_equal(array, chosen[owner], equal_nan=True):
                wrong.append(f"{name} is tied to {owner}, but differs from it")
        missing = [name for name in tensors if name not in chosen]
        if strict:
            wrong = [f"missing {name}" for name in missing] + [f"unexpected {name}" for name in unexpected] + wrong
        if wrong:
            prefix = find_prefix(state, names)
            if prefix:
                wrong = [
                    f"all names begin with {prefix!r}: load {{name.removeprefix({prefix!r}): a for name, a in ...}}"
                ]
            raise ValueError(f"this state does not fit {type(self).__name__}: " + "; ".join(wrong))
        for name, array in chosen.items():
            tensors[name].assign_(array)
        return missing, unexpected

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state to one safetensors file, atomically."""
        save_arrays(path, {name: tensor.numpy() for name, tensor in self._tensors().items()})

    def load(self, path: str | os.PathLike[str]) -> None:
        """Read a file that `save` wrote.

        Raises:
            CheckpointError: the file is damaged or does not fit this module. The message names the file and lists
                every misfit; nothing has been changed.
        """
        arrays = load_arrays(path)
        try:
            self.load_state_dict(arrays)
        except ValueError as error:
            raise CheckpointError(f"{os.fspath(path)}: {error}") from error

    # ----------------------------------------------------------------------------------------------- modes and dtypes

    @property
    def training(self) -> bool:
        """Whether the module is in train mode, in which dropout is on. Inside of `evaluating` it is not."""
        return self._training and id(self) not in modes.STATE.get().evaluating

    @training.setter
    def training(self, training: bool) -> None:
        object.__setattr__(self, "_training", training)

    def train(self, mode: bool = True) -> Self:
        """Set train mode (or, with `mode=False`, eval mode) for this module and all modules in it."""
        for _, module in self.named_modules():
            module.training = mode
        return self

    def eval(self) -> Self:
        """Set eval mode, in which dropout is off, for this module and all modules in it."""
        return self.train(False)

    def evaluating(self) -> EvalMode[Self]:
        """A context manager: eval mode inside, for this thread and task only; elsewhere the model may train.

        The modules are collected once, at the call; the result may be entered repeatedly, as in a loop.
        """
        return EvalMode(self)

    @translate_keywords
    def zero_grad(self) -> None:
        """Reset the gradients of all parameters to None."""
        for parameter in self.parameters():
            parameter.zero_grad()

    def astype(self, dtype: Any) -> Self:
        """Convert every floating tensor in place to another floating dtype. Gradients are reset to None.

        Convert before an optimizer is made: its state keeps the dtype of the parameters at that time.
        """
        dtype = as_dtype(dtype)
        if dtype.kind != "f":
            raise TypeError(f"expected a floating dtype, got {dtype}")
        for tensor in self._tensors().values():
            if tensor.dtype.kind == "f" and tensor.dtype != dtype:
                replace_array(tensor, tensor._data.astype(dtype))
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy with the same ties. All modules are created before any is filled, so nesting needs no recursion."""
        pairs = [(module, object.__new__(type(module))) for _, module in self.named_modules()]
        for module, twin in pairs:
            memo[id(module)] = twin
        for module, twin in pairs:
            twin.__dict__.update({name: copy.deepcopy(value, memo) for name, value in vars(module).items()})
        return memo[id(self)]

    def __repr__(self) -> str:
        tensors = self._tensors()
        first = {id(tensor): name for name, tensor in tensors.items()}
        rows = []
        for name, tensor in self._named_tensors():
            owner = first[id(tensor)]
            note = f"{tensor.size:,}" if tensor.requires_grad else f"({tensor.size:,} constant)"
            rows.append((name, str(tensor.shape), note if owner == name else f"tied to {owner}"))
        widths = [max((len(row[i]) for row in rows), default=0) for i in range(2)]
        lines = [f"  {name:{widths[0]}}  {shape:{widths[1]}}  {note}" for name, shape, note in rows]
        n = self.count()
        return "\n".join([f"{type(self).__name__}: {n:,} parameter{'' if n == 1 else 's'}", *lines])


M = TypeVar("M", bound=Module)


class EvalMode(Generic[M]):
    """The context manager that `Module.evaluating` returns."""

    def __init__(self, module: M) -> None:
        self._module = module
        self._modules = [found for _, found in module.named_modules()]  # held, so that their ids stay theirs
        self._ids = frozenset(map(id, self._modules))

    def __enter__(self) -> M:
        modes.enter(self, evaluating=modes.STATE.get().evaluating | self._ids)
        return self._module

    def __exit__(self, *exception: object) -> None:
        modes.leave(self, "evaluating")


def has_array_forward(module: Module) -> bool:
    """Whether a module, without those in it, computes on arrays; see `Module.takes_arrays`."""
    return bool(vars(type(module)).get("takes_arrays")) and "forward" not in vars(module)


def copy_on_arrays(module: M, kept: Iterable[Module] = ()) -> M:
    """A twin of `module` for inference: in eval mode, with arrays in the place of tensors. It returns arrays.

    No node, scope or Tensor is made in its calls, so they take less time. The twin shares the memory of the parameters.
    The modules `kept`, and those in them, belong to both. If another one does not compute on arrays, the result is
    `module` itself.
    """
    twins: dict[int, Module] = {id(inner): inner for outer in kept for _, inner in outer.named_modules()}
    modules = [inner for _, inner in module.named_modules() if id(inner) not in twins]
    if not all(map(has_array_forward, modules)):
        return module
    for inner in modules:
        kind: Any = type(inner)
        twins[id(inner)] = object.__new__(class_on_arrays(kind, kind.forward))

    def convert(value: Any) -> Any:
        if isinstance(value, (Tensor, Module)):
            return value._data if isinstance(value, Tensor) else twins[id(value)]
        if isinstance(value, (list, tuple)):
            return [convert(item) for item in value]
        return value

    for inner in modules:
        contents = {name: convert(value) for name, value in vars(inner).items()}
        vars(twins[id(inner)]).update(contents, _training=False)
    return cast(M, twins[id(module)])


@functools.cache
def class_on_arrays(kind: type[Module], forward: Callable[..., Any]) -> type[Module]:
    """The class of the twins of `kind`. Their calls are their `forward`: no node is made that could have a scope."""
    return type(kind.__name__, (kind,), {"on_arrays": True, "__call__": forward, "__module__": kind.__module__})


PLAIN = frozenset((type(None), bool, int, float, str))  # most attributes have one of these classes, and hold nothing


def walk(root: Any, path: str = "", enter_modules: bool = True) -> Iterator[tuple[str, Any]]:
    """Every module, tensor and generator in `root` with its path, in the order of definition.

    Tensors and generators are yielded as often as they are held. Modules and containers are entered once, so a
    reference back to a parent is harmless. Iterative, so the depth of nesting is not limited.
    """
    entered: set[int] = set()
    stack = [(path, root)]
    while stack:
        path, value = stack.pop()
        if isinstance(value, (Tensor, np.random.Generator)):
            yield path, value
            continue
        if not isinstance(value, (Module, dict, list, tuple)):
            check_holds_nothing(path, value)
            continue
        if id(value) in entered:
            continue
        entered.add(id(value))
        if isinstance(value, Module):
            yield path, value
            if not enter_modules:
                continue
            held: Any = vars(value).items()
        elif isinstance(value, dict):
            held = value.items()
        else:
            held = enumerate(value)
            check_is_uniform(path, value)
        prefix = f"{path}." if path else ""
        inside = [(f"{prefix}{key}", inner) for key, inner in held if inner.__class__ not in PLAIN]
        stack.extend(reversed(inside))


def check_holds_nothing(path: str, value: Any) -> None:
    """Raise TypeError if another container than a list, tuple or dict holds tensors or modules: none is found there."""
    if value is None or isinstance(value, (str, bytes, int, float, range)):
        return
    if isinstance(value, np.ndarray):
        held: Any = value.flat if value.dtype == object else ()
    elif isinstance(value, Mapping):
        held = value.values()
    elif isinstance(value, SimpleNamespace):
        held = vars(value).values()
    elif isinstance(value, Collection):
        held = value
    else:
        return
    kind = next((type(x).__name__ for x in held if isinstance(x, (Tensor, Module))), None)
    if kind:
        raise TypeError(f"{path} is a {type(value).__name__} with a {kind}: use a list, tuple or dict for it")


def check_is_uniform(path: str, values: Sequence[Any]) -> None:
    """Raise TypeError for an array in a list of parameters: it has replaced one, and would not be trained or saved."""
    if any(isinstance(x, Tensor) and x.requires_grad for x in values):
        for i, x in enumerate(values):
            if isinstance(x, np.ndarray):
                raise TypeError(
                    f"{path}.{i} is an array in a {type(values).__name__} of parameters: write numbers into a "
                    f"parameter with assign_(array), or make a new one, Tensor(array, requires_grad=True)"
                )


def check_overrides(name: str, value: Any, kind: type[Module], in_class: bool = False) -> None:
    """Raise AttributeError if `value` takes the place of a method that modules call.

    A class may define a method again; an object may take another function in the place of a method of its own class.
    """
    method = getattr(kind, name, None)
    is_ours = name in vars(Module) and name != "forward"
    if inspect.isfunction(method) and (not callable(value) or (is_ours and not in_class)):
        if isinstance(value, (property, classmethod, staticmethod, functools.cached_property)):
            return
        owner = "Module" if name in vars(Module) else kind.__name__
        raise AttributeError(f"{name} is a method of {owner}: choose another name for this attribute")


def first_names(pairs: Any) -> dict[str, Any]:
    """{name: object} with each object once, under the first of its names."""
    found: dict[str, Any] = {}
    seen: set[int] = set()
    for name, thing in pairs:
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if name in found:
            raise ValueError(f"two different things are called {name!r}: rename the key of a dict or an attribute")
        found[name] = thing
    return found


def find_prefix(state: Iterable[str], names: Iterable[str]) -> str:
    """What all names of a state begin with and those of the module do not, such as "module."; "" if nothing."""
    shortest, expected = min(state, key=len, default=""), min(names, key=len, default="")
    prefix = shortest.removesuffix(expected)
    return prefix if {prefix + name for name in names} == set(state) else ""


def find_misfit(name: str, array: np.ndarray, tensor: Tensor) -> list[str]:
    """Why `array` cannot be copied into `tensor`: a list of one sentence, or an empty one."""
    if array.shape != tensor.shape:
        hint = " (transposed? weights are stored (in, out))" if array.shape == tensor.shape[::-1] else ""
        return [f"{name} has shape {array.shape}, expected {tensor.shape}{hint}"]
    if array.dtype.kind not in "fiub" or not np.can_cast(array.dtype, tensor.dtype, "same_kind"):
        return [f"{name} has dtype {array.dtype}, which does not fit into {tensor.dtype}"]
    return []
