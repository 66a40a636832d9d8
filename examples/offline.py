"""Answer two prompts with an INT8 KV cache: python examples/offline.py MODEL."""

import sys

from tightkv import LLM, SamplingParams

llm = LLM(sys.argv[1], kv_cache_dtype="int8")
params = SamplingParams(temperature=0.7, top_p=0.9, seed=1, max_tokens=48)
prompts = ["The lighthouse stood", "A good engineer"]
for output in llm.generate(prompts, params):
    print(f"{output.prompt!r} → {output.outputs[0].text!r}")
print(f"{llm.engine.plan.bytes_per_token:,.0f} bytes per token in the KV cache")
