"""Embeddings over HTTP: ``FXOPT_FOLDER=minilm-fast uvicorn app:app``, then ``POST /embed {"texts": ["..."]}``.

A process uses one thread for its model; start one for each core (``--workers``). Requests to one process take turns.
"""

from __future__ import annotations

import os
from threading import Lock
from typing import Annotated

from fastapi import Body, FastAPI

import fxopt

app = FastAPI()
encoder = fxopt.BatchEncoder(os.environ["FXOPT_FOLDER"], threads=1)
turn = Lock()


@app.post("/embed")
def embed(texts: Annotated[list[str], Body(embed=True)]) -> list[list[float]]:
    """Return a vector for each text."""
    with turn:
        vectors: list[list[float]] = encoder.encode(texts).tolist()
    return vectors


@app.get("/health")
def health() -> str:
    """Answer as soon as the model is open."""
    return "ok"
