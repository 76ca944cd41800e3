# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA over rows of 512 columns, DeepSeek-V4's slots and second caches, against float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cumla
from tests.gpu.tools import kernels, variants
from tests.gpu.tools.arrays import bits_of
from tests.gpu.tools.problem import Guarded
from tests.gpu.tools.v4_problem import CASES, V4Case, V4Problem, make_v4, place_caches

KERNELS = (
    "select_rows",
    "mla_sparse",
    "mla_sparse_v4",
    "mla_sparse_v41",
    "mla_sparse_fp8",
    "mla_sparse_packed",
)
cp: Any = pytest.importorskip("cupy")

Report = Callable[..., None]
EVERY_FORM = (  # form, heads, entries of a second list
    ("v4", 64, 512),
    ("v4", 16, 0),
    ("v4", 128, 70),
    ("v41", 64, 512),
    ("v41", 16, 0),
    ("v41+v41_fp4", 64, 512),
    ("v41_fp4", 128, 70),
    ("v32_no_rope", 16, 0),
    ("v32_no_rope", 64, 0),
    ("e4m3", 16, 0),
    ("e4m3", 64, 0),
    ("bfloat16", 16, 0),
    ("bfloat16", 128, 0),
    ("float16", 64, 0),
)
every_form = pytest.mark.parametrize(("form", "heads", "extra"), EVERY_FORM)


def formed(form: str) -> dict[str, str]:
    """Return what a case has of a form, or of those of two caches."""
    first, _, second = form.partition("+")
    return {"form": first, "extra_form": second}


def run(problem: V4Problem, plan: Any = None, **options: Any) -> tuple[Guarded, Guarded]:
    """Run once into poisoned outputs, by a call or a plan."""
    out, lse = problem.outputs()
    if plan is None:
        problem.call(out=out.array, lse=lse.array, **options)
    else:
        plan.run(**problem.inputs, out=out.array, lse=lse.array, **options)
    out.check_guards()
    lse.check_guards()
    return out, lse


def attend_and_check(problem: V4Problem) -> dict[str, float]:
    """Every element must be written, and nothing else."""
    if problem.case.outputs == "allocated":
        blocks = [cp.full(1 << 22, 0xFF, dtype=cp.uint8) for _ in range(2)]
        del blocks  # NaN for the allocator to hand out again
        return problem.check(*problem.call())
    out, lse = run(problem)
    return problem.check(out.array, lse.array)


def arrays_of(result: tuple[Guarded, Guarded]) -> tuple[Any, Any]:
    return result[0].array, result[1].array


def same_bits(one: Any, other: Any) -> bool:
    return all(bool((bits_of(a) == bits_of(b)).all()) for a, b in zip(one, other, strict=True))


def with_lists(problem: V4Problem, **lists: np.ndarray) -> V4Problem:
    """The same with other lists, in arrays of their own."""
    there = {name: cp.asarray(array) for name, array in lists.items()}
    return dataclasses.replace(
        problem, lists=problem.lists | lists, arguments=problem.arguments | there
    )


# --- shapes, lists, lengths -----------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_forms_and_modes(case: V4Case, record_figures: Report) -> None:
    record_figures(attend_and_check(make_v4(cp, case)))


@pytest.mark.parametrize("lists", ["random", "same", "absent", "mixed", "first", "blocks"])
@pytest.mark.parametrize("scales", ["powers", "wild", "zero"])
@pytest.mark.parametrize("heads", [17, 64, 128])
@pytest.mark.parametrize("form", ["v4", "v41", "v41+v41_fp4", "v32_no_rope"])
def test_lists_and_scales(
    form: str, heads: int, scales: str, lists: str, record_figures: Report
) -> None:
    for batch, topk, extra in ((200, 1, 1), (80, 70, 130), (3, 2048, 640)):
        # Of two rows that cancel, roundings are left
        extra = 0 if lists == "same" or form == "v32_no_rope" else extra
        case = V4Case(
            *(batch, 1, heads, topk),
            **formed(form),
            extra=extra,
            extra_page_size=64,
            scales=scales,
            lists=lists,
            lengths="requests",
            outputs="float32",
        )
        record_figures(attend_and_check(make_v4(cp, case)))


@pytest.mark.parametrize("page_size", [1, 2, 53, 64, 256])
@pytest.mark.parametrize("extra_page_size", [1, 2, 64])
@pytest.mark.parametrize("form", ["v4", "v41+v41_fp4"])
def test_pages(form: str, page_size: int, extra_page_size: int, record_figures: Report) -> None:
    case = V4Case(
        *(4, 2, 64, 300),
        **formed(form),
        page_size=page_size,
        extra=150,
        extra_page_size=extra_page_size,
        gaps=True,
        places="rows",
        lists="mixed",
    )
    record_figures(attend_and_check(make_v4(cp, case)))


@every_form
def test_every_tail(form: str, heads: int, extra: int, record_figures: Report) -> None:
    ends = np.array([1, 2, 7, 15, 16, 17, 31, 33, 48, 63, 64, 65, 127, 128, 129, 191, 193, 255])
    case = V4Case(batch=len(ends), q_len=2, heads=heads, topk=256, **formed(form), extra=extra)
    lists = {"topk_lens": ends.astype(np.int32)}
    if extra:
        lists["extra_topk_lens"] = ends[::-1].astype(np.int32) % 71
    record_figures(attend_and_check(with_lists(make_v4(cp, case), **lists)))


@every_form
def test_the_highest_sinks(form: str, heads: int, extra: int, record_figures: Report) -> None:
    """As in test_mla_sparse.py."""
    for batch, topk in ((1, 2000), (100, 65)):
        case = V4Case(*(batch, 2, heads, topk), **formed(form), extra=extra, sinks="mixed")
        case = dataclasses.replace(case, lengths="tokens")
        record_figures(attend_and_check(make_v4(cp, case)))


@pytest.mark.parametrize("heads", [8, 17, 40, 64])
def test_few_lists_by_tiles_of_heads(heads: int, record_figures: Report) -> None:
    """Of rows in 16 bits: of 16 heads, the last of which may have fewer; and lists of few heads."""
    for form, batch, lists in (("bfloat16", 1, "mixed"), ("float16", 2, "random")):
        case = V4Case(batch=batch, heads=heads, topk=2176, form=form, lists=lists, sinks="mixed")
        record_figures(attend_and_check(make_v4(cp, case)))


@pytest.mark.parametrize("batch", [1, 66, 263, 264, 300])
def test_lists_of_few_heads(batch: int, record_figures: Report) -> None:
    """Of rows in 16 bits; on an H200 another kernel serves 264 lists than 263."""
    case = V4Case(batch=batch, heads=8, topk=300, form="bfloat16", lengths="requests")
    record_figures(attend_and_check(make_v4(cp, case)))


@pytest.mark.parametrize("heads", [64, 128])
def test_batches_around_the_number_of_multiprocessors(heads: int, record_figures: Report) -> None:
    count = cp.cuda.runtime.getDeviceProperties(0)["multiProcessorCount"]
    for batch in (count // 2, count + 1, 2 * count):
        case = V4Case(batch=batch, heads=heads, topk=128, extra=512, lengths="requests")
        record_figures(attend_and_check(make_v4(cp, case)))


@pytest.mark.parametrize(
    ("form", "extra"), [("v4", 64), ("v41+v41_fp4", 64), ("v32_no_rope", 0), ("bfloat16", 0)]
)
def test_thousands_of_query_tokens(form: str, extra: int, record_figures: Report) -> None:
    """As a prefill has them."""
    case = V4Case(
        *(1, 4001, 64, 200), **formed(form), extra=extra, operation="tokens", lists="mixed"
    )
    record_figures(attend_and_check(make_v4(cp, case)))


def test_every_e4m3_number_and_every_exponent(record_figures: Report) -> None:
    """But NaN, and exponents of which a number times the factor is beyond bfloat16."""
    problem = make_v4(cp, V4Case(topk=300, steep=2.0**-9, outputs="float32"))
    assert problem.scales is not None
    codes = np.random.default_rng(0).permutation(problem.latent.size) % 256
    codes[codes % 128 == 127] = 0
    problem.latent = cp.asarray(codes.astype(np.uint8).reshape(problem.latent.shape))
    place_caches(problem)
    record_figures(attend_and_check(problem))
    for exponent in (1, 90, 127, 150, 170):
        problem.scales[...] = exponent
        problem.arguments["softmax_scale"] = float(2.0 ** min(107 - exponent, 0))
        place_caches(problem)
        out, _ = run(problem)
        arguments = problem.arguments.items()
        host = {n: a.get() if hasattr(a, "get") else a for n, a in arguments}
        want = cumla.reference.mla_sparse_decode(**host).out.astype(np.float64)
        got = cp.asnumpy(out.array).astype(np.float64)
        np.testing.assert_allclose(got, want, rtol=2.0**-6, atol=2.0 ** (max(exponent, 119) - 130))


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "extra"),
    [("v4", 70), ("v41", 70), ("v41_fp4", 0), ("v32_no_rope", 0), ("bfloat16", 0)],
)
def test_slots_beyond_2_gigabytes(form: str, extra: int) -> None:
    cp.get_default_memory_pool().free_all_blocks()
    slots = {"bfloat16": 2_400_000, "v41_fp4": 8_000_000}.get(form, 4_400_000)
    case = V4Case(topk=700, **formed(form), extra=extra, lists="mixed")
    problem = make_v4(cp, case, num_pages=slots // case.page_size)
    assert problem.memory["kv_cache"].nbytes > 1 << 31
    attend_and_check(problem)


@every_form
@pytest.mark.parametrize("what", ["column", "scale"])
def test_a_nan_that_is_selected(form: str, heads: int, extra: int, what: str) -> None:
    """It makes NaN of the results of queries that see it, and changes no bit of others."""
    if what == "scale" and not form.startswith("v"):
        return
    case = V4Case(batch=20, q_len=2, heads=heads, topk=130, **formed(form), extra=extra)
    problem = make_v4(cp, case)
    before = run(problem)
    row = 77
    sees = (problem.named() == row).any(axis=1)
    assert 0 < sees.sum() < len(sees)
    if problem.raw:
        rows, is_fp4 = problem.raw["kv_cache"], form == "v41_fp4"
        if what == "scale" or is_fp4:
            columns = 256 if is_fp4 else 512
            nan = {"v41": [0xFF], "v41_fp4": [0x7F]}.get(case.form, [0, 0, 0xC0, 0x7F])
            at = columns + 3 * len(nan)
            rows[row, at : at + len(nan)] = cp.asarray(np.array(nan, np.uint8))
        else:
            rows[row, 300] = 0x7F
    elif what == "scale":
        problem.scales[row, 3] = 0xFF
    else:
        problem.latent[row, 300] = {"v4": 0x7F, "e4m3": 0x7F, "float16": 0x7E01}.get(form, 0x7FC1)
    place_caches(problem)
    after = run(problem)
    for values in problem.by_token(*arrays_of(after)):
        is_nan = cp.isnan(values.reshape(case.tokens, case.heads, -1)).any(axis=2).all(axis=1)
        assert bool((is_nan == cp.asarray(sees)).all())
    others = cp.asarray(~sees)
    for one, other in zip(after, before, strict=True):
        bits = [array.bits.reshape(20, -1) for array in (one, other)]
        whole = others.reshape(20, 2).all(axis=1)  # requests of which no token sees it
        assert bool((bits[0][whole] == bits[1][whole]).all())


@every_form
def test_an_entry_that_is_left_out_shows(form: str, heads: int, extra: int) -> None:
    problem = make_v4(cp, V4Case(heads=heads, topk=640, **formed(form), extra=extra))
    name = "extra_indices" if extra else "indices"
    indices = problem.lists[name].copy()
    indices[1, 0, 33] = -1
    out, lse = run(with_lists(problem, **{name: indices}))
    with pytest.raises(AssertionError, match=r"^(out|lse): "):
        problem.check(out.array, lse.array)


# --- bits, plans, graphs, streams -----------------------------------------------------------------


@every_form
def test_50_repeats_give_the_same_bits(form: str, heads: int, extra: int) -> None:
    for batch, topk in ((1, 2048), (5, 700), (150, 130)):
        case = V4Case(batch=batch, heads=heads, topk=topk, **formed(form), extra=extra)
        problem = make_v4(cp, case)
        results = [arrays_of(run(problem)) for _ in range(50)]
        assert all(same_bits(result, results[0]) for result in results[1:])


@every_form
def test_batch_invariant(form: str, heads: int, extra: int, record_figures: Report) -> None:
    """A list alone, or in another place among others."""
    case = V4Case(batch=6, heads=heads, topk=2048, **formed(form), extra=extra, lengths="requests")
    problem = make_v4(cp, case)
    whole = run(problem, batch_invariant=True)
    record_figures(problem.check(*arrays_of(whole)))
    names = ("q", "indices", "topk_lens", "extra_indices", "extra_topk_lens")
    for requests in ([4], [5, 1, 4, 3]):
        index = cp.asarray(np.array(requests))
        some = {n: problem.arguments[n][index] for n in names if n in problem.arguments}
        got = cumla.mla_sparse_decode(**problem.arguments | some, batch_invariant=True)
        for a, b in zip(got, whole, strict=True):
            assert bool((bits_of(a) == b.bits[index].ravel()).all()), requests


@every_form
def test_a_plan_over_layers(form: str, heads: int, extra: int, record_figures: Report) -> None:
    """With other lists in each, and garbage in its buffer before the update."""
    case = V4Case(
        *(5, 2, heads, 600), **formed(form), extra=extra, lengths="tokens", sinks="finite"
    )
    first = make_v4(cp, case)
    kind = {"cache_format": "v4"} if form == "v4" else first.case.formats
    kind = {"cache_format": "e4m3_512"} if form == "e4m3" else kind
    size = cumla.MLASparsePlan.workspace_bytes(5, 2, heads, 600, extra_topk=extra, **kind)
    buffer = cp.full(size + 4096, 0xFF, cp.uint8)
    plan = first.plan(workspace=buffer[:size])
    for layer in range(3):
        problem = make_v4(cp, dataclasses.replace(case, seed=11 * layer, lists="mixed"))
        for name, lengths in first.lengths.items():
            problem.lists[name] = first.lists[name]
            problem.arguments[name] = lengths
        expected = arrays_of(run(problem))
        got = run(problem, plan)
        assert same_bits(arrays_of(got), expected)
        if layer == 0:  # elsewhere entries behind the ends of lists name poison
            record_figures(problem.check(*expected))
    assert bool((buffer[size:] == 0xFF).all()), "memory behind the workspace was written"


@every_form
def test_a_graph_serves_new_lists_and_lengths(form: str, heads: int, extra: int) -> None:
    case = V4Case(
        *(4, 2, heads, 500), **formed(form), extra=extra, lengths="requests", sinks="finite"
    )
    problem = make_v4(cp, case)
    plan = problem.plan()
    out, lse = problem.outputs()
    run(problem, plan)
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        plan.update(**problem.lengths)
        plan.run(**problem.inputs, out=out.array, lse=lse.array)
        graph = stream.end_capture()
    rng = np.random.default_rng(0)
    sets = [("", problem.slots, 500), *([("extra_", problem.extra_slots, extra)] if extra else [])]
    for lengths in ([500] * 4, [1, 500, 64, 0], [0] * 4, [499, 65, 2**31 - 1, -7]):
        for turn, (prefix, slots, topk) in enumerate(sets):
            indices = slots[rng.integers(0, len(slots), (4, 2, topk))]
            indices[rng.random(indices.shape) < 0.2] = -1
            problem.lists[f"{prefix}indices"] = indices.astype(np.int32)
            problem.lists[f"{prefix}topk_lens"] = np.roll(np.array(lengths, np.int32), turn)
            for name in (f"{prefix}indices", f"{prefix}topk_lens"):
                problem.arguments[name][...] = cp.asarray(problem.lists[name])
        for output in (out, lse):
            output.repoison()
        cp.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        for output in (out, lse):
            output.check_guards()
        problem.check(out.array, lse.array)


def test_a_side_stream() -> None:
    """What that stream does before, and late, is seen; the calls do not wait."""
    problem = make_v4(cp, V4Case(topk=128, extra=512, lengths="requests"))
    expected = arrays_of(run(problem))
    plan = problem.plan()
    names = ("indices", "topk_lens", "extra_indices", "extra_topk_lens")
    late = {name: cp.full_like(problem.arguments[name], -1) for name in names}
    moved = dataclasses.replace(problem, arguments=problem.arguments | late)
    outputs = [moved.outputs() for _ in range(2)]
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    with stream:
        kernels.spin(100_000_000)
        for name in names:
            late[name][...] = problem.arguments[name]
    moved.call(out=outputs[0][0].array, lse=outputs[0][1].array, stream=stream)
    plan.update(**moved.lengths, stream=stream)
    plan.run(**moved.inputs, out=outputs[1][0].array, lse=outputs[1][1].array, stream=stream)
    assert not stream.done, "a call waited for the device"
    stream.synchronize()
    for result in outputs:
        assert same_bits(arrays_of(result), expected)


def test_random_delays_around_every_barrier() -> None:
    """Delays shift who waits for whom; the results keep the bits of the kernels without them."""
    shapes = (
        (3, 16, 100, 0, "full"),
        (3, 128, 700, 300, "full"),
        (40, 64, 130, 512, "tokens"),
        (400, 64, 150, 70, "requests"),
        (700, 64, 130, 0, "requests"),  # many lists a part, some of them empty
    )
    problems = [
        make_v4(cp, V4Case(batch, 1, heads, topk, **formed(form), extra=extra, lengths=lengths))
        for form in ("v4", "v41", "v41+v41_fp4")
        for batch, heads, topk, extra, lengths in shapes
    ]
    expected = [arrays_of(run(problem)) for problem in problems]
    with variants.installed(*variants.SPARSE_DELAYS):
        for problem, result in zip(problems, expected, strict=True):
            for _ in range(25):
                assert same_bits(arrays_of(run(problem)), result), problem.case.name
