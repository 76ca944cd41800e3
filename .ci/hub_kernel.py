# SPDX-License-Identifier: Apache-2.0
"""Writes cumla as a kernel repository of Hugging Face, as its package `kernels` loads it.

    python .ci/hub_kernel.py OUT

OUT holds a card and two variants, ``build/torch-cuda`` and ``build/torch-cpu``: the same files, of
one backend each. A variant is the package cumla with its CUDA sources, without compiled code, and
`hub_kernel_init.py` as its ``__init__.py``. `kernels` installs no dependencies but those of a list
of its own, so the card names those of cumla.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import shutil
import tomllib
from pathlib import Path

import cumla

ROOT = Path(__file__).resolve().parents[1]
NAME = "cumla-flash-attn"  # Transformers goes by "flash" in it
VERSION = 1  # of the functions, as in get_kernel(..., version=1)
_BACKENDS = {"cuda": {"type": "cuda", "archs": ["9.0a"]}, "cpu": {"type": "cpu"}}
_CARD = """\
---
library_name: kernels
license: apache-2.0
tags:
- kernels
- attention
---
# {name}

cumla {version}: attention kernels for inference on NVIDIA Hopper GPUs (compute capability 9.0).
Tensors on the CPU are computed by NumPy. Kernels are CUDA sources, compiled when first used.
Install what they need:

```sh
pip install {cu12}  # CUDA 12
pip install {cu13}  # CUDA 13
```

`flash_attn_func` and `flash_attn_varlen_func` take what Transformers passes, with sinks as `s_aux`:

```python
model = AutoModelForCausalLM.from_pretrained(
    name,
    attn_implementation="OWNER/{name}",
    allow_all_kernels=True,
    dtype=torch.bfloat16,
    device_map="cuda",
)
```

The name of the repository must contain `flash`. After `kernels.get_kernel` the whole package can be
imported as `cumla`.
"""


def requirements() -> dict[str, str]:
    """Write the requirements with each extra for a GPU as arguments of pip."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    return {
        extra: " ".join(f"'{one}'" for one in project["dependencies"] + extras[extra])
        for extra in ("cu12", "cu13")
    }


def digest(variant: Path) -> dict[str, str]:
    """Hash all files of a folder: path in it -> SHA-256 in base 64."""
    files = sorted(path for path in variant.rglob("*") if path.is_file())
    return {
        path.relative_to(variant).as_posix(): base64.b64encode(
            hashlib.sha256(path.read_bytes()).digest()
        ).decode()
        for path in files
    }


def write(output: Path) -> None:
    """Write the repository into a new folder; raise `FileExistsError` if there is something."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise FileExistsError(f"OUT: needs a new or an empty folder, got {output}; pass another")
    for backend, described in _BACKENDS.items():
        variant = output / "build" / f"torch-{backend}"
        ignored = shutil.ignore_patterns("__pycache__", "*.cubin")
        shutil.copytree(ROOT / "cumla", variant / "cumla", ignore=ignored)
        init = (ROOT / ".ci" / "hub_kernel_init.py").read_text("utf-8")
        init = init.replace("@VERSION@", cumla.__version__)
        (variant / "__init__.py").write_text(init, "utf-8")
        files = digest(variant)
        unique = hashlib.sha256(json.dumps(files).encode()).hexdigest()[:7]
        metadata = {
            "id": f"_{NAME.replace('-', '_')}_{backend}_{unique}",
            "name": NAME,
            "version": VERSION,
            "license": "Apache-2.0",
            "python-depends": [],
            "backend": described,
            "digest": {"algorithm": "sha256", "files": files},
        }
        (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", "utf-8")
    card = _CARD.format(name=NAME, version=cumla.__version__, **requirements())
    (output / "README.md").write_text(card, "utf-8")
    shutil.copy(ROOT / "LICENSE", output)


def main(arguments: list[str] | None = None) -> None:
    """Write, and say where."""
    parser = argparse.ArgumentParser(description="Write cumla as a kernel repository.")
    parser.add_argument("output", type=Path, metavar="OUT")
    output = parser.parse_args(arguments).output
    write(output)
    print(json.dumps({"repository": str(output), "name": NAME, "version": VERSION}))


if __name__ == "__main__":
    main()
