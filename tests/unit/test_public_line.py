"""What is public: the names of each folder's `__init__`; plugins import nothing else, and a page lists them."""

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import megaopt_core

ROOT = Path(__file__).parents[2]
FOLDERS = sorted(path.parent.name for path in (ROOT / "megaopt_core").glob("*/__init__.py"))
PUBLIC = ("megaopt_core", "megaopt_core.errors", *(f"megaopt_core.{folder}" for folder in FOLDERS))
PLUGINS = sorted(
    [
        *ROOT.glob("plugins/*/src"),
        *ROOT.glob("tests/thirdparty/*/src"),
        *(ROOT / name for name in ("tests/plugins", "examples")),
    ]
)
PAGE = ROOT / "docs" / "public-names.md"
MOST_FILES = 12


def _imports(file: Path) -> Iterator[tuple[str, str]]:
    """Yield module and name of everything that a file imports from the core, for type checkers too."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.startswith("megaopt_core."))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "megaopt_core":
            yield from ((str(node.module), alias.name) for alias in node.names)


@pytest.mark.parametrize("source", PLUGINS, ids=lambda source: str(source.relative_to(ROOT)))
def test_plugins_import_public_names_only(source) -> None:
    """Ours and the guide's: what they need, every plugin may use."""
    private = [
        f"{file.relative_to(source)}: {module} {name}"
        for file in sorted(source.rglob("*.py"))
        for module, name in _imports(file)
        if module not in PUBLIC or name not in importlib.import_module(module).__all__
    ]
    assert private == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_everything_else_in_a_folder_begins_with_an_underscore(folder) -> None:
    """A reader sees what is public; a folder has room for a dozen files."""
    entries = [
        path for path in (ROOT / "megaopt_core" / folder).iterdir() if path.suffix == ".py" or path.is_dir()
    ]
    assert [path.name for path in entries if not path.name.startswith("_")] == []
    files = [path for path in entries if path.suffix == ".py" and not path.name.startswith("__")]
    assert len(files) <= MOST_FILES


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_are_there(module) -> None:
    """`__all__` and `dir()` name them, and each is there."""
    found = importlib.import_module(module)
    assert list(found.__all__) == sorted(set(found.__all__), key=list(found.__all__).index)
    assert set(found.__all__) <= set(dir(found))
    assert [name for name in found.__all__ if getattr(found, name) is None] == []


@pytest.mark.parametrize(
    "source", sorted(ROOT.glob("plugins/*/src/megaopt_*/__init__.py")), ids=lambda path: path.parent.name
)
def test_plugins_show_their_public_names(source) -> None:
    """`dir()` of a package names them before they are used, as `help` and the completion of a prompt ask it."""
    package = pytest.importorskip(source.parent.name)
    assert set(getattr(package, "__all__", ())) <= set(dir(package))


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_name_that_a_folder_does_not_have_is_an_attribute_error(folder) -> None:
    """With the usual words."""
    with pytest.raises(
        AttributeError, match=rf"^module 'megaopt_core.{folder}' has no attribute 'nonsense'$"
    ):
        importlib.import_module(f"megaopt_core.{folder}").nonsense  # noqa: B018 - reading is the test


@pytest.mark.parametrize(
    "file",
    ["plugin_api/_hookspecs.py", "plugin_api/_entries.py", "sharding/_protocol.py", "precision/_policy.py"],
)
def test_what_plugins_are_written_against_is_typed_with_public_names(file) -> None:
    """A hook or a protocol whose argument nobody may import could not be implemented."""
    path = Path(megaopt_core.__file__).parent / file
    public = {name for module in PUBLIC for name in importlib.import_module(module).__all__}
    of_core = {name for _, name in _imports(path)}
    used = set()
    for node in ast.walk(ast.parse(path.read_text())):
        parts = [node.annotation] if isinstance(node, ast.arg | ast.AnnAssign) else []
        parts += [node.returns] if isinstance(node, ast.FunctionDef) else []
        used |= {name.id for part in parts if part for name in ast.walk(part) if isinstance(name, ast.Name)}
    assert used & of_core
    assert (used & of_core) - public == set()


def test_the_page_lists_exactly_the_public_names() -> None:
    """One line a folder."""
    rows = re.findall(r"^\| `(megaopt_core[\w.]*)` \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    listed = {module: re.findall(r"`(\w+)`", names) for module, names in rows}
    assert listed == {module: list(importlib.import_module(module).__all__) for module in PUBLIC}


def test_the_root_holds_where_the_parts_meet_and_nothing_else() -> None:
    """A module that has no folder has no subject."""
    files = {path.name for path in Path(megaopt_core.__file__).parent.glob("*.py")}
    assert files == {"__init__.py", "__main__.py", "build.py", "builtins.py", "errors.py"}


# What a pipeline stage is made of inside: nobody outside is handed one.
INSIDE = {
    ("Comparison", "_Key"), ("MegatronOptimizer", "GroupChecks"), ("OptimizerPart", "ChangeRecord"),
    ("OptimizerPart", "Counting"), ("OptimizerPart", "ForeignWrites"), ("OptimizerPart", "GroupChecks"),
    ("OptimizerPart", "GroupSettings"), ("buffers_alike", "_Buffers"),
    ("StatefulOptimizer", "GroupChecks"), ("MegatronOptimizer", "Observers"),
    ("known_wrappers", "FoundWrapper"), ("Samples", "_Kind"), ("WatchedModel", "_Names"),
}  # fmt: skip


def _annotations(node: ast.stmt) -> Iterator[ast.expr | None]:
    """Yield what a public function, or the public parts of a class, are annotated with."""
    if isinstance(node, ast.FunctionDef):
        arguments = node.args
        yield from (
            each.annotation for each in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        )
        yield node.returns
    for part in node.body if isinstance(node, ast.ClassDef) else ():
        if isinstance(part, ast.AnnAssign) and not ast.unparse(part.target).startswith("_"):
            yield part.annotation
        elif isinstance(part, ast.FunctionDef) and (part.name == "__init__" or not part.name.startswith("_")):
            yield from _annotations(part)


def test_public_names_are_typed_with_public_ones() -> None:
    """Who is handed something can name what it is."""
    public = {name for module in PUBLIC for name in importlib.import_module(module).__all__}
    trees = [ast.parse(file.read_text()) for file in sorted((ROOT / "megaopt_core").rglob("*.py"))]
    defined = {
        node.name.id if isinstance(node, ast.TypeAlias) else node.name
        for tree in trees
        for node in tree.body
        if isinstance(node, (ast.ClassDef, ast.TypeAlias))
    }
    private = {
        (node.name, word)
        for tree in trees
        for node in tree.body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name in public
        for annotation in _annotations(node)
        for word in re.findall(r"[A-Za-z_]\w*", "" if annotation is None else ast.unparse(annotation))
        if word in defined - public
    }
    assert private <= INSIDE
