"""The patch series as data and as commits: read it, check it, turn it into a repository for editing and back.

Law: standard library and git only, since it runs before any environment exists. The checkout is written by `export` alone.
"""
