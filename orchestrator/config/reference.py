"""The documentation of each setting, read from the source that declares it.

A setting is documented by the string under its field. ``orchestrator init`` writes these texts
as comments, and ``docs/generate_settings.py`` writes them into ``docs/settings.md``.
"""

from __future__ import annotations

import ast
import inspect

from orchestrator.config.settings import Config, section_types


def setting_texts() -> dict[str, str]:
    """Return the text under each setting, by its flat name."""
    texts: dict[str, str] = {}
    for kind in (Config, *section_types().values()):
        texts |= field_texts(kind)
    return texts


def field_texts(kind: type) -> dict[str, str]:
    """Return the text under each field of a dataclass, on one line."""
    (declaration,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(declaration, ast.ClassDef)
    texts: dict[str, str] = {}
    for field, following in zip(declaration.body, declaration.body[1:], strict=False):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            texts[field.target.id] = " ".join(str(following.value.value).split())
    return texts
