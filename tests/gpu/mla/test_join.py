# SPDX-License-Identifier: Apache-2.0
"""Pieces of split requests: who joins them, and when, never changes a bit.

tests/launch/split/test_join_protocol.py goes through every interleaving of a model; here the kernel
meets delays, neighbours and shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cumla
from tests.gpu.tools import variants
from tests.gpu.tools.arrays import bits_of
from tests.gpu.tools.cases import SPLIT_CASES, Case, by_every_kernel
from tests.gpu.tools.problem import PAGE_SIZE, Problem, make_problem
from tests.gpu.tools.repeats import Repeats, count_differences, decode_by, wait_for
from tests.launch.split.schedule_mirror import schedule

KERNELS = ("schedule", "mla_decode", "mla_decode_swapped")
cp: Any = pytest.importorskip("cupy")

Report = Callable[..., None]

RUNS = by_every_kernel({name: case for name, (case, _) in SPLIT_CASES.items()})


def small(name: str) -> Problem:
    case, lengths = SPLIT_CASES[name]
    return make_problem(cp, case, np.array(lengths))


def most_pieces(problem: Problem) -> int:
    """Pieces of the request of which this GPU's schedule makes most."""
    plan = cumla.MLADecodePlan.from_arrays(problem.q, problem.kv_cache)
    key = plan.key
    splits = schedule(problem.lengths, key.parts, key.row_groups, key.tiles).splits
    return int((splits[:, 2] - splits[:, 1]).max(initial=0)) + 1


def undisturbed(problem: Problem, variant: str | None = None) -> tuple[Any, Any]:
    """Bits of out and lse by the kernel as it is."""
    result = decode_by(variant, problem)
    problem.check(*result)
    out, lse = problem.outputs()
    bits = tuple(
        bits_of(array).reshape(like.bits.shape)
        for array, like in zip(result, (out, lse), strict=True)
    )
    cp.cuda.Device().synchronize()
    return bits


# --- delays, patience, waiting -------------------------------------------------------------------


def differences(problem: Problem, variant: str, replays: int, *edits: variants.Edit) -> int:
    """Words that differ from those of the kernel as it is; two runs for each update."""
    options = {"expected": undisturbed(problem, variant), "variant": variant, "runs": 2}
    with variants.installed(*edits, *variants.JOIN_DELAYS):
        return count_differences(problem, replays, noise=True, **options)


@pytest.mark.parametrize(("name", "variant"), RUNS)
def test_10000_runs_with_random_delays_at_every_ticket(name: str, variant: str) -> None:
    """The second run of each update meets at tickets that have been used."""
    assert differences(small(name), variant, 5000) == 0


@pytest.mark.parametrize(("name", "variant"), RUNS)
@pytest.mark.parametrize("edit", ["no patience", "no waiting"])
def test_who_joins_does_not_matter(name: str, variant: str, edit: str) -> None:
    assert differences(small(name), variant, 500, *variants.ALL[edit]) == 0


@pytest.mark.parametrize("variant", ["swapped", "one_tile"])
def test_the_comparison_finds_an_early_join(variant: str) -> None:
    with pytest.raises(AssertionError):
        late = variants.LATE_PIECES[variant]
        assert differences(small("many pieces"), variant, 1000, variants.EARLY_JOIN, late) == 0


@pytest.mark.parametrize("variant", ["swapped", "one_tile"])
def test_late_pieces_are_waited_for(variant: str) -> None:
    assert differences(small("many pieces"), variant, 100, variants.LATE_PIECES[variant]) == 0


# --- neighbours ----------------------------------------------------------------------------------


@pytest.mark.parametrize("streams", [2, 5])
def test_plans_on_several_streams_that_each_need_the_whole_gpu(streams: int) -> None:
    """Thread blocks wait for others that cannot run before they themselves are done."""
    names = ("many pieces", "three row tiles", "parts that share two requests, kv heads")
    problems = [small(name) for name in names]
    repeats = [Repeats(problems[i % 3], runs=3) for i in range(streams)]
    graphs = [each.graph(5) for each in repeats]
    cp.cuda.Device().synchronize()
    for _ in range(40):
        for each, graph in zip(repeats, graphs, strict=True):
            graph.launch(each.stream)
    assert [each.finish() for each in repeats] == [0] * streams


def test_several_streams_with_delays() -> None:
    names = ("many pieces", "parts that share two requests, row tiles")
    problems = [small(name) for name in names]
    expected = [undisturbed(problem) for problem in problems]
    with variants.installed(*variants.JOIN_DELAYS):
        repeats = [
            Repeats(problem, bits, runs=2) for problem, bits in zip(problems, expected, strict=True)
        ]
        graphs = [each.graph(10) for each in repeats]
        for _ in range(20):
            for each, graph in zip(repeats, graphs, strict=True):
                graph.launch(each.stream)
        assert [each.finish() for each in repeats] == [0, 0]


# --- shapes --------------------------------------------------------------------------------------


def check_call(
    problem: Problem, output: str | None = None, variant: str | None = None
) -> dict[str, float]:
    """One call into guarded outputs, against float64; and the same bits from a plan."""
    out, lse = problem.outputs(output)
    decode_by(variant, problem, out=out.array, lse=lse.array)
    figures = problem.check(out.array, lse.array)
    first = out.bits.copy(), lse.bits.copy()
    repeats = Repeats(problem, first, output, runs=3, variant=variant)
    with repeats.stream:
        repeats.step()
    assert repeats.finish() == 0
    out.check_guards()
    lse.check_guards()
    return figures


@pytest.mark.parametrize("variant", ["swapped", "one_tile"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("pieces", [2, 3, 4, 5, 8, 9, 16, 17, 31, 33, 64, 100])
def test_numbers_of_pieces(pieces: int, dtype: str, variant: str, record_figures: Report) -> None:
    """Equal requests, as many as take that many parts each."""
    parts = cumla.MLADecodePlan(1, 1, 16).key.parts
    batch = max(1, parts // pieces)
    blocks = 24 * pieces if pieces < 32 else 6 * parts
    case = Case(batch=batch, kv_len=blocks * PAGE_SIZE - 5, ragged=False, dtype=dtype)
    problem = make_problem(cp, case)
    assert pieces <= most_pieces(problem) <= 2 * pieces + 1
    record_figures(check_call(problem, variant=variant))


@pytest.mark.parametrize("output", [None, "float32"])
@pytest.mark.parametrize("heads", [1, 7, 8, 9, 15, 16, 17, 31, 33, 48, 49, 63, 64])
def test_numbers_of_rows(heads: int, output: str | None, record_figures: Report) -> None:
    """Rows that end within a group of 16, and groups that are not there at all."""
    problem = make_problem(cp, Case(batch=2, heads=heads), np.array([9000, 700]))
    assert most_pieces(problem) > 8
    for variant in (None, *problem.case.variants):
        record_figures(check_call(problem, output, variant))


@pytest.mark.parametrize("output", [None, "float32"])
@pytest.mark.parametrize(
    "case",
    [
        Case(batch=3, heads=65),
        Case(batch=3, heads=128, q_len=2),
        Case(batch=3, heads=48, q_len=4, dtype="float16"),
        Case(batch=3, heads=24, kv_heads=8, q_len=2, cache="heads first"),
        Case(batch=3, heads=160, kv_heads=2, dtype="float16", causal=False),
        Case(batch=3, heads=128, kv_heads=64),
        Case(batch=3, heads=24, kv_heads=8, q_len=5, cache="heads first"),
        Case(batch=3, heads=5, q_len=3),
        Case(batch=3, heads=16, inputs="outliers", softmax="192"),
        Case(batch=3, heads=20, q_len=70),
    ],
    ids=lambda case: case.name,
)
def test_row_tiles_and_kv_heads(case: Case, output: str | None, record_figures: Report) -> None:
    """Short requests beside a long one; causal rows that see nothing of a piece."""
    problem = make_problem(cp, case, np.array([200, 30_000, 65]))
    assert most_pieces(problem) > 1
    record_figures(check_call(problem, output))


@pytest.mark.parametrize("heads", [8, 32])
@pytest.mark.parametrize("place", [0, 7, 15])
def test_a_giant_among_dwarfs(place: int, heads: int, record_figures: Report) -> None:
    lengths = np.array([1, 64, 0, 65, 3, 130, 2, 0, 64, 63, 200, 5, 1, 0, 70, 66])
    lengths[place] = 100_000
    problem = make_problem(cp, Case(batch=16, heads=heads, q_len=2), lengths)
    assert most_pieces(problem) > 50
    record_figures(check_call(problem))


# --- graphs --------------------------------------------------------------------------------------

CHANGING = (
    [33_000, 0, 0],
    [1, 33_000, 65],
    [33_000, 33_000, 33_000],
    [64, 64, 64],
    [0, 0, 2000],
    [0, 0, 0],
    [5000, 33_000, 4000],
)


@pytest.mark.parametrize(
    "case",
    [Case(batch=3, heads=16), Case(batch=3, heads=40), Case(batch=3, heads=64, q_len=3)],
    ids=lambda case: case.name,
)
def test_a_graph_whose_requests_have_ever_other_numbers_of_pieces(case: Case) -> None:
    """One update and three runs a replay, each replayed three times before the lengths change."""
    problem = make_problem(cp, case, np.full(3, 33_000))
    repeats = Repeats(problem, runs=3)
    graph = repeats.graph(1)
    seen = set()
    for lengths in CHANGING * 2:
        problem.lengths = np.array(lengths, dtype=np.int32)
        problem.kv_lens.set(problem.lengths)
        seen.add(most_pieces(problem))
        out, lse = cumla.mla_decode(*problem.arrays)
        problem.check(out, lse)
        for place, array in zip(repeats.expected, (out, lse), strict=True):
            place[...] = bits_of(array).reshape(place.shape)
        cp.cuda.Device().synchronize()
        for _ in range(3):
            graph.launch(repeats.stream)
        assert repeats.finish() == 0, lengths
    assert len(seen) >= 4


@pytest.mark.parametrize("heads", [16, 32])
def test_a_graph_of_runs_alone_after_updates_with_other_lengths(heads: int) -> None:
    """Tickets are as good after an odd number of runs as after an even one."""
    problem = make_problem(cp, Case(batch=3, heads=heads), np.full(3, 33_000))
    repeats = Repeats(problem)
    plan, stream = repeats.plan, repeats.stream
    with stream:
        stream.begin_capture()
        plan.run(**problem.inputs, out=repeats.out.array, lse=repeats.lse.array)
        graph = stream.end_capture()
        for count, lengths in enumerate(CHANGING, start=1):
            problem.lengths = np.array(lengths, dtype=np.int32)
            problem.kv_lens.set(problem.lengths)
            plan.update(problem.kv_lens)
            for _ in range(count):
                repeats.out.repoison()
                repeats.lse.repoison()
                graph.launch(stream)
            wait_for(stream)
            problem.check(repeats.out.array, repeats.lse.array)


# --- precision of pieces --------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("cache", ["bfloat16", "float8_e4m3fn"])
def test_pieces_keep_16_bits(cache: str, heads: int) -> None:
    """Where all tokens have the same latent columns, these are the output, whatever the weights."""
    torch = pytest.importorskip("torch")
    generator, tokens = torch.Generator().manual_seed(heads), 8192
    numbers = torch.tensor([-1.5, -1.0, -0.625, 0.75, 1.25, 1.75])  # of e4m3, too
    rows = torch.randn(tokens, 576, generator=generator)
    rows[:, :512] = numbers[torch.randint(6, (512,), generator=generator)]
    kv_cache = torch.zeros(tokens // 64, 64, 1, 576, device="cuda").to(getattr(torch, cache))
    scale = {"kv_scale": 1.0} if cache == "float8_e4m3fn" else {}
    slots = torch.arange(tokens, dtype=torch.int32, device="cuda")
    cumla.append_mla_cache(rows.to("cuda", torch.bfloat16), kv_cache, slots, **scale)
    q = torch.randn(1, 1, heads, 576, generator=generator).to("cuda", torch.bfloat16)
    table, kv_lens = slots[: tokens // 64][None], slots.new_tensor([tokens])
    out = torch.empty(1, 1, heads, 512, device="cuda")
    cumla.mla_decode(q, kv_cache, table, kv_lens, out=out, **scale)
    errors = (out.cpu() / rows[0, :512] - 1).abs()
    assert errors.max().item() <= 2.0**-15 + 2.0**-17  # a piece's numbers, and float32 sums
