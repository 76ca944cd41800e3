# SPDX-License-Identifier: Apache-2.0
"""block_attention_few, emulated: lists whose every chunk has a warp of its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

import cumla
from cumla.blocks import attention
from cumla.errors import CumlaError
from cumla.launch.blocks import block_attention_few
from cumla.launch.blocks import key as keys
from cumla.launch.blocks.choice import FewForm
from tests.blocks.block_cases import Sample, check, make, samples
from tests.emulator import emulated_gpu
from tests.fake_cuda import FakeBindings, FakeCuPy
from tests.launch.blocks.test_block_attention import key
from tests.selection import some

E4M3 = ("bfloat16", "float8_e4m3fn")
FEW = [
    sample
    for sample in samples(300, columns=(128, 128), invariant=False)
    if sample.block[0] % 32 == 0
    and sample.heads[0] // sample.heads[1] <= 16
    and sample.topk * sample.block[0] <= 2048
    and sample.queries != "ragged"
    and len(sample.lens) * sample.queries * sample.heads[1] <= (4 if sample.has_e4m3 else 8)
]


def run(sample: Sample, **given: Any) -> bytes:
    """Check the call of a sample; the bits of its result."""
    problem = make(sample)
    with emulated_gpu(132) as cupy:
        there = {name: cupy.like(value) for name, value in (problem.given | given).items()}
        got = cumla.block_sparse_attention(**there)
    check(problem, cumla.AttentionState(*map(np.array, got)), sample.dtype)
    return np.array(got.out).tobytes() + np.array(got.lse).tobytes()


@pytest.mark.parametrize("sample", some(FEW, 8), ids=str)
def test_lists(sample: Sample) -> None:
    with mock.patch.object(keys, "list_form", side_effect=AssertionError("another kernel")):
        run(sample)


LOOPS = [
    (FewForm(8, ctas, 16, chunks=64), sample)
    for ctas, sample in zip((2, 4, 8), [s for s in FEW if not s.has_e4m3], strict=False)
]


@pytest.mark.parametrize(("form", "sample"), LOOPS, ids=str)
def test_several_chunks(form: FewForm, sample: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a warp."""
    monkeypatch.setattr(keys, "few_form", lambda *_: form)
    attention._key.cache_clear()
    run(sample)
    attention._key.cache_clear()


@pytest.mark.parametrize(("cache", "topk", "lens"), [("same", 32, (2300,)), ("e4m3", 17, (700, 5))])
def test_lists_are_sets(cache: str, topk: int, lens: tuple[int, ...]) -> None:
    """Order and repetition change no bit."""
    sizes: dict[str, Any] = {"columns": (128, 128), "heads": (12, 1), "queries": 1, "lens": lens}
    fixed = {"invariant": False, "counts": None, "are": "blocks", "outputs": "new", "cache": cache}
    (sample,) = samples(1, block=(64, 2), topk=topk, lists="hostile", **sizes, **fixed)
    first = make(sample).given["block_indices"]
    moved = np.random.default_rng(0).permuted(first, axis=-1)
    assert run(sample) == run(sample, block_indices=moved)


def test_which_lists() -> None:
    """As many warps as a list has chunks, by thread blocks of half of the multiprocessors."""
    lists = (1, 4, 5, 8, 9)
    most, half = FewForm(8, 16, 16), FewForm(8, 8, 16)
    twice = FewForm(8, 8, 16, chunks=2)
    assert [key(n).few for n in lists] == [most, most, twice, twice, None]
    assert [key(n, dtypes=E4M3).few for n in lists] == [most, most, None, None, None]
    assert [key(n, topk=8).few for n in lists] == [half] * 4 + [None]
    assert [key(n, topk=1).few for n in (1, 33, 34)] == [FewForm(8, 2, 16)] * 2 + [None]
    assert key(1, topk=17).few is None
    assert key(1, topk=32, dtypes=E4M3).few == FewForm(8, 16, 32)
    assert key(1, topk=33, block_size=32).few is None
    assert key(1, columns=(96, 128)).few is None
    assert key(1, batch_invariant=True).few is None


def test_clusters_of_sixteen_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which CUDA asks for; what it refuses is an error that says so."""
    bindings = FakeBindings(FakeCuPy())
    monkeypatch.setattr(block_attention_few, "import_driver", lambda: bindings)
    loaded = SimpleNamespace(handle=7)
    monkeypatch.setattr(block_attention_few, "load", lambda *of, **named: loaded)
    launch = SimpleNamespace(spec=block_attention_few.block_attention_few_spec(key(1)), cluster=16)
    block_attention_few.allow_clusters(launch, 0, bool)  # type: ignore[arg-type]
    name = "CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED"
    assert bindings.attributes == [(7, name, 1)]
    bindings.refused = SimpleNamespace(name="CUDA_ERROR_INVALID_VALUE")
    with pytest.raises(CumlaError, match=r"few_bfloat16_8x16: .* clusters of 16 .*INVALID_VALUE"):
        block_attention_few.allow_clusters(launch, 0, bool)  # type: ignore[arg-type]
