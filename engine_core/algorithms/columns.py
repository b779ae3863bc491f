"""Columns that the core computes after the rollouts, by name."""

from __future__ import annotations

from collections.abc import Mapping

from engine_core.specs import Column

COLUMNS: Mapping[str, Column] = {
    "old_log_probs": Column(role="actor", output="log_probs"),
    "sum_pi_squared": Column(role="actor", output="sum_pi_squared"),
    "ref_log_probs": Column(role="ref", output="log_probs"),
    "teacher_log_probs": Column(role="teacher", output="log_probs"),
    "values": Column(role="critic", output="values"),
}
"""The core's columns of the table ``engine_columns``, in the order in which they are computed."""
