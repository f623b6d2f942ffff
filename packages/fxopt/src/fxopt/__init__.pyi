# What `__init__.py` offers, for type checkers: all public names of its homes.
# ruff: noqa: F403
from fxopt.drop_in.batches import *
from fxopt.guarded_graphs import *
from fxopt.optimization import *
from fxopt_arith import *
from fxopt_capture import *
from fxopt_checkpoints import *
from fxopt_compile.torch_passes import *
from fxopt_core import *
from fxopt_cpu import *
from fxopt_linear import *
from fxopt_norm import *
from fxopt_report import *
from fxopt_rewrite import *
from fxopt_simplify import *
from fxopt_testing import *
from fxopt_tools import *

__version__: str
