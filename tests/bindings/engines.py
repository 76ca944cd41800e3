# SPDX-License-Identifier: Apache-2.0
"""What the plugins of vLLM and SGLang use of them, and what each version has of that.

``python -m tests.bindings.engines WHEEL...`` reads wheels of any number of versions, and writes
engines.json: engine -> name -> form -> versions. Nothing is imported. `test_engines.py` holds the
plugins against it: a plugin that uses another name needs the wheels once more.

A name is ``module:name`` for what a plugin imports, and ``module:Class.member`` for what one of its
classes overrides, must define, or reads of a class from which it is derived, and for what is in
`OPTIONS`. A form is the parameters in brackets, with "abstract" before them where a class must
define the method, or "class", "module", "value". Of classes in `FIELDS` it is the names of their
fields, of calls in `CALLS` the names of the arguments.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from tests.compat.signatures import parameters

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(__file__).with_suffix(".json")
ENGINES = ("vllm", "sglang")
_MLA = "vllm.model_executor.layers.attention"
_INDEXER = "vllm.v1.attention.backends.mla.indexer"
FIELDS = {  # of dataclasses that a plugin reads
    f"{_MLA}.mla_attention": (
        *("MLACommonMetadata", "MLACommonDecodeMetadata", "MLACommonPrefillMetadata"),
        "MLACommonPrefillMetadata.ChunkedContextMetadata",
    ),
    "vllm.v1.attention.backend": ("CommonAttentionMetadata",),
    _INDEXER: (
        *("DeepseekV32IndexerMetadata", "DeepSeekV32IndexerDecodeMetadata"),
        *("DeepseekV32IndexerPrefillMetadata", "DeepseekV32IndexerPrefillChunkMetadata"),
    ),
    "sglang.srt.model_executor.forward_batch_info": ("ForwardBatch",),
    "sglang.srt.managers.schedule_batch": ("MultimodalDataItem", "MultimodalInputs"),
    "sglang.srt.speculative.eagle_info": ("EagleVerifyInput",),
    "sglang.srt.layers.attention.verify_mask": ("VerifyMask",),
    "sglang.srt.layers.attention.dsa_backend": ("DSAMetadata",),
}
CALLS = {f"{_MLA}.sparse_mla_attention": ("metadata_cls",)}  # of what a plugin passes
# What a plugin reads and sets of a configuration. It looks for some that only later versions have:
# under another name these would have no effect, in silence.
OPTIONS = {
    "vllm.config.attention:AttentionConfig": (
        *("backend", "backend_per_kind", "hisparse_config", "sparse_mla_force_mqa"),
    ),
    "vllm.config.cache:CacheConfig": ("cache_dtype",),
    "vllm.config.compilation:CompilationConfig": (
        *("cudagraph_mode", "max_cudagraph_capture_size", "static_forward_context"),
    ),
    "vllm.config.model:ModelConfig": (
        *("dtype", "get_num_attention_heads", "hf_config", "hf_text_config", "is_mm_prefix_lm"),
        *("rswa_window", "use_mla"),
    ),
    "vllm.config.parallel:ParallelConfig": ("decode_context_parallel_size", "use_ubatching"),
    "vllm.config.scheduler:SchedulerConfig": ("max_num_batched_tokens", "max_num_seqs"),
    "vllm.config.speculative:SpeculativeConfig": ("enable_adaptive_verification",),
    "vllm.config.vllm:VllmConfig": (
        *("additional_config", "attention_config", "cache_config", "compilation_config"),
        *("model_config", "parallel_config", "scheduler_config", "speculative_config"),
    ),
}


class Sources(Protocol):
    """The Python files of a version: path -> text, None for no such file."""

    def __call__(self, path: str) -> str | None: ...


class Class(NamedTuple):
    """A class of a plugin."""

    name: str  # file under cumla, and class
    bases: tuple[tuple[str, str], ...]  # of the engine: module, name
    methods: dict[str, list[str]]  # its own, and those of its bases in cumla
    used: frozenset[str]  # what it reads of itself, and does not define


# --- what a plugin uses ---------------------------------------------------------------------------


def imported(engine: str) -> dict[str, set[tuple[str, str]]]:
    """Files of a plugin -> module and name of all that they import of an engine."""
    found: dict[str, set[tuple[str, str]]] = {}
    for path in sorted((ROOT / "cumla" / engine).glob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        known = _aliases(tree, engine)
        names = set(known.values())
        for node in ast.walk(tree):  # of modules, if these are some
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                module = known.get(node.value.id)
                if module is not None:
                    names.add((".".join(module), node.attr))
        found[f"{engine}/{path.name}"] = names
    return found


def _aliases(tree: ast.AST, package: str) -> dict[str, tuple[str, str]]:
    """Names in a file -> module and name of what they are."""
    return {
        alias.asname or alias.name: (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == package
        for alias in node.names
        if node.module
    }


def classes(engine: str) -> list[Class]:
    """Return the classes of a plugin that are derived from classes of the engine."""
    found = []
    for path in sorted((ROOT / "cumla" / engine).glob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        theirs, ours = _aliases(tree, engine), _aliases(tree, "cumla")
        for node in tree.body:
            if not isinstance(node, ast.ClassDef):
                continue
            names = [name for base in node.bases if (name := _plain(base))]
            bases = tuple(theirs[name] for name in names if name in theirs)
            if bases:
                own = [*_own(node, tree)]
                for name in names:
                    if name in ours:
                        own += _elsewhere(*ours[name])
                found.append(_class(f"{engine}/{path.name}:{node.name}", bases, own))
    return found


def _plain(base: ast.expr) -> str:
    if isinstance(base, ast.Subscript):
        base = base.value
    return base.id if isinstance(base, ast.Name) else ""


def _own(node: ast.ClassDef, tree: ast.Module) -> Iterator[ast.ClassDef]:
    """A class and its bases in the same file."""
    yield node
    for base in node.bases:
        for other in tree.body:
            if isinstance(other, ast.ClassDef) and other.name == _plain(base):
                yield from _own(other, tree)


def _elsewhere(module: str, name: str) -> list[ast.ClassDef]:
    tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text("utf-8"))
    (node,) = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name]
    return [*_own(node, tree)]


def _class(name: str, bases: tuple[tuple[str, str], ...], own: list[ast.ClassDef]) -> Class:
    methods: dict[str, list[str]] = {}
    read: set[str] = set()
    given: set[str] = set()
    for node in own:
        for statement in node.body:
            if isinstance(statement, ast.FunctionDef):
                methods.setdefault(statement.name, _parameters(statement))
        for each in ast.walk(node):
            if isinstance(each, ast.Attribute) and _is_self(each.value):
                (given if isinstance(each.ctx, ast.Store) else read).add(each.attr)
    # What is written and not read, and has no private name, is for the engine.
    told = {name for name in given - read if not name.startswith("_")}
    ours = methods.keys() | {t for node in own for s in node.body for t in _targets(s)}
    return Class(name, bases, methods, frozenset(((read - given) | told) - ours))


def _is_self(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) and value.func.id == "super"
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


def _targets(statement: ast.stmt) -> list[str]:
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    targets = [statement.target] if isinstance(statement, ast.AnnAssign) else targets
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _parameters(node: ast.FunctionDef) -> list[str]:
    return [name for name in parameters(node.args) if name != "cls"]


# --- what a version has ---------------------------------------------------------------------------


class Version:
    """The sources of one version of an engine."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources

    def tree(self, module: str) -> ast.Module | None:
        """The statements of a module, None where there is none."""
        return self._parsed(module)[0]

    @cache  # noqa: B019  # one object reads one wheel
    def _parsed(self, module: str) -> tuple[ast.Module | None, bool]:
        path = module.replace(".", "/")
        for name, is_package in ((f"{path}.py", False), (f"{path}/__init__.py", True)):
            text = self._sources(name)
            if text is not None:
                return ast.parse(text), is_package
        return None, False

    def find(self, module: str, name: str) -> tuple[str, Any] | None:
        """Return where a name is defined, through imports: its module, and its node or form."""
        tree, is_package = self._parsed(module)
        for node in _statements(tree.body if tree else []):  # a folder may have no __init__.py
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
                return module, node
            if name in _targets(node):
                return module, "value"
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self._through(module, is_package, node, alias.name)
                    if alias.name == "*" and name[0] != "_":
                        found = self._through(module, is_package, node, name)
                        if found is not None and found[0].split(".")[0] == module.split(".")[0]:
                            return found
            if isinstance(node, ast.Import) and any(
                (alias.asname or alias.name) == name for alias in node.names
            ):
                return module, "module"
        return (module, "module") if self._parsed(f"{module}.{name}")[0] else None

    def _through(
        self, module: str, is_package: bool, node: ast.ImportFrom, name: str
    ) -> tuple[str, Any] | None:
        other = node.module or ""
        if node.level:
            parts = module.split(".")
            parts = parts[: len(parts) - node.level + is_package]
            other = ".".join([*parts, *([other] if other else [])])
        if other.split(".")[0] != module.split(".")[0]:
            return other, "value"  # of another library
        return self.find(other, name)

    def form(self, module: str, name: str) -> str | None:
        """Return the form of a name, None where the version does not have it."""
        found = self.find(module, name)
        if found is None:
            return None
        _, node = found
        if isinstance(node, ast.FunctionDef):
            return f"({', '.join(_parameters(node))})"
        return "class" if isinstance(node, ast.ClassDef) else str(node)

    def members(self, module: str, name: str) -> dict[str, str]:
        """Return the members of a class and of its bases, by name."""
        found: dict[str, str] = {}
        written: set[str] = set()
        for node in self._line(module, name):
            for statement in node.body:
                if isinstance(statement, ast.FunctionDef):
                    found.setdefault(statement.name, _method(statement))
                for target in _targets(statement):
                    found.setdefault(target, "value")
            for each in ast.walk(node):
                is_written = isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)
                if is_written and _is_self(each.value):  # type: ignore[attr-defined]
                    written.add(each.attr)  # type: ignore[attr-defined]
        return dict.fromkeys(written, "value") | found

    def _line(self, module: str, name: str) -> Iterator[ast.ClassDef]:
        found = self.find(module, name)
        if found is None or not isinstance(found[1], ast.ClassDef):
            return
        where, node = found
        yield node
        for base in node.bases:
            if plain := _plain(base):
                yield from self._line(where, plain)

    def passed(self, module: str, name: str) -> str | None:
        """Return the names of the arguments of the calls of ``self.name`` in a module."""
        found = {
            keyword.arg
            for node in ast.walk(self.tree(module) or ast.Module([], []))
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == name
            for keyword in node.keywords
            if keyword.arg
        }
        return ", ".join(sorted(found)) or None


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module, also of those that depend on something."""
    for node in body:
        yield node
        for part in ("body", "orelse", "handlers", "finalbody"):
            if isinstance(node, ast.If | ast.Try):
                for each in getattr(node, part, []):
                    inner = each.body if isinstance(each, ast.ExceptHandler) else [each]
                    yield from _statements(inner)


def _method(node: ast.FunctionDef) -> str:
    marks = {ast.unparse(mark).split(".")[-1] for mark in node.decorator_list}
    if marks & {"property", "cached_property"}:
        return "value"
    return f"{'abstract ' if 'abstractmethod' in marks else ''}({', '.join(_parameters(node))})"


def fields(body: list[ast.stmt], owner: str = "") -> dict[str, list[str]]:
    """Classes by name, those within classes too -> their fields."""
    found = {}
    for node in body:
        if isinstance(node, ast.ClassDef):
            name = f"{owner}{node.name}"
            annotated = [n.target for n in node.body if isinstance(n, ast.AnnAssign)]
            found[name] = [target.id for target in annotated if isinstance(target, ast.Name)]
            found |= fields(node.body, f"{name}.")
    return found


# --- the table ------------------------------------------------------------------------------------


def wanted(engine: str, version: Version) -> Iterator[tuple[str, str]]:
    """Yield name and form of all that the plugin uses of a version, and the version has."""
    for module, name in sorted(set().union(*imported(engine).values())):
        form = version.form(module, name)
        if form is not None:
            yield f"{module}:{name}", form
    inherited: dict[str, str] = {}
    for each in classes(engine):
        for module, name in each.bases:
            for member, form in version.members(module, name).items():
                if member in each.methods or member in each.used or form.startswith("abstract"):
                    inherited[f"{module}:{name}.{member}"] = form
    yield from sorted(inherited.items())
    for module, names in FIELDS.items():
        tree = version.tree(module) if module.startswith(f"{engine}.") else None
        known = fields(tree.body) if tree is not None else {}
        yield from ((f"{module}:{name}", ", ".join(known[name])) for name in names if name in known)
    for name, options in OPTIONS.items():
        if name.startswith(f"{engine}."):
            members = version.members(*name.split(":"))
            yield from ((f"{name}.{each}", members[each]) for each in options if each in members)
    for module, names in CALLS.items():
        if module.startswith(f"{engine}."):
            for name in names:
                if (form := version.passed(module, name)) is not None:
                    yield f"{module}:{name}()", form


def read(archives: list[Path]) -> dict[str, dict[str, dict[str, list[str]]]]:
    """Collect what wheels have of what the plugins use: engine -> name -> form -> versions."""
    table: dict[str, dict[str, dict[str, list[str]]]] = {}
    for archive in archives:
        engine, number = archive.name.split("-")[:2]
        with zipfile.ZipFile(archive) as wheel:
            names = set(wheel.namelist())
            version = Version(lambda path: wheel.read(path).decode() if path in names else None)  # noqa: B023
            for name, form in wanted(engine, version):
                rows = table.setdefault(engine, {}).setdefault(name, {})
                rows.setdefault(form, []).append(number)
    return {engine: dict(sorted(rows.items())) for engine, rows in table.items()}


if __name__ == "__main__":
    by_version = sorted(
        map(Path, sys.argv[1:]), key=lambda p: [*map(int, re.findall(r"\d+", p.name))]
    )
    DATA.write_text(json.dumps(read(by_version), indent=1) + "\n", "utf-8")
