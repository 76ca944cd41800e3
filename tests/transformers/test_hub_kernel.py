# SPDX-License-Identifier: Apache-2.0
"""cumla as a kernel repository: its layout, and models that load it from a local path.

Each process here is one that cannot import the checkout's cumla.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import cumla
from cumla.launch import all_specs
from cumla.launch.source import cubin_name

ROOT = Path(__file__).resolve().parents[2]
REPOSITORY = "owner/cumla-flash-attn"


def python(code: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: v for name, v in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=environment | variables,
        check=False,
        text=True,
        capture_output=True,
    )


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "repository"
    command = [sys.executable, str(ROOT / ".ci" / "hub_kernel.py"), str(folder)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, env=environment, cwd=folder.parent, check=True, text=True, capture_output=True
    )
    assert json.loads(done.stdout)["repository"] == str(folder)
    again = subprocess.run(command, env=environment, check=False, text=True, capture_output=True)
    assert "FileExistsError: OUT: needs a new or an empty folder" in again.stderr
    return folder


@pytest.mark.parametrize("backend", ["cuda", "cpu"])
def test_layout(repository: Path, backend: str) -> None:
    """A variant of each backend: the files of the package, described and hashed."""
    variant = repository / "build" / f"torch-{backend}"
    wanted = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "cumla").rglob("*")
        if path.is_file() and path.suffix not in (".pyc", ".cubin")
    }
    assert {Path(name).suffix for name in wanted} >= {".py", ".cu", ".cuh"}
    metadata = json.loads((variant / "metadata.json").read_text("utf-8"))
    files = metadata["digest"]["files"]
    assert files.keys() == wanted | {"__init__.py"}
    for name, digest in files.items():
        found = hashlib.sha256((variant / name).read_bytes()).digest()
        assert base64.b64encode(found).decode() == digest
    assert metadata["backend"] == {"type": backend} | (
        {"archs": ["9.0a"]} if backend == "cuda" else {}
    )
    assert re.fullmatch(r"_cumla_flash_attn_(cuda|cpu)_[0-9a-f]{7}", metadata["id"])
    assert metadata["name"] == REPOSITORY.partition("/")[2]
    card = (repository / "README.md").read_text("utf-8")
    assert card.startswith("---\nlibrary_name: kernels\n")
    for requirement in ("numpy>=", "ml_dtypes>=", "cupy-cuda12x>=", "cupy-cuda13x>="):
        assert f"'{requirement}" in card


LOAD = """
import sys
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location("_unique_name", {!r} + "/__init__.py")
kernel = sys.modules["_unique_name"] = module_from_spec(spec)
spec.loader.exec_module(kernel)
"""


@pytest.fixture(scope="module")
def linked(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A variant as in the Hub's cache: each file is a link to one of another name."""
    cache, variant = tmp_path_factory.mktemp("cache"), repository / "build" / "torch-cpu"
    files = [path for path in variant.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    (cache / "blobs").mkdir()
    for number, path in enumerate(files):
        blob = cache / "blobs" / str(number)
        blob.write_bytes(path.read_bytes())
        link = cache / "torch-cpu" / path.relative_to(variant)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blob)
    return cache / "torch-cpu"


def test_package_under_another_name(linked: Path, tmp_path: Path) -> None:
    """The kernel is imported by a name of its own, cumla as `cumla`; sources give equal cubins."""
    pytest.importorskip("torch")
    code = f"""{LOAD.format(str(linked))}
import cumla.mla
from cumla.launch import all_specs
from cumla.launch.source import cubin_name
print(cumla.__file__, kernel.cumla is cumla, {str(linked)!r} in sys.path)
print(*map(cubin_name, all_specs()[::100]))

import torch
generator = torch.Generator().manual_seed(0)
q, k, v = (torch.randn(2, n, h, 64, generator=generator) for n, h in ((3, 4), (9, 2), (9, 2)))
sinks = torch.randn(4, generator=generator)
window = {{"causal": True, "window_size": (4, 4), "softcap": 2.0, "s_aux": sinks}}
out = kernel.flash_attn_func(q, k, v, 0.2, **window)
rows = kernel.flash_attn_varlen_func(
    *(x.flatten(0, 1) for x in (q, k, v)), torch.tensor([0, 3, 6], dtype=torch.int32),
    torch.tensor([0, 9, 18], dtype=torch.int32), 3, 9, softmax_scale=0.2, **window
)
scores = torch.einsum("bqhgd,bkhd->bhgqk", q.unflatten(2, (2, 2)), k) * 0.2
scores = 2 * torch.tanh(scores / 2)
ahead = torch.arange(9) - (torch.arange(3)[:, None] + 6)
scores = scores.masked_fill((ahead > 0) | (ahead < -4), float("-inf"))
sink = sinks.view(2, 2)[None, :, :, None, None].expand(2, -1, -1, 3, 1)
weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
wanted = torch.einsum("bhgqk,bkhd->bqhgd", weights, v).flatten(2, 3)
torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-5)
torch.testing.assert_close(rows, wanted.flatten(0, 1), atol=1e-5, rtol=1e-5)
"""
    done = python(code, tmp_path)
    assert done.returncode == 0, done.stderr
    place, names = done.stdout.splitlines()
    assert place == f"{linked / 'cumla' / '__init__.py'} True False"
    assert names.split() == [cubin_name(spec) for spec in all_specs()[::100]]


@pytest.mark.parametrize("version", [cumla.__version__, "9.8.7"])
def test_cumla_that_is_there(linked: Path, tmp_path: Path, version: str) -> None:
    """A cumla of the same version serves; another one is refused, with both versions."""
    pytest.importorskip("torch")
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import cumla
cumla.__version__ = {version!r}
{LOAD.format(str(linked))}
print(kernel.cumla.__file__)
"""
    done = python(code, tmp_path)
    if version == cumla.__version__:
        assert done.stdout == f"{ROOT / 'cumla' / '__init__.py'}\n", done.stderr
    else:
        wanted = f"needs version {cumla.__version__}, got {version}, imported before"
        assert f"ImportError: cumla: this kernel {wanted}" in done.stderr


def test_kernels_loads_it(repository: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("kernels", reason="the package kernels of Hugging Face is not installed")
    code = f"""
from pathlib import Path
import kernels
kernel = kernels.get_local_kernel(Path({str(repository)!r}), backend="cpu")
import cumla
print(kernel.cumla is cumla, cumla.__file__, len(kernels.get_loaded_kernels()))
"""
    done = python(code, tmp_path, HF_HUB_OFFLINE="1")
    file = repository / "build" / "torch-cpu" / "cumla" / "__init__.py"
    assert done.stdout == f"True {file} 1\n", done.stderr


GENERATE = """
import sys, torch, transformers
sizes = dict(
    hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, head_dim=32,
    num_key_value_heads=2, vocab_size=256, max_position_embeddings=512, eos_token_id=None,
    pad_token_id=2,
)
if MODEL == "gpt_oss":
    sizes |= dict(sliding_window=8, num_local_experts=2, num_experts_per_tok=2)
config = transformers.AutoConfig.for_model(MODEL, **sizes)
torch.manual_seed(0)
model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=THEIRS).eval()
with torch.no_grad():
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=1.5 * weight.shape[-1] ** -0.5)
ids = torch.randint(3, 256, (3, 20), generator=torch.Generator().manual_seed(1))
for padding in (0, 7):
    mask = torch.ones_like(ids)
    mask[1, :padding] = 0
    for cache in ({}, {"cache_implementation": "static", "disable_compile": True}):
        found = []
        for implementation in (THEIRS, OURS):
            model.set_attn_implementation(implementation)
            found.append(model.generate(
                ids, attention_mask=mask, max_new_tokens=12, do_sample=False, output_logits=True,
                return_dict_in_generate=True, **cache,
            ))
        assert torch.equal(found[0].sequences, found[1].sequences)
        for one, other in zip(found[0].logits, found[1].logits, strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
        assert model.config._attn_implementation == OURS
        print(sys.modules["cumla"].__file__)
"""


@pytest.fixture(scope="module")
def _transformers() -> None:
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers", "5.20")
    if find_spec("kernels") is None:
        pytest.skip("the package kernels of Hugging Face is not installed")
    if not transformers.utils.is_kernels_available():
        pytest.skip(f"Transformers {transformers.__version__} takes other versions of kernels")


def generate(repository: Path, folder: Path, name: str, code: str) -> list[str]:
    variables = {"LOCAL_KERNELS": f"{name}={repository}", "HF_HUB_OFFLINE": "1"}
    done = python(code, folder, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.usefixtures("_transformers")
def test_attn_implementation_by_repository(repository: Path, tmp_path: Path) -> None:
    """Tokens are those of sdpa, padded or not, in dynamic and static caches and in a batch."""
    code = f"""
MODEL, THEIRS, OURS = 'llama', 'sdpa', {REPOSITORY!r}
{GENERATE}
wanted = model.generate(ids, max_new_tokens=12, do_sample=False)[:, 20:]
options = transformers.GenerationConfig(
    max_new_tokens=12, do_sample=False, eos_token_id=-1, pad_token_id=2
)
results = model.generate_batch(inputs=ids.tolist(), generation_config=options)
assert [one.generated_tokens for one in results.values()] == wanted.tolist()
"""
    said = generate(repository, tmp_path, REPOSITORY, code)
    assert said == [str(repository / "build" / "torch-cpu" / "cumla" / "__init__.py")] * 4


@pytest.mark.usefixtures("_transformers")
def test_attn_implementation_by_name(repository: Path, tmp_path: Path) -> None:
    """The loaded package registers its own name, for sinks as well."""
    load = f"import kernels; kernels.get_kernel({REPOSITORY!r}, version=1)\n"
    code = f"{load}import cumla.transformers\nMODEL, THEIRS, OURS = 'gpt_oss', 'eager', 'cumla'\n"
    said = generate(repository, tmp_path, REPOSITORY, code + GENERATE)
    assert said == [str(repository / "build" / "torch-cpu" / "cumla" / "__init__.py")] * 4


@pytest.mark.usefixtures("_transformers")
def test_repository_without_flash_in_its_name(repository: Path, tmp_path: Path) -> None:
    """Transformers passes no mask then: static caches would count keys that are not written."""
    code = f"MODEL, THEIRS, OURS = 'llama', 'sdpa', 'owner/cumla'\n{GENERATE}"
    variables = {"LOCAL_KERNELS": f"owner/cumla={repository}", "HF_HUB_OFFLINE": "1"}
    said = python(code, tmp_path, **variables).stderr
    assert "needs a repository whose name contains \"flash\", got 'owner/cumla'" in said
