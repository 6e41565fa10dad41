"""tcport: paged attention for torch.compile, fitted to the GPU it runs on.

Importing this package registers operators and touches no driver, no CUDA context and no Inductor.
"""

__version__ = "0.1.0"
