"""Tests in `live` start vLLM, in an environment of its own: `make test-vllm` makes it and names its Python."""

import os

collect_ignore = [] if "KVPAGER_VLLM" in os.environ else ["live"]
