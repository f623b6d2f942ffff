"""Small models of all of transformers' and timm's architectures: built, captured, optimized, undone, saved.

`python -m zoo` tries them and writes docs/benchmarks/zoo.json and docs/zoo.md.
"""
