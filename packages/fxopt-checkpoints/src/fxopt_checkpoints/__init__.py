"""Loading and saving checkpoints of the original model with models that fxopt has rewritten."""

from fxopt_checkpoints.distributed import distributed_state_dict
from fxopt_checkpoints.key_map import KeyMap
from fxopt_checkpoints.load import load_original_state_dict, original_state_dict
from fxopt_checkpoints.streaming.loader import load_checkpoint
from fxopt_checkpoints.tensor_map import Destination, OriginalTensor
from fxopt_checkpoints.trace import key_map

__version__ = "0.1.0"

__all__ = [
    "Destination",
    "KeyMap",
    "OriginalTensor",
    "distributed_state_dict",
    "key_map",
    "load_checkpoint",
    "load_original_state_dict",
    "original_state_dict",
]
