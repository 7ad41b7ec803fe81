"""Mirrors core/lifetime.py: 5,000 mixed operations of eight clients against a naive model of cells and users (F026)."""

from hypothesis import settings

from tests.unit.core.tree_lives import TreeLives

TestTreeLives = TreeLives.TestCase
TestTreeLives.settings = settings(max_examples=100, stateful_step_count=50, deadline=None, derandomize=True)
