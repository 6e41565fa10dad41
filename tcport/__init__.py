"""tcport: paged attention for torch.compile, fitted to the GPU it runs on.

Importing this package registers operators and touches no driver, no CUDA context and no Inductor.
"""

from tcport import eager as eager  # binds the implementations of the operators
from tcport.ops import kv_write, merge_states, paged_attention

__all__ = ["__version__", "kv_write", "merge_states", "paged_attention"]

__version__ = "0.1.0"
