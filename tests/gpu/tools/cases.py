# SPDX-License-Identifier: Apache-2.0
"""The grid of dense decode cases, and a covering sample of it that is always the same."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from cumla.launch.mla.shape import SWAPPED_ROWS, VARIANTS

FACTORS: dict[str, tuple[object, ...]] = {
    "batch": (1, 2, 6, 64, 128),
    "q_len": (1, 2, 3, 4),
    "kv_len": (0, 1, 20, 63, 64, 65, 140, 4096, 16384),
    "heads": (1, 3, 9, 16, 63, 64, 96, 126, 128),
    "kv_heads": (1, 2, 3, 8),
    "ragged": (False, True),
    "causal": (True, False),
    "dtype": ("bfloat16", "float16"),
    "inputs": ("0.1", "1", "outliers"),
    "cache": ("plain", "3d", "padded rows", "padded pages", "padded both", "heads first"),
    "query": ("plain", "padded", "transposed"),
    "table": ("plain", "padded"),
    "outputs": ("given", "allocated", "float32"),
    "softmax": ("default", "192"),
}

TRIPLES = (
    ("batch", "kv_len", "ragged"),
    ("kv_len", "q_len", "causal"),
    ("heads", "kv_heads", "q_len"),
    ("kv_len", "heads", "dtype"),
)
"""Combinations of three factors that are covered completely, beyond all the pairs."""

MAX_TOKENS = 1 << 22
"""Most tokens times kv heads of a case (4.8 GB of cache): what keeps the whole grid in seconds."""

SEED = 20261120


@dataclass(frozen=True)
class Case:
    """One point of the grid; see ``FACTORS`` for what the fields may be."""

    batch: int = 2
    q_len: int = 1
    kv_len: int = 140
    heads: int = 16
    kv_heads: int = 1
    ragged: bool = True
    causal: bool = True
    dtype: str = "bfloat16"
    inputs: str = "0.1"
    cache: str = "plain"
    query: str = "plain"
    table: str = "plain"
    outputs: str = "given"
    softmax: str = "default"
    seed: int = 0

    @property
    def rows(self) -> int:
        """Query rows of a kv head."""
        return self.q_len * self.heads // self.kv_heads

    @property
    def variants(self) -> tuple[str, ...]:
        """The kernels that can serve it, whichever would be chosen."""
        few = self.rows <= SWAPPED_ROWS
        return tuple(variant for variant in VARIANTS if few or variant != "swapped")

    @property
    def name(self) -> str:
        """A short test id."""
        words = [
            f"b{self.batch}",
            f"s{self.q_len}",
            f"l{self.kv_len}{'r' if self.ragged else ''}",
            f"h{self.heads}x{self.kv_heads}",
            "causal" if self.causal else "full",
            {"bfloat16": "bf16", "float16": "fp16"}[self.dtype],
            f"in_{self.inputs}",
            f"kv_{self.cache}",
            f"q_{self.query}",
            f"bt_{self.table}",
            f"out_{self.outputs}",
            f"sm_{self.softmax}",
        ]
        return "-".join(words).replace(" ", "_")


def allowed(chosen: Mapping[str, object]) -> bool:
    """Return whether the factors chosen so far can stand together (missing ones are still open)."""
    heads, kv_heads = chosen.get("heads"), chosen.get("kv_heads")
    if isinstance(heads, int) and isinstance(kv_heads, int) and heads % kv_heads:
        return False
    layout = chosen.get("cache")
    if isinstance(kv_heads, int) and layout == ("heads first" if kv_heads == 1 else "3d"):
        return False
    if heads in (1,) and layout == "heads first":  # one query head has one kv head
        return False
    batch, kv_len = chosen.get("batch"), chosen.get("kv_len")
    if isinstance(batch, int) and isinstance(kv_len, int):
        least = 2 if layout == "heads first" else 1
        tokens = batch * kv_len * (kv_heads if isinstance(kv_heads, int) else least)
        return tokens <= MAX_TOKENS
    return True


def requirements() -> set[tuple[tuple[str, object], ...]]:
    """Every combination of values that some case must contain: all pairs, and the triples named."""
    wanted = set()
    for names in _groups():
        for values in itertools.product(*(FACTORS[name] for name in names)):
            combination = tuple(zip(names, values, strict=True))
            if _completable(dict(combination)):
                wanted.add(combination)
    return wanted


@cache
def _groups() -> tuple[tuple[str, ...], ...]:
    """All pairs of factors, and the triples named, in the order of FACTORS."""
    order = list(FACTORS)
    groups = (*itertools.combinations(FACTORS, 2), *TRIPLES)
    return tuple([tuple(sorted(group, key=order.index)) for group in groups])


def _completable(chosen: dict[str, object]) -> bool:
    """Return whether a case exists that contains these values."""
    return _are_completable(*[(n, chosen[n]) for n in _BOUND if n in chosen])


_BOUND = ("heads", "kv_heads", "cache", "batch", "kv_len")  # to each other


@cache
def _are_completable(*items: tuple[str, object]) -> bool:
    chosen = dict(items)
    if not allowed(chosen):
        return False
    name = next((n for n in _BOUND if n not in chosen), None)
    return name is None or any(_completable({**chosen, name: value}) for value in FACTORS[name])


def covered_by(values: Mapping[str, object]) -> Iterator[tuple[tuple[str, object], ...]]:
    """The combinations that a complete case contains."""
    items = {name: (name, value) for name, value in values.items()}
    for names in _groups():
        yield tuple([items[name] for name in names])


@cache
def covering_sample(seed: int = SEED, attempts: int = 3) -> tuple[Case, ...]:
    """Cases that together contain every requirement, found greedily.

    Each case starts from a requirement that is still open (triples first) and takes, factor by
    factor in random order, the value that meets most open pairs; the best of a few attempts stays.
    """
    rng = random.Random(seed)
    wanted = requirements()
    order = sorted(wanted, key=lambda c: (-len(c), repr(c)))
    cases: list[Case] = []
    for start in order:
        if start not in wanted:
            continue
        best: dict[str, object] = {}
        best_gain = -1
        for _ in range(attempts):
            values = _extend(dict(start), wanted, rng)
            gain = sum(combination in wanted for combination in covered_by(values))
            if gain > best_gain:
                best, best_gain = values, gain
        wanted.difference_update(covered_by(best))
        cases.append(Case(**best, seed=len(cases)))  # type: ignore[arg-type]
    return tuple(cases)


def _extend(
    chosen: dict[str, object], wanted: set[tuple[tuple[str, object], ...]], rng: random.Random
) -> dict[str, object]:
    index = {name: i for i, name in enumerate(FACTORS)}
    rest = [name for name in FACTORS if name not in chosen]
    rng.shuffle(rest)
    for name in rest:
        options = [v for v in FACTORS[name] if _completable({**chosen, name: v})]
        rng.shuffle(options)

        def gain(value: object, name: str = name) -> int:
            pairs = (
                ((name, value), other) if index[name] < index[other[0]] else (other, (name, value))
                for other in chosen.items()
            )
            return sum(pair in wanted for pair in pairs)

        chosen[name] = max(options, key=gain)
    return chosen


def by_every_kernel(cases: Mapping[str, Case]) -> list[tuple[str, str]]:
    """Names of cases, each with the kernels to which a plan for it may be pinned."""
    return [(name, variant) for name, case in cases.items() for variant in case.variants]


HEADS = ((1, 1), (3, 1), (3, 3), (9, 1), (9, 3), (16, 1), (16, 2), (17, 1), (48, 1), (48, 2))
HEADS += ((48, 3), (64, 1), (64, 2), (128, 1), (128, 2))  # query and kv heads
KV_LENS = (0, 1, 63, 64, 65, 140, 4096)


def sample_of_every_kernel() -> list[Case]:
    """Cases for each kernel that can serve them: heads with every kv_len, q_len and mask."""
    cases = []
    for i, (heads, kv_heads) in enumerate(HEADS):
        for j, (q_len, causal) in enumerate(itertools.product((1, 2, 3, 4), (True, False))):
            kv_len = KV_LENS[(2 * i + i // 2 + j) % len(KV_LENS)]
            # The log-sum-exp of one token is its score: near 0 it is rounding errors of its terms.
            inputs = "0.1" if kv_len == 1 else ("0.1", "1", "outliers")[(i + j) % 3]
            case = Case(
                batch=3,
                q_len=q_len,
                kv_len=kv_len,
                heads=heads,
                kv_heads=kv_heads,
                ragged=(i + j // 2) % 3 != 0,
                causal=causal,
                dtype=("bfloat16", "float16")[(i // 2 + q_len + j) % 2],
                inputs=inputs,
                outputs=("given", "float32")[(i + q_len) % 2],
                softmax=("default", "192")[j // 4],
                seed=len(cases),
            )
            cases.append(case)
    return cases


SPLIT_CASES = {
    "two pieces": (Case(batch=66, heads=16), [45 * 64] * 66),
    "many pieces": (Case(batch=1, heads=16), [17_003]),
    "a giant among dwarfs": (Case(batch=6, heads=64, q_len=2), [65, 0, 9000, 3, 700, 1]),
    "three row tiles": (Case(batch=2, heads=80, q_len=2), [3000, 2500]),
    "parts that share two requests, row tiles": (
        Case(batch=18, heads=128, q_len=2),
        [3500 + 64 * (i % 5) + 2500 * (i == 9) for i in range(18)],
    ),
    "parts that share two requests, kv heads": (
        Case(batch=18, heads=64, kv_heads=4),
        [3500 + 64 * (i % 5) + 2500 * (i == 9) for i in range(18)],
    ),
}
"""Calls of which every one cuts requests, with their lengths, for runs by the thousand."""
