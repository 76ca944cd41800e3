# SPDX-License-Identifier: Apache-2.0
"""What evidence is about: digests of a kernel's entry points, of its launcher, and of host code.

A launcher's digest covers the statements of its module and the definitions that these use from
other modules of cumla, wherever they stand. Moves, imports, comments, docstrings, annotations and
the words of error messages change no digest.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import pkgutil
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import cumla
from cumla import launch
from cumla.launch.source import KernelSpec, digest

PACKAGE = Path(cumla.__file__).resolve().parent

HOST = (
    # options, compilation, shared-memory limit, launch attributes
    *(f"cumla.launch.{name}" for name in ("device", "kernel", "module", "source")),
    # streams, lifetimes, memory; what is checked, and how much memory a kernel is given
    *(f"cumla.{name}" for name in ("core", "indexer", "merge", "mla")),
)
"""Modules, or packages, on which every launch depends: one digest for all kernels.

The packages of other families count with the launchers of their kernels.
"""
LOOKS = frozenset(("check_values", "check_factors", "may_look", "copy_to_host"))
"""Functions that look at values where CUMLA_CHECK is set: no kernel's run depends on them."""


def texts(package: Path = PACKAGE) -> dict[str, str]:
    """The Python files of cumla, by dotted name."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = ("cumla", *path.relative_to(package).with_suffix("").parts)
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = path.read_text("utf-8")
    return found


# --- kernels and launchers -----------------------------------------------------------------------


@functools.cache
def launchers() -> dict[str, ModuleType]:
    """The module of cumla.launch, at any depth, among whose SPECS a kernel is; by kernel."""
    found: dict[str, ModuleType] = {}
    for info in pkgutil.walk_packages(launch.__path__, "cumla.launch."):
        if info.ispkg:
            continue
        module = import_module(info.name)
        for stem in dict.fromkeys(spec.stem for spec in getattr(module, "SPECS", ())):
            if stem in found:
                raise ValueError(f"{stem} has two launchers: {found[stem].__name__}, {info.name}")
            found[stem] = module
    return dict(sorted(found.items()))


def specs(stem: str) -> tuple[KernelSpec, ...]:
    """The entry points of a kernel."""
    return tuple(spec for spec in launchers()[stem].SPECS if spec.stem == stem)


def subject(stem: str) -> dict[str, Any]:
    """The digests of a kernel as its sources are now."""
    return {
        "entries": {spec.entry: digest(spec) for spec in specs(stem)},
        "launcher": launcher_digest(launchers()[stem].__name__),
    }


def of(subject: Mapping[str, Any]) -> str:
    """One digest of a kernel's."""
    return _digest_of([*subject["entries"].values(), subject["launcher"]])


def launcher_digest(name: str, sources: Mapping[str, str] | None = None) -> str:
    """The digest of a launcher's module, its family, and what both use, HOST's left out."""
    modules = _Modules(texts() if sources is None else sources)
    host = set(modules.of_host())
    family = f"cumla.{name.split('.')[2]}"  # of cumla.launch.<family>.<kernel>
    own = [name, *(found for found in modules.within(family) if found not in host)]
    waiting = [(found, statement) for found in own for statement in modules[found]]
    seen: dict[tuple[str, Statement], None] = {}
    while waiting:
        at, statement = place = waiting.pop()
        if place in seen:
            continue
        seen[place] = None
        for module, used in statement.uses:
            found = modules.definitions(module or at, used)
            waiting += [(where, s) for where, s in found if where not in host]
    return _digest_of(statement.code for _, statement in seen)


def host_digest(sources: Mapping[str, str] | None = None) -> str:
    """The digest of all code in HOST."""
    modules = _Modules(texts() if sources is None else sources)
    return _digest_of(s.code for name in modules.of_host() for s in modules[name])


def _digest_of(code: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(sorted(set(code))).encode()).hexdigest()


# --- Python code without what does not run -------------------------------------------------------


class Statement(NamedTuple):
    """A statement of a module: names that it binds, its code, and what it uses of which module."""

    names: frozenset[str]
    code: str
    uses: frozenset[tuple[str, str]]  # module, or "" for its own; name


class _Modules:
    """The statements of modules, read when first needed."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self.sources = sources
        self.known = frozenset(sources)

    def __getitem__(self, name: str) -> tuple[Statement, ...]:
        return _read(self.sources[name], self.known)[0]

    def definitions(self, module: str, name: str) -> Iterator[tuple[str, Statement]]:
        """Where a name of a module is bound: there, or where that imports it from."""
        if module not in self.known:
            return
        statements, imported = _read(self.sources[module], self.known)
        found = [(module, s) for s in statements if name in s.names]
        yield from found
        if not found and imported.get(name, ("", None))[1] is not None:
            yield from self.definitions(*imported[name])

    def of_host(self) -> list[str]:
        """The modules that HOST names."""
        found = []
        for entry in HOST:
            modules = self.within(entry)
            if not modules:
                raise LookupError(f"HOST names {entry}, which is no module")
            found += modules
        return found

    def within(self, entry: str) -> list[str]:
        """The module of that name, or those of the package."""
        return [m for m in self.known if m == entry or m.startswith(f"{entry}.")]


Imports = dict[str, tuple[str, Any]]  # local name -> module and name in it, None for the module


@functools.lru_cache(maxsize=512)
def _read(text: str, known: frozenset[str]) -> tuple[tuple[Statement, ...], Imports]:
    tree = ast.parse(text)
    imported = dict(_imports(tree, known))
    statements = []
    for node in filter(_is_code, tree.body):
        names = frozenset(_bound(node))
        if names != {"__all__"}:
            writer = _Writer(imported, known)
            statements.append(Statement(names, writer.write(node), frozenset(writer.uses)))
    return tuple(statements), imported


def _imports(tree: ast.AST, known: frozenset[str]) -> Iterator[tuple[str, tuple[str, Any]]]:
    """What is imported from cumla, for types alone or not."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ImportFrom):
            if node.level:
                raise ValueError("cumla's imports are absolute: digests follow no others")
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                of = (whole, None) if whole in known else (str(node.module), alias.name)
                if of[0] in known:
                    yield alias.asname or alias.name, of
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name in known and not alias.asname:
                    raise ValueError(f"import {alias.name}: digests need a name for it, as ...")
                if alias.name in known:
                    yield str(alias.asname), (alias.name, None)
        else:
            yield from _imports(node, known)


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def _is_code(node: ast.AST) -> bool:
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    is_place = isinstance(node, ast.keyword) and node.arg == "package"  # of a kernel's file
    nothing = isinstance(node, ast.Import | ast.ImportFrom | ast.Pass)
    looks = isinstance(node, ast.FunctionDef) and node.name in LOOKS
    return not (is_text or is_place or nothing or looks or _is_for_types(node))


def _bound(node: ast.AST) -> Iterator[str]:
    """The names that a statement binds where it stands."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif not isinstance(
        node, ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
    ):
        for child in ast.iter_child_nodes(node):
            yield from _bound(child)


class _Writer:
    """Writes a statement in a form of its own: `ast.dump` differs between Python versions."""

    IGNORED = ("ctx", "kind", "type_comment")
    TYPES = ("annotation", "returns")  # what they name is used, but says nothing to the machine

    def __init__(self, imported: Imports, known: frozenset[str]) -> None:
        self.imported, self.known = imported, known
        self.uses: set[tuple[str, str]] = set()

    def write(self, node: Any, *, words: bool = True) -> str:
        if isinstance(node, list):
            return f"[{', '.join(self.write(n, words=words) for n in node if _is_code(n))}]"
        if isinstance(node, ast.Name):
            return self._name(node.id)
        if isinstance(node, ast.Attribute) and (name := self._of_module(node)):
            return name
        if not isinstance(node, ast.AST):
            return repr(node)
        if isinstance(node, ast.Constant | ast.JoinedStr) and not words:
            return "..."
        words = words and not isinstance(node, ast.Raise)
        fields = []
        for name, value in ast.iter_fields(node):
            if name in self.IGNORED or value is None or value == []:
                continue
            text = self.write(value, words=words)
            if name not in self.TYPES:
                fields.append(f"{name}={text}")
        return f"{type(node).__name__}({', '.join(fields)})"

    def _name(self, name: str) -> str:
        """A name, as the module calls it that binds it."""
        module, there = self.imported.get(name, ("", name))
        if there is None:
            return f"module {module.rpartition('.')[2]}"
        self.uses.add((module, there))
        return f"Name({there})"

    def _of_module(self, node: ast.Attribute) -> str:
        """``name`` of ``module.name``, whatever the module is called; empty if it is none."""
        module, there = self.imported.get(ast.unparse(node.value), ("", ""))
        if there is not None:
            return ""
        self.uses.add((module, node.attr))
        return f"Name({node.attr})"
