# SPDX-License-Identifier: Apache-2.0
"""Memory that plans keep between calls: whose it is now, and on which stream it is used.

The order between streams is kept on the device; nothing here waits for it.
"""

from __future__ import annotations

import logging
import sys
import weakref
from typing import TYPE_CHECKING, Protocol

from cumla._driver import driver
from cumla._lifetime import keep_until_event
from cumla.arrays import order_streams
from cumla.errors import CumlaError

if TYPE_CHECKING:
    from cumla.arrays import Call

__all__ = ["User", "Workspace"]

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
    """

    __slots__ = (
        "__weakref__",
        "_device",
        "_event",
        "_home",
        "_owner",
        "_stream",
        "_stream_object",
        "_user",
    )

    def __init__(self, owner: object, call: Call) -> None:
        self._owner = owner
        self._device = call.device
        self._home = call.stream  # where it is free to be reused as soon as the owner lets go
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

    @property
    def away(self) -> bool:
        """Whether the last use outside captures was on another stream than the allocator's."""
        return self._stream is not None and self._stream != self._home

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
        """Remember the point up to which the call's stream uses the memory, if that is not home.

        The allocator reuses memory in the order of its own stream. For any other the point is noted
        at each use, because the stream may be destroyed before the memory is let go.
        """
        if call.stream == self._home or call.capturing:
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
