"""What is checked by `check.attention`: a function or module of NumPy, of this package or of torch, called alike.

A candidate is called with arrays and returns an array, whatever it works with. torch is never imported here: a
candidate that needs it has imported it.

Axes: T tokens, T_q queries, T_k keys, C width, d_k, d_v widths of a key and a value.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from tinygrad_mha.check.verdict import PACKAGE, name_subject
from tinygrad_mha.files.python_files import TimeLimitError, catching_exit, limiting
from tinygrad_mha.modes import no_grad
from tinygrad_mha.nn import GPT, GPTConfig
from tinygrad_mha.nn.module import Module, walk
from tinygrad_mha.tensors import Tensor, plain

__all__ = ["Candidate", "CandidateError", "Inputs", "walk_modules"]

Inputs = tuple[np.ndarray, ...]
"""x, or q, k and v."""

TOKENS, WIDTH, HEADS, D_K, D_V = 7, 12, 2, 5, 11  # of the inputs and modules that the check makes

# Names that people give to one thing. Options: what a call may pass.
OPTIONS = {
    "allow": ("allow", "mask", "attn_mask", "attention_mask"),
    "key_allow": ("key_allow", "key_mask", "key_padding_mask"),
    "causal": ("causal", "is_causal"),
    "cache": ("cache",),
    "positions": ("positions",),
}
SIZES = {
    WIDTH: ("d_model", "n_embd", "embed_dim", "hidden_size", "d_in", "d_out", "width", "dim", "channels"),
    HEADS: ("n_head", "n_heads", "num_heads", "num_attention_heads", "heads"),
    16: ("block_size", "max_len", "context_length", "seq_len"),
}


class CandidateError(ValueError):
    """A candidate that cannot be run: the message says why."""


class Candidate:
    """A function or module to check.

    Args:
        target: a function or module of x, or of q, k, v; or a class or factory of such modules.
        inputs: arrays, or () for inputs of its own size.
        seed: of the inputs, and of the weights of a class.
        causal: passed to a candidate that has such an argument, unless None.

    Raises:
        CandidateError: it cannot be called so, or returns something else than an array of one row for each query.

    Attributes:
        inputs: float64 arrays: x (..., T, C), or q (..., T_q, d_k), k (..., T_k, d_k) and v (..., T_k, d_v).
        library: "numpy", "tinygrad_mha" or "torch".
        module: a copy of the module in eval mode and float64, or None for a function.
        options: those of OPTIONS that it takes, as {role: its own name}.
        printed: what it printed.
        float_errors: "overflow", "divide by zero" and "invalid value", as NumPy noticed them in its calls.
    """

    def __init__(self, target: Any, inputs: tuple[Any, ...] = (), seed: int = 0, causal: bool | None = None) -> None:
        if not callable(target):
            raise CandidateError(f"expected a function, a module or a class of modules, got a {type(target).__name__}")
        if isinstance(target, GPT):
            advice = "check its attention, model.h[0].attn, or the model with check.kv_cache(model, ids)"
            raise CandidateError(f"a GPT takes token ids, not rows: {advice}")
        self.name = name_subject(target)
        self.printed = ""
        self.float_errors: set[str] = set()
        rng = np.random.default_rng(seed)
        if inspect.isclass(target) or list(read_parameters(target))[:2] == ["config", "rng"]:
            with self.guard():
                target = make_module(target, rng)
            if target is None:
                raise CandidateError(f"{self.name} returned None instead of a module")
        self.torch: Any = sys.modules.get("torch")
        is_torch = self.torch is not None and isinstance(target, self.torch.nn.Module)
        self._modules: dict[Any, Any] = {}
        if is_torch or isinstance(target, Module):
            for dtype, name in ((np.float32, "float"), (np.float64, "double")):
                twin = copy.deepcopy(target).eval()
                self._modules[np.dtype(dtype)] = getattr(twin, name)() if is_torch else twin.astype(dtype)
        self.module: Any = self._modules.get(np.dtype(np.float64))
        self.target = target
        self.libraries = ["torch"] if is_torch else ["tinygrad_mha"]
        if self.module is None:  # first what its code names: operations of ours and of torch take arrays too
            libraries = ["numpy", "tinygrad_mha", *(["torch"] if self.torch is not None else [])]
            self.libraries = sorted(libraries, key=lambda library: not is_named(library, target) or library == "numpy")
        self.library = self.libraries[0]
        own_call = isinstance(target, Module) and type(target).__call__ is not Module.__call__
        self.defaults = read_parameters(target.__call__ if own_call else getattr(target, "forward", target))
        self.options = {role: name for role, names in OPTIONS.items() for name in names[::-1] if name in self.defaults}
        self.fixed = {self.options["causal"]: causal} if "causal" in self.options and causal is not None else {}
        self.inputs = self._find_inputs(inputs, rng)

    @property
    def takes_rows(self) -> bool:
        """Whether it is a function of x, not of q, k and v."""
        return len(self.inputs) == 1

    @property
    def names(self) -> list[str]:
        """The names of the inputs."""
        return ["x"] if self.takes_rows else ["q", "k", "v"]

    def share(self, tensor: Any) -> np.ndarray:
        """The array of a parameter, which shares memory with it."""
        return np.asarray(tensor.detach().numpy() if self.library == "torch" else tensor.data)

    def states_causal(self) -> bool | None:
        """Whether it says that it is causal: by an attribute, the default of an argument, or by taking a cache."""
        stated = [*self.fixed.values(), getattr(self.target, "is_causal", None)]
        stated += [self.defaults.get(self.options.get("causal", "")), "cache" in self.options or None]
        return next((value for value in stated if isinstance(value, bool)), None)

    def accepts_tensors(self) -> bool:
        """Whether Tensors of this package give a Tensor, though arrays give an array."""
        try:
            y = self.call_raw(*(Tensor(x, requires_grad=True) for x in self.inputs))
        except CandidateError:
            return False
        return isinstance(y, Tensor)

    def parameters(self) -> list[np.ndarray]:
        """The arrays of all parameters, which share memory with them."""
        if isinstance(self.module, Module):
            return [self.share(p) for _, p in walk(self.module) if isinstance(p, Tensor)]
        return [] if self.module is None else [self.share(p) for p in self.module.parameters()]

    def find_number(self, *names: str) -> Any:
        """The number that the candidate, a module in it or a default of its arguments calls by one of `names`."""
        modules = [module for _, module in walk_modules(self.module)]
        found = [getattr(module, name, None) for module in modules for name in names]
        found += [self.defaults.get(name) for name in names]
        return next((n for n in found if isinstance(n, (int, float)) and not isinstance(n, bool)), None)

    def __call__(self, *inputs: Any, dtype: Any = np.float64, **options: Any) -> np.ndarray:
        """The result for arrays of `dtype`; `options` by their role.

        Raises:
            CandidateError: it raised an exception or called sys.exit(), or did not return an array of numbers.
        """
        named = {self.options.get(role, role): value for role, value in options.items()}
        with no_grad():
            y = self.call_raw(*(self.convert(np.asarray(x, dtype)) for x in inputs), **named)
        y = y.detach().numpy() if self.library == "torch" and hasattr(y, "detach") else plain(y)
        if not isinstance(y, np.ndarray) or y.dtype.kind != "f":
            kind = str(y.dtype) if isinstance(y, np.ndarray) else type(y).__name__
            kind = "a torch.Tensor for NumPy inputs" if type(y).__module__ == "torch" else kind
            kind += ": does it end with return?" if y is None else ", expected an array or tensor of floating numbers"
            raise CandidateError(f"it returned {kind}".replace("NoneType", "None"))
        return y

    def hide(self, inputs: Iterable[np.ndarray], key_allow: np.ndarray, **options: Any) -> np.ndarray:
        """The result with the same `key_allow` (T_k,) for each sequence of a batch; of one sequence it is made one."""
        rows = list(inputs)
        is_alone = rows[0].ndim == 2 and (self.takes_rows or self.module is not None)  # a function may be of one head
        rows = [x[None] for x in rows] if is_alone else rows
        key_allow = np.broadcast_to(key_allow, (len(rows[0]) if rows[0].ndim > 2 else 1, len(key_allow)))
        y = self(*rows, key_allow=key_allow, **options)
        return y[0] if is_alone and y.ndim == 3 else y

    def call_raw(self, *inputs: Any, **options: Any) -> Any:
        """What it returns for arrays or tensors of its library, the first part of a tuple."""
        target = self.target
        if self.module is not None:
            target = self._modules[np.dtype(str(inputs[0].dtype).removeprefix("torch."))]
        if self.library == "torch":
            options = {n: self.torch.tensor(o) if isinstance(o, np.ndarray) else o for n, o in options.items()}
        with self.guard():
            y = target(*inputs, **self.fixed, **options)
        return y[0] if isinstance(y, tuple) and y else y

    def convert(self, x: np.ndarray, requires_grad: bool = False) -> Any:
        """An array as what the library of the candidate computes with."""
        if self.library == "torch":
            return self.torch.tensor(x, requires_grad=requires_grad)
        return Tensor(x, requires_grad=requires_grad) if self.library == "tinygrad_mha" else x.copy()

    def _find_inputs(self, given: tuple[Any, ...], rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        """The given inputs, or the first of its own that it can be called with. Sets the library too."""
        if given:
            required = [name for name, default in self.defaults.items() if default is inspect.Parameter.empty]
            if len(given) < len(required):
                raise CandidateError(f"it takes {', '.join(required)}: give an input for each, got {len(given)}")
            choices = [self._read_inputs(given)]
        else:
            choices = [tuple(rng.standard_normal(shape) for shape in shapes) for shapes in self._list_shapes()]
        problems: dict[str, str] = {}
        may_fit = False  # whether inputs of another size could help
        for inputs in choices:
            for self.library in self.libraries:  # noqa: B020
                try:
                    y, raw = self(*inputs), self.call_raw(*map(self.convert, inputs))
                except CandidateError as error:
                    cause = error.__cause__
                    is_of_size = isinstance(cause, (ValueError, IndexError)) or type(cause) is RuntimeError
                    shapes = f" (inputs: {', '.join(str(x.shape) for x in inputs)})" if is_of_size else ""
                    may_fit = is_of_size if not problems else may_fit
                    problems.setdefault(self.library, f"{error}{shapes}")
                    continue
                if self.library != "numpy" and isinstance(raw, np.ndarray) and self.module is None:
                    self.library = "numpy"
                elif self.library == "numpy" and isinstance(raw, Tensor):
                    self.library = "tinygrad_mha"
                expected = inputs[0].shape[:-1]
                if y.shape[:-1] != expected:
                    raise CandidateError(
                        f"it returned the shape {y.shape}, expected {(*expected, '...')}: a row for each"
                    )
                return inputs
        hint = "" if given or not may_fit else ". Give inputs of its size: check.attention(f, x), or --shape 7x11"
        raise CandidateError(problems[self.libraries[0]] + hint)

    def _read_inputs(self, given: tuple[Any, ...]) -> tuple[np.ndarray, ...]:
        """The given inputs as float64 arrays."""
        arrays = [np.array(plain(x)) for x in given]
        shapes = ", ".join(str(x.shape) for x in arrays)
        if not all(x.ndim >= 2 and x.size and x.dtype.kind in "fiu" and np.isfinite(x).all() for x in arrays):
            raise CandidateError(f"inputs must be finite numbers of shape (..., T, width), got {shapes}")
        if len(arrays) not in (1, 3):
            raise CandidateError(f"expected one input x, or three, q, k and v; got {shapes}")
        return tuple(x.astype(np.float64) for x in arrays)

    def _list_shapes(self) -> Iterator[tuple[tuple[int, ...], ...]]:
        """Shapes of inputs to try."""
        required = [name for name, default in self.defaults.items() if default is inspect.Parameter.empty]
        if required and len(required) not in (1, 3):
            raise CandidateError(f"it takes {', '.join(required)}, expected a function of x or of q, k, v")
        counts = (len(required),) if required else (3, 1)
        widths = [
            self.find_number(*SIZES[WIDTH]),
            *(p.shape[axis] for p in self.parameters() if p.ndim for axis in (0, -1)),
            WIDTH,
        ]
        for count in counts:
            for front in ((), (1,), (1, 1)):
                if count == 3 and self.module is None:
                    for d_k, d_v in ((D_K, D_V), (D_K, D_K), (D_K + 1, D_V), (D_K + 1, D_K + 1)):
                        yield tuple((*front, TOKENS, d) for d in (d_k, d_k, d_v))
                    continue
                for width in dict.fromkeys(w for w in widths if w):
                    yield ((*front, TOKENS, int(width)),) * count

    def _note_float_error(self, kind: str, flag: int) -> None:
        self.float_errors.add(kind)

    @contextlib.contextmanager
    def guard(self, calls: int = 1) -> Iterator[None]:
        """Keep the candidate from printing, warning, exiting and running for ever; its exceptions are one line."""
        out = io.StringIO()
        try:
            with (
                limiting(calls),
                catching_exit(),
                contextlib.redirect_stdout(out),
                contextlib.redirect_stderr(io.StringIO()),
                warnings.catch_warnings(),
                np.errstate(over="call", divide="call", invalid="call", under="ignore", call=self._note_float_error),
            ):
                warnings.simplefilter("ignore")
                yield
        except SystemExit as error:
            raise CandidateError(f"it called sys.exit({'' if error.code is None else error.code})") from error
        except (CandidateError, KeyboardInterrupt, TimeLimitError):
            raise
        except BaseException as error:
            text = " ".join(str(error).split())[:300]
            line = find_own_line(error)
            raise CandidateError(f"it raised {type(error).__name__}: {text}{f' ({line})' if line else ''}") from error
        finally:
            self.printed += out.getvalue()


def find_own_line(error: BaseException) -> str:
    """The innermost line of a person's own code in a traceback, "mine.py, line 6"; "" if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith((PACKAGE, "<frozen")) and "site-packages" not in f.filename]
    return f"{os.path.basename(own[-1].filename)}, line {own[-1].lineno}" if own else ""


def walk_modules(module: Any) -> Iterator[tuple[str, Any]]:
    """A module and those in it, with their paths; none for None."""
    yield from () if module is None else module.named_modules()


def is_named(package: str, f: Any) -> bool:
    """Whether the code of a function names something of a package."""
    values = [f.__globals__.get(name) for name in f.__code__.co_names] if hasattr(f, "__code__") else [f]
    places = [place for value in values for place in (value, type(value))]
    found = [getattr(place, name, None) for place in places for name in ("__module__", "__name__")]
    return any(str(name).partition(".")[0] == package for name in found)


def read_parameters(f: Any) -> dict[str, Any]:
    """The names of the parameters of a function with their defaults, `Parameter.empty` for none."""
    try:
        parameters = inspect.signature(f).parameters.values()
    except (TypeError, ValueError):  # a compiled function: its documentation begins with the signature
        names = re.findall(
            r"(\w+)(=?)[^,]*", (getattr(f, "__doc__", None) or "").strip().partition("(")[2].partition(")")[0]
        )
        return {name: None if equals else inspect.Parameter.empty for name, equals in names}
    variadic = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    named = {p.name: p.default for p in parameters if p.kind not in variadic}
    if any(p.kind is p.VAR_KEYWORD for p in parameters) and isinstance(getattr(f, "__self__", None), Module):
        named |= {"cache": None, "positions": None, "key_allow": None}
    return named


def make_module(factory: Callable[..., Any], rng: np.random.Generator) -> Any:
    """Call a class, or a function of (config, rng), with small sizes for the arguments that it needs."""
    sizes: dict[str, Any] = {name: size for size, names in SIZES.items() for name in names}
    sizes |= {"config": GPTConfig(11, 16, 1, HEADS, WIDTH), "rng": rng, "seed": 0}
    needed = [name for name, value in read_parameters(factory).items() if value is inspect.Parameter.empty]
    unknown = [name for name in needed if name not in sizes]
    if unknown:
        raise CandidateError(f"the class needs {', '.join(unknown)}: give an object, or a function of (config, rng)")
    return factory(**{name: sizes[name] for name in needed})
