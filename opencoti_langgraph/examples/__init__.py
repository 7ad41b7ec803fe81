"""Small programs that show the package at work, on any model: `python -m opencoti_langgraph.examples.fan_out --url URL`.

Law: each runs in seconds against a running polykv-proxy, prints what pools spared and how fast sessions were, and cleans up.
"""
