# SPDX-License-Identifier: Apache-2.0
"""Memory that plans keep between calls: whose it is now, and on which stream it is used.

The order between streams is kept on the device; nothing here waits for it.
"""

from __future__ import annotations

import logging
import sys
import weakref
from typing import TYPE_CHECKING, Any, Protocol, cast

from cumla.core._driver import driver
from cumla.core._lifetime import keep_until_event
from cumla.core.arrays import open_call, open_device, order_streams, place_name
from cumla.errors import CumlaError
from cumla.launch.kernel import ReadyLaunches
from cumla.mla.checks import check_workspace

if TYPE_CHECKING:
    from cumla.core.arrays import ArrayView, Call
    from cumla.launch.kernel import PreparedLaunch

__all__ = ["PlanMemory", "User", "Workspace", "check_plan_device", "never_updated", "open_plan"]

_log = logging.getLogger(__name__)


class User(Protocol):
    """What uses a workspace, from when it is handed over until another one takes it."""

    def lose_workspace(self) -> None:
        """Learn that another user is going to write to the workspace."""


class Workspace:
    """Device memory with one user at a time, on one stream at a time.

    Parameters
    ----------
    owner : object
        The array that holds the memory.
    call : Call
        In which the memory was allocated, or handed over by the caller.

    Attributes
    ----------
    home : int
        CUstream handle: there the memory may be used again as soon as the owner lets go.
    """

    __slots__ = (
        "__weakref__",
        "_device",
        "_event",
        "_owner",
        "_stream",
        "_stream_object",
        "_user",
        "home",
    )

    def __init__(self, owner: object, call: Call) -> None:
        self._owner = owner
        self._device = call.device
        self.home = call.stream
        self._stream = None if call.capturing else call.stream  # of the last use outside captures
        self._event = 0  # on the last stream, behind the last use, if that stream is not home
        # A handle of a destroyed stream must not be touched: the driver may crash on it.
        self._stream_object = None if self._stream is None else call.stream_object
        self._user: weakref.ref[User] | None = None

    @classmethod
    def at(cls, owner: object, address: int, call: Call) -> Workspace:
        """Return the workspace at an address, the same one for all whom the caller gives it to."""
        found = _given.get(address)
        if found is None:
            found = _given[address] = cls(owner, call)
        return found

    def hand_to(self, user: User, call: Call) -> None:
        """Let `user` write to the memory on the call's stream, behind all that used it before.

        Work that is being captured is left out of the order: a wait for a stream outside would
        break the capture, and when the graph will run is the caller's to say.
        """
        previous = None if self._user is None else self._user()
        if previous is not user:
            if previous is not None:
                previous.lose_workspace()
            self._user = weakref.ref(user)
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
        event = driver().record_event(call.stream)
        self._destroy_event()
        self._event = event

    def _destroy_event(self) -> None:
        if self._event:
            driver().destroy_event(self._event)
        self._event = 0

    def __del__(self) -> None:
        event = getattr(self, "_event", 0)
        if event and not sys.is_finalizing():
            keep_until_event(self._owner, event, self._device or 0, self._stream or 0)


# The workspaces that callers gave, by address, as long as anyone uses them.
_given: weakref.WeakValueDictionary[int, Workspace] = weakref.WeakValueDictionary()


class PlanMemory:
    """A plan's buffer on the GPU, and the stream on which its schedule was computed.

    Parameters
    ----------
    call : Call
        In which the plan is made, entered; its only view is the workspace's.
    nbytes : int
        Size of the buffer.
    workspace : array or None
        The caller's, if there is one.

    Attributes
    ----------
    buffer : ArrayView
        The memory.
    ready : ReadyLaunches
        Launches of runs that were found in order, on the stream of the last update.
    stream : int or None
        CUstream handle of the last update: a run there needs no other before it. None before the
        first, and since another plan has taken the workspace.
    """

    def __init__(self, call: Call, nbytes: int, workspace: Any) -> None:
        self.buffer: ArrayView
        if workspace is None:
            owner, self.buffer = call.empty((nbytes,), "uint8")
            self._workspace = Workspace(owner, call)
        else:
            (self.buffer,) = cast("tuple[ArrayView]", call.views)
            check_workspace(self.buffer, nbytes)
            self._workspace = Workspace.at(workspace, self.buffer.ptr, call)
        self.ready = ReadyLaunches()
        self.stream: int | None = None
        self._lost = False  # to another plan, since the last update

    def lose_workspace(self) -> None:
        """Forget the schedule: another plan is being updated in the same workspace."""
        self.stream = None
        self._lost = True

    def update(self, call: Call, launch: PreparedLaunch) -> None:
        """Have the schedule computed by `launch`, on the call's stream."""
        self._workspace.hand_to(self, call)
        self.run(call, launch)
        if call.stream != self.stream:
            self.ready.clear()
        self.stream = call.stream
        self._lost = False

    def run(self, call: Call, launch: PreparedLaunch) -> None:
        """Launch what uses the schedule, on the call's stream."""
        launch()
        if call.stream != self._workspace.home:  # eager runs are many, most of them at home
            self._workspace.note_use(call)

    def check_serves(self, stream: int, lengths: str) -> None:
        """Refuse a run on a stream that needs an update, whose arguments are `lengths`, first."""
        if stream == self.stream:
            return
        if self._lost:
            raise ValueError(
                f"plan: its workspace has been taken by another plan, whose update came later; "
                f"call plan.update({lengths}) again, behind the runs of that plan, or give each "
                f"plan a workspace of its own"
            )
        if self.stream is None:
            raise never_updated(lengths)
        raise ValueError(
            f"plan: updated on stream {self.stream:#x}, got a run on stream {stream:#x}; a plan "
            f"serves one stream at a time: call plan.update on this stream first"
        )


def check_plan_device(made_for: int | None, call: Call) -> None:
    """Refuse arrays that are not where the plan was made for."""
    if call.device != made_for:
        raise ValueError(
            f"plan: made for {place_name(made_for)}, got arrays on {place_name(call.device)}; "
            f"make a plan for each device"
        )


def never_updated(lengths: str) -> ValueError:
    """Make the error of a run before the first update, whose argument is `lengths`."""
    return ValueError(f"plan: never updated; call plan.update({lengths}) before the first run")


def open_plan(device: int | None, like: Any, workspace: Any, stream: Any) -> Call:
    """Open the call that makes a plan: of `workspace`, else of `like`, else of a device number."""
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
                f"{name}: needs an array on {place_name(place)} ({reason}), got one on "
                f"{place_name(call.device)}; let device, like and workspace name one place"
            )
    if workspace is not None and place is None:
        raise ValueError(
            "workspace: needs an array on the GPU, got one on the CPU, where a plan has no buffer; "
            "leave it out"
        )
    return calls[last]
