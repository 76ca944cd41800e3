# SPDX-License-Identifier: Apache-2.0
"""The arguments of a public operation, listed once.

A :class:`Spec` has a row for each argument of a function, in the order of its signature. From it
follow the inputs, outputs and options of a call, the result, the kernels that `cumla.prepare`
loads, and the operations of PyTorch. A test compares each function with its spec.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from functools import partial
from itertools import chain, count
from numbers import Real
from operator import itemgetter
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from cumla.core.arguments import checked_flag, checked_int, checked_scale, number_of
from cumla.core.arrays import check_mutable, parts
from cumla.core.names import arg

Function = TypeVar("Function", bound=Callable[..., Any])
Split = Callable[[str, Any], dict[str, Any]]
"""Names the arrays that an argument consists of."""
Check = Callable[[str, Any], Any]
"""Returns an option in its one form, or raises an error with its name."""
Getter = Callable[[tuple[Any, ...]], tuple[Any, ...]]
"""Picks some of the arguments of a call."""
Sorted = tuple[dict[str, Any], dict[str, Any], Any]
"""Inputs, arrays to write to, and options, as `cumla.core.operation.run` takes them."""

_PARTS = (tuple, list)
REQUIRED: Any = object()
"""Default of an argument that has none."""
SPECS: dict[str, Spec] = {}
"""By the names of the functions, of all modules that are loaded."""


# --- rows ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Argument:
    """An argument, and its default."""

    name: str
    default: Any = None


@dataclass(frozen=True)
class Input(Argument):
    """An array that is read; one without a default may be None if it is nullable."""

    split: Split | None = None  # of a tuple or list; of anything if it `must_split`
    must_split: bool = False
    is_list: bool = False  # it may come in parts
    is_stack: bool = False  # one array for all parts has them on its first axis
    is_nullable: bool = False


@dataclass(frozen=True)
class Record(Input):
    """Arrays that are the fields of a dataclass, and read; one is None where it is not given.

    Array ``field`` of argument ``name`` is ``name.field``.
    """

    kind: type[Any] = object  # the dataclass

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the arrays."""
        return tuple([field.name for field in fields(self.kind)])


@dataclass(frozen=True)
class Cache(Input):
    """An array that is written to in place."""


@dataclass(frozen=True)
class Out(Argument):
    """An array that is written to and returned; a new one where it is None."""

    of: str = ""  # without this argument there is no such output
    only_given: bool = False  # where it is None nothing is written


@dataclass(frozen=True)
class Instead(Argument):
    """An array that is written to in place of argument `of`, which is written to if this is None.

    Neither is returned.
    """

    of: str = ""


@dataclass(frozen=True)
class Option(Argument):
    """An argument that is no array."""

    check: Check = lambda name, value: value
    kind: str = "bool"  # in a schema of PyTorch
    asks: bool = False  # for an output of its name, which is always new


@dataclass(frozen=True)
class Factor(Option):
    """The factor of an FP8 cache: an option if it is a number, else an array that is read."""

    check: Check = number_of
    kind: str = "float?"


def array(name: str, split: Split | None = None, **form: bool) -> Input:
    """Describe an array that a call needs, or arrays that `split` names."""
    return Input(name, REQUIRED, split, is_list=split is not None, **form)


def optional(name: str, split: Split | None = None) -> Input:
    """Describe an array that may be left out."""
    return Input(name, None, split, is_list=split is not None)


def record(name: str, kind: type[Any]) -> Record:
    """Describe a dataclass of arrays that may be left out."""
    return Record(name, None, partial(_fields_of, kind=kind), must_split=True, kind=kind)


def _fields_of(name: str, value: Any, kind: type[Any]) -> dict[str, Any]:
    """Name the arrays of a record that are given."""
    if not isinstance(value, kind):
        raise TypeError(
            f"{arg(name)}: needs cumla.{kind.__name__}, got {type(value).__qualname__}; pass the "
            f"array to one of its builders or fields"
        )
    given = {f"{name}.{field}": array for field, array in vars(value).items() if array is not None}
    if not given:
        raise ValueError(f"{arg(name)}: needs at least one array, got none; leave it out")
    return given


def cache(name: str, split: Split | None = None) -> Cache:
    """Describe an array that a call writes to in place."""
    return Cache(name, REQUIRED, split, is_list=split is not None)


def flag(name: str, default: bool, *, asks: bool = False) -> Option:
    """Describe an option that is on or off."""
    return Option(name, default, checked_flag, asks=asks)


def integer(name: str, way_out: str, default: Any = REQUIRED, least: int = 1) -> Option:
    """Describe a number that is at least `least`; its default need not be."""
    check = partial(checked_int, way_out=way_out, least=least)
    return Option(name, default, check, "int?" if default is None else "int")


def in_parts(*names: str) -> Split:
    """Split a tuple or list; `names` are as in `cumla.core.arrays.parts`."""
    return partial(parts, names=names)


SOFTMAX_SCALE = Option(
    "softmax_scale", None, lambda name, value: checked_scale(value, 1.0, name), "float?"
)
OUT_AND_LSE = (Out("out"), Out("lse"))
STREAM = Argument("stream")


# --- a spec --------------------------------------------------------------------------------------


@dataclass(eq=False)
class Spec:
    """The arguments of one public function in their order, all but `stream`, which is last."""

    name: str
    arguments: tuple[Argument, ...]
    _: KW_ONLY
    positional: int  # arguments that may be given without their names, the first ones
    kernels: tuple[str, ...]  # how the names of those begin that a call may launch
    returns: tuple[str, ...] = ()  # outputs, in the order of the result
    result: Callable[..., Any] | None = None  # of them; None: nothing is returned, or one array
    planned: tuple[str, ...] = ()  # arrays from whose values a schedule follows
    # Options that are no arguments, with their values: plans of other libraries have other ones.
    hidden: Mapping[str, Any] = field(default_factory=dict)
    function: Callable[..., Any] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        SPECS[self.name] = self
        self.arrays: tuple[Input, ...] = self.rows(Input)
        self.outputs: tuple[Out, ...] = self.rows(Out)
        self.options: tuple[Option, ...] = self.rows(Option)
        names = (*[option.name for option in self.options], *self.hidden)
        self.Options: Any = _record(self.name, names)
        self.has_caches = bool(self.rows(Cache))
        self.sorted = Sorter(self)
        values: list[Any] = [None if a.default is REQUIRED else a.default for a in self.options]
        self.defaults: Any = self.Options(*values, *self.hidden.values())
        self._is_plain = self.returns == tuple([o.name for o in self.outputs]) and not any(
            o.of or o.only_given for o in self.outputs
        )

    def rows(self, kind: type[Any]) -> tuple[Any, ...]:
        """List the arguments of a kind."""
        return tuple([a for a in self.arguments if isinstance(a, kind)])

    def __call__(self, function: Function) -> Function:
        """Take the function whose arguments these are: a decorator."""
        self.function = function
        return function

    def returned(self, results: Sequence[Any], outputs: Iterable[str]) -> Any:
        """Make what the function returns of what `cumla.core.operation.run` does, by its names."""
        if self.result is None:
            return results[0] if results else None
        if self._is_plain:
            return self.result(*results)
        named = dict(zip(outputs, results, strict=True))
        return self.result(*[named.get(name) for name in self.returns])

    def given(
        self, inputs: Mapping[str, Any], outputs: Mapping[str, Any], options: Sequence[Any]
    ) -> dict[str, Any] | None:
        """Turn what `sorted` returns into arguments; None for a call that no function makes.

        Arrays that come in parts are lists.
        """
        kinds = {a.name: a.kind for a in self.rows(Record)}
        records: dict[str, dict[str, Any]] = {}
        values = dict(zip(self.Options._fields, options, strict=True))
        if any(values.pop(name) != value for name, value in self.hidden.items()):
            return None
        arguments: dict[str, Any] = {
            a.name: None if a.default is REQUIRED else a.default for a in self.arguments
        }
        arguments |= values
        for name, value in (*inputs.items(), *outputs.items()):
            of, _, part = name.partition("[")
            record, _, field = name.partition(".")
            if record in kinds:
                records.setdefault(record, {})[field] = value
            elif part:
                arguments[of] = [*(arguments[of] if part[0] != "0" else ()), value]
            elif value is not None:
                arguments[of] = value
        return arguments | {name: kinds[name](**given) for name, given in records.items()}


class Sorter:
    """Sorts the arguments of a call, by name, into inputs, arrays to write to, and options.

    A cache comes first, because its framework must know of what is written; its other parts are
    arrays to write to. `names` are the arguments that a call has, all of the function by default;
    `hidden` replace hidden options.
    """

    def __init__(
        self,
        spec: Spec,
        names: Sequence[str] | None = None,
        hidden: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        def known(kind: type[Any]) -> list[Any]:
            return [a for a in spec.rows(kind) if names is None or a.name in names]

        arrays, outputs = known(Input), known(Out)
        self._options = tuple([(a.name, a.default, a.check) for a in spec.options])
        self._hidden = tuple({**spec.hidden, **hidden}.values())
        self._make = spec.Options
        self._factors = tuple([i for i, a in enumerate(spec.options) if isinstance(a, Factor)])
        reads = [a for a in arrays if not isinstance(a, Cache)]
        self._reads = tuple(
            [(a.name, a.default is None or a.is_nullable, a.split, a.must_split) for a in reads]
        )
        self._caches = tuple([(a.name, a.split) for a in arrays if isinstance(a, Cache)])
        self._records = known(Record)
        self._instead = known(Instead)
        self._outputs = outputs
        self._asks = [a.name for a in known(Option) if a.asks]
        self._output_names = tuple([a.name for a in outputs])
        # True if the function writes to no arrays but outputs that every call has.
        self._is_plain = not (
            self._caches or self._asks or any(a.of or a.only_given for a in outputs)
        )
        listed = [a.name for a in (*spec.arguments, STREAM)]
        self.names = tuple(listed if names is None else names)
        self._looked_at = [*arrays, *self._instead, *outputs, *known(Option)]
        self.looks: dict[tuple[type[Any], ...], Look] = {}  # by the types of all arguments
        self.outputs_of = self._getter(self._output_names)

    def __call__(self, given: Mapping[str, Any]) -> Sorted:
        """Sort the arguments, and check each option by itself."""
        options = [v if (v := given[n]) is d else check(n, v) for n, d, check in self._options]
        inputs: dict[str, Any] = {}
        outputs = self.written(given)
        if self._caches:
            for name, value in outputs.items():
                check_mutable(name, value)
            first = next(iter(outputs))
            inputs[first] = outputs.pop(first)
        for name, may_be_none, split, must_split in self._reads:
            value = given[name]
            if (value is None and may_be_none) or name in outputs:
                continue
            if split is None or not (must_split or isinstance(value, _PARTS)):
                inputs[name] = value
            else:
                inputs.update(split(name, value))
        for i in self._factors:
            name = self._options[i][0]
            if options[i] is None and given[name] is not None:
                inputs[name] = given[name]
        return inputs, outputs, self._make(*options, *self._hidden)

    def written(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Name what a call writes to, a cache first, and None for each output that is missing."""
        if self._is_plain:
            return {name: given[name] for name in self._output_names}
        written: dict[str, Any] = {}
        for name, split in self._caches:
            value = given[name]
            if split is None or not isinstance(value, _PARTS):
                written[name] = value
            else:
                written.update(split(name, value))
        for other in self._instead:
            name = other.of if given[other.name] is None else other.name
            if given[name] is not None:
                written[name] = given[name]
        for output in self._outputs:
            value = given[output.name]
            if output.of and given[output.of] is None:
                if value is not None:
                    raise ValueError(
                        f"{output.of}: needed with {output.name}, got None; pass it, or no "
                        f"{output.name}"
                    )
            elif value is not None or not output.only_given:
                written[output.name] = value
        return written | {name: None for name in self._asks if given[name]}

    def look(self, types: tuple[type[Any], ...], values: tuple[Any, ...]) -> Look:
        """Return how to know calls again whose arguments, those of `names`, have these types.

        An option counts with its type, and with those of the values in a tuple, because 3.0 equals
        3 and 1 equals True.
        """
        arrays, options = [], []
        for argument in self._looked_at:
            value = values[self.names.index(argument.name)]
            is_option = isinstance(argument, Option)
            if isinstance(argument, Factor):
                is_option = isinstance(value, Real)
            if is_option:
                options.append(argument.name)
            elif value is not None:
                arrays.append(argument.name)
        given = dict(zip(self.names, values, strict=True))
        kinds = {type(given[name]) for name in arrays}
        kind = kinds.pop() if len(kinds) == 1 else None
        found = Look(next(_numbers), kind, self._getter(arrays), self._getter(options))
        if several := [name for name in options if isinstance(given[name], tuple)]:
            found = self._with_types(found, self._getter(several))
        split = [name for name in arrays if isinstance(given[name], _PARTS)]
        records = {a.name: a.kind for a in self._records if isinstance(given[a.name], a.kind)}
        if split or records:
            found = self._apart(
                found, self._getter(split), self._getter([*records]), tuple(records.values())
            )
        if len(self.looks) >= _MOST_LOOKS:
            self.looks.clear()
        self.looks[types] = found
        return found

    @staticmethod
    def _with_types(look: Look, several_of: Getter) -> Look:
        """Count the types of what is in options that are tuples."""

        def typed(values: tuple[Any, ...]) -> tuple[Any, ...]:
            return (*look.options_of(values), *map(type, chain(*several_of(values))))

        return look._replace(options_of=typed)

    @staticmethod
    def _apart(
        look: Look, parts_of: Getter, records_of: Getter, kinds: tuple[type[Any], ...]
    ) -> Look:
        """Take arrays in parts one by one, and count the parts; those of records likewise."""
        number, _, arrays_of, options_of = look

        def flat(values: tuple[Any, ...]) -> tuple[Any, ...]:
            found: list[Any] = []
            for array in arrays_of(values):
                if isinstance(array, _PARTS):
                    found.extend(array)
                elif isinstance(array, kinds):
                    found.extend([one for one in vars(array).values() if one is not None])
                else:
                    found.append(array)
            return tuple(found)

        def counted(values: tuple[Any, ...]) -> tuple[Any, ...]:
            absent = [one is None for record in records_of(values) for one in vars(record).values()]
            return (*options_of(values), *map(len, parts_of(values)), *absent)

        return Look(number, None, flat, counted)

    def _getter(self, names: Sequence[str]) -> Getter:
        """Make the function that picks the values of some names."""
        places = [self.names.index(name) for name in names]
        if len(places) > 1:
            return itemgetter(*places)
        if not places:
            return lambda values: ()
        (place,) = places
        return lambda values: (values[place],)


class Look(NamedTuple):
    """The way to read calls whose arguments have the same types."""

    number: int  # its own
    kind: type[Any] | None  # of all arrays, if it is one
    arrays_of: Getter
    options_of: Getter


_MOST_LOOKS = 256
_numbers = count()


def _record(name: str, fields: Sequence[str]) -> Any:
    """Make a class of records."""
    return namedtuple(name, fields, module=__name__)
