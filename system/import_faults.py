"""Packages that are installed and cannot be imported: which one it is, and what its import said. Diffusers and
transformers import lazily and wrap what fails; the first cause is in the chain of exceptions."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from types import TracebackType

from .versions import installed_version

# Packages with compiled parts that fit one build of torch.
_FIT_TORCH = ("torchvision", "torchaudio", "torchao", "xformers", "flash_attn", "bitsandbytes", "triton")
_OURS = __name__.partition(".")[0]
_STANDARD = {*sys.stdlib_module_names, "__main__", _OURS}


def import_fault(error: BaseException) -> str:
    """What keeps a package from being imported, and what would help; "" for an error that is no failed import.
    A text of this pack about a package that it misses itself is left alone."""
    frames = list(_frames(error.__traceback__))
    if frames and frames[-1][0].partition(".")[0] == _OURS and isinstance(error.__cause__, ImportError):
        return ""
    found = [(each, package) for each in _causes(error) if (package := _package_of(each))]
    if not found:
        return ""
    cause, package = found[-1]
    said = " ".join(f"{type(cause).__name__}: {cause}".split())[:500]
    if isinstance(cause, ModuleNotFoundError) and cause.name and cause.name.partition(".")[0] == package:
        return f"the package {package} is missing ({said}); pip install {package}"
    helps = f"install it again: pip install --force-reinstall {package}"
    if package in _FIT_TORCH:
        helps = f"install the build of it that fits torch{_version('torch')}, from where torch came, or remove it: "
        helps += f"pip uninstall {package}"
    return f"the package {package}{_version(package)} is installed and cannot be imported ({said}); {helps}"


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and those that it came from. A package that was looked for in vain before is no cause."""
    known: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in known:
        known.add(id(each))
        yield each
        context = None if each.__suppress_context__ else each.__context__
        each = each.__cause__ or (None if isinstance(context, ModuleNotFoundError) else context)


def _package_of(error: BaseException) -> str:
    """The package whose import an error ended; "" if it ended none."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        missing = error.name.partition(".")[0]
        with contextlib.suppress(ImportError, ValueError):
            if importlib.util.find_spec(missing) is not None:
                missing = ""
        if missing:
            return missing
    modules = [name for name, code in _frames(error.__traceback__) if code == "<module>"]
    packages = [name.partition(".")[0] for name in modules]
    if isinstance(error, ImportError) and error.name:
        packages.insert(0, error.name.partition(".")[0])  # of a name that another version has
    return next((name for name in reversed(packages) if name not in _STANDARD), "")


def _frames(traceback: TracebackType | None) -> Iterator[tuple[str, str]]:
    """Module and function of each, the innermost last."""
    while traceback is not None:
        frame = traceback.tb_frame
        yield str(frame.f_globals.get("__name__") or ""), frame.f_code.co_name
        traceback = traceback.tb_next


def _version(package: str) -> str:
    return f" {found}" if (found := installed_version(package)) else ""


def try_import(module: str, attribute: str) -> str:
    """Why this part of a package cannot be imported; "" where it can. What the package prints goes to stderr."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            getattr(importlib.import_module(module), attribute)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever a package's own import raises: SystemExit, a panic of Rust
        return import_fault(error) or f"{type(error).__name__}: {error}"
    return ""
