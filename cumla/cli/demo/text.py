# SPDX-License-Identifier: Apache-2.0
"""The demo's text, and the requests that are cut from it."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import cumla

LONGEST_PROMPT = 2048
PROMPT_SHARES = (1.0, 0.625, 0.25, 1 / 64)  # of the longest prompt, one a request


@dataclass(frozen=True)
class Request:
    """A stretch of text: the prompt, and the bytes that the steps append."""

    tokens: NDArray[Any]
    prompt: int


def load_text(file: Path | None) -> tuple[str, bytes]:
    """Read the text and name it.

    None stands for cumla's README: the one that the installed package carries as its description,
    or that of the source tree.
    """
    if file is not None:
        return str(file), file.read_bytes()
    try:
        description = metadata.metadata("cumla").json.get("description")
    except metadata.PackageNotFoundError:
        description = None
    if isinstance(description, str):
        return "README of the installed cumla", description.encode()
    readme = Path(cumla.__file__).parent.parent / "README.md"
    if readme.is_file():
        return "README.md of cumla's source tree", readme.read_bytes()
    raise ValueError("cumla is installed without its README; name a text with --file")


def cut_requests(text: bytes, steps: int, most: int = LONGEST_PROMPT) -> list[Request]:
    """Cut a request of each length from the text, spread from its beginning to its end."""
    longest = min(len(text) - steps, most)
    if longest < 1:
        raise ValueError(
            f"--steps {steps} needs a text of more than {steps} bytes, got {len(text)}; "
            "take fewer steps or name a longer text with --file"
        )
    data = np.frombuffer(text, np.uint8)
    requests = []
    for i, share in enumerate(PROMPT_SHARES):
        prompt = max(round(share * longest), 1)
        start = (len(text) - prompt - steps) * i // (len(PROMPT_SHARES) - 1)
        requests.append(Request(data[start : start + prompt + steps], prompt))
    return requests
