"""`make demo-vllm`: one long prompt through two vLLM servers, one after the other, with nothing but the mount in common.

`python -m kvfs.tools.demo_vllm` finds or sets up a vLLM (`finding`), mounts kvfs, starts each server (`server`), asks it
with the OpenAI client in a process of vLLM's own Python (`asking`), and shows the time to the first token (`report`).
"""
