# SPDX-License-Identifier: Apache-2.0
"""Plans: a schedule that many calls use, in a buffer that belongs to one stream at a time.

The order between streams is kept on the device; nothing here waits for it.
"""

from __future__ import annotations

import logging
import sys
import weakref
from abc import ABC, abstractmethod
from inspect import signature
from math import prod
from threading import get_ident
from types import MappingProxyType
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Generic,
    NoReturn,
    Self,
    SupportsIndex,
    TypeVar,
    cast,
)

import numpy as np

from cumla.core._dlpack import numpy_dtype
from cumla.core._driver import driver
from cumla.core._lifetime import keep_until_event, order_streams
from cumla.core.arguments import check_device_number, check_workspace
from cumla.core.arrays import (
    WORKSPACE,
    from_numpy,
    glance,
    note_written,
    open_call,
    open_device,
    place_name,
    reopen_call,
    to_numpy,
)
from cumla.core.check_mode import check_factors, check_mode, copy_to_host, may_look
from cumla.core.frameworks import framework_of
from cumla.core.names import arg
from cumla.core.operation import (
    Operation,
    Packed,
    Ready,
    checked_outputs,
    form_of,
    movable,
    pack,
    run_on_cpu,
    trusted_of,
    without_addresses,
)
from cumla.core.overlap import refuse_overlap
from cumla.core.spec import STREAM, Sorter
from cumla.errors import CumlaError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping

    from cumla.core.arguments import Views
    from cumla.core.arrays import ArrayView, Call
    from cumla.core.operation import Scheduled
    from cumla.core.spec import Spec, Split

    Launch = Callable[[], None]

K = TypeVar("K")

_log = logging.getLogger(__name__)
_ALIGNMENT = 256  # bytes, of buffers


class Workspace:
    """Device memory with one user at a time, on one stream at a time.

    `owner` is the array that holds the memory; `call` is the one in which it was allocated, or
    handed over by the caller.
    """

    def __init__(self, owner: object, call: Call) -> None:
        self._owner = owner
        self._device = call.device
        self.home = call.stream  # there the memory is free as soon as the owner lets go
        self._stream = None if call.capturing else call.stream  # of the last use outside captures
        self._event = 0  # on the last stream, behind the last use, if that stream is not home
        # A handle of a destroyed stream must not be touched: the driver may crash on it.
        self._stream_object = None if self._stream is None else call.stream_object
        self._user: weakref.ref[PlanMemory | Joint] | None = None
        self.nbytes = 0  # of what the caller gave

    @classmethod
    def at(cls, owner: object, view: ArrayView, call: Call) -> Workspace:
        """Return the workspace at an address, the same one for all whom the caller gives it to."""
        begin, end = view.ptr, view.ptr + view.shape[0]
        for other, workspace in [*_given.items()]:
            if other != begin and begin < other + workspace.nbytes and other < end:
                raise ValueError(
                    f"workspace: needs memory apart from that of other plans, or all of theirs, "
                    f"got {begin:#x} to {end:#x}, which overlaps one at {other:#x}; pass the same "
                    f"array to both plans, or slices that do not overlap"
                )
        found = _given.get(begin)
        if found is None:
            found = _given[begin] = cls(owner, call)
        found.nbytes = max(found.nbytes, view.shape[0])
        return found

    def hand_to(self, user: PlanMemory | Joint, call: Call) -> None:
        """Let `user` use the memory on the call's stream, behind all that used it before.

        Work that is being captured is left out of the order: a wait for a stream outside would
        break the capture, and when the graph will run is the caller's to say.
        """
        previous = None if self._user is None else self._user()
        if previous is not user:
            if previous is not None:
                previous.lose_workspace()
            self._user = weakref.ref(user)
        self.go_to(call)

    def go_to(self, call: Call) -> None:
        """Let the call's stream use the memory behind the last one, unless it is captured."""
        if call.stream != self._stream and not call.capturing:
            self._follow(call.stream)
            self._stream, self._stream_object = call.stream, call.stream_object

    def _follow(self, stream: int) -> None:
        """Order a stream behind the last one, unless a capture is going on there by now."""
        last = self._stream
        if last is None:
            return
        try:
            if not driver().is_capturing(last):
                order_streams(last, stream)
        except CumlaError as error:  # such a stream can finish its work, but not be waited for
            _log.warning(
                "the stream %#x, on which a plan was used last, is not there any more (%s): "
                "nothing on stream %#x waits for it; keep streams until their work is done",
                *(last, str(error), stream),  # an error holds the frames that it went through
            )

    def note_use(self, call: Call) -> None:
        """Remember the point up to which the call's stream, which is not home, uses the memory.

        The allocator reuses memory in the order of its own stream. For any other the point is noted
        at each use, because the stream may be destroyed before the memory is let go.
        """
        if call.capturing:
            return
        self._event = driver().record_event(call.stream, self._event)

    # Bound here, because the globals of this module may be gone at interpreter exit.
    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        event = getattr(self, "_event", 0)
        if event and not _is_finalizing():
            keep_until_event(self._owner, event, self._device or 0, self._stream or 0)


# The workspaces that callers gave, by address, as long as anyone uses them.
_given: weakref.WeakValueDictionary[int, Workspace] = weakref.WeakValueDictionary()


class Joint:
    """Memory of a plan that consists of several, and of arrays between them, on one stream.

    Its arrays are new ones, or parts of the caller's workspace, one after the other. Made as
    `PlanMemory` is.
    """

    def __init__(self, call: Call, nbytes: int, workspace: Any) -> None:
        self._given, self._at = workspace, 0
        self._allocator = call.allocator  # of the workspace's framework; plans may be of another
        self._plans: weakref.WeakSet[PlanMemory] = weakref.WeakSet()
        self._owners: list[object] = []
        if workspace is None:
            self.workspace = Workspace(self._owners, call)
        else:
            (view,) = cast("tuple[ArrayView]", call.views)
            check_workspace(view, nbytes)
            self.workspace = Workspace.at(workspace, view, call)

    def empty(self, call: Call, shape: tuple[int, ...], dtype: str) -> tuple[object, ArrayView]:
        """Make the next array."""
        if self._given is None:
            array, view = call.empty(shape, dtype)
            self._owners.append(array)
        else:
            array, view = self._allocator.part(self._given, self._at, shape, dtype)
            self._at += part_bytes(shape, dtype)
        return array, view

    def join(self, plan: PlanMemory) -> None:
        """Take a plan that has a buffer of this memory."""
        self._plans.add(plan)

    def lose_workspace(self) -> None:
        """Forget the schedules: another plan is being updated in the same workspace."""
        for plan in self._plans:
            plan.lose_workspace()


def part_bytes(shape: tuple[int, ...], dtype: str) -> int:
    """Return how many bytes of a workspace an array takes, so that the next one is aligned."""
    return -(-prod(shape) * numpy_dtype(dtype).itemsize // _ALIGNMENT) * _ALIGNMENT


class PlanMemory:
    """A plan's buffer on the GPU, and the stream on which its schedule was computed.

    Made inside the `with` block of `call`, whose only view is the workspace's, if the caller gave
    one.
    """

    def __init__(self, call: Call, nbytes: int, workspace: Any) -> None:
        self.owner: object  # the array that holds the buffer
        self.buffer: ArrayView
        self._user: PlanMemory | Joint | None = None  # of the workspace, if it is another one
        if isinstance(workspace, Joint):
            self.owner, self.buffer = workspace.empty(call, (nbytes,), "uint8")
            self._workspace, self._user = workspace.workspace, workspace
            workspace.join(self)
        elif workspace is None:
            self.owner, self.buffer = call.empty((nbytes,), "uint8")
            self._workspace = Workspace(self.owner, call)
        else:
            self.owner = workspace
            (self.buffer,) = cast("tuple[ArrayView]", call.views)
            check_workspace(self.buffer, nbytes)
            self._workspace = Workspace.at(workspace, self.buffer, call)
        # Launches of runs that were found in order, on the stream of the last update.
        self.ready = Ready()
        self.forms = Ready()  # what runs launch, at any addresses of their arrays
        # The same by layouts without addresses, with the names of the arrays, for runs without
        # outputs.
        self.near = Ready()
        # Stream of the last executed update, or of the last run after it: later runs follow it.
        # None before the first, and since another plan has taken the workspace.
        self.stream: int | None = None
        # Capture of the last captured update: captured runs there follow it.
        self.captured: int | None = None
        self._lost = False  # to another plan, since the last update

    def lose_workspace(self) -> None:
        """Forget the schedule: another plan is being updated in the same workspace."""
        self.stream = self.captured = None
        self._lost = True

    def update(self, call: Call, launch: Launch) -> None:
        """Have the schedule computed by `launch`, on the call's stream."""
        self._workspace.hand_to(self._user or self, call)
        launch()
        self.note_use(call)
        if call.capturing:  # computed when the graph is replayed, in the place of any before it
            self.stream, self.captured = None, call.stream
            return
        if call.stream != self.stream:
            self.ready.clear()
        self.stream = call.stream
        self._lost = False

    def note_use(self, call: Call) -> None:
        """Note that a call has launched what uses the schedule, on its stream."""
        if call.stream != self._workspace.home:  # eager runs are many, most of them at home
            self._workspace.note_use(call)

    def take_to(self, call: Call, lengths: str) -> None:
        """Let a run on the call's stream follow the last use of the schedule, wherever that was.

        One update, whose arguments are `lengths`, serves runs on any stream. Another stream waits
        on the device for the last one. A captured run waits for nothing outside of its capture: the
        order of a replay is the caller's to say. Refused are runs that need an update first.
        """
        stream = call.stream
        if stream == self.stream:
            return
        if self.stream is not None:
            if not call.capturing:
                self._workspace.hand_to(self._user or self, call)
                self.ready.clear()
                self.stream = stream
            return
        if stream == self.captured:
            if call.capturing:
                return
            raise ValueError(
                f"plan: its last update was captured into a CUDA graph, and is computed when that "
                f"is replayed; call plan.update({lengths}) outside of a capture before this run"
            )
        if self._lost:
            raise ValueError(
                f"plan: its workspace has been taken by another plan, whose update came later; "
                f"call plan.update({lengths}) again, after the runs of that plan, or give each "
                f"plan a workspace of its own"
            )
        raise _never_updated(lengths)


class Single(ABC):
    """Base of what holds a schedule, and is never copied: a copy would write to the same memory."""

    @abstractmethod
    def prepare(self) -> None:
        """Compile and load all kernels."""

    def _misplaced(self, method: str, given: Iterable[str]) -> TypeError:
        """Make the error for keywords that a method lacks: it says what takes them."""
        name, kind = next(iter(given)), type(self).__name__
        ways = {
            "update": ("to update", "call plan.update before the runs of a step"),
            "select": ("to select", "move it"),
            "run": ("to run", "move it"),
            "__init__": ("when the plan is made", f"pass it to {kind} or {kind}.from_arrays"),
        }
        for taker, (where, way_out) in ways.items():
            if taker != method and name in self._parameters(taker):
                return TypeError(
                    f"{name}: needs to be given {where}, got it in {method}; {way_out}"
                )
        return TypeError(f"{kind}.{method}() got an unexpected keyword argument {name!r}")

    @classmethod
    def _parameters(cls, method: str) -> set[str]:
        """List what a method takes, here or in a base."""
        owners = [vars(base)[method] for base in cls.__mro__ if method in vars(base)]
        found = [p for owner in owners for p in signature(owner).parameters.values()]
        return {p.name for p in found if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse `copy.copy`, `copy.deepcopy` and `pickle`: two would write to one buffer."""
        raise TypeError(
            f"{type(self).__name__}: a plan cannot be copied or pickled, because both would have "
            f"the memory of one schedule; make another plan from the same arguments"
        )


class Step(Single):
    """Base of a plan that consists of several plans, and has arrays between them."""

    _device: int | None
    _framework: str
    _memory: Workspace | None = None  # of all; None on the CPU, and for arrays that are not kept
    _chosen: Any = None  # the array that a selection is written to, of the plan's framework

    def _check_framework(self, name: str, array: Any) -> None:
        """Refuse an array of another framework than the plan's, where the results go."""
        found = framework_of(name, array).name
        if (found or ("numpy" if self._device is None else "cupy")) != self._framework:
            raise TypeError(
                f"{name}: needs an array of {self._framework}, as the plan's own are, got "
                f"{type(array).__module__}.{type(array).__qualname__}; make the plan with "
                f"like={name}"
            )

    def _follow(self, stream: Any) -> None:
        """Order a call behind the last one, which used the same arrays, on whatever stream."""
        if self._memory is not None:
            with reopen_call(self._chosen, self._device, stream) as call:
                self._memory.go_to(call)

    def _note_use(self, stream: Any) -> None:
        """Keep the plan's arrays until work so far is done, on another stream than theirs."""
        if self._memory is not None:
            call = reopen_call(self._chosen, self._device, stream)
            if call.stream != self._memory.home:
                with call:
                    self._memory.note_use(call)


def new_array(call: Call, joint: Joint | None, shape: tuple[int, ...], dtype: str) -> Any:
    """Make an array between plans, in their joint memory; without it on the CPU."""
    if joint is None:
        return from_numpy(call.framework, np.zeros(shape, dtype))
    owner, _ = joint.empty(call, shape, dtype)
    return call.export(owner) if call.exports else owner


class Plan(Single, Generic[K]):
    """A schedule and its buffer, for every layer of a step: base of all families' plans."""

    _operation: ClassVar[Scheduled[Any, Any]]
    _lengths: ClassVar[str]  # arguments of an update, in messages
    _hidden: ClassVar[Mapping[str, Any]] = MappingProxyType({})  # options of no function
    # Parts of `_operation`:
    _spec: ClassVar[Spec]
    _schedule: ClassVar[Operation[Any, Any]]
    _attend: ClassVar[Operation[Any, Any]]
    _of_run: ClassVar[tuple[str, ...]]  # arguments
    _sorted: ClassVar[Sorter]
    # Lengths, whether they are needed, and what names the arrays of a record.
    _planned: ClassVar[tuple[tuple[int, str, bool, Split | None], ...]]
    _lengths_sorted: ClassVar[Sorter]  # of `update`

    key: K  # the shape for which the plan was made

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        own = vars(cls)
        if "_operation" in own:
            operation = cls._operation
            assert operation.spec is not None
            cls._spec, cls._schedule = operation.spec, operation.schedule
            cls._attend = operation.attend
            planned = [a for a in cls._spec.arrays if a.name in cls._spec.planned]
            cls._planned = tuple(
                [(i, a.name, a.default is not None, a.split) for i, a in enumerate(planned)]
            )
            cls._lengths_sorted = Sorter(cls._spec, [*[a.name for a in planned], STREAM.name])
            parameters = signature(cls.run).parameters.values()  # type: ignore[attr-defined]
            names = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
            cls._of_run = tuple(names[1:])
        if "_operation" in own or "_hidden" in own:
            cls._sorted = Sorter(cls._spec, cls._of_run, cls._hidden)

    @property
    def _batch(self) -> Any:
        """The schedule's options."""
        raise NotImplementedError

    def _fixed(self) -> dict[str, Any]:
        """Return the options that runs have from the plan."""
        raise NotImplementedError

    def _make(
        self,
        key_on: Callable[[int | None], K],
        device: int | None,
        workspace: Any,
        like: Any,
        stream: Any,
    ) -> None:
        """Take a buffer on the GPU that `device`, `like` or `workspace` name; none on the CPU."""
        call = open_plan(device, like, workspace, stream)
        self._device = call.device
        self.key = key_on(call.device)
        self._values: dict[str, np.ndarray[Any, Any]] | None = None  # of the CPU, and of check mode
        self._sources: dict[str, Any] = {}  # arrays that these are copies of, in check mode
        self._thread = 0  # of the last update, in check mode
        self._memory: PlanMemory | None = None
        self._updates = Ready()
        if call.device is not None:
            with call:
                nbytes = self._attend.workspace_bytes(self.key)
                self._memory = PlanMemory(call, nbytes, workspace)

    @classmethod
    def _from(cls, arrays: dict[str, Any], stream: Any, **options: Any) -> Self:
        """Make a plan for the shapes of arrays, with a buffer of the framework of the first."""
        call = open_call(tuple(arrays.items()), stream=stream)
        numbers = cls._numbers(dict(zip(arrays, call.views, strict=True)), options)
        place: dict[str, Any] = {"like": next(iter(arrays.values())), "stream": stream}
        with call:
            return cls(**numbers, **options, **place)

    @classmethod
    def _numbers(
        cls, views: dict[str, ArrayView | None], options: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the numbers that the class takes from the arrays of `from_arrays`."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Compile and load the plan's kernels: later calls do not wait, nor fail under capture.

        `CompilationError` or `MissingDependencyError` if the kernels cannot be had here.
        """
        if self._device is not None:
            self._load(self._device, lambda: False)

    def _load(self, device: int, capturing: Callable[[], bool]) -> None:
        """Load every kernel of the key."""
        raise NotImplementedError

    def serves(self, stream: int) -> bool:
        """Return whether a run on a stream can do without an update before it.

        An update that was executed serves every stream, one that was captured only captured runs
        on its own. `stream` is a CUstream handle; for a plan on the CPU any.
        """
        memory = self._memory
        if memory is None:
            return self._values is not None
        if memory.stream is not None:
            return True
        return stream == memory.captured and driver().is_capturing(stream)

    def _renew(self, *values: Any) -> None:
        """Update the schedule; `values` are the arguments of `update`, in their order.

        It is launched as before if the arrays are those of an earlier update.
        """
        memory, key = self._memory, None
        if memory is not None:
            key, _, array = self._updates.find(self._lengths_sorted, values)
            if key is None and not check_mode() and all(a is None for a in values[:-1]):
                array = memory.owner
                key = glance((array,))
            if key is not None:
                again = reopen_call(array, self._device, values[-1])
                launch = self._updates.get((key, again.stream))
                if launch is not None:
                    with again:
                        memory.update(again, launch)
                    self._values, self._sources, self._thread = None, {}, 0
                    return
        lengths: dict[str, Any] = {}
        for place, name, is_needed, split in self._planned:
            value = values[place]
            if value is not None or is_needed:
                lengths |= {name: value} if split is None else split(name, value)
        self._update(lengths, values[-1], key)

    def _update(self, inputs: dict[str, Any], stream: Any, key: Hashable = None) -> None:
        """Compute the schedule from arrays of lengths.

        Without any it is computed on the stream of the framework that the buffer is of. What is
        launched is kept by `key`.
        """
        memory = self._memory
        buffer = np.empty(0) if memory is None else memory.owner
        named = tuple(inputs.items()) or ((WORKSPACE, buffer),)
        call, options = open_call(named, stream=stream), self._batch
        views: dict[str, ArrayView | None] = dict(zip(inputs, call.views, strict=False))
        packed, form = None, (form_of(call, views), options)
        if memory is not None and not check_mode():
            views = movable(views)
            packed = memory.forms.get(form)
        arguments = None if packed else self._schedule.arguments(views, options)
        self._check_device(call)
        if memory is not None:
            refuse_overlap({WORKSPACE: memory.buffer}, views)
        with call:
            if memory is None:
                self._values = {name: np.array(to_numpy(name, a)) for name, a in inputs.items()}
            else:
                looks = check_mode() and may_look(call)
                self._values = _on_host(call, tuple(inputs)) if looks else None
            noted = self._values if check_mode() else None
            if noted is not None:
                self._check_lengths(noted)
            self._sources, self._thread = ({}, 0) if noted is None else (inputs, get_ident())
            if memory is None:
                return
            assert call.device is not None
            self._load(call.device, lambda: call.capturing)
            if packed is None:
                packed = pack(call, self._schedule, self.key, arguments, (), (), memory.buffer.ptr)
                if not check_mode():
                    memory.forms.keep(form, packed)
            launch = _in_turn(packed.moved(views).placed(call)[0])
            if key is not None:
                self._updates.keep((key, call.stream), launch)
            memory.update(call, launch)

    def _check_lengths(self, host: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """In check mode: raise for the first length of an update that is out of range."""

    def _check_noted(self, stream: int) -> None:
        """In check mode: refuse lengths that have changed since the update, and other threads."""
        if self._thread not in (0, get_ident()):
            raise ValueError(
                "plan: updated by another thread; a plan serves one thread at a time: make a plan "
                "for each, or call plan.update in the thread that runs"
            )
        if not self._sources or self._values is None:
            return
        with open_call(tuple(self._sources.items()), stream=stream) as call:
            if call.device is None:
                now = {name: to_numpy(name, array) for name, array in self._sources.items()}
            else:
                now = _on_host(call, tuple(self._sources))
        for name, values in now.items():
            changed = np.argwhere(values != self._values[name])
            if changed.size:
                at = tuple(changed[0])
                raise ValueError(
                    f"{arg(name)}[{', '.join(map(str, at))}]: needs the value "
                    f"{arg('that the plan was updated with')}, {self._values[name][at]}, got "
                    f"{values[at]}; "
                    f"{arg(f'call plan.update({self._lengths}) after each change of the lengths')}"
                )

    def _call(self, *values: Any) -> Any:
        """Run a layer; `values` are the arguments of `run`, in their order.

        What has been run is known again by what its arrays look like.
        """
        memory, make, key = self._memory, self._spec.result, None
        if memory is not None:
            key, ready, array = memory.ready.find(self._sorted, values)
            if ready is None and key is not None and memory.near:
                ready = self._from_near(memory, key)
            if ready is not None:
                again = reopen_call(array, self._device, values[-1])
                if again.stream == memory.stream:
                    results = self._sorted.outputs_of(values)
                    with again:
                        if isinstance(ready, Packed):
                            results = ready.run(again, results)
                        else:
                            if again.note_written is not None:
                                note_written(again, results)
                            ready()
                        memory.note_use(again)
                    return results[0] if make is None else make(*results)
        given = dict(zip(self._sorted.names, values, strict=True)) | self._fixed()
        inputs, outputs, options = self._sorted(given)
        results = self._run(inputs, outputs, options, values[-1], key)
        return results[0] if make is None else make(*results)

    @staticmethod
    def _from_near(memory: PlanMemory, key: Any) -> Packed | None:
        """Pack a run whose arrays are those of an earlier one but for their addresses."""
        near = memory.near.get(without_addresses(key))
        if near is None:
            return None
        names, packed = near
        seen, *_ = key
        moved: Packed = packed.at({name: one[0] for name, one in zip(names, seen, strict=True)})
        memory.ready.keep(key, moved)
        return moved

    def _run(
        self,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any],
        options: Hashable,
        stream: Any,
        key: Hashable = None,
    ) -> tuple[Any, ...]:
        call = open_call(tuple(inputs.items()), tuple(outputs.items()), stream=stream)
        self._check_device(call)
        memory = self._memory
        with call:
            if memory is not None:
                memory.take_to(call, self._lengths)
            elif self._values is None:
                raise _never_updated(self._lengths)
            views: dict[str, ArrayView | None]
            views = dict(zip((*inputs, *outputs), call.views, strict=True))
            if memory is not None and not check_mode():
                form = (form_of(call, views), options)
                packed = memory.forms.get(form)
                if packed is not None:
                    known = {**views, WORKSPACE: memory.buffer}
                    self._attend.check_overlap(known, tuple(outputs))
                    self._keep_near(memory, key, inputs, views, outputs, packed)
                    return self._launch(memory, call, packed.moved(views), outputs, key)
                views = movable(views)
            arguments = self._attend.arguments(views, options)
            self._check_shape(arguments)
            returned = self._attend.outputs(arguments)
            known = views if memory is None else {**views, WORKSPACE: memory.buffer}
            given = checked_outputs(self._attend, returned, known, tuple(outputs))
            looks = check_mode() and (memory is None or may_look(call))
            if looks:
                self._check_noted(call.stream)
            if memory is None:
                assert self._values is not None
                values = self._values
                return run_on_cpu(self._attend, call, arguments, {**inputs, **values}, outputs)
            if looks and self._values is not None:
                trusted = trusted_of(self._attend, views).items()
                host = {name: copy_to_host(view, call.stream) for name, view in trusted}
                host |= self._values
                check_factors(host, self._attend.factor_axes)
                self._attend.check_values(host, arguments)
            buffer = memory.buffer.ptr
            packed = pack(call, self._attend, self.key, arguments, returned, given, buffer)
            if not check_mode():
                memory.forms.keep(form, packed)
                self._keep_near(memory, key, inputs, views, outputs, packed)
            return self._launch(memory, call, packed.moved(views), outputs, key)

    @staticmethod
    def _keep_near(
        memory: PlanMemory,
        key: Any,
        inputs: Mapping[str, Any],
        views: Views,
        outputs: Mapping[str, Any],
        packed: Packed,
    ) -> None:
        """Keep a run for arrays elsewhere, if the glance saw its inputs, and nothing else."""
        if key is None or any(value is not None for value in outputs.values()):
            return
        seen, *_ = key
        found = [None if (view := views[name]) is None else view.ptr for name in inputs]
        if found == [one[0] for one in seen] and packed.missing:
            memory.near.keep(without_addresses(key), (tuple(inputs), packed))

    @staticmethod
    def _launch(
        memory: PlanMemory, call: Call, packed: Packed, outputs: Mapping[str, Any], key: Hashable
    ) -> tuple[Any, ...]:
        """Launch, and keep that by `key`."""
        results = packed.run(call, tuple(outputs.values()))
        memory.note_use(call)
        if key is not None and packed.templates and call.stream == memory.stream:
            again = packed if packed.missing else _in_turn(packed.placed(call)[0])
            memory.ready.keep(key, again)
        return results

    def _check_shape(self, arguments: Any) -> None:
        """Refuse arrays of another shape than the plan's."""
        raise NotImplementedError

    def _check_device(self, call: Call) -> None:
        if call.device != self._device:
            raise ValueError(
                f"plan: made for {place_name(self._device)}, got arrays on "
                f"{place_name(call.device)}; copy them, or make a plan for each device"
            )


def _on_host(call: Call, names: tuple[str, ...]) -> dict[str, np.ndarray[Any, Any]]:
    """Copy the views of a call from the GPU, and wait for it."""
    views = cast("tuple[ArrayView, ...]", call.views)
    return {n: copy_to_host(view, call.stream) for n, view in zip(names, views, strict=False)}


def _in_turn(launches: list[Launch]) -> Launch:
    """Make one of several launches, in their order; of none for an empty batch."""
    if len(launches) == 1:
        return launches[0]

    def launch() -> None:
        for one in launches:
            one()

    return launch


def _never_updated(lengths: str) -> ValueError:
    return ValueError(f"plan: never updated; call plan.update({lengths}) before the first run")


def open_plan(device: int | None, like: Any, workspace: Any, stream: Any) -> Call:
    """Open the call that makes a plan: of `workspace`, else of `like`, else of a device number."""
    if isinstance(workspace, Joint):  # in which there is room
        workspace = None
    check_device_number(device)
    if like is None and workspace is None:
        return open_device(device, stream=stream)
    calls = {
        name: open_call(((name, array),), stream=stream)
        for name, array in (("like", like), ("workspace", workspace))
        if array is not None
    }
    (first, *_), (last, *_) = calls, reversed(calls)
    place, reason = (calls[first].device, f"as {first}") if device is None else (device, "device=")
    for name, call in calls.items():
        if call.device != place:
            raise ValueError(
                f"{arg(name)}: needs an array on {place_name(place)} ({reason}), got one on "
                f"{place_name(call.device)}; let device, like and workspace name one place"
            )
    if workspace is not None and place is None:
        raise ValueError(
            "workspace: needs an array on the GPU, got one on the CPU, where a plan has no buffer; "
            "leave it out"
        )
    return calls[last]
