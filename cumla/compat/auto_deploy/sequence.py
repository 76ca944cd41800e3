# SPDX-License-Identifier: Apache-2.0
"""What AutoDeploy tells its attention: the layout of a batch, of the caches and of a layer."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from cumla.compat._torch import import_torch
from cumla.core.arguments import checked_int

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

__all__ = ["AttentionInfo", "CacheConfig", "PositionalEmbeddingConfig", "SequenceInfo"]


@dataclass
class PositionalEmbeddingConfig:
    """How positions enter attention: not at all, or by a rotation; rope_scale is 1."""

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
    """How caches are made: in the dtype of the attention by default."""

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


def _no_tensor() -> Any:
    """Stand for a tensor that is made when the sizes are known."""
    return None


@dataclass
class SequenceInfo:
    """A batch of sequences, and where their tokens lie in the caches.

    Tokens of all sequences lie in ``input_ids``, one sequence after the other: ``(batch, 1)`` if
    each has one, else ``(1, total_tokens)``. Sequence i has ``seq_len[i]`` of them, after
    ``input_pos[i]`` that the caches have already. Its pages are the next ``pages_per_seq[i]``
    numbers of ``cache_loc``; no two sequences have the same page. All tensors are int32, on the CPU
    until `to` moves them. A page_size of 0 stands for max_seq_len: each sequence has one page, its
    slot. A max_num_tokens of 0 stands for max_batch_size * max_seq_len.
    """

    max_seq_len: int = 1
    max_batch_size: int = 1
    page_size: int = 0
    max_num_tokens: int = 0

    # The arguments of a metadata operation, in this order.
    input_ids: torch.Tensor = field(default_factory=_no_tensor)
    seq_len: torch.Tensor = field(default_factory=_no_tensor)
    input_pos: torch.Tensor = field(default_factory=_no_tensor)
    cache_loc: torch.Tensor = field(default_factory=_no_tensor)
    pages_per_seq: torch.Tensor = field(default_factory=_no_tensor)

    _sequence_lengths: list[int] = field(default_factory=list)
    _num_pages: int = 1

    def __post_init__(self) -> None:
        torch = import_torch()
        for name in ("max_seq_len", "max_batch_size"):
            setattr(self, name, checked_int(name, getattr(self, name), "pass more"))
        for name in ("page_size", "max_num_tokens"):
            checked_int(name, getattr(self, name), "pass 0 for the most", -1)
        all_tokens = self.max_batch_size * self.max_seq_len
        if self.page_size < 1:
            self.page_size = self.max_seq_len
        if self.max_num_tokens < 1:
            self.max_num_tokens = all_tokens
        more = max(min(self.max_num_tokens, all_tokens) - self.max_batch_size, 0)
        # The last page of each sequence may have one token.
        all_pages = self.max_batch_size * -(-self.max_seq_len // self.page_size)
        self._num_pages = min(all_pages, self.max_batch_size + more // self.page_size)
        self._dynamic_shapes: tuple[dict[int, Any], ...] | None = None
        for name in ("seq_len", "input_pos", "pages_per_seq"):
            setattr(self, name, torch.zeros(self.max_batch_size, dtype=torch.int32))
        self.cache_loc = torch.zeros(self._num_pages, dtype=torch.int32)
        self.reset()

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.input_pos.device

    @property
    def args(self) -> list[torch.Tensor]:
        """The tensors, in the order in which a metadata operation takes them."""
        return [getattr(self, name) for name in ("input_ids", *self.extra_arg_names)]

    @property
    def extra_arg_names(self) -> list[str]:
        """The names of the tensors after input_ids."""
        return ["seq_len", "input_pos", "cache_loc", "pages_per_seq"]

    @property
    def dynamic_shapes(self) -> tuple[dict[int, Any], ...]:
        """Which axes of the tensors `torch.export` must not fix."""
        if self._dynamic_shapes is None:
            from torch.export import Dim

            axes = {1: Dim("seq_len", max=self.max_seq_len)}
            if self.max_batch_size > 1:
                axes[0] = Dim("batch_size", max=self.max_batch_size)
            self._dynamic_shapes = (axes, *({} for _ in self.extra_arg_names))
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
        """Whether each sequence has one new token."""
        return all(length == 1 for length in self.sequence_lengths)

    @property
    def num_pages(self) -> int:
        """Pages of the caches; setting it makes cache_loc longer or shorter."""
        return self._num_pages

    @num_pages.setter
    def num_pages(self, value: int) -> None:
        torch = import_torch()
        value = checked_int("num_pages", value, "pass the pages of the caches")
        numbers = torch.arange(value, dtype=self.cache_loc.dtype, device=self.device)
        kept = min(value, self._num_pages)
        numbers[:kept] = self.cache_loc[:kept]
        self.cache_loc, self._num_pages = numbers, value

    @property
    def is_paged(self) -> bool:
        """Whether a sequence may have several pages."""
        return self.page_size < self.max_seq_len

    @property
    def page_assignments(self) -> list[list[int]]:
        """The pages of each sequence, copied to the host."""
        counts = self.pages_per_seq[: self.num_sequences].tolist()
        pages = self.cache_loc[: sum(counts)].split(counts)
        return [numbers.tolist() for numbers in pages]

    @classmethod
    def _get_sanitized_seq_len(cls, input_ids: torch.Tensor, seq_len: torch.Tensor) -> torch.Tensor:
        """Cut seq_len to the sequences that there are.

        Each of ``(batch, 1)`` counts one token, also those that pad a graph. Of ``(1,
        total_tokens)`` this copies lengths to the host.
        """
        count = cls._get_sanitized_num_sequences(input_ids, seq_len)
        if input_ids.shape[1] > 1:
            return seq_len[:count].detach().clone()
        return seq_len.new_ones(count)

    @staticmethod
    def _get_sanitized_num_sequences(input_ids: torch.Tensor, seq_len: torch.Tensor) -> int:
        """Count the sequences; of ``(1, total_tokens)`` this copies lengths to the host."""
        count: int = input_ids.shape[0]
        if input_ids.shape[1] <= 1:
            return count
        lengths = seq_len.tolist()
        count = sum(length > 0 for length in lengths)
        if any(lengths[count:]):
            raise ValueError(
                f"seq_len: needs its zeros after all other lengths, got {lengths}; leave sequences "
                f"without tokens out"
            )
        return count

    def to(self, *args: Any, **kwargs: Any) -> None:
        """Move or convert all tensors, as `torch.Tensor.to` does."""
        for name in ("input_ids", *self.extra_arg_names):
            setattr(self, name, getattr(self, name).to(*args, **kwargs))

    def sync(self, other: SequenceInfo) -> None:
        """Take over another batch, into the tensors that are there; input_ids are replaced.

        Raises
        ------
        ValueError
            The other was set up with other sizes.
        """
        tensors = ("input_ids", *self.extra_arg_names)
        for one in fields(self):
            mine, others = getattr(self, one.name), getattr(other, one.name)
            if one.name not in (*tensors, "_sequence_lengths") and mine != others:
                raise ValueError(
                    f"other: needs {one.name.strip('_')} {mine}, got {others}; set both up alike"
                )
        self.input_ids = other.input_ids.to(self.device)
        self._sequence_lengths = other._sequence_lengths
        for name in self.extra_arg_names:
            tensor = getattr(other, name)
            getattr(self, name)[: len(tensor)].copy_(tensor, non_blocking=True)

    def reset(self) -> None:
        """Make it max_batch_size sequences of one token, without a history, with a page each."""
        self.nest_sequences([[0]] * self.max_batch_size)
        self.input_pos.zero_()
        self.pages_per_seq.fill_(1)
        torch = import_torch()
        self.cache_loc.copy_(torch.arange(self.num_pages, dtype=self.cache_loc.dtype))

    def _set_generate_only_batch(self) -> None:
        """Make it an example of sequences that decode."""
        self.reset()
        self.nest_sequences([[1]] * self.max_batch_size)

    def _set_example_sequence(self) -> None:
        """Make it an example to export a model with: input_ids have the axes of a plain batch."""
        self.reset()
        lengths = min(2, self.max_batch_size), min(4, self.max_seq_len)
        input_ids = self.seq_len.new_ones(lengths)
        self.nest_sequences(list(input_ids))
        self.input_ids = input_ids

    def _set_max_num_tokens_sample(self) -> None:
        """Make it an example of prefills of max_num_tokens in all."""
        self.reset()
        tokens = min(self.max_num_tokens // self.max_batch_size, self.max_seq_len)
        self.pages_per_seq.fill_(-(-tokens // self.page_size))
        self.nest_sequences([[1] * tokens] * self.max_batch_size)

    def nest_sequences(self, input_ids: Sequence[Sequence[int] | torch.Tensor]) -> None:
        """Take new tokens: a list, or a tensor, per sequence.

        Positions and pages are not touched. ValueError if they are more sequences than
        max_batch_size, or longer than max_seq_len.
        """
        torch = import_torch()
        lengths = [_count("input_ids", ids) for ids in input_ids]
        if len(lengths) > self.max_batch_size:
            raise ValueError(
                f"input_ids: needs at most {self.max_batch_size} sequences, got {len(lengths)}; "
                f"set max_batch_size"
            )
        if max(lengths, default=0) > self.max_seq_len:
            raise ValueError(
                f"input_ids: needs at most {self.max_seq_len} tokens a sequence, got "
                f"{max(lengths)}; set max_seq_len"
            )
        self.seq_len.zero_()
        self.seq_len[: len(lengths)].copy_(_int32(lengths), non_blocking=True)
        tokens = [
            ids.detach().to(self.device) if isinstance(ids, torch.Tensor) else _int32(ids)
            for ids in input_ids
        ]
        flat = torch.cat([ids.to(self.device, non_blocking=True) for ids in tokens] or [_int32([])])
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
        if count > self.max_batch_size:
            raise ValueError(
                f"seq_len: needs at most {self.max_batch_size} numbers, got {count}; set "
                f"max_batch_size"
            )
        numbers = numbers.to(torch.int32).to(self.device, non_blocking=True)
        if reset:
            self.input_pos[:count] = numbers
        else:
            self.input_pos[:count] += numbers

    def assign_cache_loc(self, page_assignments: Sequence[Sequence[int]]) -> None:
        """Give each sequence its pages.

        ValueError if a sequence is missing, or if a page is used twice or does not exist.
        """
        counts = _int32([_count("page_assignments", pages) for pages in page_assignments])
        pages = [page for pages in page_assignments for page in _listed(pages)]
        if len(pages) > self.num_pages or len(counts) > self.max_batch_size:
            raise ValueError(
                f"page_assignments: needs at most {self.max_batch_size} sequences and "
                f"{self.num_pages} pages, got {len(counts)} and {len(pages)}; set num_pages"
            )
        if len(counts) < self.num_sequences:
            raise ValueError(
                f"page_assignments: needs the pages of each of the {self.num_sequences} sequences, "
                f"got {len(counts)} lists; pass an empty list for a sequence without pages"
            )
        seen: set[int] = set()
        for page in pages:
            if checked_int("page_assignments", page, "pass page numbers", 0) >= self.num_pages:
                raise ValueError(
                    f"page_assignments: needs pages from 0 to {self.num_pages - 1}, got {page}; "
                    f"set num_pages"
                )
            if page in seen:
                raise ValueError(
                    f"page_assignments: needs each page once, got {page} twice; give each sequence "
                    f"pages of its own"
                )
            seen.add(page)
        self.cache_loc[: len(pages)].copy_(_int32(pages), non_blocking=True)
        self.pages_per_seq[: len(counts)].copy_(counts, non_blocking=True)


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
