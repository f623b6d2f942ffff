"""The history as a table and as JSON."""

from __future__ import annotations

import json
import pickle

import torch
from torch import nn
from torch.fx import symbolic_trace

from fxopt_core import History, Ledger, Record, Refusal, Rewrite, history

RECORD = Record(
    pass_name="merge-linears",
    transformation="fxopt_linear.merge:MergeLinears",
    options=(("min_group", 3), ("where", "layer.*"), ("dtype", torch.float16)),
    signature="a1b2",
    rewrites=(Rewrite("q + k", ("q", "k"), ("q_k", "narrow"), ("att.q", "att.k"), ("att.q_k",)),),
    refusals=(Refusal("v", "hooks", "module `v` has <hooks>", ("v",)),),
    seconds=0.0123,
    run=2,
    index=1,
)
PLAIN = Record(
    "swap", "m:Swap", (), "c3", (Rewrite("mul", ("mul",), ("mul",)), Rewrite("neg", ("neg",))), state="undone"
)


def test_it_is_a_tuple_of_records() -> None:
    graph_module = symbolic_trace(nn.ReLU())
    assert (history(graph_module), repr(history(graph_module)), len(history(graph_module))) == ((), "()", 0)
    graph_module.meta["fxopt"] = Ledger((RECORD,))
    found = history(graph_module)
    assert found == (RECORD,)
    assert found[0] is RECORD
    assert type(found[:1]) is tuple
    assert pickle.loads(pickle.dumps(found)) == found
    assert isinstance(pickle.loads(pickle.dumps(found)), History)


def test_the_table() -> None:
    assert str(History()) == "nothing was applied"
    assert str(History((PLAIN, RECORD))).splitlines() == [
        "run  pass           options                                   state    rewritten  refused    ms",
        "0    swap                                                     undone           2        0   0.0",
        "     + mul: changed in place",
        "     + neg -> nothing",
        "2.1  merge-linears  min_group=3, where='layer.*', dtype=t...  applied          1        1  12.3",
        "     + q + k -> q_k",
        "     - v: hooks: module `v` has <hooks>",
    ]


def test_what_a_pass_notes_stands_beside_the_rewrite() -> None:
    record = Record("a-pass", "m:A", (), "s", (Rewrite("q", ("q",), ("k",), note="measured: 1.2"),))
    assert str(History((record,))).splitlines()[-1] == "     + q -> k (measured: 1.2)"
    assert json.loads(History((record,)).to_json())["passes"][0]["rewritten"][0]["note"] == "measured: 1.2"


def test_json_for_scripts() -> None:
    text = History((RECORD,)).to_json(indent=2)
    assert json.loads(text) == {
        "history_version": 1,
        "ledger_version": 1,
        "passes": [
            {
                "pass": "merge-linears",
                "class": "fxopt_linear.merge:MergeLinears",
                "options": {"min_group": 3, "where": "layer.*", "dtype": "torch.float16"},
                "signature": "a1b2",
                "state": "applied",
                "run": 2,
                "index": 1,
                "reversible": False,
                "changed": False,
                "seconds": 0.0123,
                "rewritten": [
                    {
                        "site": "q + k",
                        "nodes_before": ["q", "k"],
                        "nodes_after": ["q_k", "narrow"],
                        "modules_before": ["att.q", "att.k"],
                        "modules_after": ["att.q_k"],
                        "note": "",
                    }
                ],
                "refused": [{"site": "v", "reason": "hooks", "message": "module `v` has <hooks>", "nodes": ["v"]}],
            }
        ],
    }
