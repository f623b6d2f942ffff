"""Runs of packed layers as one oneDNN Graph program, recorded by TorchScript."""
