# SPDX-License-Identifier: Apache-2.0
"""Objects that stay alive until the GPU has passed a point, and the order of two streams.

The host never waits: a later call looks which points have been passed, and releases what was
kept for them. Streams and events are handles of the driver, devices CUDA ordinals.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from functools import partial

from cumla.core._driver import driver, forked, on_device

# By device and stream: points are passed in the order of their stream, so that one that is not
# yet says the same of all behind it, and nothing of other streams.
waiting: dict[tuple[int, int], deque[tuple[Callable[[], bool], object]]] = {}
# By id: the owners that a graph may read whenever it is replayed.
in_graphs: dict[int, object] = {}

# Objects that a forked process cannot release: the memory is the parent's, and the driver does not
# work there.
_of_parent: list[object] = []

# A garbage collection may run finalizers that come back here in the middle of anything.
_lock = threading.RLock()
_looking = False


def _leave_to_parent() -> None:
    """Start anew in a forked process; what was kept is neither asked for nor freed there."""
    global _lock, _looking
    _lock, _looking = threading.RLock(), False  # another thread may have held it
    if waiting or in_graphs:
        _of_parent.append((dict(waiting), dict(in_graphs)))
    waiting.clear()
    in_graphs.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


def keep_until(passed: Callable[[], bool], owner: object, device: int, queue: int) -> None:
    """Keep `owner` until `passed()`, which is asked once all before it in its queue are."""
    if forked():  # a plan of the parent ends here
        _of_parent.append(owner)
        return
    with _lock:
        waiting.setdefault((device, queue), deque()).append((passed, owner))


def keep_until_passed(owner: object, stream: int, device: int | None = None) -> None:
    """Keep an object alive until a stream has done all that is enqueued on it by now.

    While the stream is being captured there is no such point, because the graph can be replayed at
    any time: the object is kept for the life of the process (once, however often it comes). Without
    `device` the stream is of the device that is current: the call's inside the `with` block of a
    `Call`.
    """
    cuda = driver()
    with on_device(cuda, device):
        if cuda.is_capturing(stream):
            in_graphs[id(owner)] = owner
            return
        event = cuda.record_event(stream)
        keep_until(partial(_event_passed, event), owner, cuda.current_device(), stream)


def keep_until_event(owner: object, event: int, device: int, stream: int) -> None:
    """Keep an object alive until a recorded event has passed; the event is destroyed then.

    `device` and `stream` are where it was recorded; the stream may be gone by now.
    """
    keep_until(partial(_event_passed, event), owner, device, stream)


def order_streams(before: int, after: int, device: int | None = None) -> None:
    """Make a stream wait for what is enqueued on another one by now; the host does not wait.

    If `before` is being captured, `after` joins that capture, as everywhere in CUDA; if only
    `after` is, the driver refuses (`CumlaError`). `device` is that of `before`; without it, the one
    that is current: the call's inside the `with` block of a `Call`.
    """
    if before == after:
        return
    cuda = driver()
    with on_device(cuda, device):
        event = cuda.record_event(before)
        try:
            cuda.wait_event(after, event)
        finally:
            cuda.destroy_event(event)  # the driver keeps what it needs until it has been passed


def release_finished() -> None:
    """Let go of all that was kept for points which have been passed."""
    with driver().relaxed_capture():
        finished = _take_finished()
        del finished  # what this frees may query events, too


def _take_finished() -> list[object]:
    global _looking
    finished: list[object] = []
    if not _lock.acquire(blocking=False):
        return finished  # another thread is looking
    try:
        if _looking:
            return finished
        _looking = True
        try:
            for (device, queue), points in list(waiting.items()):
                with on_device(driver(), device):  # the thread may have no context at all
                    while points and points[0][0]():
                        finished.append(points.popleft())
                if not points:
                    del waiting[device, queue]
        finally:
            _looking = False
    finally:
        _lock.release()
    return finished


def _event_passed(event: int) -> bool:
    cuda = driver()
    if not cuda.event_passed(event):
        return False
    cuda.destroy_event(event)
    return True
