"""Where the files of an installed package lie, found without running any of its code."""

import importlib.util
from pathlib import Path

_INSTALL = "pip install 'finetune-elements[examples]'"


def package_file(package: str, relative: str) -> Path:
    """An existing file or folder that an installed package brings.

    The package is looked up, not imported: what it would import need not be installed.

    Args:
      package: The name one would import, without a dot.
      relative: The path below the package's folder, with `/` between its parts.

    Returns:
      The absolute path.

    Raises:
      ModuleNotFoundError: If `package` is not installed; says which line installs it.
      FileNotFoundError: If `package` is installed but has no `relative`.

    Example:

    >>> package_file("json", "decoder.py").name
    'decoder.py'
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(
            f"`package` ({package}) is not installed, and this example reads its files. "
            f"Install it: {_INSTALL}",
            name=package,
        )
    folder = Path(spec.submodule_search_locations[0])
    path = folder / relative
    if not path.exists():
        raise FileNotFoundError(
            f"`relative` ({relative}) must be a file or folder of the package {package}, which "
            f"lies in {folder} and has {sorted(p.name for p in folder.iterdir())}. "
            f"Install the version that this example was written for: {_INSTALL}"
        )
    return path
