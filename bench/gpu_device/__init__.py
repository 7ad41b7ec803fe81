"""A check of the GPU share on a real GPU that travels: source, model and measurement, for a machine without network."""
