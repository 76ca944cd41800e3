# SPDX-License-Identifier: Apache-2.0
"""MLA: dense decoding in bfloat16 and over FP8 rows, chunks of queries, schedules, options."""

from __future__ import annotations

from functools import partial
from typing import Any

import cumla
from bench.case import Case, Section, Variant, shapes
from bench.lab import Lab
from bench.libraries import Schedule
from bench.oracle import attend, row_error, sampled

COLUMNS, VALUES = 576, 512
_ROPE = COLUMNS - VALUES
SCALE = COLUMNS**-0.5
_PAGE = 64
_ROW_BYTES, _QUERY_BYTES = 2 * COLUMNS, 2 * (COLUMNS + VALUES)
DEVIATION = 0.1  # of inputs: scores as spread as those of a model


def flops(heads: int, pairs: int, columns: int = COLUMNS, values: int = VALUES) -> int:
    """Operations of so many pairs of a query token and a row."""
    return 2 * heads * pairs * (columns + values)


def visible(q_len: int, kv_len: int, most: int | None = None) -> int:
    """Pairs of the last query tokens of a request and the rows that they see, at most so many."""
    most = kv_len if most is None else most
    return sum(min(max(kv_len - (q_len - 1 - i), 0), most) for i in range(q_len))


class Decode:
    """A batch of requests of one length, in shuffled pages; `window` as `mla_decode` has it."""

    def __init__(
        self,
        lab: Lab,
        sizes: tuple[int, int, int, int],
        *,
        page: int = _PAGE,
        cache_dtype: str = "bfloat16",
        deviation: float = DEVIATION,
        options: dict[str, Any] | None = None,
        width: tuple[int, int] = (VALUES, _ROPE),
        window: int | None = None,
    ) -> None:
        self.lab, self.columns, self.values = lab, sum(width), width[0]
        self.scale, self.window = self.columns**-0.5, window
        self.batch, self.q_len, self.heads, self.kv_len = batch, q_len, heads, kv_len = sizes
        self.page, self.pages = page, -(-kv_len // page)
        self.sinks: Any = None
        self.cache = lab.normal(batch * self.pages, page, 1, self.columns, std=deviation)
        if cache_dtype != "bfloat16":
            self.cache = self.cache.to(lab.dtype(cache_dtype))
        self.q = lab.normal(batch, q_len, heads, self.columns, std=deviation)
        self.table, self.lens = lab.table(batch, self.pages), lab.full(batch, kv_len)
        self.out = lab.empty(batch, q_len, heads, self.values)
        self.lse = lab.empty(batch, q_len, heads, dtype="float32")
        self.plan = cumla.MLADecodePlan.from_arrays(
            self.q, self.cache, window=window, **(options or {})
        )
        self.plan.update(self.lens)

    def run(self, **options: Any) -> Any:
        self.plan.run(
            self.q, self.cache, block_table=self.table, out=self.out, lse=self.lse, **options
        )
        return self.out

    def rows(self, request: int) -> Any:
        """The rows of a request, as float64."""
        pages = self.table[request].long()
        bits = self.cache.view(self.lab.torch.uint8)[pages].view(self.cache.dtype)
        return bits.reshape(-1, self.columns)[: self.kv_len].double()

    def error(self, got: Any) -> float:
        """All heads of the first and the last token of some requests."""
        got = got.reshape(self.batch, self.q_len, self.heads, self.values)
        worst = 0.0
        for request in sampled(self.batch):
            rows = self.rows(request)
            for token in {0, self.q_len - 1}:
                end = self.kv_len - (self.q_len - 1 - token)
                seen = rows[max(end - self.seen, 0) : end]
                query = self.q[request, token]
                want = attend(query, seen, seen[:, : self.values], self.scale)
                worst = max(worst, row_error(got[request, token], want))
        return worst

    @property
    def seen(self) -> int:
        """Rows that a query can see at most."""
        return self.kv_len if self.window is None else self.window + 1

    @property
    def nbytes(self) -> int:
        """Each row that is seen once, queries and output."""
        row: int = self.columns * self.cache.element_size()
        query = 2 * (self.columns + self.values)
        rows = min(self.kv_len, self.seen + self.q_len - 1)
        return self.batch * (rows * row + self.q_len * self.heads * query)

    @property
    def flops(self) -> int:
        pairs = self.batch * visible(self.q_len, self.kv_len, self.seen)
        return flops(self.heads, pairs, self.columns, self.values)

    def case(self, limit: float, **options: Any) -> Case:
        return Case(self.run, self.error, limit, nbytes=self.nbytes, flops=self.flops, **options)

    def flash_mla(self) -> list[Variant]:
        found = []
        for name, build in self.lab.libraries.flash_mla.items():
            # With several query tokens vLLM's build wants another layout: it gets no output.
            out = self.lab.torch.empty_like(self.out) if self.q_len == 1 else None
            given = (self.q, self.cache, self.table, self.lens, self.scale, Schedule(), out)
            found.append(Variant(name, partial(build.dense, *given)))
        return found

    def flash_attention(self) -> list[Variant]:
        library, found = self.lab.libraries.flash_attention, []
        if library is None:
            return []
        q, k = self.q[..., self.values :], self.cache[..., self.values :]
        if self.columns == self.values:  # it wants some: 0 in the query, so that they do not count
            q, k = self.lab.torch.zeros_like(self.q[..., :_ROPE]), self.cache[..., :_ROPE]
        window = (-1, -1) if self.window is None else (self.window, 0)
        for splits in (0, 1, 32) if self.batch < 64 else (0, 1):
            schedule = library.schedule(
                self.lens,
                max_q=self.q_len,
                max_kv=self.pages * self.page,
                heads=(self.heads, 1),
                columns=(q.shape[-1], self.values),
                dtype=self.q.dtype,
                page=self.page,
                window=window,
                splits=splits,
            )
            call = partial(
                library,
                *(q, k, self.cache[..., : self.values]),
                qv=self.q[..., : self.values],
                lens=self.lens,
                table=self.table,
                scale=self.scale,
                window=window,
                sinks=None if self.sinks is None else self.sinks.to(self.q.dtype),
                schedule=schedule,
                splits=splits,
                out=self.lab.torch.empty_like(self.out),
            )
            found.append(Variant(f"splits {splits}" if splits else "its splits", call))
        return found


# --- decoding -------------------------------------------------------------------------------------


def small(lab: Lab, batch: int, queries: int, heads: int, kv_len: int) -> tuple[int, int, int, int]:
    batch, heads, kv_len = lab.at_most(batch=(batch, 3), heads=(heads, 4), kv_len=(kv_len, 130))
    return batch, queries, heads, kv_len


def dense(lab: Lab, batch: int, queries: int, heads: int, kv_len: int) -> Case:
    work = Decode(lab, small(lab, batch, queries, heads, kv_len))
    peers = {"FlashMLA": work.flash_mla(), "FlashAttention-3": work.flash_attention()}
    return work.case(4e-3, peers=peers)


_SIZES = {
    "batch": "requests",
    "queries": "query tokens",
    "heads": "heads",
    "kv_len": "cached tokens",
}
_KEYS = "batch queries heads kv_len"

DENSE = Section(
    name="dense",
    title="Dense decoding",
    about="`cumla.MLADecodePlan.run` over bfloat16 rows in pages of 64 tokens. All requests have "
    "the same length.",
    columns=_SIZES,
    shapes=shapes(
        _KEYS,
        *((128, 1, 128, kv_len) for kv_len in (1024, 4096, 8192, 16384)),
        *((128, 2, 128, kv_len) for kv_len in (1024, 4096, 8192)),
        *((128, 1, 64, kv_len) for kv_len in (1024, 4096, 16384)),
        *((128, 1, 16, kv_len) for kv_len in (1024, 4096, 8192, 16384)),
        *((batch, 1, heads, 8192) for batch in (16, 4, 1) for heads in (128, 16)),
        *((1, 1, heads, 131072) for heads in (128, 16)),
        (4, 1, 16, 131072),
        (16, 1, 128, 131072),
    ),
    build=dense,
)

SHORT = Section(
    name="dense-short",
    title="Dense decoding with few requests",
    about="The same with one to four requests, where a call is as long as its slowest request.",
    columns=_SIZES,
    shapes=shapes(
        _KEYS,
        *((b, 1, h, kv) for h in (16, 128) for b in (1, 2, 4) for kv in (1024, 4096, 8192)),
    ),
    build=dense,
)


def fp8(lab: Lab, batch: int, queries: int, heads: int, kv_len: int, products: str) -> Case:
    in_fp8 = products == "float8_e4m3fn"
    batch, queries, few, kv_len = small(lab, batch, queries, heads, kv_len)
    sizes = (batch, queries, min(heads, 64) if lab.tiny and in_fp8 else few, kv_len)
    work = Decode(lab, sizes, cache_dtype="float8_e4m3fn", deviation=1.0)
    peers = {}
    if lab.libraries.flash_mla:
        q = work.q.to(lab.dtype("float8_e4m3fn"))
        given = (q, work.cache, work.table, work.lens, SCALE, queries * sizes[2])
        peers["FlashMLA"] = [
            Variant(name, build.dense_fp8(*given))
            for name, build in lab.libraries.flash_mla.items()
        ]
    return Case(
        partial(work.run, kv_scale=1.0, fp8_products=in_fp8),
        work.error,
        limit=2e-1 if in_fp8 else 6e-3,
        nbytes=work.nbytes,
        flops=work.flops,
        product=products,
        peers=peers,
        peer_limit=3e-1,
    )


FP8 = Section(
    name="fp8",
    title="FP8 caches",
    about="`cumla.MLADecodePlan.run` over rows of float8_e4m3fn with one scale. cumla multiplies "
    "in bfloat16, which is exact, or with `fp8_products=True` in FP8. FlashMLA always multiplies "
    "in FP8, and its queries are FP8, too.",
    columns=_SIZES | {"products": "cumla's products"},
    shapes=shapes(
        f"{_KEYS} products",
        *(
            (batch, queries, heads, kv_len, products)
            for batch, queries, heads, kv_len in (
                *((128, 1, heads, kv_len) for heads in (128, 64) for kv_len in (1024, 4096, 8192)),
                *((batch, 1, heads, 8192) for batch in (16, 1) for heads in (128, 64)),
                *((128, 2, heads, 4096) for heads in (128, 64)),
            )
            for products in ("float8_e4m3fn", "bfloat16")
        ),
        (128, 1, 16, 4096, "bfloat16"),
        (128, 1, 16, 8192, "bfloat16"),
    ),
    build=fp8,
)


# --- chunks ---------------------------------------------------------------------------------------


def chunks(lab: Lab, batch: int, queries: int, decodes: int, heads: int, kv_len: int) -> Case:
    """Chunks of so many query tokens, and beside them requests that decode one."""
    batch, queries, decodes, heads, kv_len = lab.at_most(
        batch=(batch, 2), queries=(queries, 5), decodes=(decodes, 2), heads=(heads, 4),
        kv_len=(kv_len, 130),
    )  # fmt: skip
    counts = [1] * decodes + [queries] * batch
    requests, pages = len(counts), -(-kv_len // _PAGE)
    starts = lab.ints([sum(counts[:i]) for i in range(requests + 1)])
    cache = lab.normal(requests * pages, _PAGE, 1, COLUMNS, std=DEVIATION)
    q = lab.normal(sum(counts), heads, COLUMNS, std=DEVIATION)
    table, lens = lab.table(requests, pages), lab.full(requests, kv_len)
    out = lab.empty(sum(counts), heads, VALUES)
    lse = lab.empty(sum(counts), heads, dtype="float32")
    plan = cumla.MLAAttentionPlan.from_arrays(q, cache, qo_indptr=starts)
    plan.update(lens, qo_indptr=starts)

    def run() -> Any:
        plan.run(q, cache, block_table=table, out=out, lse=lse)
        return out

    def error(got: Any) -> float:
        worst = 0.0
        for request in sampled(requests):
            rows = cache[table[request].long()].reshape(-1, COLUMNS)[:kv_len]
            for token in sampled(counts[request]):
                seen = rows[: kv_len - (counts[request] - 1 - token)]
                place = sum(counts[:request]) + token
                want = attend(q[place], seen, seen[:, :VALUES], SCALE)
                worst = max(worst, row_error(got[place], want))
        return worst

    peers = {}
    if (library := lab.libraries.flash_attention) is not None:
        common = {
            "lens": lens,
            "max_q": max(counts),
            "q_starts": starts,
            "table": table,
            "scale": SCALE,
            "qv": q[..., :VALUES],
            "out": lab.torch.empty_like(out),
        }
        parts = (q[..., VALUES:], cache[..., VALUES:], cache[..., :VALUES])
        peers["FlashAttention-3"] = [Variant("no schedule", partial(library, *parts, **common))]
    pairs = sum(visible(count, kv_len) for count in counts)
    nbytes = requests * kv_len * _ROW_BYTES + sum(counts) * heads * _QUERY_BYTES
    return Case(run, error, 4e-3, nbytes=nbytes, flops=flops(heads, pairs), peers=peers)


CHUNKS = Section(
    name="chunks",
    title="Chunks of queries",
    about="`cumla.MLAAttentionPlan.run`: each chunk holds the last tokens of its request, and "
    "decoding requests of one query token run in the same call.",
    columns={
        "batch": "chunks",
        "queries": "query tokens of one",
        "decodes": "decoding requests",
        "heads": "heads",
        "kv_len": "cached tokens",
    },
    shapes=shapes(
        "batch queries decodes heads kv_len",
        (1, 512, 0, 128, 8192),
        (1, 2048, 0, 64, 8192),
        (1, 2048, 0, 128, 8192),
        (1, 4096, 0, 128, 4096),
        (8, 512, 0, 64, 8192),
        (8, 512, 0, 128, 8192),
        (4, 512, 60, 128, 4096),
    ),
    build=chunks,
)

# --- schedules and options ------------------------------------------------------------------------


def schedules(lab: Lab, batch: int, heads: int, kv_len: int) -> Case:
    work = Decode(lab, small(lab, batch, 1, heads, kv_len))

    def update() -> None:
        work.plan.update(work.lens)

    def error(_: Any) -> float:
        """The attention that follows: a captured update counts only once its graph has run."""
        update()
        return work.error(work.run())

    peers = {}
    if (library := lab.libraries.flash_attention) is not None:
        given = {
            "max_q": 1,
            "max_kv": work.pages * _PAGE,
            "heads": (work.heads, 1),
            "columns": (_ROPE, VALUES),
            "dtype": work.q.dtype,
            "page": _PAGE,
        }
        peers["FlashAttention-3"] = [Variant("", partial(library.schedule, work.lens, **given))]
    return Case(update, error, 4e-3, peers=peers)


SCHEDULES = Section(
    name="schedules",
    title="The schedule of a decoding step",
    about="`cumla.MLADecodePlan.update`, once a step for all layers. An empty kernel takes what "
    "the ceilings say.",
    columns={"batch": "requests", "heads": "heads", "kv_len": "cached tokens"},
    shapes=shapes(
        "batch heads kv_len",
        *((1, 128, 8192), (16, 128, 8192), (128, 128, 4096), (1024, 16, 1024)),
    ),
    build=schedules,
)


def _beside_usual(work: Decode, usual: Decode, limit: float = 4e-3) -> Case:
    """The same inputs through a plan with an option, and through the usual one."""
    return work.case(limit, peers={"usual": [Variant("", usual.run)]}, peer_limit=limit)


def invariant(lab: Lab, batch: int, queries: int, heads: int, kv_len: int, splits: str) -> Case:
    sizes = small(lab, batch, queries, heads, kv_len)
    usual = Decode(lab, sizes)
    if splits == "none":
        return _not_split(usual)
    work = Decode(lab, sizes, options={"batch_invariant": True, "max_kv_len": sizes[3]})
    work.q, work.cache, work.table = usual.q, usual.cache, usual.table
    return _beside_usual(work, usual)


def _not_split(usual: Decode) -> Case:
    """Whole requests: the bits of decoding, drafts and a prefill are the same."""
    lab, q = usual.lab, usual.q.flatten(0, 1)
    out = lab.torch.empty_like(usual.out.flatten(0, 1))
    starts = lab.ints(range(0, usual.batch * usual.q_len + 1, usual.q_len))
    lse = usual.lse.flatten(0, 1)
    plan = cumla.MLAAttentionPlan.from_arrays(
        q, usual.cache, qo_indptr=starts, batch_invariant=True, max_kv_len=1
    )
    plan.update(usual.lens, qo_indptr=starts)

    def run() -> Any:
        plan.run(q, usual.cache, block_table=usual.table, out=out, lse=lse)
        return out

    peers = {"usual": [Variant("", usual.run)]}
    return Case(run, usual.error, 4e-3, usual.nbytes, usual.flops, peers=peers, peer_limit=4e-3)


INVARIANT = Section(
    name="invariant",
    title="The batch-invariant mode",
    about="With `batch_invariant=True` a request has the same bits in any batch. Beside it the "
    "same call without. Requests that are not split (`MLAAttentionPlan` with `max_kv_len=1`) have "
    "the bits of a prefill, too.",
    columns=_SIZES | {"splits": "splits of a request"},
    shapes=shapes(
        f"{_KEYS} splits",
        *(
            (*sizes, splits)
            for sizes in (
                (128, 1, 128, 4096),
                (128, 1, 16, 4096),
                (16, 1, 128, 8192),
                (1, 1, 16, 131072),
            )
            for splits in ("fixed", "none")
        ),
    ),
    build=invariant,
    baseline={"usual": "the usual mode"},
)


def pages(lab: Lab, batch: int, heads: int, kv_len: int, page: int) -> Case:
    sizes = small(lab, batch, 1, heads, kv_len)
    usual, work = Decode(lab, sizes), Decode(lab, sizes, page=page)
    work.q = usual.q
    rows = usual.cache[usual.table.long()].reshape(sizes[0], -1, COLUMNS)[:, : sizes[3]]
    whole = lab.torch.zeros(
        sizes[0], work.pages * page, COLUMNS, dtype=rows.dtype, device=rows.device
    )
    whole[:, : sizes[3]] = rows
    work.cache[work.table.long()] = whole.view(sizes[0], work.pages, page, 1, COLUMNS)
    return _beside_usual(work, usual)


PAGES = Section(
    name="pages",
    title="Page sizes",
    about="Dense decoding of one query token over pages of other sizes, beside pages of 64 tokens.",
    columns={
        "batch": "requests",
        "heads": "heads",
        "kv_len": "cached tokens",
        "page": "tokens of a page",
    },
    shapes=shapes(
        "batch heads kv_len page",
        *(
            (batch, heads, kv_len, page)
            for batch, heads, kv_len in ((128, 16, 4096), (128, 128, 4096), (16, 128, 8192))
            for page in (1, 16, 32, 128)
        ),
    ),
    build=pages,
    baseline={"usual": "pages of 64"},
)
