"""vLLM on kvpager's store: run it twice, and the second run finds what the first has computed.

    python examples/vllm_store.py MODEL store.db

in an environment with vLLM and kvpager (docs/vllm.md). MODEL is a folder or a Hugging Face id.
"""

import sys
import time

from vllm import LLM, SamplingParams


def main(model: str, store: str) -> None:
    """Answer one long prompt, and tell how much of it was found."""
    llm = LLM(
        model,
        kv_transfer_config={
            "kv_connector": "KVPagerConnector",
            "kv_connector_module_path": "kvpager.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"store": store},
        },
    )
    prompt = " ".join(f"Line {number} of a long document." for number in range(60))
    began = time.perf_counter()
    (answer,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=8))
    seconds = time.perf_counter() - began
    print(f"{answer.num_cached_tokens} of {len(answer.prompt_token_ids)} tokens found, {seconds:.2f} s")
    print(f"answer: {answer.outputs[0].text!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
