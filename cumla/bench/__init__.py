# SPDX-License-Identifier: Apache-2.0
"""``python -m cumla bench``: how fast the kernels are, beside the ceilings of the same GPU.

`cases` says what is measured and how much work it is, `timing` how; `ceilings`, `dense`, `host` and
`start` measure; `peers` holds published figures of other libraries against ours; `run` puts it all
together and `report` prints tables. All that touches the GPU goes through `gpu`. The kernels that
measure the hardware, and the float64 one that checks results, are in ``cuda/``.
"""
