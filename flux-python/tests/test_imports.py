"""How the package's modules import each other."""

import ast
from pathlib import Path

import flux_tp

ROOT = Path(flux_tp.__file__).parent
NATIVE = "flux_tp._native"
"""Not written in Python, so it imports nothing. A program that names itself, for pickles, is no circle either."""


def module_names():
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imports(name, path, known):
    """The modules of the package that a module imports, also inside functions and for type checkers."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            source = ".".join([*package[: len(package) + 1 - node.level], *filter(None, [node.module])]) if node.level else node.module
            for alias in node.names:
                inner = f"{source}.{alias.name}"
                if inner in known or source in known:
                    yield inner if inner in known else source


def test_no_module_imports_in_a_circle():
    paths = dict(module_names())
    left = {name: set(imports(name, path, {*paths, NATIVE})) - {NATIVE, name} for name, path in paths.items()}
    assert left["flux_tp._ops"] >= {"flux_tp._torch", "flux_tp._numpy"}
    while free := {name for name, needs in left.items() if not needs & left.keys()}:
        left = {name: needs for name, needs in left.items() if name not in free}
    assert not left, left
