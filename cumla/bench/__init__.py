# SPDX-License-Identifier: Apache-2.0
"""``python -m cumla bench``: how fast dense decoding is, beside the ceilings of the same GPU.

A section is data (`section`); `dense` is the one that users measure. `gpu`, `timing` and `ceilings`
measure; ``cuda/`` holds the kernels that measure the hardware, and the float64 one that checks
results.

All other sections, and what records runs and compares libraries, are in ``bench/`` of the
repository, which builds on this package.
"""
