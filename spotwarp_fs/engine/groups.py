"""Take an error out of the groups that nurseries wrap it in.

Invariant: nothing is lost: with several causes the most telling one is given, and the group stays its context.
"""

from __future__ import annotations

from spotwarp_fs.core.errors import SpotwarpError


def leaves(error: BaseException) -> list[BaseException]:
    """Give the errors inside *error*, however deep, in order."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in leaves(inner)]
    return [error]


def only_cause(error: BaseException) -> BaseException:
    """Give the error that says most: one of ours if there is any, else the first."""
    found = leaves(error)
    return next((leaf for leaf in found if isinstance(leaf, SpotwarpError)), found[0])
