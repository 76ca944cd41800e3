# SPDX-License-Identifier: Apache-2.0
"""What find_prefix_groups finds, by plain loops over requests and pages."""

from __future__ import annotations

from tests.prefix_cases import MOST, Batch

WINDOW = 1024  # requests, of which no group crosses a multiple


def expected_groups(batch: Batch, min_tokens: int) -> tuple[list[int], list[int]]:
    """Try every number of pages for each run, token by token and page by page."""
    table, lens, offsets, page_size, _ = batch
    count = len(lens)
    least = max(-(-min_tokens // page_size), 1)

    def usable(request: int) -> int:
        queries = max(int(offsets[request + 1]) - int(offsets[request]), 0)
        return max(min(int(lens[request]), table.shape[1] * page_size) - queries, 0) // page_size

    def alike(request: int) -> int:
        if request % WINDOW == 0:
            return 0
        pages = 0
        while pages < min(usable(request), usable(request - 1)):
            if table[request, pages] != table[request - 1, pages]:
                break
            pages += 1
        return pages if pages >= least else 0

    shared = [alike(request) for request in range(count)]
    group, prefix = list(range(count)), [0] * count
    first = 0
    while first < count:
        end = first + 1
        while end < count and shared[end]:
            end += 1
        tried = [
            (pages * sum(s >= pages for s in shared[first + 1 : end]), pages)
            for pages in shared[first + 1 : end]
        ]
        chosen = max(tried, default=(0, MOST))[1]
        begin = first
        for request in range(first, end):
            if request > first and shared[request] < chosen:
                begin = request
            group[request] = begin
        for request in range(first, end):
            members = [r for r in range(first, end) if group[r] == group[request]]
            if len(members) > 1:
                prefix[request] = min(shared[r] for r in members[1:]) * page_size
        first = end
    return group, prefix
