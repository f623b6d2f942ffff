"""Pages that are made whenever the site is built: one for each pass, and the reference of each package.

`pass_folder` writes those of passes, from what the registry, the pass and its docstring say and from models it is tried
on; `references` writes those of packages, from docstrings. They are nowhere else: what is installed has its pages, and
nothing has to be kept in step.
"""
