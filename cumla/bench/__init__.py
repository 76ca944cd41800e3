# SPDX-License-Identifier: Apache-2.0
"""``python -m cumla bench``: how fast the kernels are, beside the ceilings of the same GPU.

`cases` says what is measured and how much work it is, `timing` how; `ceilings`, `dense`, `host` and
`start` measure, and so do `attention`, `pages`, `merge`, `append`, `indexer` and `indexer_cache`,
which bring their cases along; `peer_runs` measures other libraries where they are installed
(`triton_decode` is a kernel of ours to compare with), `peers` holds published figures of the
others; `run` puts it all together, `report` prints tables and `plot` draws. `explain` tells which
kernel is chosen. All that touches the GPU goes through `gpu`. The kernels that measure the
hardware, and the float64 one that checks results, are in ``cuda/``.
"""
