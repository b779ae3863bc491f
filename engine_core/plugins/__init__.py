"""Discovery, checks and loading of plugins, and the choice of the names that a run uses."""

from engine_core.plugins.plugin_set import PluginProblems, PluginSet

__all__ = ["PluginProblems", "PluginSet"]
