# SPDX-License-Identifier: Apache-2.0
"""The backend of SGLang: decoding, verification of drafts and prefill, for MLA and for MHA."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.verify_mask import VerifyMask
from sglang.srt.mem_cache.base_swa_memory_pool import BaseSWAKVPool
from sglang.srt.runtime_context import get_exec, get_parallel, get_spec
from sglang.srt.speculative.eagle_utils import TreeMaskMode

import cumla
from cumla._choices import Layers, invariance, log_layers
from cumla._serving import (
    Plans,
    Step,
    append_rows,
    cache_dtype,
    current_capture,
    image_spans,
    in_parts,
)
from cumla.compat._engine import refusal
from cumla.core.tree import MOST_DRAFTS
from cumla.mla.shape import WIDTH, WIDTHS
from cumla.sglang import is_deterministic

__all__ = ["Backend"]

_WAY_OUT = "leave out --attention-backend cumla"
_MOST_PAGES = 1 << 20  # that a graph fills in, used or not: some 10 us of an H200


class Form(NamedTuple):
    """The properties that layers with one plan have in common."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    window: int | None
    is_tree: bool = False  # a mask has the drafts, and the window
    has_mask: bool = False  # of rows: it has the images, or the chunk, and the window


class Tree(NamedTuple):
    """The visible keys of the drafts of a step."""

    mask: torch.Tensor  # flat
    is_full: bool  # it has all keys, and else drafts alone
    positions: torch.Tensor  # of the drafts, by their depth


class Batch(NamedTuple):
    """A step: the requests, and a schedule for each form of layers."""

    q_len: int  # query tokens of each request; 0 where they differ
    offsets: torch.Tensor  # of the requests among the query tokens
    kv_lens: torch.Tensor
    block_table: torch.Tensor
    steps: dict[Form, Step]
    in_place: bool  # a graph may read it
    tree: Tree | None
    # For trees of drafts: masks by window; with MLA, under None, lists of slots.
    masks: dict[int | None, Any]
    before: torch.Tensor | None  # lengths without the drafts, where these are trees with MLA
    # Spans of image tokens that see each other, (requests, n, 2), and masks of rows.
    spans: torch.Tensor | None
    rows: dict[Any, cumla.AttentionMask]


class Backend(AttentionBackend):
    """Attention of all layers of a model; refuses what the kernels do not compute.

    SGLang prepares a step eagerly, or lets its CUDA graph do so: lengths and page numbers are
    filled in there. The first layer of a form then computes the schedule, on the device; in a graph
    each replay does. What graphs read is in buffers that stay: those of `init_cuda_graph_state`,
    and those of the plans.
    """

    needs_cpu_seq_lens = False  # else SGLang waits for the lengths of drafts in each step

    def __init__(self, runner: Any) -> None:
        super().__init__()
        _refuse_configuration(runner)
        self.max_context_len = runner.model_config.context_len  # SGLang's workers read it
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.req_to_token_pool = runner.req_to_token_pool
        self.kv_index_translator = getattr(runner, "kv_index_translator", None)
        self.forward_metadata: Batch | None = None
        self._model = runner.model_config
        self._is_mla = runner.use_mla_backend
        self._page_size = runner.page_size
        self._dtype = runner.dtype
        self._cache_dtype = cache_dtype(runner.kv_cache_dtype)
        self._num_drafts = get_spec().speculative_num_draft_tokens
        self._is_deterministic = is_deterministic()
        self._has_trees = _has_trees()
        self._has_own_masks = self._has_trees and not runner.spec_algorithm.is_ngram()
        self._chunk = _chunk(self._model)  # of some layers
        self._has_images = _see_images(self._model)
        self._verify_mask: Any = None
        self._masks: dict[int | None, cumla.AttentionMask] = {}  # that graphs read, by window
        self._slots = runner.req_to_token_pool.req_to_token  # of the tokens of each request
        self._plans: dict[Form, Plans] = {}
        self._list_plans: dict[int, Plans] = {}  # of the drafts of trees with MLA, by heads
        self._offsets: dict[tuple[int, int], torch.Tensor] = {}
        self._constants: dict[int, torch.Tensor] = {}
        self._recorded: dict[tuple[int, int], Batch] = {}  # steps whose graphs fill them in
        self._kv_lens: torch.Tensor | None = None  # all for graphs
        self._block_table: torch.Tensor | None = None
        self._before: torch.Tensor | None = None
        self._lists: torch.Tensor | None = None

    # --- steps -----------------------------------------------------------------------------------

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Make what graphs of up to `max_bs` requests read."""
        pages = -(-self._slots.shape[1] // self._page_size)
        self._kv_lens = self._slots.new_zeros(max_bs, dtype=torch.int32)
        self._masks.clear()  # they have the size of these
        self._recorded.clear()
        self._block_table = self._slots.new_zeros((max_bs, pages), dtype=torch.int32)
        if self._has_trees and self._is_mla:
            self._before = torch.zeros_like(self._kv_lens)
            of_drafts = max_bs * self._num_drafts, self._num_drafts
            self._lists = self._slots.new_zeros(of_drafts, dtype=torch.int32)
        if self._has_own_masks:
            self._verify_mask = VerifyMask(
                buffer=self._slots.new_zeros(max_bs * self._num_drafts**2, dtype=torch.bool),
                mode=TreeMaskMode.QLEN_ONLY,
                max_bs=max_bs,
            )

    @property
    def verify_mask(self) -> Any:
        """Return where SGLang writes what drafts see: of drafts alone, not of all keys."""
        return self._verify_mask

    def update_verify_buffers_to_fill_after_draft(
        self, spec_info: Any, cuda_graph_bs: int | None
    ) -> None:
        """Build the masks of a step anew, which SGLang prepared before the drafts were there."""
        batch = self.forward_metadata
        if self._has_trees and batch is not None and batch.q_len > 1:
            tree = self._tree(spec_info, spec_info.positions, len(batch.kv_lens))
            batch = self.forward_metadata = batch._replace(tree=tree)
            for window in batch.masks:
                batch.masks[window] = self._filled(batch, window)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return the length of the requests that pad a graph."""
        return 1

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Prepare a step that runs eagerly."""
        self._begin(forward_batch, in_place=False)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Prepare a step before its graph is captured or replayed."""
        mode = forward_batch.forward_mode
        is_kept = mode.is_decode_or_idle() or mode.is_target_verify()
        recorded = self._recorded.get((forward_batch.batch_size, mode.is_target_verify()))
        if is_kept and recorded is not None:
            self.forward_metadata = recorded._replace(steps={}, rows={})
        else:
            self._begin(forward_batch, is_kept, in_capture)
        batch = self.forward_metadata
        if in_capture and batch is not None and batch.q_len:
            is_tree, tokens = self._has_trees and batch.q_len > 1, len(batch.kv_lens) * batch.q_len
            for form in self._plans:  # as far as layers have run
                if form.is_tree == is_tree:
                    self._step(form, tokens).prepare()
            if is_tree:
                for heads in self._list_plans:
                    self._list_step(heads).prepare()

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Fill in a step as part of its graph: then nothing is launched before a replay.

        SGLang calls this in the run before a capture, and in the capture. Trees of drafts, whose
        masks are made from lengths, and tables with very many pages are filled in before replays.
        """
        batch = self.forward_metadata
        if batch is None or not batch.in_place or (self._has_trees and batch.q_len > 1):
            return
        if batch.block_table.numel() <= _MOST_PAGES:
            drafts = forward_batch.forward_mode.is_target_verify()
            self._fill(forward_batch, self._num_drafts if drafts else 0, self._slots.shape[1])
            if any(current_capture(self._slots.device)):
                self._recorded[forward_batch.batch_size, drafts] = batch

    def _fill(self, fb: Any, more: int, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Write lengths and page numbers where graphs read them."""
        assert self._kv_lens is not None and self._block_table is not None
        batch = fb.batch_size
        kv_lens, block_table = self._kv_lens[:batch], self._block_table[:batch]
        torch.add(fb.seq_lens[:batch], more, out=kv_lens)
        return kv_lens, self._pages(fb.req_pool_indices[:batch], longest, block_table)

    def _begin(self, fb: Any, in_place: bool, in_capture: bool = False) -> None:
        batch, mode = fb.batch_size, fb.forward_mode
        q_len, more = 0, 0
        if mode.is_decode_or_idle():
            q_len = 1
        elif mode.is_target_verify():
            q_len = more = self._num_drafts
        longest = self.max_context_len + more
        if fb.seq_lens_cpu is not None and batch:
            longest = int(fb.seq_lens_cpu[:batch].max()) + more
        if in_place:
            kv_lens, block_table = self._fill(fb, more, longest)
        else:
            kv_lens = (fb.seq_lens[:batch] + more).int()
            block_table = self._pages(fb.req_pool_indices[:batch], longest, None)
        offsets = self._uniform(batch, q_len) if q_len else _offsets(fb.extend_seq_lens[:batch])
        tree = None
        if more and self._has_trees and not in_capture and _has_drafts(fb):
            tree = self._tree(fb.spec_info, fb.positions, batch)
        before = None
        if more and self._has_trees and self._is_mla:
            before = fb.seq_lens[:batch].int()
            if in_place:
                assert self._before is not None
                before = self._before[:batch].copy_(before)
        spans = None if q_len or not self._has_images else _spans(fb, self._slots.device)
        step = Batch(
            q_len, offsets, kv_lens, block_table, {}, in_place, tree, {}, before, spans, {}
        )
        self.forward_metadata = step
        if tree is not None and in_place:  # for the graph's replay
            windows = [None] if self._is_mla else list(self._masks)
            step.masks.update({window: self._filled(step, window) for window in windows})

    def _tree(self, spec_info: Any, positions: torch.Tensor, batch: int) -> Tree:
        """Take what drafts see from SGLang's arrays, which may hold fewer requests than a graph."""
        missing = batch * self._num_drafts - len(positions)
        if missing > 0:
            positions = torch.nn.functional.pad(positions, (0, missing))
        is_full = self._verify_mask is None  # else SGLang follows its mode, there and elsewhere
        return Tree(spec_info.custom_mask, is_full, positions[: batch * self._num_drafts])

    def _filled(self, batch: Batch, window: int | None) -> Any:
        """Build the mask of a step for layers with a window; graphs find it where it was.

        With MLA it is a list of slots for each draft: those of the drafts that it sees, or -1.
        """
        tokens, drafts = len(batch.kv_lens) * self._num_drafts, self._num_drafts
        if self._is_mla:
            kept = self._lists[:tokens] if batch.in_place and self._lists is not None else None
            if batch.tree is None:
                assert kept is not None
                return kept
            found = self._lists_of(batch, batch.tree)
            return found if kept is None else kept.copy_(found)
        out = None
        if batch.in_place:
            assert self._kv_lens is not None
            kept = self._masks.get(window)
            if kept is None:
                if any(current_capture(self._kv_lens.device)):  # each replay would clear it
                    raise RuntimeError(
                        "CUDA graph: cumla's backend needs a run of all layers before the capture "
                        "of drafts that are trees, got none; pass --disable-cuda-graph"
                    )
                most = len(self._kv_lens) * drafts
                start = None if window is None else self._kv_lens.new_zeros(most)
                words = self._kv_lens.new_zeros((most, -(-drafts // 32)))
                kept = self._masks[window] = cumla.AttentionMask(start, tree=words)
            start = None if kept.start is None else kept.start[:tokens]
            out = cumla.AttentionMask(start, tree=kept.tree[:tokens])
        if batch.tree is None:
            assert out is not None
            return out
        more = {"window": window, "positions": batch.tree.positions, "out": out}
        return self._mask_of(batch, batch.tree, **more)

    def _mask_of(self, batch: Batch, tree: Tree, **more: Any) -> cumla.AttentionMask:
        mask, drafts = tree.mask.view(torch.bool), self._num_drafts
        if not tree.is_full:
            mask = mask.view(-1, drafts, drafts)
        options = {"full": tree.is_full, "q_len": drafts, "kv_lens": batch.kv_lens}
        return cumla.AttentionMask.from_tree(mask, **options, **more)

    def _lists_of(self, batch: Batch, tree: Tree) -> torch.Tensor:
        """List the slots of the drafts that each draft sees, and -1 for the others."""
        drafts, size = self._num_drafts, self._page_size
        bits = self._mask_of(batch, tree).tree.view(torch.int32)
        columns = torch.arange(drafts, device=bits.device)
        is_seen = bits[:, columns // 32] >> (columns % 32) & 1
        places = (batch.kv_lens[:, None] - drafts + columns).clamp(min=0)
        slots = batch.block_table.gather(1, places // size) * size + places % size
        lists = torch.where(is_seen.view(-1, drafts, drafts) > 0, slots[:, None], -1)
        return lists.view(-1, drafts).int()

    def _mask(self, window: int | None) -> Any:
        """Return what the drafts of a step see in layers with a window; None where no trees are.

        With MLA these are lists of slots.
        """
        batch = self.forward_metadata
        assert batch is not None
        if not self._has_trees or batch.q_len < 2:
            return None
        if window not in batch.masks:
            batch.masks[window] = self._filled(batch, window)
        return batch.masks[window]

    def _mask_of_rows(
        self, window: int | None, layer: Any, tokens: int
    ) -> cumla.AttentionMask | None:
        """Return what tokens see in layers with chunks, and in steps with images; else None.

        The first layer that needs a mask builds it, in a CUDA graph at each replay.
        """
        batch = self.forward_metadata
        assert batch is not None
        chunk = self._chunk if layer.use_irope else None
        if chunk is None and batch.spans is None:
            return None
        key = window, chunk, current_capture(self._slots.device)
        if key not in batch.rows:
            options: dict[str, Any] = {"qo_indptr": batch.offsets, "kv_lens": batch.kv_lens}
            options["total_tokens"] = tokens
            if chunk is not None:
                mask = cumla.AttentionMask.chunks(chunk, **options)
            else:
                options |= {"window": window, "clamp": True}  # as SGLang's Triton kernels
                mask = cumla.AttentionMask.image_spans(batch.spans, **options)
            batch.rows[key] = mask
        return batch.rows[key]

    def _pages(
        self, requests: torch.Tensor, longest: int, out: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the pages of requests, of which the longest has so many tokens."""
        size = self._page_size
        slots = self._slots[:, :longest:size].index_select(0, requests)
        if out is None:
            return slots // size
        torch.floor_divide(slots, size, out=out[:, : slots.shape[1]])
        return out

    def _uniform(self, batch: int, q_len: int) -> torch.Tensor:
        """Return the offsets of requests of one length; they stay, graphs have their address."""
        found = self._offsets.get((batch, q_len))
        if found is None:
            end = batch * q_len + 1
            found = torch.arange(0, end, q_len, dtype=torch.int32, device=self._slots.device)
            self._offsets[batch, q_len] = found
        return found

    def _step(self, form: Form, tokens: int) -> Step:
        """Return the schedule for a form of layers: the first layer of a form makes its plan."""
        assert self.forward_metadata is not None
        batch = self.forward_metadata
        q_len, offsets, kv_lens, steps = batch.q_len, batch.offsets, batch.kv_lens, batch.steps
        if form in steps:
            return steps[form]
        plans = self._plans.get(form)
        if self._is_mla:
            sizes = {"cache_dtype": self._cache_dtype, "head_dim": form.head_dim}
            if form.is_tree:  # all drafts see all that is before them
                assert batch.before is not None
                kv_lens = batch.before
            plans = plans or self._made(form, sizes, causal=not form.is_tree)
            step = plans.begin_mla(form.num_heads, tokens, q_len, kv_lens, offsets)
        else:
            heads = {"num_kv_heads": form.num_kv_heads, "head_dim_v": form.head_dim_v}
            options = {"window": form.window, "cache_dtype": self._cache_dtype}
            if form.is_tree or form.has_mask:
                options = {"mask_form": "tree" if form.is_tree else "rows"}
                options["cache_dtype"] = self._cache_dtype
            plans = plans or self._made(form, heads, **options)
            shape = (len(kv_lens), tokens, form.num_heads, form.head_dim)
            step = plans.begin(cumla.AttentionPlan, shape, kv_lens, offsets)
        steps[form] = step
        return step

    def _list_step(self, heads: int) -> Step:
        """Return the schedule for the lists of the drafts of trees with MLA."""
        batch, drafts = self.forward_metadata, self._num_drafts
        assert batch is not None
        form = Form(heads, 0, 0, 0, None, is_tree=True)  # no form of layers has no columns
        if form not in batch.steps:
            plans = self._list_plans.get(heads)
            if plans is None:
                sizes: dict[str, Any] = {"cache_dtype": self._cache_dtype}
                sizes["batch_invariant"] = self._is_deterministic
                plans = Plans(self._slots.device, sizes, dtype=self._dtype)
                self._list_plans[heads] = plans
            shape = len(batch.kv_lens), drafts, heads, drafts
            lens = self._constant(len(batch.kv_lens), drafts)
            batch.steps[form] = Step(plans, lambda: (cumla.MLASparsePlan, shape), lens, lens)
        return batch.steps[form]

    def _constant(self, batch: int, drafts: int) -> torch.Tensor:
        """Return the lengths of lists that have an entry for each draft; graphs have them."""
        found = self._constants.get(batch)
        if found is None:
            found = self._constants[batch] = self._slots.new_full(
                (batch, drafts), drafts, dtype=torch.int32
            )
        return found

    def _made(self, form: Form, sizes: dict[str, Any], **options: Any) -> Plans:
        options |= {"page_size": self._page_size, "dtype": self._dtype}
        sizes = sizes | invariance(self._is_deterministic)
        self._plans[form] = Plans(self._slots.device, sizes, **options)
        layers = Layers(
            form.num_heads,
            self._page_size,
            str(self._dtype).removeprefix("torch."),
            self._cache_dtype,
            0 if self._is_mla else form.num_kv_heads,
            form.head_dim,
            form.head_dim_v,
            form.window,
            is_invariant=self._is_deterministic,
        )
        what = "with MLA" if self._is_mla else "without a window"
        what = what if form.window is None else f"with a window of {form.window + 1}"
        what = "of trees of drafts" if form.is_tree else what
        what = "with a mask of images or chunks" if form.has_mask else what
        log_layers("cumla.sglang", {f"layers {what}": layers})
        return self._plans[form]

    # --- layers ----------------------------------------------------------------------------------

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        *,
        q_rope: torch.Tensor | None = None,
        k_rope: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the new keys and values of a layer, and attend: ``(tokens, heads * columns)``."""
        _refuse_layer(self._model, layer, self._is_mla)
        slots = forward_batch.out_cache_loc if save_kv_cache and k is not None else None
        if self._is_mla:
            return self._attend_mla(q, k, layer, slots, q_rope, k_rope)
        form = Form(
            layer.tp_q_head_num,
            layer.tp_k_head_num,
            layer.qk_head_dim,
            layer.v_head_dim,
            layer.sliding_window_size if (layer.sliding_window_size or -1) > 0 else None,
        )
        q = q.view(-1, form.num_heads, form.head_dim)
        pool = self.token_to_kv_pool
        k_cache, v_cache = (
            cache.unflatten(0, (-1, self._page_size)) if cache.ndim == 3 else cache.transpose(1, 2)
            for cache in pool.get_kv_buffer(layer.layer_id)
        )
        scales = {}
        if self._cache_dtype is not None:
            scales = {"k_scale": _factor(layer.k_scale), "v_scale": _factor(layer.v_scale)}
        if slots is not None:
            assert k is not None and v is not None
            k = k.view(-1, form.num_kv_heads, form.head_dim)
            v = v.view(-1, form.num_kv_heads, form.head_dim_v)
            cumla.append_kv_cache(k, v, k_cache, v_cache, slots, **scales)
        mask = self._mask(form.window)
        if mask is not None:
            form = form._replace(window=None, is_tree=True)
        else:
            mask = self._mask_of_rows(form.window, layer, len(q))
            form = form if mask is None else form._replace(window=None, has_mask=True)
        out, _ = self._step(form, len(q)).run(
            q,
            k_cache,
            v_cache,
            block_table=self._table(),
            mask=mask,
            softcap=layer.logit_cap or None,
            sinks=None if sinks is None else sinks.detach().float(),
            softmax_scale=layer.scaling,
            **scales,
        )
        return out.flatten(1)

    forward_decode = forward_extend

    def _attend_mla(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        layer: Any,
        slots: torch.Tensor | None,
        q_rope: torch.Tensor | None,
        k_rope: torch.Tensor | None,
    ) -> torch.Tensor:
        heads, latent = layer.tp_q_head_num, layer.v_head_dim
        rope = layer.qk_head_dim - latent
        cache = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        cache = cache.unflatten(0, (-1, self._page_size))
        if slots is not None:
            assert k is not None
            rows = k if k_rope is None else (k, k_rope.view(len(k), 1, rope))
            append_rows(rows, cache, slots)  # as SGLang writes, without a scale
        queries: Any = q.view(-1, heads, layer.qk_head_dim) if q_rope is None else None
        if q_rope is not None:
            queries = q.view(-1, heads, latent), q_rope.view(len(q), heads, rope)
        form = Form(heads, 1, layer.qk_head_dim, layer.v_head_dim, None)
        lists = self._mask(None)
        if lists is None:
            step = self._step(form, q.shape[0])
            out, _ = step.run_mla(
                queries, cache, block_table=self._table(), softmax_scale=layer.scaling
            )
            return out.flatten(1)
        return self._attend_mla_tree(form._replace(is_tree=True), queries, cache, lists, layer)

    def _attend_mla_tree(
        self, form: Form, q: Any, cache: torch.Tensor, lists: torch.Tensor, layer: Any
    ) -> torch.Tensor:
        """Attend to what is before the drafts, then each draft to those it sees, and merge."""
        heads, drafts = form.num_heads, self._num_drafts
        before = self._step(form, lists.shape[0]).run_mla(
            q, cache, block_table=self._table(), softmax_scale=layer.scaling
        )
        parts = [
            part.unflatten(0, (-1, drafts)) for part in (q if isinstance(q, tuple) else in_parts(q))
        ]
        own = self._list_step(heads).run(
            tuple(parts), cache, lists.view(-1, drafts, drafts), softmax_scale=layer.scaling
        )
        shape = own.out.shape[:3]
        outs = before.out.view(own.out.shape), own.out
        lses = before.lse.view(shape), own.lse.view(shape)
        return cumla.merge_attention_states(outs, lses).out.flatten(0, 1).flatten(1)

    def _table(self) -> torch.Tensor:
        assert self.forward_metadata is not None
        return self.forward_metadata.block_table


def _has_drafts(fb: Any) -> bool:
    """Tell whether a step verifies drafts: a capture has none yet, nor has an idle rank."""
    mode = getattr(fb, "actual_forward_mode", None)
    is_idle = mode is not None and mode.is_idle()
    return not is_idle and getattr(fb.spec_info, "custom_mask", None) is not None


def _chunk(model: Any) -> int | None:
    """Return the tokens of a chunk, where some layers of a model attend in chunks (Llama 4)."""
    chunk: int | None = getattr(model, "attention_chunk_size", None)
    return chunk if getattr(model, "is_local_attention_model", False) else None


def _see_images(model: Any) -> bool:
    """Tell whether the image tokens of a model see each other, as SGLang's model asks Triton for.

    SGLang serves Gemma 4 by other backends alone.
    """
    return "Gemma3ForConditionalGeneration" in (model.hf_config.architectures or ())


def _spans(fb: Any, device: torch.device) -> torch.Tensor | None:
    """Return the images that hold tokens of a step; those of cached prefixes are left out."""
    images: list[list[Any]] = [[] for _ in range(fb.batch_size)]
    for spans, request in zip(images, fb.mm_inputs or (), strict=False):
        items = [] if request is None else request.mm_items
        spans += [span for item in items if item.is_image() for span in item.offsets or ()]
    return image_spans(images, fb.extend_prefix_lens_cpu or [0] * fb.batch_size, device)


def _offsets(lengths: torch.Tensor) -> torch.Tensor:
    """Return where each request begins among the tokens, and where the last one ends."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()


def _factor(scale: Any) -> Any:
    """Return a scale of SGLang as cumla takes it: a number, one float32 on the device, or None."""
    return scale.detach().view(1) if isinstance(scale, torch.Tensor) else scale


def _refuse_configuration(runner: Any) -> None:
    model, stored = runner.model_config, runner.kv_cache_dtype
    if stored not in (runner.dtype, torch.float8_e4m3fn):
        raise refusal(
            model,
            f"kv_cache_dtype: cumla's backend reads {runner.dtype} and e4m3 caches, got {stored}; "
            f"pass --kv-cache-dtype auto or fp8_e4m3",
        )
    if _chunk(model) is not None and _has_trees():  # Llama 4
        raise refusal(
            model,
            "speculative_eagle_topk: cumla's backend verifies no trees of drafts beside chunked "
            f"local attention, got {get_spec().speculative_eagle_topk}; pass "
            f"--speculative-eagle-topk 1",
        )
    if _see_images(model) and get_exec().overlap.enable_two_batch_overlap:  # halves have no images
        raise refusal(
            model,
            "enable_two_batch_overlap: cumla's backend needs the images of a step, which SGLang "
            "does not give to its halves, got True; leave out --enable-two-batch-overlap",
        )
    if isinstance(runner.token_to_kv_pool, BaseSWAKVPool):
        raise refusal(
            model,
            "memory pool: cumla's backend needs one pool for all layers, got one of its own for "
            "layers with windows; pass --disable-hybrid-swa-memory",
        )
    if get_parallel().attn_dcp_size > 1:
        raise refusal(
            model,
            f"dcp_size: cumla's backend has no decode context parallelism, got "
            f"{get_parallel().attn_dcp_size}; {_WAY_OUT}",
        )
    most = get_spec().speculative_num_draft_tokens or 0
    if _has_trees() and most > MOST_DRAFTS:
        raise refusal(
            model,
            f"speculative_eagle_topk: cumla's backend verifies trees of up to {MOST_DRAFTS} "
            f"drafts, got {get_spec().speculative_eagle_topk} with {most} drafts; pass "
            f"--speculative-eagle-topk 1",
        )


def _has_trees() -> bool:
    """Tell whether drafts are trees, and no chains."""
    return (get_spec().speculative_eagle_topk or 1) > 1


def _refuse_layer(model: Any, layer: Any, is_mla: bool) -> None:
    if layer.is_cross_attention or layer.attn_type.value != "decoder":
        raise refusal(
            model,
            f"layer {layer.layer_id}: cumla's backend serves causal self-attention, got "
            f"{'cross-attention' if layer.is_cross_attention else layer.attn_type}; {_WAY_OUT}",
        )
    if layer.xai_temperature_len > 0 or layer.pos_encoding_mode != "NONE":
        raise refusal(
            model,
            f"layer {layer.layer_id}: cumla's backend scales no scores by their position, got "
            f"xai_temperature_len {layer.xai_temperature_len}, pos_encoding_mode "
            f"{layer.pos_encoding_mode}; {_WAY_OUT}",
        )
    width = layer.v_head_dim, layer.qk_head_dim - layer.v_head_dim
    if is_mla and width not in WIDTHS:
        raise refusal(
            model,
            f"layer {layer.layer_id}: cumla's backend needs absorbed queries of "
            f"{', '.join(str(sum(width)) for width in WIDTHS)} columns for MLA, got "
            f"{layer.qk_head_dim}; {_WAY_OUT}",
        )
    if is_mla and _has_trees() and width != WIDTH:
        raise refusal(
            model,
            f"layer {layer.layer_id}: cumla's backend verifies trees of drafts over MLA rows of "
            f"{sum(WIDTH)} columns, got {layer.qk_head_dim}; pass --speculative-eagle-topk 1",
        )
