# SPDX-License-Identifier: Apache-2.0
"""The references take one thread of OpenBLAS, and leave the number as it was."""

from __future__ import annotations

from threading import Barrier, Thread

import pytest

from cumla import reference
from cumla.reference import threads
from cumla.reference.threads import one_blas_thread

WITH_PRODUCTS = (
    "mla_decode",
    "mla_attention",
    "attention",
    "mla_sparse_decode",
    "mla_sparse_attention",
    "mqa_logits",
    "paged_mqa_logits",
)


@pytest.mark.parametrize("name", WITH_PRODUCTS)
def test_references_with_products_take_one_thread(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    monkeypatch.setattr(threads, "_openblas", lambda: (lambda: 8, told.append))
    with pytest.raises(TypeError, match="missing"):  # also after an error
        getattr(reference, name)()
    assert told == [1, 8]


def test_the_last_of_several_calls_gives_the_threads_back(monkeypatch: pytest.MonkeyPatch) -> None:
    number, both = [8], Barrier(2, timeout=60)
    monkeypatch.setattr(threads, "_openblas", lambda: (lambda: number[0], take))

    def take(count: int) -> None:
        number[0] = count

    def second() -> None:
        with one_blas_thread():
            both.wait()  # both are inside
            both.wait()  # the first one is not
            assert number == [1]

    thread = Thread(target=second)
    thread.start()
    with one_blas_thread():
        both.wait()
    both.wait()
    thread.join()
    assert number == [8]


def test_numpys_own_openblas_is_found() -> None:
    found = threads._openblas()
    if found is None:
        pytest.skip("NumPy has another BLAS")
    get, put = found
    before = get()
    put(2)
    try:
        with one_blas_thread():
            assert get() == 1
        assert get() == 2
    finally:
        put(before)


def test_another_blas_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_openblas", lambda: None)
    with one_blas_thread():
        assert threads._inside == 0
