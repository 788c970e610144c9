"""Which models can be trained: GPT-2 and Llama families, from a config.json or a model directory."""
