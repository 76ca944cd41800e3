# SPDX-License-Identifier: Apache-2.0
"""MHA and GQA: decoding, few requests, and prefill."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import cumla
from bench.case import Case, Section, Variant
from bench.lab import Lab
from bench.oracle import attend, row_error, sampled


@dataclass(frozen=True)
class _Shape:
    batch: int
    heads: int
    kv_heads: int
    columns: int
    kv_len: int
    queries: int = 1
    value_columns: int = 0  # 0: as many as columns
    window: int = 0  # tokens; 0: all
    sinks: bool = False
    page: int = 64  # 0: rows without pages
    cache: str = "bfloat16"
    decodes: int = 0  # requests of one query token beside the others
    lengths: str = "equal"  # or "lognormal": the mean is kv_len

    def values(self) -> dict[str, Any]:
        """As the row of a table."""
        wide = f"{self.columns}"
        if self.value_columns:
            wide += f"/{self.value_columns}"
        return {
            "kinds": f"{self.heads}/{self.kv_heads}",
            "columns": f"d{wide}",
            "batch": self.batch,
            "queries": self.queries,
            "kv_len": self.kv_len,
            "more": " ".join(self._more()),
        }

    def _more(self) -> list[str]:
        said = {
            f"window {self.window}": self.window > 0,
            "sinks": self.sinks,
            "e4m3": self.cache != "bfloat16",
            "rows": self.page == 0,
            f"pages of {self.page}": self.page not in (0, 64),
            f"+ {self.decodes} decodes": self.decodes > 0,
            self.lengths: self.lengths != "equal",
        }
        return [word for word, is_so in said.items() if is_so]

    def tiny(self) -> _Shape:
        """The same, as small as it can be."""
        kv_heads = min(self.kv_heads, 2)
        group = min(self.heads // self.kv_heads, 4)
        return _Shape(
            **{
                **self.__dict__,
                "batch": min(self.batch, 2),
                "heads": kv_heads * group,
                "kv_heads": kv_heads,
                "kv_len": 200,
                "queries": 200 if self.queries == self.kv_len else min(self.queries, 3),
                "decodes": min(self.decodes, 2),
                "window": min(self.window, 20),
            }
        )


class _Work:
    """Arrays of a shape."""

    def __init__(self, lab: Lab, shape: _Shape) -> None:
        self.lab, self.shape = lab, shape
        torch = lab.torch
        self.counts = [shape.queries] * shape.batch + [1] * shape.decodes
        self.lengths = [shape.kv_len] * len(self.counts)
        if shape.lengths == "lognormal":
            drawn = torch.randn(len(self.counts), generator=torch.Generator().manual_seed(0))
            parts = (drawn * 0.8).exp()
            of_all = parts / parts.sum() * sum(self.lengths)
            self.lengths = of_all.round().clamp(1).long().tolist()
        self.starts = lab.ints([sum(self.counts[:i]) for i in range(len(self.counts) + 1)])
        self.lens = lab.ints(self.lengths)
        values = shape.value_columns or shape.columns
        self.widths = (shape.columns, values)
        self.q = lab.normal(sum(self.counts), shape.heads, shape.columns)
        if shape.page:
            self._lay_pages()
        else:
            self.k, self.v = (
                lab.normal(sum(self.lengths), shape.kv_heads, width) for width in self.widths
            )
            self.k_starts = lab.ints([sum(self.lengths[:i]) for i in range(len(self.lens) + 1)])
        self.sinks = None
        if shape.sinks:
            self.sinks = torch.linspace(-2, 2, shape.heads, device=lab.device)
        self.out = lab.empty(sum(self.counts), shape.heads, values)
        self.is_uniform = not shape.decodes
        self._make_plan()

    def _lay_pages(self) -> None:
        lab, shape = self.lab, self.shape
        counts = [-(-length // shape.page) for length in self.lengths]
        self.k, self.v = (
            lab.normal(sum(counts), shape.page, shape.kv_heads, width).to(lab.dtype(shape.cache))
            for width in self.widths
        )
        order, begin = lab.shuffled(sum(counts)), 0
        self.table = lab.torch.zeros(
            len(counts), max(counts), dtype=lab.torch.int32, device=lab.device
        )
        for request, count in enumerate(counts):
            self.table[request, :count] = order[begin : begin + count]
            begin += count

    def _make_plan(self) -> None:
        lab, shape = self.lab, self.shape
        window = shape.window - 1 if shape.window else None
        make = partial(cumla.AttentionPlan.from_arrays, window=window)
        if shape.page and self.is_uniform:
            q = self.q.view(shape.batch, shape.queries, shape.heads, shape.columns)
            lse = lab.empty(shape.batch, shape.queries, shape.heads, dtype="float32")
            self.plan = make(q, self.k, self.v)
            self.plan.update(self.lens)
            out = self.out.view(*q.shape[:3], -1)
            self._run = partial(
                self.plan.run, q, self.k, self.v, block_table=self.table, out=out, lse=lse
            )
            return
        lse = lab.empty(*self.q.shape[:2], dtype="float32")
        self.plan = make(self.q, self.k, self.v, qo_indptr=self.starts)
        if shape.page:
            self.plan.update(self.lens, qo_indptr=self.starts)
            pages = {"block_table": self.table}
        else:
            self.plan.update(qo_indptr=self.starts, kv_indptr=self.k_starts)
            pages = {}
        given = self.q, self.k, self.v
        self._run = partial(self.plan.run, *given, **pages, out=self.out, lse=lse)

    def run(self) -> Any:
        self._run(sinks=self.sinks)
        return self.out

    def _rows(self, request: int) -> list[Any]:
        """Keys and values of a request, (tokens, kv heads, columns)."""
        length = self.lengths[request]
        if not self.shape.page:
            begin = sum(self.lengths[:request])
            return [rows[begin : begin + length] for rows in (self.k, self.v)]
        pages = self.table[request, : -(-length // self.shape.page)].long()
        bits = (
            rows.view(self.lab.torch.uint8)[pages].view(rows.dtype) for rows in (self.k, self.v)
        )
        return [rows.reshape(-1, *rows.shape[2:])[:length] for rows in bits]

    def error(self, got: Any) -> float:
        """The first and the last kv head of some tokens of some requests."""
        shape = self.shape
        got, worst = got.reshape(self.out.shape), 0.0
        group = shape.heads // shape.kv_heads
        for request in sampled(len(self.counts)):
            keys, values = self._rows(request)
            for token in sampled(self.counts[request]):
                last = self.lengths[request] - self.counts[request] + token
                first = max(0, last - shape.window + 1) if shape.window else 0
                place = sum(self.counts[:request]) + token
                for head in {0, shape.kv_heads - 1}:
                    heads = slice(head * group, (head + 1) * group)
                    want = attend(
                        self.q[place, heads],
                        keys[first : last + 1, head],
                        values[first : last + 1, head],
                        shape.columns**-0.5,
                        None if self.sinks is None else self.sinks[heads],
                    )
                    worst = max(worst, row_error(got[place, heads], want))
        return worst

    def _pairs(self) -> int:
        found = 0
        for count, length in zip(self.counts, self.lengths, strict=True):
            seen = (length - count + 1 + token for token in range(count))
            found += sum(min(n, self.shape.window or n) for n in seen)
        return found

    @property
    def nbytes(self) -> int:
        """Each key and value that is seen once, queries and output."""
        shape = self.shape
        seen = sum(
            min(length, shape.window + count - 1 if shape.window else length)
            for count, length in zip(self.counts, self.lengths, strict=True)
        )
        item: int = self.k.element_size()
        cached = seen * shape.kv_heads * sum(self.widths) * item
        return cached + sum(self.counts) * shape.heads * sum(self.widths) * 2

    @property
    def flops(self) -> int:
        return 2 * self.shape.heads * sum(self.widths) * self._pairs()

    # --- FlashAttention-3 -------------------------------------------------------------------------

    def flash_attention(self) -> list[Variant]:
        library = self.lab.libraries.flash_attention
        if library is None:
            return []
        return self._paged(library) if self.shape.page else self._unpaged(library)

    def _common(self) -> dict[str, Any]:
        shape = self.shape
        sinks = None if self.sinks is None else self.sinks.to(self.lab.torch.bfloat16)
        window = (shape.window - 1, 0) if shape.window else (-1, -1)
        return {"window": window, "scale": shape.columns**-0.5, "sinks": sinks}

    def _schedule(self, library: Any, **options: Any) -> Any:
        shape = self.shape
        return library.schedule(
            self.lens,
            max_q=max(self.counts),
            heads=(shape.heads, shape.kv_heads),
            columns=self.widths,
            window=(shape.window - 1, 0) if shape.window else (-1, -1),
            **options,
        )

    def _paged(self, library: Any) -> list[Variant]:
        shape, found = self.shape, []
        q: Any = self.q
        given: dict[str, Any] = {"q_starts": self.starts, "max_q": max(self.counts)}
        if self.is_uniform:
            q, given = q.view(shape.batch, shape.queries, shape.heads, -1), {}
        factors = None
        if shape.cache != "bfloat16":  # its queries have the dtype of its keys
            q = q.to(self.k.dtype)
            factors = self.lab.torch.ones(len(self.lens), shape.kv_heads, device=self.lab.device)
        options: list[tuple[int, bool | None]] = [(0, None), (1, None)]
        if shape.queries > 1:
            options += [(0, True), (1, True)]
        if shape.queries >= 64:
            options += [(0, False)]
        if shape.batch * shape.kv_heads <= 64 and shape.queries == 1:
            options += [(16, None), (32, None)]
        for splits, pack in options:
            schedule = self._schedule(
                library,
                max_kv=self.table.shape[1] * shape.page,
                dtype=q.dtype,
                page=shape.page,
                splits=splits,
                pack=pack,
                q_starts=given.get("q_starts"),
            )
            call = partial(
                library,
                *(q, self.k, self.v),
                lens=self.lens,
                table=self.table,
                factors=factors,
                schedule=schedule,
                splits=splits,
                pack=pack,
                out=self.lab.empty(*q.shape[:-1], self.widths[1]),
                **given,
                **self._common(),
            )
            found.append(Variant(_said(splits, pack), call))
        return found

    def _unpaged(self, library: Any) -> list[Variant]:
        shape, found = self.shape, []
        lengths = {
            "q_starts": self.starts,
            "k_starts": self.k_starts,
            "max_q": max(self.counts),
            "max_kv": max(self.lengths),
        }
        packs = (None,) if shape.heads == shape.kv_heads else (None, True, False)
        for pack in packs:
            schedule = self._schedule(
                library,
                max_kv=max(self.lengths),
                dtype=self.q.dtype,
                splits=1,
                pack=pack,
                q_starts=self.starts,
                k_starts=self.k_starts,
            )
            for name, made in (("", schedule), (", no schedule", None)):
                call = partial(
                    library,
                    *(self.q, self.k, self.v),
                    schedule=made,
                    splits=1,
                    pack=pack,
                    out=self.lab.torch.empty_like(self.out),
                    **lengths,
                    **self._common(),
                )
                found.append(Variant(_said(1, pack) + name, call))
        return found

    # --- FlashAttention-4 -------------------------------------------------------------------------

    def flash_attention_4(self) -> list[Variant]:
        """Calls over the arrays of all requests, and by request where they are alike.

        It has no split keys on Hopper, so decoding is left out, and no e4m3.
        """
        shape, library = self.shape, None
        if shape.queries > 1 and shape.cache == "bfloat16":
            library = self.lab.libraries.flash_attention_4
        if library is None:
            return []
        window = (shape.window - 1, 0) if shape.window else (None, None)
        options: dict[str, Any] = {"causal": True, "window_size": window}
        if self.sinks is not None:
            options["learnable_sink"] = self.sinks.to(self.lab.torch.bfloat16)
        counted = {"cu_seqlens_q": self.starts, "max_seqlen_q": max(self.counts)}
        varlen = partial(library.flash_attn_varlen_func, self.q, self.k, self.v, **counted)
        if shape.page:
            varlen = partial(varlen, seqused_k=self.lens, page_table=self.table)
            return [Variant("pages", partial(_out_of, partial(varlen, **options)))]
        varlen = partial(varlen, cu_seqlens_k=self.k_starts, max_seqlen_k=max(self.lengths))
        found = [Variant("rows", partial(_out_of, partial(varlen, **options)))]
        if self.is_uniform:
            given = [rows.unflatten(0, (shape.batch, -1)) for rows in (self.q, self.k, self.v)]
            alike = partial(library.flash_attn_func, *given, **options)
            found.append(Variant("requests alike", partial(_out_of, alike)))
        return found


def _out_of(call: Any) -> Any:
    """The output of a call that returns a log-sum-exp beside it."""
    return call()[0]


def _said(splits: int, pack: bool | None) -> str:
    words = f"splits {splits}" if splits else "its splits"
    return words if pack is None else f"{words}, {'packed' if pack else 'not packed'}"


def _build(known: dict[str, _Shape], lab: Lab, **values: Any) -> Case:
    shape = known["|".join(map(str, values.values()))]
    work = _Work(lab, shape.tiny() if lab.tiny else shape)
    return Case(
        work.run,
        work.error,
        limit=6e-3,
        nbytes=work.nbytes,
        flops=work.flops,
        peers={
            "FlashAttention-3": work.flash_attention(),
            "FlashAttention-4": work.flash_attention_4(),
        },
        peer_limit=2e-1 if shape.cache != "bfloat16" else 2e-2,
    )


_COLUMNS = {
    "kinds": "heads/kv heads",
    "columns": "columns",
    "batch": "requests",
    "queries": "query tokens",
    "kv_len": "cached tokens",
    "more": "",
}


def _section(name: str, title: str, about: str, rows: list[_Shape]) -> Section:
    known = {"|".join(map(str, row.values().values())): row for row in rows}
    if len(known) < len(rows):
        raise ValueError(f"{name}: two rows look the same")
    values = tuple(row.values() for row in rows)
    return Section(name, title, about, _COLUMNS, values, partial(_build, known))


_LLAMA, _WIDE, _NARROW, _GEMMA = (32, 8, 128), (64, 8, 128), (64, 8, 64), (16, 8, 256)

DECODE = _section(
    "gqa",
    "GQA decoding",
    "`cumla.AttentionPlan.run` over pages of 64 tokens. With e4m3, keys and values are "
    "float8_e4m3fn; FlashAttention-3 then takes queries of float8_e4m3fn, too, cumla bfloat16. "
    "`lognormal`: the lengths of requests differ, the mean is as given.",
    [
        *(_Shape(1, *_LLAMA, kv_len) for kv_len in (1024, 8192, 32768)),
        *(_Shape(16, *_LLAMA, kv_len) for kv_len in (1024, 8192)),
        *(_Shape(128, *_LLAMA, kv_len) for kv_len in (1024, 8192, 32768)),
        *(_Shape(batch, *_WIDE, kv) for batch, kv in ((16, 8192), (64, 1024), (64, 8192))),
        _Shape(1, *_NARROW, 8192),
        *(_Shape(batch, *_NARROW, kv_len) for batch in (16, 128) for kv_len in (1024, 8192)),
        *(_Shape(batch, *_GEMMA, kv) for batch, kv in ((1, 8192), (16, 1024))),
        *(_Shape(128, *_GEMMA, kv_len) for kv_len in (1024, 8192)),
        *(
            _Shape(batch, *_LLAMA, kv_len, cache="float8_e4m3fn")
            for batch, kv_len in ((1, 8192), (16, 1024), (16, 8192), (128, 8192))
        ),
        *(_Shape(batch, *_NARROW, 4096, window=128, sinks=True) for batch in (1, 128)),
        _Shape(64, 8, 4, 256, 8192, window=1024),
        *(_Shape(64, *_WIDE, 4096, queries=queries) for queries in (2, 4, 8)),
        _Shape(4, *_LLAMA, 4096, queries=512, decodes=60),
        *(_Shape(128, *_LLAMA, kv_len, lengths="lognormal") for kv_len in (1024, 4096)),
    ],
)

SHORT = _section(
    "gqa-short",
    "GQA decoding with few requests",
    "The same with one to four requests.",
    [
        _Shape(batch, heads, 8, 128, kv_len)
        for heads in (32, 64)
        for batch in (1, 2, 4)
        for kv_len in (1024, 4096, 8192)
    ],
)

PREFILL = _section(
    "prefill",
    "Prefill",
    "`cumla.AttentionPlan.run`, causal: all tokens of a request, or the last ones over a longer "
    "cache. `rows`: keys and values lie in rows without pages.",
    [
        *(_Shape(1, *_LLAMA, n, queries=n, page=0) for n in (2048, 4096, 8192)),
        _Shape(1, *_LLAMA, 8192, queries=8192),
        *(_Shape(1, *_WIDE, n, queries=n, page=0) for n in (2048, 8192)),
        *(
            _Shape(1, heads, heads, 192, n, queries=n, value_columns=128, page=0)
            for heads in (16, 128)
            for n in (2048, 8192)
        ),
        *(_Shape(2, *kinds, 8192, queries=8192, page=0) for kinds in (_GEMMA, _NARROW)),
        *(
            _Shape(2, *kinds, 8192, queries=8192, window=1024, page=0)
            for kinds in (_NARROW, _GEMMA)
        ),
        *(_Shape(1, *_WIDE, 16384, queries=2048, page=page) for page in (16, 64, 128)),
    ],
)
