"""What fxopt costs and brings, beside its peers: `nox -s benchmarks`, or `python -m benchmarks` where all is installed.

A topic is a function from `Settings` to tables (`benchmarks.suite`), and `benchmarks.topics` lists them.
"""
