"""A page for each pass, made from what the registry, the pass and its docstring say, and from models it is tried on.

`sphinx_extension` writes them whenever the site is built. They are nowhere else: a family that is installed has its
pages, and nothing has to be kept in step.
"""
