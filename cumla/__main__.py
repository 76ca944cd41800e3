# SPDX-License-Identifier: Apache-2.0
"""`python -m cumla`: the same as the `cumla` script."""

from __future__ import annotations

import sys

from cumla.cli import main

if __name__ == "__main__":
    sys.exit(main())
