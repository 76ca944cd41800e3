# SPDX-License-Identifier: Apache-2.0
"""An operation as data and pure functions, and the one way to run it.

Everything of an :class:`Operation` but :func:`run` is pure and needs no GPU: checked arguments,
shapes of outputs, bytes of workspace and launches follow from views and options. The public
functions, plans and bindings are callers of the same recipe.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cache
from importlib import import_module
from itertools import accumulate
from operator import mul
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

from cumla.core._dlpack import ArrayView, numpy_dtype
from cumla.core.arguments import FACTORS, check_output
from cumla.core.arrays import (
    WORKSPACE,
    from_numpy,
    glance,
    note_written,
    open_call,
    reopen_call,
    to_numpy,
)
from cumla.core.check_mode import check_factors, check_mode, copy_to_host, may_look
from cumla.core.frameworks import DLPACK, Traced, eager_only, framework_of_type
from cumla.core.overlap import refuse_overlap

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    import numpy as np

    from cumla.core.arguments import Views
    from cumla.core.arrays import Call
    from cumla.core.spec import Sorter, Spec

_FP8 = "float8_e4m3fn"
_MOST_READY = 1024
_ALIGNMENT = 256  # bytes: more than any kernel or allocator asks for
_ROW = 4096  # bytes: more than any row whose parts a kernel knows as one
_MOST_PLACES = 16  # of outputs and workspaces, that launches of the same arrays are kept for

A = TypeVar("A")
K = TypeVar("K")


class Address(int):
    """The address of an argument, as a number that knows which argument it is of.

    Views that carry such numbers give a recipe whose launches can be patched for other addresses.
    """

    argument: str
    addend: int  # bytes from where the argument begins

    @classmethod
    def of(cls, argument: str, value: int, addend: int = 0) -> Address:
        """Name the address `value`, which is `addend` bytes into an argument."""
        address = cls(value)
        address.argument, address.addend = argument, addend
        return address

    def __add__(self, other: int) -> Address:
        return Address.of(self.argument, int(self) + other, self.addend + other)

    __radd__ = __add__


class Template(Protocol):
    """A launch whose kernel is loaded, as `cumla.launch.kernel.Template`."""

    def bound(self, addresses: Mapping[str, int]) -> Template:
        """Put these addresses into the parameters, and leave others open."""

    def at(self, addresses: Mapping[str, int], stream: int) -> Callable[[], None]:
        """Put addresses into the parameters; what comes back launches when it is called."""


class Launchable(Protocol):
    """A launch as data, as `cumla.launch.kernel.Launch`."""

    def template(self, device: int, capturing: Callable[[], bool]) -> Template:
        """Load the kernel and pack its parameters."""


class Output(NamedTuple):
    """An array that an operation returns."""

    name: str  # of the argument that takes the caller's array
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]  # the first where none is given; a given one may have any
    lies: str = "rows"  # the layout of a given one, as in `cumla.core.arguments.Array`
    swapped: bool = False  # a new one on a GPU has its last two axes in the other order in memory


class Ready(dict["Hashable", Any]):
    """Checked and packed calls, by addresses and layouts of their arrays, and by their options.

    The same arrays need no second check: launches hold addresses, shapes and strides, and no array.
    """

    def keep(self, key: Hashable, value: Any) -> None:
        """Keep a value; where there are too many, the others are forgotten."""
        if len(self) >= _MOST_READY:
            self.clear()
        self[key] = value

    @eager_only
    def find(self, sorter: Sorter, values: tuple[Any, ...]) -> tuple[Hashable, Any, Any]:
        """Look a call up by its arguments, those of ``sorter.names``: key, value, first array.

        The value is None for a call that is not kept, the key for one that cannot be.
        """
        if check_mode():
            return _UNKNOWN
        types = tuple(map(type, values))
        look = sorter.looks.get(types) or sorter.look(types, values)
        number, kind, arrays_of, options_of = look
        arrays = arrays_of(values)
        seen = (
            glance(arrays) if kind is None else framework_of_type.get(kind, DLPACK).glance(arrays)
        )
        if seen is None:
            return _UNKNOWN
        key = seen, number, options_of(values)
        try:
            return key, self.get(key), arrays[0]
        except TypeError:  # an option that cannot be hashed
            return _UNKNOWN


_UNKNOWN = (None, None, None)


forms = Ready()
"""Launches of calls, for any addresses of their arrays, by operation, form and options."""


class Operation(ABC, Generic[A, K]):
    """One public operation. `A` are its checked arguments, `K` is the shape that it is planned for.

    Stateless but for what it remembers of the last calls.
    """

    # Arrays whose values kernels take on trust, and the check mode looks at beside factors.
    trusted: tuple[str, ...] = ()

    # Axes of factors, at most, that it looks at.
    factor_axes = 2

    @property
    def writes_first(self) -> bool:
        """Return whether the first of the inputs is written to: a cache."""
        return self.spec is not None and self.spec.has_caches

    # Outputs that may be the very input named.
    in_place: Mapping[str, str] = MappingProxyType({})

    def __init__(self, spec: Spec | None = None) -> None:
        self.ready = Ready()
        self.spec = spec  # of the public function that runs it

    def call(self, *values: Any) -> Any:
        """Run a call of the public function; `values` are its arguments, in their order."""
        spec = self.spec
        assert spec is not None
        key, ready, array = self.ready.find(spec.sorted, values)
        # The first call keeps what it found by this key before it launches, which may fail.
        if isinstance(ready, _Ready):
            written: list[Any] = []
            for place, part in ready.written:
                value: Any = None if place is None else values[place]
                written.append(value if part is None else value[part])
            with reopen_call(array, ready.device, values[-1]) as call:
                return spec.returned(ready.packed.run(call, written), ready.packed.returned)
        inputs, outputs, options = spec.sorted(dict(zip(spec.sorted.names, values, strict=True)))
        results = run(self, inputs, outputs, options, values[-1], key)
        if key is not None and (known := self.ready.get(key)) is not None:
            first = list(inputs.values())[:1] if spec.has_caches else []
            places = tuple([_place(value, values) for value in (*outputs.values(), *first)])
            self.ready.keep(key, _Ready(known.device, known.packed, places))
        return spec.returned(results, outputs)

    @abstractmethod
    def arguments(self, views: Views, options: Any) -> A:
        """Check views and options against each other; all errors but those of outputs."""

    def outputs(self, arguments: A) -> tuple[Output, ...]:
        """Return what comes back; nothing for an operation that writes in place."""
        return ()

    def key(self, arguments: A, device: int) -> K:
        """Return the shape to plan for, on a GPU; raises where the GPU cannot run the kernels."""
        raise NotImplementedError

    def workspace_bytes(self, key: K) -> int:
        """Return how many bytes of memory the launches share."""
        return 0

    @abstractmethod
    def recipe(
        self, key: K, arguments: A, outs: Sequence[ArrayView], buffer: int
    ) -> Sequence[Launchable]:
        """Describe the launches, in their order; none where there is nothing to do.

        `arguments` are checked, `outs` are as :meth:`outputs` lists them, and `buffer` is the
        address of the workspace, 0 if there is none.
        """

    def check_overlap(self, views: Views, written: Sequence[str]) -> None:
        """Refuse memory that is written to and is that of another array as well."""
        inputs = dict(views)
        outs = {name: view for name in written if (view := inputs.pop(name, None)) is not None}
        if outs:
            refuse_overlap(outs, inputs, self.in_place)

    def check_values(self, host: Mapping[str, np.ndarray[Any, Any]], arguments: A) -> None:
        """Check mode: raise for the first value out of range, of the arrays in `trusted`."""

    @abstractmethod
    def reference(
        self, host: Mapping[str, np.ndarray[Any, Any]], arguments: A
    ) -> Sequence[np.ndarray[Any, Any]]:
        """Compute on the CPU, into the outputs that are among the arrays; return all outputs."""


class Packed(NamedTuple):
    """Launches of a call, packed except for addresses that the call allocates itself."""

    returned: tuple[str, ...]  # names of the outputs
    # As `Call.allocate` takes it: what the caller did not give, outputs, then the workspace.
    missing: tuple[tuple[str, tuple[int, ...], str, bool], ...]
    templates: tuple[Template, ...]  # in the order of the launches
    # Launches by stream and places, of the last few.
    launches: dict[Hashable, list[Callable[[], None]]]

    def moved(self, views: Views) -> Packed:
        """Take other arrays of the same form."""
        return self.at({name: view.ptr for name, view in views.items() if view is not None})

    def at(self, places: Mapping[str, int]) -> Packed:
        """Take arrays of the same form at other addresses."""
        templates = tuple([template.bound(places) for template in self.templates])
        return self._replace(templates=templates, launches={})

    def placed(self, call: Call) -> tuple[list[Callable[[], None]], list[Any]]:
        """Allocate what is missing: the launches, and what must live until the last of them."""
        made, addresses = call.allocate(self.missing)
        at = (call.stream, *addresses)
        launches = self.launches.get(at)
        if launches is None:
            places: dict[str, int] = {}
            for (name, *_), address in zip(self.missing, addresses, strict=True):
                places[name] = address
            launches = []
            for template in self.templates:
                launches.append(template.at(places, call.stream))
            if len(self.launches) >= _MOST_PLACES:
                self.launches.clear()
            self.launches[at] = launches
        return launches, made

    def run(self, call: Call, written: Sequence[Any]) -> tuple[Any, ...]:
        """Allocate what is missing, launch, and hand the outputs out in the caller's framework.

        `written` are the outputs that are returned, None for each that is missing, then all other
        arrays that are written to.
        """
        launches, made = self.placed(call)
        if call.note_written is not None:
            note_written(call, written)
        for launch in launches:
            launch()
        results, new = [], iter(made)
        for given in written[: len(self.returned)]:
            if given is None:
                given = call.export(next(new)) if call.exports else next(new)
            results.append(given)
        return tuple(results)


_module = cache(import_module)
"""Finds a binding by its name: core imports none."""


class _Ready(NamedTuple):
    """A call on a GPU that was found in order, by its arguments."""

    device: int
    packed: Packed
    # The arrays that it writes, as `Packed.run` takes them: index of the argument, and which part.
    written: tuple[tuple[int | None, int | None], ...]


def _place(array: Any, values: tuple[Any, ...]) -> tuple[int | None, int | None]:
    """Find an array among the arguments of a call; a new one has no place."""
    for place, value in enumerate(values):
        if array is not None and value is array:
            return place, None
        if isinstance(value, (tuple, list)):
            for part, one in enumerate(value):
                if one is array:
                    return place, part
    return None, None


class _Known(NamedTuple):
    """A call whose arrays and options were found in order."""

    arguments: Any
    device: int | None
    trusted: dict[str, ArrayView]
    packed: Packed | None  # None on the CPU


def run(
    operation: Operation[Any, Any],
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Any],
    options: Hashable,
    stream: Any = None,
    key: Hashable = None,
) -> tuple[Any, ...]:
    """Run an operation: look at the arrays, check, allocate, launch; its outputs come back.

    The first of the inputs decides about framework and stream. `outputs` are the arrays to write
    to, None where the caller gave none: those that the operation returns, in their order, and
    others that are written in place. `options` are all that is no array, `stream` is as in
    `open_call`. A call on a GPU that was found in order is kept by `key`, too.
    """
    given = {name: array for name, array in outputs.items() if array is not None}
    looks = check_mode()
    if stream is None and not (looks or given):
        framework = framework_of_type.get(type(next(iter(inputs.values()))))
        if framework is not None and framework.binding:
            eagerly = _module(framework.binding).run_eagerly
            results: tuple[Any, ...] | None = eagerly(operation, inputs, tuple(outputs), options)
            if results is not None:
                return results
    seen = None if looks else glance((*inputs.values(), *given.values()))
    identity = (seen, *inputs, *given, options)
    known = None if seen is None else operation.ready.get(identity)
    if known is None:
        binding = None
        try:
            call = open_call(tuple(inputs.items()), tuple(outputs.items()), stream=stream)
        except Traced as traced:  # left before the binding's own errors, which it would precede
            binding = traced.binding
        if binding is not None:
            module = _module(binding)
            return tuple(module.run(operation, inputs, outputs, options, stream))
        if seen is None:  # then it does not tell the framework, on which new arrays depend
            identity = (call.views, call.framework, *inputs, *given, options)
            known = None if looks else operation.ready.get(identity)
    else:
        call = reopen_call(next(iter(inputs.values())), known.device, stream)
    with call:
        if known is None:
            known = _check(operation, call, inputs, outputs, options)
            if key is None or known.packed is None:
                operation.ready.keep(identity, known)
        if key is not None and known.packed is not None:
            operation.ready.keep(key, known)
        if operation.writes_first and call.note_written is not None:
            first = next(iter(inputs))
            outputs = {**outputs, first: inputs[first]}
        packed = known.packed
        if packed is None:
            return run_on_cpu(operation, call, known.arguments, dict(inputs), outputs)
        if looks and may_look(call):
            host = {n: copy_to_host(v, call.stream) for n, v in known.trusted.items()}
            check_factors(host, operation.factor_axes)
            operation.check_values(host, known.arguments)
        return packed.run(call, tuple(outputs.values()))


def _check(
    operation: Operation[Any, Any],
    call: Call,
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Any],
    options: Hashable,
) -> _Known:
    """Check a call that has not been seen before."""
    views: dict[str, ArrayView | None] = dict(zip((*inputs, *outputs), call.views, strict=True))
    written = tuple(outputs)
    if call.device is not None:
        form = (operation, call.device, form_of(call, views), written, options)
        packed = None if check_mode() else forms.get(form)
        if packed is not None:
            operation.check_overlap(views, written)
            return _Known(None, call.device, {}, packed.moved(views))
        views = movable(views)
    arguments = operation.arguments(views, options)
    returned = operation.outputs(arguments)
    given = checked_outputs(operation, returned, views, written)
    trusted = trusted_of(operation, views)
    if call.device is None:
        return _Known(arguments, None, trusted, None)
    key = operation.key(arguments, call.device)
    packed = pack(call, operation, key, arguments, returned, given, None)
    forms.keep(form, packed)
    return _Known(arguments, call.device, trusted, packed.moved(views))


def form_of(call: Call, views: Views) -> Hashable:
    """Tell all that checks and launches follow from, but where arrays lie.

    That is their shapes, strides and dtypes, the alignment of their addresses, and where in a row
    the parts of one argument lie to each other.
    """
    found: list[Any] = [call.framework, *views]
    before = 0
    for name, view in views.items():
        if view is None:
            found.append(None)
            continue
        ptr, shape, strides, dtype, _, read_only = view
        part = ptr - before if name[-1] == "]" and name[-2] != "0" else 0
        if not -_ROW < part < _ROW:
            part = 0
        found.append((shape, strides, dtype, read_only, ptr % _ALIGNMENT, not ptr, part))
        before = ptr
    return tuple(found)


def without_addresses(key: Any) -> Hashable:
    """Return what `form_of` does, from what `Ready.find` sees: all but the addresses."""
    seen, *rest = key
    found: list[Any] = []
    before = 0
    for ptr, *other in seen:
        part = ptr - before
        if not -_ROW < part < _ROW:
            part = 0
        found.append((ptr % _ALIGNMENT, not ptr, part, *other))
        before = ptr
    return (*found, *rest)


def movable(views: Views) -> dict[str, ArrayView | None]:
    """Let what is packed of the views be patched for others of the same form."""
    return {n: v and v._replace(ptr=Address.of(n, v.ptr)) for n, v in views.items()}


def trusted_of(operation: Operation[Any, Any], views: Views) -> dict[str, ArrayView]:
    """Pick what the check mode looks at."""
    names = (*operation.trusted, *FACTORS)
    return {n: view for n in names if (view := views.get(n)) is not None}


def checked_outputs(
    operation: Operation[Any, Any], returned: Sequence[Output], views: Views, written: Sequence[str]
) -> tuple[ArrayView | None, ...]:
    """Check the arrays that the caller gave to be written to; views of those that are returned."""
    for name, shape, dtypes, lies, _ in returned:
        view = views[name]
        if view is not None:
            check_output(name, view, shape, dtypes, lies)
    operation.check_overlap(views, written)
    return tuple([views[output.name] for output in returned])


def pack(
    call: Call,
    operation: Operation[Any, Any],
    key: Any,
    arguments: Any,
    returned: Sequence[Output],
    given: Sequence[ArrayView | None],
    buffer: int | None,
) -> Packed:
    """Load all kernels of a recipe and pack their parameters, before anything is allocated.

    Without a buffer the call allocates its workspace.
    """
    device = call.device
    assert device is not None
    missing, outs = [], []
    for output, view in zip(returned, given, strict=True):
        if view is None:
            output = output._replace(swapped=output.swapped and not call.exports)
            # CuPy has no e4m3 dtype of its own.
            bits = output.dtypes[0] == _FP8 and call.framework == "cupy"
            dtype = "uint8" if bits else output.dtypes[0]
            missing.append((output.name, output.shape, dtype, output.swapped))
        outs.append(unplaced(output, device) if view is None else view)
    if buffer is None:
        nbytes = operation.workspace_bytes(key)
        buffer = Address.of(WORKSPACE, 0) if nbytes else 0
        if nbytes:
            missing.append((WORKSPACE, (nbytes,), "uint8", False))
    recipe = operation.recipe(key, arguments, outs, buffer)
    templates = tuple([launch.template(device, lambda: call.capturing) for launch in recipe])
    names = tuple([output.name for output in returned])
    return Packed(names, tuple(missing), templates, {})


def unplaced(output: Output, device: int | None) -> ArrayView:
    """Describe a new output, whose place is not known yet: contiguous, but for the axes' order."""
    name, shape, (dtype, *_), _, swapped = output
    of_memory = (*shape[:-2], shape[-1], shape[-2]) if swapped else shape
    sizes = (numpy_dtype(dtype).itemsize, *of_memory[:0:-1])
    strides = tuple(accumulate(sizes, mul))[::-1] if shape else ()
    if swapped:
        strides = (*strides[:-2], strides[-1], strides[-2])
    return ArrayView(Address.of(name, 0), shape, strides, dtype, device)


def run_on_cpu(
    operation: Operation[Any, Any],
    call: Call,
    arguments: Any,
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Any],
) -> tuple[Any, ...]:
    """Compute with the reference, of arrays in CPU memory; `outputs` as of `Packed.run`."""
    given = (*inputs.items(), *outputs.items())
    host = {name: to_numpy(name, array) for name, array in given if array is not None}
    if check_mode():
        check_factors(host, operation.factor_axes)
        operation.check_values(host, arguments)
    note_written(call, outputs.values())
    results = operation.reference(host, arguments)
    out = [outputs[output.name] for output in operation.outputs(arguments)]
    pairs = zip(out, results, strict=True)
    return tuple([from_numpy(call.framework, new) if a is None else a for a, new in pairs])


def parts_on_host(host: Mapping[str, Any], name: str) -> Any:
    """Return an argument as it came: an array, or a tuple of its parts."""
    if name in host:
        return host[name]
    return tuple(host[part] for i in range(3) if (part := f"{name}[{i}]") in host)


class Both(NamedTuple, Generic[A]):
    """Checked arguments of a schedule, and of what works by it."""

    lengths: Any
    attend: A
    options: Any  # of the public function


class Scheduled(Operation[Both[A], K], Generic[A, K]):
    """An operation in two: a schedule from lengths, and attention, or scores, by the schedule.

    Both have one key, and their arguments are this one's.
    """

    def __init__(
        self, schedule: Operation[Any, K], attend: Operation[A, K], spec: Spec | None = None
    ) -> None:
        super().__init__(spec)
        self.schedule = schedule
        self.attend = attend
        self.trusted = (*schedule.trusted, *attend.trusted)
        self.factor_axes = attend.factor_axes

    @abstractmethod
    def batch(self, attend: A, views: Views) -> Any:
        """Separate the schedule's options from the other arguments."""

    def arguments(self, views: Views, options: Any) -> Both[A]:
        """Check those of both."""
        attend = self.attend.arguments(views, options)
        lengths = self.schedule.arguments(views, self.batch(attend, views))
        return Both(lengths, attend, options)

    def outputs(self, arguments: Both[A]) -> tuple[Output, ...]:
        """Return what attention returns."""
        return self.attend.outputs(arguments.attend)

    def workspace_bytes(self, key: K) -> int:
        """Return the size of a plan's buffer."""
        return self.attend.workspace_bytes(key)

    def recipe(
        self, key: K, arguments: Both[A], outs: Sequence[ArrayView], buffer: int
    ) -> Sequence[Launchable]:
        """Describe the schedule, then attention."""
        attend = self.attend.recipe(key, arguments.attend, outs, buffer)
        lengths = arguments.lengths
        return (*self.schedule.recipe(key, lengths, (), buffer), *attend) if attend else ()

    def reference(
        self, host: Mapping[str, np.ndarray[Any, Any]], arguments: Both[A]
    ) -> Sequence[np.ndarray[Any, Any]]:
        """Compute with the lengths that came."""
        return self.attend.reference(host, arguments.attend)

    def check_values(self, host: Mapping[str, np.ndarray[Any, Any]], arguments: Both[A]) -> None:
        """Look at lengths, offsets and page numbers."""
        self.attend.check_values(host, arguments.attend)
