"""Find, check and load plugins, and pick what a run names."""

from engine_core.plugins.plugin_set import PluginProblems, PluginSet

__all__ = ["PluginProblems", "PluginSet"]
