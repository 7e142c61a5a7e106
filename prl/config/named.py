"""A thing chosen by its name in the configuration: a registered one, or a user's own by import path."""

from __future__ import annotations

import difflib
import pkgutil
from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")


class SetupError(ValueError):
    """Something that the user must mend in the configuration, found when a part is made of it: exit code 2, no traceback."""


def named(kind: str, registered: Mapping[str, T], what: str) -> T:
    """The registered `kind`, or the object at the import path `package.module:name`.

    Raises SetupError that names `what` and `kind`, lists what is registered, and says what failed in the import.
    """
    if kind in registered:
        return registered[kind]
    if ":" in kind:
        try:
            return pkgutil.resolve_name(kind)
        except (ImportError, AttributeError, ValueError) as error:
            raise SetupError(f"{what} {kind!r}: cannot be imported: {error}") from error
    near = difflib.get_close_matches(kind, registered, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise SetupError(f"{what} {kind!r}: expected one of {', '.join(sorted(registered))}, or package.module:name{hint}")
