"""The server's own exceptions.

TenutoServerError
├── ConfigError        a setting that cannot be used; names it
├── ModelError         a model that cannot be loaded; says what to do
└── InvariantBroken    a bug of ours: the engine stops loudly
"""

from __future__ import annotations

import errno

UNWRITABLE = frozenset((errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT))
"""What the system says where nothing can be written now, and perhaps can later."""


class TenutoServerError(Exception):
    """Base of all of them."""


class ConfigError(TenutoServerError):
    """A setting that cannot be used; the message names it and what would be accepted."""


class ModelError(TenutoServerError):
    """A model that cannot be found or loaded; the message says what to do next."""


class InvariantBroken(TenutoServerError):
    """An internal invariant does not hold: a bug of ours, never the world's doing."""
