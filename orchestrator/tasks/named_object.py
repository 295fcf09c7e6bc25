"""Objects of the user's own code, by name: ``package.module:Name``.

User code is imported only if the user named it on the command line or in the config.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from orchestrator.config.names.nearest import did_you_mean
from orchestrator.config.settings import Config
from orchestrator.errors import UserError
from orchestrator.tasks.user_code import user_code


def make_named_object(kind: str, name: str, config: Config) -> Any:
    """Return the object that ``package.module:Name`` names; a class or a function is called.

    One with a required parameter gets the config. ``kind`` says in messages what the name is for."""
    module_name, colon, attribute = name.partition(":")
    parts = module_name.split(".")
    is_path = len(parts) > 1 and parts[-1] == "py"
    if not colon or is_path or not all(part.isidentifier() for part in [attribute, *parts]):
        raise UserError(
            f"{kind} {name!r} is no name of a {kind}; write package.module:Name, with dots in place of "
            "slashes and without .py"
        )
    module = _import_module(kind, name, module_name)
    factory = getattr(module, attribute, None)
    if factory is None:
        classes = [known for known, value in vars(module).items() if inspect.isclass(value)]
        raise UserError(
            f"{kind} {name!r}: module {module_name} has no {attribute!r}{did_you_mean(attribute, classes)}"
        )
    with user_code(f"making the {kind} {attribute}"):
        return _call_factory(factory, config) if callable(factory) else factory


def _import_module(kind: str, name: str, module_name: str) -> ModuleType:
    folder = str(Path.cwd())
    # Python does not search the current folder when it runs a console script.
    if folder not in sys.path:
        sys.path.insert(0, folder)
    with user_code(f"importing {module_name}"):
        try:
            return importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            # Modules that the user's own module lacks are errors of the user's code, and shown as such.
            if error.name and (module_name == error.name or module_name.startswith(f"{error.name}.")):
                raise UserError(
                    f"{kind} {name!r}: there is no module {error.name!r} in {folder} or among the installed "
                    "packages"
                ) from None
            raise


def _call_factory(factory: Any, config: Config) -> Any:
    """Call a class or function with the config if it has a required parameter, else with nothing."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return factory()
    required = [p for p in parameters if p.default is p.empty and p.kind <= p.POSITIONAL_OR_KEYWORD]
    return factory(config) if required else factory()
