import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parent.parent

# Imports point down: to a lower floor, or to a module further left on the same one.
FLOORS = [
    [
        "version",
        "preemption",
        "progress",
        "summaries",
        "state",
        "paths",
        "bundle",
        "data",
        "selection",
    ],
    [
        "indexing",
        "budget",
        "selectors",
        "rules",
        "calling",
        "randomness",
        "packing",
        "loading",
        "delta",
    ],
    [
        "pruning",
        "updates",
        "slots",
        "targets",
        "takeover",
        "optimizer_state",
        "optimizer",
        "scores",
        "task",
        "certificate",
    ],
    ["arguments", "runs", "loop", "exporting"],
    ["trainer", "__init__"],
    ["examples", "configurables"],
    ["launch"],
]
PLACE = {
    module: (floor, position)
    for floor, modules in enumerate(FLOORS)
    for position, module in enumerate(modules)
}
SOURCES = sorted([*CHECKOUT.glob("finetune/**/*.py"), *CHECKOUT.glob("launch/**/*.py")])


def module_of(source: Path) -> str:
    """The name in FLOORS: a folder counts as one module."""
    parts = source.relative_to(CHECKOUT).with_suffix("").parts
    return parts[0] if parts[0] == "launch" else parts[1]


def imports(source: Path) -> Iterator[str]:
    """Every dotted name that the file imports, wherever in the file."""
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = source.relative_to(CHECKOUT).parts[: -node.level] if node.level else ()
            stem = ".".join([*package, *([node.module] if node.module else [])])
            yield from (f"{stem}.{alias.name}" for alias in node.names)


def imported_modules(source: Path) -> Iterator[str]:
    """The names in FLOORS that the file imports."""
    for name in imports(source):
        top, *rest = name.split(".")
        if top == "launch":
            yield "launch"
        elif top == "finetune":
            is_module = rest and (
                (CHECKOUT / "finetune" / rest[0]).is_dir()
                or (CHECKOUT / "finetune" / f"{rest[0]}.py").is_file()
            )
            yield rest[0] if is_module else "__init__"


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: str(source.relative_to(CHECKOUT)))
def test_a_module_imports_only_lower_floors(source):
    module = module_of(source)
    assert module in PLACE, f"{module} is missing from FLOORS"

    unknown = (len(FLOORS), 0)
    wrong = [name for name in imported_modules(source) if PLACE.get(name, unknown) > PLACE[module]]

    assert wrong == []


def test_only_configurables_imports_gin():
    importers = [module_of(source) for source in SOURCES if imports_any(source, "gin")]

    assert importers == ["configurables"]


def test_only_launch_parses_flags():
    parsers = ["absl.app", "absl.flags", "argparse", "click", "optparse"]

    importers = {module_of(source) for source in SOURCES if imports_any(source, *parsers)}

    assert importers == {"launch"}


def test_importing_finetune_imports_neither_gin_nor_tensorflow_datasets():
    ask = "import sys, finetune; print({'gin', 'tensorflow_datasets'} & set(sys.modules))"

    answer = subprocess.run(
        [sys.executable, "-c", ask], cwd=CHECKOUT, capture_output=True, text=True, check=True
    )

    assert answer.stdout == "set()\n"


def imports_any(source: Path, *names: str) -> bool:
    """Whether the file imports one of the names or something below one."""
    return any(
        name == wanted or name.startswith(wanted + ".")
        for name in imports(source)
        for wanted in names
    )
