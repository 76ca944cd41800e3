# SPDX-License-Identifier: Apache-2.0
"""Descriptions of a batch, of caches and of a layer, as AutoDeploy passes them to attention."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from cumla.compat._torch import import_torch
from cumla.core.arguments import checked_int

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

__all__ = ["AttentionInfo", "CacheConfig", "PositionalEmbeddingConfig", "SequenceInfo"]

_LISTS = "seq_len", "input_pos", "cache_loc", "pages_per_seq"
_TENSORS = "input_ids", *_LISTS


@dataclass
class PositionalEmbeddingConfig:
    """The positional embedding of a layer: none, or a rotation; rope_scale is 1."""

    mode: Literal["rope"] | None = None
    rope_theta: float = 10000.0
    rope_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.mode not in (None, "rope"):
            raise ValueError(f"mode: needs None or 'rope', got {self.mode!r}; pass one of them")
        if self.mode == "rope" and not self.rope_theta > 0:
            raise ValueError(
                f"rope_theta: needs a number above 0, got {self.rope_theta}; pass that of the model"
            )
        if self.mode == "rope" and self.rope_scale != 1.0:
            raise ValueError(
                f"rope_scale: needs 1.0, got {self.rope_scale}; pass a freqs_cis of your own to "
                f"the operations for scaled angles"
            )


@dataclass
class CacheConfig:
    """The dtype of caches, by default that of the attention."""

    dtype: torch.dtype | None = None


@dataclass
class AttentionInfo:
    """Sizes of an attention layer; the last rope_dim columns of a head are rotated, or all."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    cache_config: CacheConfig
    pos_embd_config: PositionalEmbeddingConfig
    rope_dim: int | None = None


def _tensor() -> Any:
    """Stand for a tensor that is made when the sizes are known."""
    return None


@dataclass
class SequenceInfo:
    """A batch of sequences, and where their tokens are in the caches.

    Tokens are in ``input_ids``, one sequence after the other: ``(batch, 1)`` if each has one, else
    ``(1, total_tokens)``. Sequence i has ``seq_len[i]`` of them, after ``input_pos[i]`` that the
    caches have already; its pages are the next ``pages_per_seq[i]`` numbers of ``cache_loc``. All
    tensors are int32, on the CPU until `to` moves them.

    Differences from AutoDeploy: no two sequences share a page. A page_size of 0 stands for
    max_seq_len, a max_num_tokens of 0 for max_batch_size * max_seq_len.
    """

    max_seq_len: int = 1
    max_batch_size: int = 1
    page_size: int = 0
    max_num_tokens: int = 0

    input_ids: torch.Tensor = field(default_factory=_tensor)
    seq_len: torch.Tensor = field(default_factory=_tensor)
    input_pos: torch.Tensor = field(default_factory=_tensor)
    cache_loc: torch.Tensor = field(default_factory=_tensor)
    pages_per_seq: torch.Tensor = field(default_factory=_tensor)

    _sequence_lengths: list[int] = field(default_factory=list)
    _num_pages: int = 1

    def __post_init__(self) -> None:
        for name in ("max_seq_len", "max_batch_size"):
            setattr(self, name, checked_int(name, getattr(self, name), "pass more"))
        for name in ("page_size", "max_num_tokens"):
            checked_int(name, getattr(self, name), "pass 0 for the most", -1)
        batch, all_tokens = self.max_batch_size, self.max_batch_size * self.max_seq_len
        if self.page_size < 1:
            self.page_size = self.max_seq_len
        if self.max_num_tokens < 1:
            self.max_num_tokens = all_tokens
        more = max(min(self.max_num_tokens, all_tokens) - batch, 0)
        # The last page of each sequence may have one token.
        all_pages = batch * -(-self.max_seq_len // self.page_size)
        self._num_pages = min(all_pages, batch + more // self.page_size)
        self._dynamic_shapes: tuple[dict[int, Any], ...] | None = None
        for name in _LISTS:
            size = self._num_pages if name == "cache_loc" else batch
            setattr(self, name, _int32([0] * size))
        self.reset()

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self.input_pos.device

    @property
    def args(self) -> list[torch.Tensor]:
        """The tensors, in the order in which a metadata operation takes them."""
        return [getattr(self, name) for name in _TENSORS]

    @property
    def extra_arg_names(self) -> list[str]:
        """The names of the tensors after input_ids."""
        return [*_LISTS]

    @property
    def dynamic_shapes(self) -> tuple[dict[int, Any], ...]:
        """The axes of the tensors that `torch.export` must not fix."""
        if self._dynamic_shapes is None:
            from torch.export import Dim

            axes = {1: Dim("seq_len", max=self.max_seq_len)}
            if self.max_batch_size > 1:
                axes[0] = Dim("batch_size", max=self.max_batch_size)
            self._dynamic_shapes = (axes, *({} for _ in _LISTS))
        return self._dynamic_shapes

    @property
    def num_sequences(self) -> int:
        """Sequences of the batch."""
        return len(self._sequence_lengths)

    @property
    def sequence_lengths(self) -> list[int]:
        """Their new tokens, as the host knows them."""
        return self._sequence_lengths

    @property
    def input_positions(self) -> list[int]:
        """Their tokens in the caches, copied to the host."""
        positions: list[int] = self.input_pos[: self.num_sequences].tolist()
        return positions

    @property
    def is_generate(self) -> bool:
        """Return whether each sequence has one new token."""
        return all(length == 1 for length in self.sequence_lengths)

    @property
    def num_pages(self) -> int:
        """Pages of the caches; setting it makes cache_loc longer or shorter."""
        return self._num_pages

    @num_pages.setter
    def num_pages(self, value: int) -> None:
        value = checked_int("num_pages", value, "pass the pages of the caches")
        numbers = import_torch().arange(value, dtype=self.cache_loc.dtype, device=self.device)
        kept = min(value, self._num_pages)
        numbers[:kept] = self.cache_loc[:kept]
        self.cache_loc, self._num_pages = numbers, value

    @property
    def is_paged(self) -> bool:
        """Return whether a sequence may have several pages."""
        return self.page_size < self.max_seq_len

    @property
    def page_assignments(self) -> list[list[int]]:
        """The pages of each sequence, copied to the host."""
        counts = self.pages_per_seq[: self.num_sequences].tolist()
        return [pages.tolist() for pages in self.cache_loc[: sum(counts)].split(counts)]

    def to(self, *args: Any, **kwargs: Any) -> None:
        """Move or convert all tensors, as `torch.Tensor.to` does."""
        for name in _TENSORS:
            setattr(self, name, getattr(self, name).to(*args, **kwargs))

    def sync(self, other: SequenceInfo) -> None:
        """Take over another batch, into the tensors that are there; input_ids are replaced."""
        for name in (one.name for one in fields(self)):
            mine, others = getattr(self, name), getattr(other, name)
            if name not in (*_TENSORS, "_sequence_lengths") and mine != others:
                raise ValueError(
                    f"other: needs {name.strip('_')} {mine}, got {others}; set both up alike"
                )
        self.input_ids = other.input_ids.to(self.device)
        self._sequence_lengths = other._sequence_lengths
        for name in _LISTS:
            self._put(name, getattr(other, name))

    def _put(self, name: str, numbers: Any) -> None:
        """Write to the beginning of a list, which a graph may read."""
        getattr(self, name)[: len(numbers)].copy_(numbers, non_blocking=True)

    def reset(self) -> None:
        """Make it max_batch_size sequences of one token, without a history, with a page each."""
        self.nest_sequences([[0]] * self.max_batch_size)
        self.input_pos.zero_()
        self.pages_per_seq.fill_(1)
        self._put("cache_loc", _int32(range(self.num_pages)))

    def nest_sequences(self, input_ids: Sequence[Sequence[int] | torch.Tensor]) -> None:
        """Take new tokens, a list or a tensor per sequence; positions and pages stay."""
        torch = import_torch()
        lengths = [_count("input_ids", ids) for ids in input_ids]
        _check_most("input_ids", len(lengths), self.max_batch_size, "sequences", "max_batch_size")
        longest, what = max(lengths, default=0), "tokens a sequence"
        _check_most("input_ids", longest, self.max_seq_len, what, "max_seq_len")
        self.seq_len.zero_()
        self._put("seq_len", _int32(lengths))
        tokens = [
            ids.detach().to(self.device)
            if isinstance(ids, torch.Tensor)
            else _int32(ids).to(self.device, non_blocking=True)
            for ids in input_ids
        ]
        flat = torch.cat(tokens or [_int32([])])
        self._sequence_lengths = lengths
        lead = (-1, 1) if self.is_generate else (1, -1)
        self.input_ids = flat.unflatten(0, lead) if len(flat) else flat.view(1, 0, *flat.shape[1:])

    def unnest_sequences(self, t_nested: torch.Tensor) -> list[torch.Tensor]:
        """Cut what belongs to input_ids, of the same two axes, into the sequences."""
        return list(t_nested.flatten(0, 1).split(self.sequence_lengths))

    def update_pos(self, seq_len: torch.Tensor | list[int] | int, reset: bool = False) -> None:
        """Move positions on by these numbers of tokens, or one number for all; or set them."""
        torch = import_torch()
        numbers = torch.as_tensor(seq_len)
        if numbers.dim() > 1 or (numbers.numel() and numbers.dtype.is_floating_point):
            raise TypeError(
                f"seq_len: needs an int, or a list of ints, one for each sequence, got "
                f"{seq_len!r}; convert it"
            )
        count = len(numbers) if numbers.dim() else self.max_batch_size
        _check_most("seq_len", count, self.max_batch_size, "numbers", "max_batch_size")
        numbers = numbers.to(torch.int32).to(self.device, non_blocking=True)
        self.input_pos[:count] = numbers if reset else self.input_pos[:count] + numbers

    def assign_cache_loc(self, page_assignments: Sequence[Sequence[int]]) -> None:
        """Assign each sequence its pages; each page exists and is used once."""
        name = "page_assignments"
        counts = [_count(name, pages) for pages in page_assignments]
        pages = [page for some in page_assignments for page in _listed(some)]
        if len(pages) > self.num_pages or len(counts) > self.max_batch_size:
            raise ValueError(
                f"{name}: needs at most {self.max_batch_size} sequences and {self.num_pages} "
                f"pages, got {len(counts)} and {len(pages)}; set num_pages"
            )
        if len(counts) < self.num_sequences:
            raise ValueError(
                f"{name}: needs the pages of each of the {self.num_sequences} sequences, got "
                f"{len(counts)} lists; pass an empty list for a sequence without pages"
            )
        seen: set[int] = set()
        for page in pages:
            if checked_int(name, page, "pass page numbers", 0) >= self.num_pages:
                raise ValueError(
                    f"{name}: needs pages from 0 to {self.num_pages - 1}, got {page}; set num_pages"
                )
            if page in seen:
                raise ValueError(
                    f"{name}: needs each page once, got {page} twice; give each sequence pages of "
                    f"its own"
                )
            seen.add(page)
        self._put("cache_loc", _int32(pages))
        self._put("pages_per_seq", _int32(counts))


def _check_most(name: str, count: int, most: int, what: str, option: str) -> None:
    if count > most:
        raise ValueError(f"{name}: needs at most {most} {what}, got {count}; set {option}")


def _count(name: str, numbers: Any) -> int:
    if not hasattr(numbers, "__len__") or isinstance(numbers, str):
        raise TypeError(
            f"{name}: needs a list of numbers for each sequence, got {numbers!r}; wrap it in a list"
        )
    return len(numbers)


def _listed(numbers: Any) -> list[int]:
    return list(numbers.tolist() if hasattr(numbers, "tolist") else numbers)


def _int32(numbers: Sequence[int]) -> Any:
    """Make a tensor on the CPU."""
    torch = import_torch()
    return torch.tensor(numbers, dtype=torch.int32)
