"""The shape of the package: what it imports, exports and says about itself."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path

import pytest

import asyncfeed
from asyncfeed import errors

PACKAGE = Path(asyncfeed.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

STOREYS = [
    {"errors", "units", "process"},
    {"planning"},
    {"storage"},
    {"memory"},
    {"engine"},
    {"cache"},
    {"stream", "feed", "cli", "compat", "epochs", "torch", "__init__", "__main__"},
]
"""From the ground up; each knows only those below, and what is on its own."""

STRANGERS = [{"storage", "memory"}]
"""Where the bytes come from, and where they go, have nothing to say to each other."""

MAX_LINES = 450

EXTRAS = {"torch"}
"""Modules that need what the library itself does not: they cannot be imported everywhere."""


def module_of(file: Path) -> str:
    """``storage.scan`` for ``asyncfeed/storage/scan.py``."""
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


TREES = {module_of(file): ast.parse(file.read_text()) for file in FILES}


def top(name: str) -> str:
    return name.split(".", maxsplit=1)[0]


def imports_of(nodes: Iterable[ast.AST]) -> set[str]:
    """The modules that these statements import; a name imported from a package counts as a module in it."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports name where they come from"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def own(imports: set[str]) -> set[str]:
    """Those of asyncfeed itself, without its name; names within modules are cut off."""
    inner = {name.removeprefix("asyncfeed").lstrip(".") for name in imports if top(name) == "asyncfeed"}
    return {name if name in TREES else name.rpartition(".")[0] or "__init__" for name in inner}


EVERYTHING = {module: imports_of(ast.walk(tree)) for module, tree in TREES.items()}
"""What every module imports, anywhere in it."""


def storey_of(module: str) -> int:
    (found,) = [i for i, names in enumerate(STOREYS) if top(module) in names]
    return found


def test_layers_import_downwards_only():
    upwards = {
        (module, other)
        for module, imports in EVERYTHING.items()
        for other in own(imports)
        if storey_of(other) > storey_of(module)
    }

    assert not upwards


def test_strangers_do_not_import_each_other():
    met = {(top(module), top(other)) for module, imports in EVERYTHING.items() for other in own(imports)}

    assert not [pair for pair in met if pair[0] != pair[1] and set(pair) in STRANGERS]


def test_no_module_imports_itself_by_a_detour():
    graph = {module: own(imports_of(tree.body)) - {"__init__"} for module, tree in TREES.items()}

    while leaves := {module for module, needs in graph.items() if not needs & graph.keys()}:
        graph = {module: needs for module, needs in graph.items() if module not in leaves}

    assert not graph


def test_planning_has_no_means_to_touch_the_world():
    forbidden = {"h5py", "os", "io", "pathlib", "anyio", "asyncio", "trio", "threading", "time", "psutil", "mmap"}
    planning = {module for module in TREES if top(module) == "planning"}

    touching = {module: {top(name) for name in EVERYTHING[module]} & forbidden for module in planning}
    called = {n.id for module in planning for n in ast.walk(TREES[module]) if isinstance(n, ast.Name)}

    assert len(planning) > 5
    assert not any(touching.values()), touching
    assert not called & {"open", "print"}


def test_async_is_the_last_thing_added():
    users = {
        (module, top(name))
        for module, imports in EVERYTHING.items()
        for name in imports
        if top(name) in {"anyio", "asyncio", "trio"}
    }

    assert {library for _, library in users} == {"anyio"}
    assert all(storey_of(module) >= storey_of("engine") for module, _ in users)


def test_nothing_of_ours_is_imported_inside_a_function():
    functions = [
        (module, node)
        for module, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]

    hidden = {(module, other) for module, function in functions for other in own(imports_of(ast.walk(function)))}

    assert hidden <= {("cli", "cli.app")}  # which needs an extra, and says so


def test_a_module_can_be_held_in_the_head():
    too_long = {file.name: n for file in FILES if (n := len(file.read_text().splitlines())) > MAX_LINES}

    assert not too_long


def test_a_module_says_what_it_is():
    silent = [module for module, tree in TREES.items() if tree.body and not ast.get_docstring(tree)]

    assert not silent


def run(code: str) -> str:
    """What a new interpreter prints."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout


def test_the_library_does_without_its_extras():
    loaded = run("import sys, asyncfeed; print(*sys.modules)").split()

    assert not {"torch", "typer", "rich", "hdf5plugin"} & set(loaded)


@pytest.mark.parametrize("extra", sorted(EXTRAS))
def test_a_module_whose_extra_is_missing_says_what_to_install(extra):
    code = f"""
        import sys
        sys.modules[{extra!r}] = None  # as if it were not there
        try:
            import asyncfeed.{extra}
        except ImportError as error:
            print(error)
    """

    assert f'pip install "asyncfeed[{extra}]"' in run(textwrap.dedent(code))


# -- the door ----------------------------------------------------------------------------------------------------


def test_the_list_on_the_door_is_sorted_and_complete():
    exported = {
        name for name, value in vars(asyncfeed).items() if not name.startswith("_") and not inspect.ismodule(value)
    }

    assert asyncfeed.__all__ == sorted(asyncfeed.__all__)
    assert set(asyncfeed.__all__) == exported - {"annotations"}


def test_everything_on_the_list_is_a_class_that_its_module_lists_too():
    for name in asyncfeed.__all__:
        thing = getattr(asyncfeed, name)
        module = importlib.import_module(thing.__module__)

        assert inspect.isclass(thing)
        assert getattr(module, name) is thing
        assert name in module.__all__


def test_everything_on_the_list_has_a_docstring_of_its_own():
    docs = {name: vars(getattr(asyncfeed, name)).get("__doc__") or "" for name in asyncfeed.__all__}

    # dataclasses and named tuples write "Name(field, ...)" where nobody wrote anything
    assert not [name for name, doc in docs.items() if not doc or doc.startswith(f"{name}(")]


def test_every_module_lists_what_others_may_use_of_it():
    modules = {module for module, tree in TREES.items() if tree.body and top(module) != "cli"} - {"__init__"}
    missing = {module for module in modules & EXTRAS if importlib.util.find_spec(module) is None}
    # Elsewhere than here, where whatever fails to import what a drop-in is for would keep others from trying again.
    code = f"""
        import importlib
        for module in {sorted(modules - missing)}:
            names = vars(importlib.import_module(f"asyncfeed.{{module}}"))
            for name in names.get("__all__", ["__all__"]):
                if name not in names:
                    print(f"{{module}}.{{name}}")
    """

    wrong = run(textwrap.dedent(code))

    assert wrong == ""


def public_members(thing: type) -> dict[str, object]:
    """What a user may call or look at, made here and not inherited."""
    return {
        name: member
        for name, member in vars(thing).items()
        if not name.startswith("_") and (callable(member) or isinstance(member, property | classmethod | staticmethod))
    }


def test_whatever_takes_arguments_says_what_it_does():
    members = [(name, *item) for name in asyncfeed.__all__ for item in public_members(getattr(asyncfeed, name)).items()]

    assert not [f"{name}.{n}" for name, n, member in members if inspect.isfunction(member) and not member.__doc__]


def hands_out_frames(member: object) -> bool:
    function = member.fget if isinstance(member, property) else member
    returned = str(getattr(function, "__annotations__", {}).get("return", ""))
    return bool(re.search(r"\bRows\b|\bStream\[|\bItems\[", returned))


def test_wherever_frames_pass_the_docstring_says_whether_they_are_copied():
    docs = {
        f"{name}.{attribute}": member.__doc__ or ""
        for name in asyncfeed.__all__
        for attribute, member in public_members(getattr(asyncfeed, name)).items()
        if hands_out_frames(member)
    }

    assert {"Feed.utterances", "Feed.batches", "Feed.windows", "Feed.partitions", "LoadedPartition.frames"} <= set(docs)
    assert not [member for member, doc in docs.items() if not re.search(r"[Cc]op(y|ies|ied)|\bviews?\b", doc)]


def fields_with_frames() -> list[tuple[str, str, str]]:
    """Class, name and docstring of every annotated attribute that holds frames, in classes that are exported."""
    found = []
    for file in FILES:
        classes = [
            n for n in ast.parse(file.read_text()).body if isinstance(n, ast.ClassDef) and n.name in asyncfeed.__all__
        ]
        for each in classes:
            for field, after in zip(each.body, [*each.body[1:], None], strict=True):
                if isinstance(field, ast.AnnAssign) and "Rows" in ast.unparse(field.annotation):
                    said = after.value.value if isinstance(after, ast.Expr) else ""
                    found.append((each.name, field.target.id, said))
    return found


def test_fields_that_hold_frames_say_whether_they_are_copies():
    fields = fields_with_frames()

    assert {(cls, name) for cls, name, _ in fields} >= {("Batch", "frames"), ("Window", "frames")}
    assert all(re.search(r"\bcopy\b|\bview\b", said) for _, _, said in fields)


# -- the tree of errors ------------------------------------------------------------------------------------------


def drawn_tree() -> dict[str, tuple[str, str | None]]:
    """Every error in the picture, with its parent there and the built-in error it is drawn to be, too."""
    tree, path = {}, []
    for line in errors.__doc__.splitlines():
        match = re.match(r"^    ((?:[│├└─ ]{4})*)(\w+Error)(?: +(?:\((\w+)\))?.*)?$", line)
        if match:
            depth = len(match[1]) // 4
            path[depth:] = [match[2]]
            tree[match[2]] = (path[depth - 1] if depth else "Exception", match[3])
    return tree


def real_tree() -> dict[str, tuple[str, str | None]]:
    found = {}
    for name in errors.__all__:
        parent, *others = getattr(errors, name).__bases__
        found[name] = (parent.__name__, others[0].__name__ if others else None)
    return found


def test_the_tree_of_errors_is_as_drawn():
    assert drawn_tree() == real_tree()


def test_every_error_is_in_the_picture_and_on_the_door():
    defined = {n for n, v in vars(errors).items() if inspect.isclass(v) and v.__module__ == errors.__name__}

    assert errors.__all__ == sorted(errors.__all__)
    assert set(errors.__all__) == defined == set(drawn_tree())
    assert defined <= set(asyncfeed.__all__)


def test_a_message_of_ours_is_shown_as_one_sentence():
    for name in errors.__all__:
        assert str(getattr(errors, name)("what, and what to do")) == "what, and what to do"


def test_what_the_weather_did_and_what_the_caller_did_hang_from_different_branches():
    branches = {errors.StorageError, errors.BudgetError, errors.UsageError}

    for name in set(errors.__all__) - {"AsyncFeedError"}:
        assert sum(issubclass(getattr(errors, name), branch) for branch in branches) == 1
