"""Benches: one file for each table of figures. `scripts/bench --list` names them, `scripts/bench NAME` runs one.

Law: a bench measures both sides in one run, in turns, prints tables for people and one JSON line last.
Whether its goals are met never decides whether the tests pass.
"""
