"""Arguments of a call, in JAX's sense: static or not, donated or not, and their leaves.

Problem: ``static_argnums``, ``static_argnames``, ``donate_argnums``,
``donate_argnames`` and pytree prefixes of shardings must mean exactly what
they mean to ``jax.jit``.

Rule for maintainers: pure functions over signatures and trees; nothing here
knows of slices or runs.

Paper: section 3 (user code changes nothing but its devices).
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
from jax.sharding import NamedSharding, PartitionSpec

from pathways_lab.client.session import failures

Numbers = int | Sequence[int] | None
Names = str | Iterable[str] | None
_F = TypeVar("_F", bound=Callable[..., Any])


def options_of(made: type, *others: str) -> Callable[[_F], _F]:
    """For a function that passes its options on to what it makes: its signature shows them.

    others: parameters of *made* that are no options.

    Raises TypeError, when it is called, for an option that there is not.
    """
    _, *shown = [p for p in inspect.signature(made).parameters.values() if p.name not in others]
    names = [option.name for option in shown]

    def showing(function: _F) -> _F:
        @functools.wraps(function)
        def checked(*given: Any, **options: Any) -> Any:
            for name in options:
                if name not in names:
                    near = difflib.get_close_matches(name, names, 1)
                    hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(names)}"
                    said = f"{function.__name__}() got an unexpected keyword argument {name!r}"
                    raise TypeError(f"{said}; {hint}")
            return function(*given, **options)

        own = inspect.signature(function)
        first, *_ = own.parameters.values()
        told: Any = checked
        told.__signature__ = own.replace(parameters=[first, *shown])
        return told  # type: ignore[no-any-return]

    return showing


def _numbers(what: str, given: Numbers) -> tuple[int, ...]:
    if given is None:
        return ()
    try:
        return (operator.index(given),)  # type: ignore[arg-type]
    except TypeError:
        with contextlib.suppress(TypeError):
            return tuple(map(operator.index, given))  # type: ignore[arg-type]
    raise TypeError(f"{what}={given!r:.60} is not a position of an argument, nor several")


def _names(what: str, given: Names) -> tuple[str, ...]:
    if given is None:
        return ()
    names = (given,) if isinstance(given, str) or not isinstance(given, Iterable) else tuple(given)
    if all(isinstance(name, str) for name in names):
        return names
    raise TypeError(f"{what}={given!r:.60} is not a name of an argument, nor several")


@dataclass(slots=True, eq=False)
class Split:
    """A call's arguments: what JAX sees, and what is part of the code.

    positions: original position of each dynamic positional argument.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    positions: tuple[int, ...]
    static: tuple[tuple[int | str, Any], ...]

    @property
    def static_key(self) -> tuple[Any, ...]:
        """Hashable, and different for values that only compare equal (1, 1.0, True)."""
        return tuple([(where, _typed(value)) for where, value in self.static])


def _typed(value: Any) -> tuple[Any, ...]:
    if type(value) is tuple:
        return (tuple, *map(_typed, value))
    return (type(value), value)


class Roles:
    """Which arguments of *function* are static and which are donated.

    Raises ValueError for arguments that it does not have, and TypeError for what names none, as
    JAX does.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        static_argnums: Numbers = None,
        static_argnames: Names = None,
        donate_argnums: Numbers = None,
        donate_argnames: Names = None,
    ) -> None:
        known = _parameters(function)
        self.parameters = tuple(p.name for p in known if p.kind in _BY_POSITION)
        self._named = tuple(p.name for p in known if p.kind in _BY_NAME)
        kinds = {p.kind for p in known}
        self._any_number = inspect.Parameter.VAR_POSITIONAL in kinds
        self._any_name = inspect.Parameter.VAR_KEYWORD in kinds
        self._function = str(getattr(function, "__name__", type(function).__name__))
        self._static_nums, self._static_names = self._resolved(
            "static", static_argnums, static_argnames
        )
        self._donated_nums, self._donated_names = self._resolved(
            "donate", donate_argnums, donate_argnames
        )
        both = [n for n in self._static_nums if n in self._donated_nums]
        both_names = sorted(self._static_names & self._donated_names)
        if both or both_names:
            raise ValueError(f"arguments {both_names or both} are both static and donated")

    def _resolved(
        self, role: str, argnums: Numbers, argnames: Names
    ) -> tuple[tuple[int, ...], frozenset[str]]:
        """The arguments with a role, by position and by name."""
        nums = _numbers(f"{role}_argnums", argnums)
        names = _names(f"{role}_argnames", argnames)
        count = len(self.parameters)
        for n in nums:
            if not (self._any_number or -count <= n < count):
                there = ", ".join(f"{n} ({name})" for n, name in enumerate(self.parameters))
                raise ValueError(
                    f"{role}_argnums={argnums!r}: {self._function!r} has no positional argument"
                    f" {n}; there is {there or 'none'}"
                )
        for name in names:
            only = name in self.parameters and name not in self._named
            if only or not (self._any_name or name in self._named):
                raise ValueError(
                    f"{role}_argnames={argnames!r}: {self._function!r} takes no argument {name!r}"
                    f" by name; there is {', '.join(self._named) or 'none'}"
                )
        # As in JAX: given only one of the two, the other follows from the signature.
        if argnames is None:
            called = (self._name(n) for n in nums)
            names = tuple(name for name in called if name and name in self._named)
        elif argnums is None:
            nums = tuple(n for n, name in enumerate(self.parameters) if name in names)
        return nums, frozenset(names)

    def _name(self, number: int) -> str | None:
        if -len(self.parameters) <= number < len(self.parameters):
            return self.parameters[number]
        return None

    def split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Split:
        """Take the static arguments out."""
        if not self._static_nums and not self._static_names:
            return Split(args, kwargs, tuple(range(len(args))), ())
        nums = {n % len(args) if n < 0 else n for n in self._static_nums if args}
        dynamic = tuple(n for n in range(len(args)) if n not in nums)
        static: list[tuple[int | str, Any]] = [(n, a) for n, a in enumerate(args) if n in nums]
        static += [(name, kwargs[name]) for name in sorted(kwargs) if name in self._static_names]
        for where, value in static:
            _check_hashable(where, value)
        rest = {name: value for name, value in kwargs.items() if name not in self._static_names}
        return Split(tuple(args[n] for n in dynamic), rest, dynamic, tuple(static))

    def donated(self, split: Split) -> tuple[int, ...]:
        """Which flat leaves are donated."""
        if not self._donated_nums and not self._donated_names:
            return ()
        count = len(split.args) + sum(isinstance(where, int) for where, _ in split.static)
        nums = {n % count if n < 0 else n for n in self._donated_nums if count}
        flags: list[bool] = []
        for position, value in zip(split.positions, split.args, strict=True):
            flags += [position in nums] * len(jax.tree.leaves(value))
        for name in sorted(split.kwargs):
            donated = name in self._donated_names
            flags += [donated] * len(jax.tree.leaves(split.kwargs[name]))
        return tuple(index for index, flag in enumerate(flags) if flag)

    def labels(self, split: Split) -> tuple[str, ...]:
        """A name for each flat leaf, as users would write it: ``params['w']``."""
        labels: list[str] = []
        for position, value in zip(split.positions, split.args, strict=True):
            name = self._name(position) or f"argument {position}"
            labels += _paths(name, value)
        for name in sorted(split.kwargs):
            labels += _paths(name, split.kwargs[name])
        return tuple(labels)


def _paths(name: str, tree: Any) -> list[str]:
    return [name + jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree)]


_EITHER = inspect.Parameter.POSITIONAL_OR_KEYWORD
_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, _EITHER)
_BY_NAME = (_EITHER, inspect.Parameter.KEYWORD_ONLY)


def _parameters(function: Callable[..., Any]) -> tuple[inspect.Parameter, ...]:
    """The parameters of a function; where Python does not know them, it takes any."""
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):
        signature = inspect.signature(lambda *args, **kwargs: None)
    return tuple(signature.parameters.values())


def _check_hashable(where: int | str, value: Any) -> None:
    try:
        hash(value)
    except TypeError:
        raise failures.capture_failure(
            f"static argument {where!r} is a {type(value).__name__}, which is not hashable",
            "static arguments are part of the code: use a tuple, a number, a string,"
            " or a frozen dataclass",
        ) from None


def is_placement(entry: Any) -> bool:
    """Where a pytree prefix of shardings ends."""
    return entry is None or isinstance(entry, PartitionSpec | NamedSharding)


def broadcast(
    prefix: Any, tree: Any, what: str, is_entry: Callable[[Any], bool] = is_placement
) -> list[Any]:
    """One entry of *prefix* per leaf of *tree*.  is_entry: where the prefix ends, beside leaves.

    Raises PathwaysError when *prefix* is no prefix of *tree*; *what* names it.
    """
    found: list[Any] = []

    def take(entry: Any, part: Any) -> None:
        found.extend([entry] * len(jax.tree.leaves(part)))

    try:
        jax.tree.map(take, prefix, tree, is_leaf=is_entry)
    except ValueError as error:
        if isinstance(prefix, tuple) and isinstance(tree, tuple) and len(prefix) != len(tree):
            why = f"{what} has {len(prefix)} entries, and what it is for has {len(tree)}"
        else:
            text = " ".join(str(error).split()).replace("tree_map tree", what)
            why = f"{what} does not have the structure of what it is for: {text}"
        raise failures.capture_failure(
            why,
            "give one entry for all, a tuple with one entry per argument, or a tree prefix",
        ) from None
    return found
