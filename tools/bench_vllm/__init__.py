"""`kvfs bench vllm`: a real vLLM server under the workload of the field, without kvfs, with it, and with all the memory it wants."""
