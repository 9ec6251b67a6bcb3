"""cuBLAS is deterministic only if it is told so before the first call."""

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
