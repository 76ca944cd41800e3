# SPDX-License-Identifier: Apache-2.0
"""Groups of ranks as PyTorch, CuPy and JAX have them, and the partial results that they exchange.

A buffer holds ``(heads, ..., columns + pad)`` numbers: each row of out, then its lse in 16 bytes.
Heads come first, so that the share of each rank lies in one piece and one collective moves all.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from importlib import import_module
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

from cumla.core._driver import driver, on_device
from cumla.core.arguments import checked_flag
from cumla.distributed.merge import MergeOfRanks
from cumla.launch.merge_states import MOST_BLOCKS, MOST_RANKS, Meeting, merge_blocks
from cumla.merge import AttentionState, merge_attention_states

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Group", "group_of"]

_LEAST_SHARED = 1 << 20  # bytes of symmetric memory for an exchange
_LSE_BYTES = 16  # of a row: the lse, and padding that keeps rows at multiples of 16 bytes


class Group(ABC):
    """A group that the user has made, seen from one of its ranks."""

    arrays: ClassVar[tuple[str, str]]  # module and class of the arrays that it moves
    reads_others: ClassVar[bool] = False  # in place of an exchange

    rank: Any
    world: int

    def check(self, name: str, array: Any) -> None:
        """Refuse an array of another framework."""
        module, kind = self.arrays
        if not isinstance(array, getattr(sys.modules.get(module), kind, ())):
            raise TypeError(
                f"{name}: needs a {module}.{kind}, as the group moves them, got "
                f"{type(array).__module__}.{type(array).__qualname__}; convert it, or make a group "
                f"of its framework"
            )

    @abstractmethod
    def computed(self, compute: Callable[..., Any], shape: tuple[int, ...], like: Any) -> Any:
        """Make a buffer of the out and the lse that `compute` gives.

        `shape` is heads, the axes of tokens, and columns of out. `compute` takes ``out=`` and
        ``lse=`` where arrays can be written to.
        """

    @abstractmethod
    def state(self, buffer: Any, columns: int, like: Any) -> tuple[Any, Any]:
        """Return out, of the dtype of `like`, and lse in a buffer."""

    def received(self, buffer: Any, whole: bool) -> Sequence[Any]:
        """Exchange buffers: what each rank has for this one, its piece of the heads or all."""
        heads, *rest = buffer.shape
        moved = (self.all_gather if whole else self.all_to_all)(buffer)
        shares = heads if whole else heads // self.world
        of_ranks = moved.reshape(self.world, shares, *rest)
        return [of_ranks[rank] for rank in range(self.world)]

    def merged(self, states: Sequence[tuple[Any, Any]]) -> AttentionState:
        """Merge what :meth:`received` has given, in the order of the ranks."""
        return merge_attention_states(*zip(*states, strict=True))

    @abstractmethod
    def all_to_all(self, buffer: Any) -> Any:
        """Send each rank its piece of the first axis; those of all ranks, one after the other."""

    @abstractmethod
    def all_gather(self, array: Any) -> Any:
        """Gather the arrays of all ranks, one after the other along the first axis."""

    @abstractmethod
    def once(self, sinks: Any) -> Any:
        """Return sinks for one rank, and for the others what adds nothing."""


class _InMemory(Group):
    """A group whose arrays can be written to: attention writes into the buffer that is sent."""

    def __init__(self, xp: Any, rank: int, world: int) -> None:
        self._xp = xp
        self.rank = rank
        self.world = world

    def computed(self, compute: Callable[..., Any], shape: tuple[int, ...], like: Any) -> Any:
        *lead, columns = shape
        buffer = self._buffer((*lead, columns + _LSE_BYTES // like.dtype.itemsize), like)
        out, lse = self.state(buffer, columns, like)
        compute(out=out, lse=lse)
        return buffer

    def state(self, buffer: Any, columns: int, like: Any) -> tuple[Any, Any]:
        lse = buffer.view(self._xp.float32)[..., columns * buffer.dtype.itemsize // 4]
        return self._xp.moveaxis(buffer[..., :columns], 0, -2), self._xp.moveaxis(lse, 0, -1)

    def once(self, sinks: Any) -> Any:
        return sinks if self.rank == 0 else None

    def _buffer(self, shape: tuple[int, ...], like: Any) -> Any:
        """Allocate what is sent."""
        return self._empty(shape, like)

    @abstractmethod
    def _empty(self, shape: tuple[int, ...], like: Any) -> Any:
        """Allocate a contiguous array of the dtype and on the device of another."""


class _Torch(_InMemory):
    """A process group of `torch.distributed`."""

    arrays = ("torch", "Tensor")

    def __init__(self, group: Any) -> None:
        torch = sys.modules["torch"]
        functions = torch.distributed
        if not functions.is_initialized():
            raise ValueError(
                "group: needs PyTorch's default process group beside it, which is not initialised; "
                "call torch.distributed.init_process_group first, and make the group again"
            )
        self._all_to_all = functions.all_to_all_single
        # Its name from PyTorch 2.13 on, where the old one warns.
        old = functions.all_gather_into_tensor
        self._all_gather = getattr(functions, "all_gather_single", old)
        self._group = group
        super().__init__(torch, functions.get_rank(group), group.size())

    def _empty(self, shape: tuple[int, ...], like: Any) -> Any:
        return like.new_empty(shape)

    def all_to_all(self, buffer: Any) -> Any:
        received = self._empty(buffer.shape, buffer)
        sent, to = (each.view(self._xp.uint8) for each in (buffer, received))  # all move bytes
        self._all_to_all(to, sent, group=self._group)
        return received

    def all_gather(self, array: Any) -> Any:
        array = array.contiguous()
        received = self._empty((self.world * array.shape[0], *array.shape[1:]), array)
        sent, to = (each.view(self._xp.uint8) for each in (array, received))
        self._all_gather(to, sent, group=self._group)
        return received


class _Shared:
    """Memory of each rank that all of them read, in parts of which exchanges take the next one.

    While a rank reads what one exchange has left, others may write for the next one: into another
    part. They write into the first part again after the next barrier, so all have read it by then.
    Captured exchanges may run after any others: they have parts of their own, and the first of a
    capture waits for all ranks before it writes. Graphs may outlive the group that made them, so
    what they use stays for the life of the process.

    The barrier is one of PyTorch, or the beginning of the merge itself, which then needs counters
    after the parts (docs/kernels/append-and-merge.md).
    """

    _of_graphs: ClassVar[set[_Shared]] = set()

    def __init__(self, memory: Any, group: Any, nbytes: int, device: Any) -> None:
        torch = sys.modules["torch"]
        if memory.get_backend(device) is None:
            raise ValueError(
                f"symmetric_memory: needs arrays on GPUs that map each other's memory, got them on "
                f"{device}; leave it out"
            )
        self._nbytes = nbytes
        world = group.size()
        counters = 4 * MOST_BLOCKS * world
        self._own = memory.empty(4 * nbytes + counters, dtype=torch.uint8, device=device)
        self._handle = memory.rendezvous(self._own, group)
        self._timeout = int(group._get_backend(device).options._timeout.total_seconds() * 1000)
        self._own[4 * nbytes :].zero_()
        self._wait()  # until nobody zeroes what another one has counted
        at = [
            self._handle.get_buffer(rank, (counters,), torch.uint8, 4 * nbytes).data_ptr()
            for rank in range(world)
        ]
        rank = torch.distributed.get_rank(group)
        nanoseconds = min(1_000_000 * self._timeout, (1 << 63) - 1)
        self.merge = MergeOfRanks(Meeting(rank, tuple(at), nanoseconds))
        self._next = {False: 0, True: 0}  # part of captured exchanges, and of others
        self._captured = False
        self._capture: int | None = None  # the last one
        self._first = 0  # byte of the part in use

    def begin(self, capture: int | None, nbytes: int) -> Any:
        """Take bytes of the next part, to be written."""
        self._captured = capture is not None
        if self._captured and capture != self._capture:
            self._capture = capture
            self._of_graphs.add(self)
            self._wait()
        self._first = (2 * self._captured + self._next[self._captured]) * self._nbytes
        return self._own[self._first : self._first + nbytes]

    def written(self, wait: bool) -> None:
        """Go on to the next part; unless the merge waits until all ranks have written, wait."""
        if wait:
            self._wait()
        self._next[self._captured] ^= 1

    def read(self, rank: int, buffer: Any, first: int, shares: int) -> Any:
        """Show heads of the buffer that another rank has in this part."""
        rest = buffer.shape[1:]
        begin = self._first // buffer.dtype.itemsize + first * prod(rest)
        return self._handle.get_buffer(rank, (shares, *rest), buffer.dtype, begin)

    def _wait(self) -> None:
        self._handle.barrier(timeout_ms=self._timeout)


class _Symmetric(_Torch):
    """A process group whose ranks read each other's results, through PyTorch's symmetric memory."""

    reads_others = True

    def __init__(self, group: Any) -> None:
        super().__init__(group)
        self._memory = import_module("torch.distributed._symmetric_memory")
        if not hasattr(self._memory, "get_backend"):
            raise ValueError(
                f"symmetric_memory: needs a PyTorch whose symmetric memory tells its backend, 2.11 "
                f"is tested, got {self._xp.__version__}; leave it out"
            )
        self._of_size: dict[int, _Shared] = {}
        self._shared: _Shared | None = None
        self._merge: Callable[..., AttentionState] = merge_attention_states
        self._failed = False

    def _buffer(self, shape: tuple[int, ...], like: Any) -> Any:
        if self._failed:
            raise RuntimeError(
                "symmetric_memory: needs all ranks to have merged as often, and a merge of this "
                "one failed; make a new ContextParallel on every rank"
            )
        nbytes = prod(shape) * like.dtype.itemsize
        size = max(_LEAST_SHARED, 1 << (nbytes - 1).bit_length())
        capture = None
        if like.is_cuda:
            stream = self._xp.cuda.current_stream(like.device).cuda_stream
            with on_device(driver(), like.device.index):
                capture = driver().capture_number(stream)
        shared = self._of_size.get(size)
        if shared is None:
            if capture is not None:
                raise RuntimeError(
                    "symmetric_memory: needs memory that all ranks map before a capture, and this "
                    "exchange is larger than those before; run it once outside of a capture"
                )
            shared = self._of_size[size] = _Shared(self._memory, self._group, size, like.device)
        self._shared = shared
        return shared.begin(capture, nbytes).view(like.dtype).view(shape)

    def received(self, buffer: Any, whole: bool) -> Sequence[Any]:
        shared, self._shared = self._shared, None
        assert shared is not None
        heads = buffer.shape[0]
        shares = heads if whole else heads // self.world
        rows = shares * prod(buffer.shape[1:-1])
        columns = (buffer.shape[-1] * buffer.dtype.itemsize - _LSE_BYTES) // 16
        few = 0 < merge_blocks(rows, columns, self.world) <= MOST_BLOCKS
        waits = buffer.is_cuda and self.world <= MOST_RANKS and few
        self._merge = shared.merge if waits else merge_attention_states
        shared.written(wait=not waits)
        first = 0 if whole else self.rank * shares
        return [shared.read(rank, buffer, first, shares) for rank in range(self.world)]

    def merged(self, states: Sequence[tuple[Any, Any]]) -> AttentionState:
        self._failed = True  # until the merge is on its way: this rank would count one less
        merged = self._merge(*zip(*states, strict=True))
        self._failed = False
        return merged


class _CuPy(_InMemory):
    """A NCCL communicator of CuPy; it works on CuPy's current stream.

    CuPy gives memory that was allocated during a capture to others as soon as nobody holds it: what
    graphs use is held here.
    """

    arrays = ("cupy", "ndarray")

    def __init__(self, communicator: Any) -> None:
        self._nccl = sys.modules["cupy.cuda.nccl"]
        self._communicator = communicator
        self._of_graphs: list[Any] = []
        super().__init__(sys.modules["cupy"], communicator.rank_id(), communicator.size())

    def _empty(self, shape: tuple[int, ...], like: Any) -> Any:
        array = self._xp.empty(shape, like.dtype)
        if self._captures():
            self._of_graphs.append(array)
        return array

    def merged(self, states: Sequence[tuple[Any, Any]]) -> AttentionState:
        if not self._captures():
            return super().merged(states)
        out, lse = (self._empty(array.shape, array) for array in states[0])
        return merge_attention_states(*zip(*states, strict=True), out=out, lse=lse)

    def all_to_all(self, buffer: Any) -> Any:
        received = self._empty(buffer.shape, buffer)
        nbytes, stream = buffer.nbytes // self.world, self._stream()
        kind = self._nccl.NCCL_UINT8
        self._nccl.groupStart()
        for peer in range(self.world):
            sent = buffer.data.ptr + peer * nbytes
            self._communicator.send(sent, nbytes, kind, peer, stream)
            self._communicator.recv(received.data.ptr + peer * nbytes, nbytes, kind, peer, stream)
        self._nccl.groupEnd()
        return received

    def all_gather(self, array: Any) -> Any:
        array = self._xp.ascontiguousarray(array)
        received = self._empty((self.world * array.shape[0], *array.shape[1:]), array)
        kind = self._nccl.NCCL_UINT8
        self._communicator.allGather(
            array.data.ptr, received.data.ptr, array.nbytes, kind, self._stream()
        )
        return received

    def _captures(self) -> bool:
        return driver().is_capturing(self._stream())

    def _stream(self) -> int:
        return int(self._xp.cuda.get_current_stream().ptr)


class _Jax(Group):
    """An axis of a mesh, inside `jax.shard_map`."""

    arrays = ("jax", "Array")

    def __init__(self, axis: str) -> None:
        self._axis = axis

    @property
    def rank(self) -> Any:
        return self._lax.axis_index(self._axis)

    @property
    def world(self) -> int:  # type: ignore[override]
        try:
            return int(self._lax.psum(1, self._axis))
        except NameError as error:
            raise ValueError(
                f"group: needs the name of an axis that jax.shard_map maps, got {self._axis!r} "
                f"outside of one; call it there, with the name of the mesh's axis"
            ) from error

    @property
    def _lax(self) -> Any:
        if "jax" not in sys.modules:
            raise TypeError(
                f"group: a name, such as {self._axis!r}, is an axis of JAX, which is not imported; "
                f"pass a process group of torch.distributed or a NCCL communicator of CuPy"
            )
        return sys.modules["jax"].lax

    def computed(self, compute: Callable[..., Any], shape: tuple[int, ...], like: Any) -> Any:
        jnp = sys.modules["jax.numpy"]
        out, lse = compute()
        out, lse = jnp.moveaxis(out, -2, 0), jnp.moveaxis(lse, -1, 0)
        # Integers, because a float that is a piece of another one may be changed as a NaN.
        bits = jnp.uint16 if out.dtype.itemsize == 2 else jnp.uint32
        out, lse = (self._lax.bitcast_convert_type(part, bits) for part in (out, lse))
        return jnp.concatenate([out, lse.reshape(*out.shape[:-1], 4 // out.dtype.itemsize)], -1)

    def state(self, buffer: Any, columns: int, like: Any) -> tuple[Any, Any]:
        jnp = sys.modules["jax.numpy"]
        bits = buffer[..., columns:]
        bits = bits if bits.shape[-1] == 2 else bits[..., 0]
        lse = self._lax.bitcast_convert_type(bits, "float32")
        out = self._lax.bitcast_convert_type(buffer[..., :columns], like.dtype)
        return jnp.moveaxis(out, 0, -2), jnp.moveaxis(lse, 0, -1)

    def all_to_all(self, buffer: Any) -> Any:
        return self._lax.all_to_all(buffer, self._axis, 0, 0, tiled=True)

    def all_gather(self, array: Any) -> Any:
        return self._lax.all_gather(array, self._axis, tiled=True)

    def once(self, sinks: Any) -> Any:
        jnp = sys.modules["jax.numpy"]
        return jnp.where(self.rank == 0, sinks, -jnp.inf)


def group_of(group: Any, symmetric_memory: bool = False) -> Group:
    """See a group of any framework; frameworks are told through `sys.modules`."""
    torch = getattr(sys.modules.get("torch.distributed"), "ProcessGroup", ())
    if checked_flag("symmetric_memory", symmetric_memory) and not isinstance(group, torch):
        raise ValueError(
            f"symmetric_memory: needs a process group of torch.distributed, got "
            f"{type(group).__module__}.{type(group).__qualname__}; leave it out"
        )
    if isinstance(group, str):
        return _Jax(group)
    for module, kind, seen in (
        ("torch.distributed", "ProcessGroup", _Symmetric if symmetric_memory else _Torch),
        ("cupy.cuda.nccl", "NcclCommunicator", _CuPy),
    ):
        if isinstance(group, getattr(sys.modules.get(module), kind, ())):
            return seen(group)
    if group is None:
        raise TypeError(
            "group: needs a process group, got None, as torch.distributed.group.WORLD is before "
            "PyTorch's group is initialised; call torch.distributed.init_process_group first"
        )
    raise TypeError(
        f"group: needs a process group of torch.distributed, a cupy.cuda.nccl.NcclCommunicator, or "
        f"the name of an axis of jax.shard_map, got {type(group).__module__}."
        f"{type(group).__qualname__}; pass torch.distributed.group.WORLD for all ranks of PyTorch"
    )
