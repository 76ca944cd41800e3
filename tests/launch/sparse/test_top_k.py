# SPDX-License-Identifier: Apache-2.0
"""What is packed for top_k, and which shape of the kernel takes which rows."""

from __future__ import annotations

import numpy as np
import pytest

from cumla.core.arrays import ArrayView
from cumla.launch.sparse import top_k
from cumla.launch.sparse.top_k import TopKViews, choose, top_k_launch
from tests.launch.structs import parameters

SMS = 132
SHAPES = top_k._SHAPES


def view(shape: tuple[int, ...], dtype: str = "int32", ptr: int = 1 << 20) -> ArrayView:
    size = np.dtype("float16" if dtype == "bfloat16" else dtype).itemsize
    strides = tuple(size * int(np.prod(shape[i + 1 :])) for i in range(len(shape)))
    return ArrayView(ptr, shape, strides, dtype, 0)


def views(scores: ArrayView, k: int, **changes: ArrayView | None) -> TopKViews:
    rows = scores.shape[0]
    nothing = dict.fromkeys(TopKViews._fields)
    given = {"scores": scores, "out": view((rows, k)), "counts": view((rows,))}
    return TopKViews(**nothing | given | changes)  # type: ignore[arg-type]


def test_the_parameters_by_name() -> None:
    launch = top_k_launch(
        views(
            view((7, 5000), "float32", 1 << 20),
            2048,
            row_lens=view((7,), ptr=2 << 20),
            row_starts=view((7,), ptr=3 << 20),
            block_table=view((9, 11), ptr=4 << 20),
            row_to_request=view((7,), ptr=5 << 20),
            offsets=view((7,), ptr=6 << 20),
            out=view((7, 2048), ptr=7 << 20),
            positions=view((7, 2048), ptr=8 << 20),
            values=view((7, 2048), "float32", 9 << 20),
            counts=view((7,), ptr=10 << 20),
        ),
        2048,
        64,
        True,
        SMS,
    )
    pointers = ("scores", "row_lens", "row_starts", "block_table", "row_to_request", "offsets")
    outputs = ("out", "positions", "values", "counts")
    of_entries = ("row_lens", "row_starts", "requests", "offsets", "counts")
    assert parameters(launch) == {
        **{name: i << 20 for i, name in enumerate((*pointers, *outputs), start=1)},
        **{f"{name}_stride": 1 for name in of_entries},
        "scores_stride": 20000,
        "table_stride": 11,
        "out_stride": 2048,
        "positions_stride": 2048,
        "width": 5000,
        "topk": 2048,
        "page_size": 64,
        "max_pages": 11,
        "requests": 9,
        "cluster_log2": 0,
        "is_sorted": True,
    }


@pytest.mark.parametrize("is_sorted", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 15, 16, 30, 31, 66, 67, 132, 4096])
def test_every_row_has_a_shape_that_holds_it(rows: int, is_sorted: bool) -> None:
    for width in (1, 2047, 8192, 8193, 32768, 32771, 65536, 131072, 262145, 524288, 1 << 20):
        for k in (1, 512, 2048, 3073, 8192, 8193, width):
            wanted = min(k, width)
            if is_sorted and wanted > top_k.MOST_SORTED:
                continue
            name, cluster = choose(rows, width, wanted, is_sorted, SMS)
            shape = SHAPES[name]
            assert shape.holds(width, cluster)
            assert cluster in shape.clusters
            assert wanted <= shape.entries or (shape.takes_turns and not is_sorted)


def test_rows_that_fit_are_read_once() -> None:
    """Up to 2 M columns; with more only the kernel is left that reads them for every pass."""
    most = 1 << 21
    assert [name for name, shape in SHAPES.items() if shape.takes_turns] == ["streamed"]
    for width in (1000, 8192, 32768, 131072, most):
        for rows in (1, 64, 4096):
            assert choose(rows, width, min(width, 2048), False, SMS)[0] != "streamed"
    assert choose(1, most + 1, 2048, False, SMS)[0] == "streamed"


def test_a_sample_has_room_on_both_sides() -> None:
    """What a sample's limit selects is about the middle between what is wanted and the list."""
    most = SHAPES["sampled"].entries // 2
    assert choose(1, 1 << 20, most, False, SMS)[0] == "sampled"
    assert choose(1, 1 << 20, most + 1, False, SMS)[0] != "sampled"


def test_targets_of_the_choice() -> None:
    """Rows that fill the multiprocessors share none; a few long ones take clusters."""
    assert choose(128, 32768, 2048, False, SMS) == ("row", 1)
    assert choose(64, 8192, 2048, False, SMS) == ("short", 1)
    assert choose(64, 131072, 2048, False, SMS) == ("sampled", 2)
    assert choose(128, 131072, 2048, False, SMS) == ("scanned", 1)
    name, cluster = choose(8, 131072, 2048, False, SMS)
    assert (name, cluster > 2) == ("cluster", True)
    assert choose(4096, 32768, 2048, False, SMS) == ("rows", 1)


@pytest.mark.parametrize(
    ("ptr", "stride", "starts", "more"),
    [(0, 0, False, 0), (4, 0, False, 3), (0, 4, False, 3), (0, 0, True, 3)],
)
def test_room_for_rows_that_begin_between_quads(
    ptr: int, stride: int, starts: bool, more: int
) -> None:
    """Of a row that begins on 16 bytes a thread has a group less than of others."""
    scores = view((200, 32768), "float32", (1 << 20) + ptr)
    scores = scores._replace(strides=(scores.strides[0] + stride, 4))
    given = views(scores, 2048, row_starts=view((200,)) if starts else None)
    assert top_k._keys(given) == 32768 + more


def test_clusters_are_whole() -> None:
    launch = top_k_launch(views(view((8, 131072), "bfloat16"), 2048), 2048, 1, False, SMS)
    assert launch.cluster > 1
    assert launch.grid == (8 * launch.cluster, 1, 1)
    assert parameters(launch)["cluster_log2"] == launch.cluster.bit_length() - 1
