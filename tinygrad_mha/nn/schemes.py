"""Scheme: the base class of settings of a model that are objects, such as positional schemes and scores."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from tinygrad_mha.arguments import check_choice
from tinygrad_mha.nn.module import Module

__all__ = ["Scheme", "find_scheme"]

S = TypeVar("S", bound="Scheme")


# unsafe_hash: a dataclass compares by its settings, which would make a module unhashable.
@dataclass(unsafe_hash=True)
class Scheme(Module):
    """A module with settings, which are the fields of a dataclass. Its name is that of the class in lower case.

    Parameters, if it has any, are made by a method `initialize` of each family of schemes.
    """

    name: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        if "name" not in vars(cls) and not cls.on_arrays:  # a twin keeps the name
            cls.name = cls.__name__.lower()

    def to_dict(self) -> str | dict[str, Any]:
        """The name, or a dict of the name and the settings if there are any; `find_scheme` reads both."""
        settings = dataclasses.asdict(self)
        return {"name": self.name, **settings} if settings else self.name


def find_scheme(given: Any, family: type[S], known: Mapping[str, type[S]], argument: str, **settings: Any) -> S:
    """The scheme that `given` describes: an object of the class `family`, a name, or what `Scheme.to_dict` returned.

    A scheme that is given by name gets those of `settings` that it has.

    Raises:
        ValueError: an unknown name, or an object of another class.
        TypeError: a setting in the dict that the scheme does not have.
    """
    if isinstance(given, family):
        return given
    if isinstance(given, Mapping):
        stored = dict(given)
        return known[check_choice(stored.pop("name", None), known, argument)](**stored)
    scheme = known[check_choice(given, known, argument)]
    fields = {field.name for field in dataclasses.fields(scheme)}
    return scheme(**{name: value for name, value in settings.items() if name in fields})
