# SPDX-License-Identifier: Apache-2.0
"""The sparse indexer: logits, and the choice of the best tokens."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import cumla
from bench.case import Case, Section, Variant, shapes
from bench.lab import Lab
from bench.oracle import row_error, sampled

_HEADS, _COLUMNS, _PAGE = 64, 128, 64
_ROW_BYTES = _COLUMNS + 4  # a key of e4m3 and its scale


def quantized(lab: Lab, x: Any) -> tuple[Any, Any]:
    """(float8_e4m3fn, float32 scales) of the rows along the last axis."""
    scale = (x.float().abs().amax(-1, keepdim=True) / 448.0).clamp_min(1e-4)
    return (x.float() / scale).to(lab.dtype("float8_e4m3fn")), scale.squeeze(-1).contiguous()


def _logits(q: Any, keys: Any, weights: Any) -> Any:
    """Logits of one query token (heads, columns) over keys (tokens, columns), float64."""
    scores = (q.double() @ keys.double().T).relu()
    return (scores * weights.double()[:, None]).sum(0)


# --- logits ---------------------------------------------------------------------------------------


def logits(lab: Lab, keys: str, batch: int, queries: int, kv_len: int) -> Case:
    batch, queries, kv_len = lab.at_most(
        batch=(batch, 2), queries=(queries, 3), kv_len=(kv_len, 128)
    )
    return (_paged if keys == "pages" else _rows)(lab, batch, queries, kv_len)


def _flops(batch: int, queries: int, kv_len: int) -> int:
    pairs = batch * sum(kv_len - (queries - 1 - token) for token in range(queries))
    return 2 * _HEADS * _COLUMNS * pairs


def _paged(lab: Lab, batch: int, queries: int, kv_len: int) -> Case:
    torch, pages = lab.torch, kv_len // _PAGE
    q = lab.normal(batch, queries, _HEADS, _COLUMNS).to(lab.dtype("float8_e4m3fn"))
    weights = lab.normal(batch * queries, _HEADS, dtype="float32")
    values, scales = quantized(lab, lab.normal(batch * pages, _PAGE, _COLUMNS))
    bits = [part.view(torch.uint8).reshape(batch * pages, -1) for part in (values, scales)]
    cache = torch.cat(bits, 1).view(batch * pages, _PAGE, 1, _ROW_BYTES)
    table, lens = lab.table(batch, pages), lab.full(batch, kv_len)
    out = lab.empty(batch * queries, kv_len, dtype="float32")
    plan = cumla.PagedMQALogitsPlan.from_arrays(q, cache, table, lens)
    plan.update(lens)

    def run() -> Any:
        return plan.run(
            q, cache, weights, block_table=table, max_kv_len=kv_len, clean=False, out=out
        )

    def error(got: Any) -> float:
        worst = 0.0
        for request in {0, batch - 1}:
            rows = (values.float() * scales[..., None])[table[request].long()].flatten(0, 1)
            for token in range(queries):
                seen, place = kv_len - (queries - 1 - token), request * queries + token
                want = _logits(q[request, token], rows[:seen], weights[place])
                worst = max(worst, row_error(got[place, :seen], want))
        return worst

    peers = {}
    if (library := lab.libraries.deep_gemm) is not None:
        tokens = range(queries)
        seen = lab.ints([[kv_len - (queries - 1 - token) for token in tokens]] * batch)
        schedule = library.get_paged_mqa_logits_metadata(seen, _PAGE, library.get_num_sms())
        given = ((q, None), cache, weights, seen, table, schedule, kv_len)
        peers["DeepGEMM"] = [Variant("", partial(library.fp8_fp4_paged_mqa_logits, *given))]
    return Case(
        run,
        error,
        limit=3e-3,
        nbytes=batch * kv_len * (_ROW_BYTES + 4 * queries),
        flops=_flops(batch, queries, kv_len),
        product="float8_e4m3fn",
        peers=peers,
        peer_limit=1e-2,
    )


def _rows(lab: Lab, batch: int, queries: int, kv_len: int) -> Case:
    q = lab.normal(queries, _HEADS, _COLUMNS).to(lab.dtype("float8_e4m3fn"))
    weights = lab.normal(queries, _HEADS, dtype="float32")
    keys = quantized(lab, lab.normal(kv_len, _COLUMNS))
    first = lab.full(queries, 0)
    behind = lab.ints(range(kv_len - queries + 1, kv_len + 1))
    out = lab.empty(queries, kv_len, dtype="float32")

    def run() -> Any:
        return cumla.mqa_logits(q, keys, weights, first, behind, clean=False, out=out)

    def error(got: Any) -> float:
        rows, worst = keys[0].float() * keys[1][:, None], 0.0
        for token in sampled(queries):
            seen = kv_len - (queries - 1 - token)
            want = _logits(q[token], rows[:seen], weights[token])
            worst = max(worst, row_error(got[token, :seen], want))
        return worst

    peers = {}
    if (library := lab.libraries.deep_gemm) is not None:
        given = ((q, None), keys, weights, first, behind, kv_len)
        peers["DeepGEMM"] = [Variant("", partial(library.fp8_fp4_mqa_logits, *given))]
    return Case(
        run,
        error,
        limit=3e-3,
        nbytes=kv_len * _ROW_BYTES + 4 * queries * kv_len,
        flops=_flops(batch, queries, kv_len),
        product="float8_e4m3fn",
        peers=peers,
        peer_limit=1e-2,
    )


LOGITS = Section(
    name="logits",
    title="Logits of the sparse indexer",
    about="`cumla.PagedMQALogitsPlan.run` and `cumla.mqa_logits`: 64 heads of 128 columns in FP8, "
    "float32 logits. What no query sees is not written (`clean=False`), as in DeepGEMM.",
    columns={
        "keys": "keys in",
        "batch": "requests",
        "queries": "query tokens",
        "kv_len": "cached tokens",
    },
    shapes=shapes(
        "keys batch queries kv_len",
        *(("pages", 64, 1, 8192), ("pages", 64, 1, 32768), ("pages", 64, 2, 8192)),
        *(("pages", 8, 1, 131072), ("pages", 1, 1, 8192), ("pages", 1, 1, 131072)),
        *(("rows", 1, 4096, 4096), ("rows", 1, 4096, 32768), ("rows", 1, 1024, 8192)),
    ),
    build=logits,
)

# --- top-k ----------------------------------------------------------------------------------------

_TOP = 2048
_MANY_ROWS = 1024  # from here on vLLM takes its kernel for prefills


def top_k(lab: Lab, rows: int, width: int, lengths: str) -> Case:
    torch = lab.torch
    rows, width, top = lab.at_most(rows=(rows, 3), width=(width, 500), top=(_TOP, 64))
    scores = lab.normal(rows, width, dtype="float32")
    lens = lab.full(rows, width)
    if lengths == "ragged":
        lens = lab.ints(torch.randint(top, width + 1, (rows,)))
    out, counts = lab.empty(rows, top, dtype="int32"), lab.empty(rows, dtype="int32")

    def run() -> Any:
        cumla.top_k(scores, top, row_lens=lens, out=out, counts=counts)
        return out

    def error(got: Any) -> float:
        """The share of wrong places of some rows; in which order they stand says nothing."""
        worst = 0.0
        for row in sampled(rows):
            want = torch.topk(scores[row, : int(lens[row])], top).indices.sort().values
            worst = max(worst, float((got[row].long().sort().values != want).double().mean()))
        return worst

    peers = {
        "FlashInfer": list(_flash_infer(lab, scores, lens, top, lengths == "ragged")),
        "vLLM": list(_vllm(lab, scores, lens, top)),
    }
    nbytes = 4 * (int(lens.long().sum()) + rows * top)
    return Case(run, error, limit=0.0, nbytes=nbytes, peers=peers, peer_limit=1e-3)


def _flash_infer(lab: Lab, scores: Any, lens: Any, top: int, ragged: bool) -> Iterator[Variant]:
    library = lab.libraries.flash_infer_top_k
    if library is None:
        return
    rows, width = scores.shape
    tokens = lab.ints(range(width))
    table = tokens[None] if ragged else tokens.repeat(rows, 1)
    of_batch = lab.full(rows, 0) if ragged else None
    transform = partial(
        library.top_k_page_table_transform, *(scores, table, lens, top), row_to_batch=of_batch
    )
    yield Variant("", transform)
    yield Variant("deterministic", partial(transform, deterministic=True))
    yield Variant("for graphs", partial(transform, dsa_graph_safe=True))
    if not ragged:
        given = (scores, lab.full(rows, 0), lens, top)
        yield Variant("ragged", partial(library.top_k_ragged_transform, *given))


def _vllm(lab: Lab, scores: Any, lens: Any, top: int) -> Iterator[Variant]:
    """Kernels that vLLM chooses among; each has an output of its own."""
    operators = lab.libraries.vllm_operators
    if operators is None:
        return
    rows, width = scores.shape

    def returning(out: Any, operator: Any, *given: Any) -> Any:
        def call() -> Any:
            operator(*given)
            return out

        return call

    def fresh() -> tuple[Any, Any]:
        memory = lab.torch.zeros(1 << 20, dtype=lab.torch.uint8, device=lab.device)
        return lab.empty(rows, top, dtype="int32"), memory

    if rows <= 64:
        out, memory = fresh()
        given = (scores, lens, out, memory, top, width)
        yield Variant("cooperative", returning(out, operators.cooperative_topk, *given))
    if rows < _MANY_ROWS:
        out, memory = fresh()
        given = (scores, lens, out, memory, top, width)
        yield Variant("persistent", returning(out, operators.persistent_topk, *given))
        out, _ = fresh()
        last = (rows, *scores.stride(), top)
        decode = returning(out, operators.top_k_per_row_decode, scores, 1, lens, out, *last)
        yield Variant("a row each", decode)
    else:
        out, _ = fresh()
        last = (lab.full(rows, 0), lens, out, rows, *scores.stride(), top)
        yield Variant("a row each", returning(out, operators.top_k_per_row_prefill, scores, *last))


TOP_K = Section(
    name="topk",
    title="The best 2,048 of a row",
    about="`cumla.top_k`, exact, float32 scores. `ragged`: each row has a length of its own.",
    columns={"rows": "rows", "width": "scores of a row", "lengths": "lengths"},
    shapes=shapes(
        "rows width lengths",
        *((rows, width, "equal") for width in (8192, 32768, 131072) for rows in (1, 8, 64, 128)),
        (4096, 32768, "ragged"),
        *((rows, 1 << 20, "equal") for rows in (1, 8)),
    ),
    build=top_k,
)
