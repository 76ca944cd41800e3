# SPDX-License-Identifier: Apache-2.0
"""SequenceInfo: sizes, tensors and what its methods make of them."""

from __future__ import annotations

from itertools import product

import pytest

torch = pytest.importorskip("torch")

from cumla.compat.auto_deploy import SequenceInfo, prepare_fused_mha_metadata  # noqa: E402


@pytest.mark.parametrize(
    ("sizes", "pages", "is_paged"),
    [
        ((32, 4), 4, False),
        ((32, 4, 0), 4, False),
        ((32, 4, 32), 4, False),
        ((32, 4, 8), 16, True),
        ((30, 3, 8), 12, True),
        ((32, 4, 8, 60), 11, True),
        ((32, 4, 8, 1000), 16, True),
        ((32, 4, 0, 60), 4, False),
    ],
)
def test_sizes(sizes: tuple[int, ...], pages: int, is_paged: bool) -> None:
    info = SequenceInfo(*sizes)
    assert (info.num_pages, info.is_paged) == (pages, is_paged)
    assert info.max_num_tokens == (sizes[3] if len(sizes) > 3 else sizes[0] * sizes[1])
    assert info.page_size == (sizes[2] if len(sizes) > 2 and sizes[2] else sizes[0])
    assert info.cache_loc.tolist() == list(range(pages))


@pytest.mark.parametrize("tokens", [3, 30, 60, 97])
def test_pages_for_any_sequences(tokens: int) -> None:
    info = SequenceInfo(30, 4, 8, tokens)
    splits = ([*some, tokens - sum(some)] for some in product(range(31), repeat=3))
    counts = [sum(-(-n // 8) for n in split) for split in splits if 0 <= split[-1] <= 30]
    assert max(*counts, 4) == info.num_pages
    assert info.page_assignments == [[0], [1], [2], [3]]


@pytest.mark.parametrize("name", ["max_seq_len", "max_batch_size"])
def test_sizes_that_do_not_exist(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: needs a number from 1, got 0"):
        SequenceInfo(**{name: 0})
    with pytest.raises(TypeError, match=f"^{name}: needs an int, got str"):
        SequenceInfo(**{name: "8"})


def test_a_new_batch_decodes_without_a_history() -> None:
    info = SequenceInfo(32, 3, 8)
    assert info.is_generate
    assert info.num_sequences == 3
    assert info.sequence_lengths == info.seq_len.tolist() == info.pages_per_seq.tolist() == [1] * 3
    assert info.input_positions == [0, 0, 0]
    assert info.page_assignments == [[0], [1], [2]]
    assert info.input_ids.shape == (3, 1)
    assert [tensor.dtype for tensor in info.args] == [torch.int32] * 5
    assert info.args[0] is info.input_ids
    assert info.extra_arg_names == ["seq_len", "input_pos", "cache_loc", "pages_per_seq"]
    for name, tensor in zip(info.extra_arg_names, info.args[1:], strict=True):
        assert getattr(info, name) is tensor
    assert info.device == torch.device("cpu")


def test_nested_sequences_come_apart_again() -> None:
    info = SequenceInfo(32, 4, 8)
    seq_len = info.seq_len
    info.nest_sequences([[1, 2, 3], torch.tensor([4], dtype=torch.int32), [5, 6]])
    assert info.input_ids.tolist() == [[1, 2, 3, 4, 5, 6]]
    assert info.input_ids.dtype == torch.int32
    assert info.seq_len is seq_len  # a graph reads it
    assert seq_len.tolist() == [3, 1, 2, 0]
    assert not info.is_generate
    hidden = torch.arange(12).view(1, 6, 2)
    assert [part.tolist() for part in info.unnest_sequences(hidden)] == [
        [[0, 1], [2, 3], [4, 5]],
        [[6, 7]],
        [[8, 9], [10, 11]],
    ]
    info.nest_sequences([[7], [8]])
    assert info.is_generate
    assert info.input_ids.tolist() == [[7], [8]]
    assert seq_len.tolist() == [1, 1, 0, 0]
    assert [part.tolist() for part in info.unnest_sequences(info.input_ids)] == [[7], [8]]
    info.nest_sequences([[], [1, 2]])
    assert info.input_ids.tolist() == [[1, 2]]
    assert [len(part) for part in info.unnest_sequences(info.input_ids)] == [0, 2]
    info.nest_sequences([])
    assert info.input_ids.shape == (1, 0)
    with pytest.raises(ValueError, match=r"^input_ids: needs at most 4 sequences, got 5"):
        info.nest_sequences([[1]] * 5)
    before = info.input_ids
    with pytest.raises(ValueError, match=r"^input_ids: needs at most 32 tokens a sequence, got 33"):
        info.nest_sequences([[1], [1] * 33])
    with pytest.raises(TypeError, match=r"^input_ids: needs a list of numbers for each sequence"):
        info.nest_sequences([1, 2])
    assert info.input_ids is before


def test_tokens_may_have_further_axes() -> None:
    info = SequenceInfo(32, 2)
    info.nest_sequences([torch.zeros(3, 5), torch.ones(1, 5)])
    assert info.input_ids.shape == (1, 4, 5)


def test_positions() -> None:
    info = SequenceInfo(32, 3)
    info.update_pos([4, 5])
    info.update_pos(2)
    assert info.input_positions == [6, 7, 2]
    info.update_pos(torch.tensor([1, 1, 1]))
    assert info.input_positions == [7, 8, 3]
    info.update_pos([9], reset=True)
    assert info.input_positions == [9, 8, 3]
    assert info.input_pos.dtype == torch.int32
    info.nest_sequences([[1, 1]])
    assert info.input_positions == [9]
    info.reset()
    assert info.input_positions == [0, 0, 0]
    with pytest.raises(ValueError, match=r"^seq_len: needs at most 3 numbers, got 4"):
        info.update_pos([1] * 4)
    with pytest.raises(TypeError, match=r"^seq_len: needs an int, or a list of ints"):
        info.update_pos([1.5])


def test_pages() -> None:
    info = SequenceInfo(32, 3, 8)
    info.assign_cache_loc([[5, 3], [], [7, 8, 9]])
    assert info.page_assignments == [[5, 3], [], [7, 8, 9]]
    assert info.cache_loc.tolist()[:5] == [5, 3, 7, 8, 9]
    info.num_pages = 20
    assert info.cache_loc.tolist() == [5, 3, 7, 8, 9, *range(5, 20)]
    info.num_pages = 6
    assert info.num_pages == 6
    assert info.cache_loc.tolist() == [5, 3, 7, 8, 9, 5]
    with pytest.raises(ValueError, match=r"^page_assignments: .*6 pages, got 1 and 7"):
        info.assign_cache_loc([[0] * 7])
    with pytest.raises(ValueError, match=r"^page_assignments: .*3 sequences.*got 4 and 0"):
        info.assign_cache_loc([[]] * 4)
    before = info.cache_loc.tolist()
    for pages, error, says in [
        ([[1], [2]], ValueError, "needs the pages of each of the 3 sequences, got 2 lists"),
        ([[1], [2], [1]], ValueError, "needs each page once, got 1 twice"),
        ([[1], [2], [6]], ValueError, "needs pages from 0 to 5, got 6"),
        ([[1], [2], [-1]], ValueError, "needs a number from 0, got -1"),
        ([[1], [2], [0.5]], TypeError, "needs an int, got float"),
        ([1, 2, 3], TypeError, "needs a list of numbers for each sequence, got 1"),
    ]:
        with pytest.raises(error, match=f"^page_assignments: {says}"):
            info.assign_cache_loc(pages)  # type: ignore[arg-type]
    assert info.cache_loc.tolist() == before
    with pytest.raises(ValueError, match=r"^num_pages: needs a number from 1, got 0"):
        info.num_pages = 0


def test_sync_fills_the_tensors_that_are_there() -> None:
    info, other = SequenceInfo(32, 3, 8), SequenceInfo(32, 3, 8)
    other.nest_sequences([[1, 2], [3]])
    other.update_pos([4, 5])
    other.assign_cache_loc([[9], [2, 3]])
    mine = info.args[1:]
    info.sync(other)
    for before, after, wanted in zip(mine, info.args[1:], other.args[1:], strict=True):
        assert before is after
        assert after.equal(wanted)
    assert info.input_ids.tolist() == [[1, 2, 3]]
    assert info.page_assignments == [[9], [2, 3]]
    assert info.sequence_lengths == [2, 1]
    with pytest.raises(ValueError, match=r"^other: needs max_batch_size 3, got 4"):
        info.sync(SequenceInfo(32, 4, 8))


def test_to_moves_every_tensor() -> None:
    info = SequenceInfo(32, 3, 8)
    info.to(device="meta")
    assert {tensor.device.type for tensor in info.args} == {"meta"}
    assert info.device.type == "meta"


def test_dynamic_shapes_are_those_of_the_arguments() -> None:
    info = SequenceInfo(32, 3, 8)
    shapes = info.dynamic_shapes
    assert len(shapes) == len(info.args)
    assert sorted(shapes[0]) == [0, 1]
    assert not any(shapes[1:])
    assert info.dynamic_shapes is shapes
    assert [*SequenceInfo(32).dynamic_shapes[0]] == [1]


def test_fewer_slots_than_sequences_that_there_may_be() -> None:
    info = SequenceInfo(32, 8, 0, 64)
    info.num_pages = 2
    info.nest_sequences([[1, 2], [3]])
    metadata = prepare_fused_mha_metadata(*info.args, info.page_size)
    assert [rows.tolist() for rows in metadata] == [[2, 1], [0, 0], [0, 1], [0, 2]]
