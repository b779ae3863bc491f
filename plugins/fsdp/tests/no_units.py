"""A plugin whose wrap policy names nothing."""

from engine_core import hookimpl


@hookimpl
def engine_wrap_policy(module):
    return []
