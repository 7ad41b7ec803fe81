"""A fleet of agents before an engine, simulated: no clock, no process, no randomness but a seed's.

Law: what decides is the real core; the engine is a model of step times, fitted to samples of a real one. It stands beside the
benches because nothing that serves requests needs it; tests and benches alone import it.
"""
