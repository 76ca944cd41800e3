# SPDX-License-Identifier: Apache-2.0
"""``python -m cumla bench``: how fast the kernels are, beside the ceilings of the same GPU.

A section is data (`section`): its cases, how one is measured, and the columns of its table. One
module a family holds the sections (`mla`, `forms`, `append`, `merge`, `indexer`); `run` measures
them, `report` prints them and `plot` draws them, all over the list in `run`. `calls` holds every
call of cumla's public functions, `problem` the arrays of MLA's and their check against float64,
`moves` what operations that move bytes share. `gpu`, `timing`, `ceilings` and `host` measure;
``cuda/`` holds the kernels that measure the hardware, and the float64 one that checks results.

What records runs and compares other libraries is in ``bench/`` of the repository.
"""
