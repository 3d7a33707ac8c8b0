"""Reading and writing layers: safetensors files, layer configs, Hugging Face configs."""
