"""Upstream's own server tests, run against the engine alone and against the proxy in its place, compared name by name.

Law: the suite is part of the engine's source in the cache and is never copied into this repository; what it needs to run here
(local models, another server program) is given to it from outside, by a pytest plugin and one environment variable.
"""
