"""Guards of the project's shape: packaging, the file tree in ARCHITECTURE.md, committed surface lists."""

import ast
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE_FOLDERS = ("cluster", "engine", "connectors", "kernels")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def source_files() -> list[Path]:
    return sorted(path for folder in CODE_FOLDERS for path in (ROOT / folder).rglob("*.py"))


def test_every_source_folder_is_packaged() -> None:
    folders = {path.parent.relative_to(ROOT) for path in source_files()} | {Path("configs")}
    expected = {"blockferry." + ".".join(folder.parts) for folder in folders}
    assert set(PYPROJECT["tool"]["setuptools"]["packages"]) == expected


def test_every_shipped_config_and_weight_is_packaged() -> None:
    patterns = PYPROJECT["tool"]["setuptools"]["package-data"]["*"]
    folder = ROOT / "configs"
    files = {path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert files == {path for pattern in patterns for path in folder.glob(pattern)}


def test_kernels_folder_is_no_regular_package() -> None:
    # a kernels/__init__.py on sys.path would shadow the Hugging Face `kernels` package
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_every_source_file_is_named_in_the_architecture_page() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text()
    files = [str(path.relative_to(ROOT)) for path in source_files() if path.name != "__init__.py"]
    assert [name for name in files if name not in page] == []


def test_every_dependency_is_pinned_and_explained() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text()
    requirements = PYPROJECT["project"]["dependencies"]
    assert [entry for entry in requirements if "==" not in entry] == []
    assert [entry for entry in requirements if f"`{entry.split('==')[0]}`" not in page] == []


@pytest.mark.parametrize("path", source_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_module_says_what_it_owns(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())), f"{path} has no module docstring"
